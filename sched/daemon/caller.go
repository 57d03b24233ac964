// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"net"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
)

// callerKey is the context key of a call's uid.
type callerKey struct{}

// callerOf returns the user who makes a call of the control socket, as the kernel says.
func callerOf(ctx context.Context) uint32 {
	uid, _ := ctx.Value(callerKey{}).(uint32)
	return uid
}

// admitCaller has server answer one connection. The server does not tell its calls on which
// connection they came, so each connection is served with a context of its own.
func (d *Daemon) admitCaller(server *ttrpc.Server) func(context.Context, *net.UnixConn) {
	return func(ctx context.Context, sock *net.UnixConn) {
		uid, err := uidOf(sock)
		if err == nil {
			err = server.Serve(context.WithValue(ctx, callerKey{}, uid), &only{sock: sock})
		}
		if !errors.Is(err, net.ErrClosed) { // not taken
			d.Log.WithError(err).Debug("control socket: a connection is not served")
			sock.Close()
		}
	}
}

func uidOf(sock *net.UnixConn) (uid uint32, err error) {
	raw, err := sock.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return cred.Uid, nil
}

// only is a listener to which one connection has come.
type only struct {
	sock  *net.UnixConn
	taken bool
}

func (o *only) Accept() (net.Conn, error) {
	if o.taken {
		return nil, net.ErrClosed
	}
	o.taken = true
	return o.sock, nil
}

func (o *only) Addr() net.Addr { return o.sock.LocalAddr() }
func (o *only) Close() error   { return nil } // the connection goes on
