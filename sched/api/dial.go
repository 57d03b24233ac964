// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// Names of sockets in the run directory. The control socket is for root; the socket of
// ViewName answers everybody, as View says.
const (
	SocketName = "control.sock"
	ViewName   = "status.sock"
)

// SocketPath returns the control socket of a run directory.
func SocketPath(runDir string) string { return filepath.Join(runDir, SocketName) }

// Conn is a connection to a running scheduler. Its calls may be made from
// several goroutines; they fail with ttrpc.ErrClosed once the scheduler ends.
type Conn struct {
	ControlService
	Server int // the process that answers; 0: the kernel does not say, as of another PID namespace
	conn   *ttrpc.Client
}

// Status asks for the status, however large it is.
func (c *Conn) Status(ctx context.Context, req *StatusRequest) (*StatusResponse, error) {
	r, err := c.ControlService.Status(ctx, req)
	if err != nil || len(r.Packed) == 0 {
		return r, err
	}
	packed, err := gzip.NewReader(bytes.NewReader(r.Packed))
	if err != nil {
		return nil, fmt.Errorf("unpack the status: %w", err)
	}
	whole, err := io.ReadAll(io.LimitReader(packed, maxStatus))
	if err != nil {
		return nil, fmt.Errorf("unpack the status: %w", err)
	}
	all := &StatusResponse{}
	return all, proto.Unmarshal(whole, all)
}

// maxStatus is more than any status, bytes.
const maxStatus = 256 << 20

// AskView asks the status socket of a run directory, which anybody may: the answer has
// what the kernel says that this process may know (StatusResponse.view). The scheduler
// sends the answer, without a question, and closes the connection. The error is an
// *UnreachableError if nobody answers.
func AskView(ctx context.Context, runDir string) (*StatusResponse, error) {
	path := filepath.Join(runDir, ViewName)
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, unreachable(path, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })()
	text, err := io.ReadAll(io.LimitReader(conn, maxStatus))
	if err != nil {
		return nil, unreachable(path, err)
	}
	r := &StatusResponse{}
	if err := proto.Unmarshal(text, r); err != nil || r.View == nil {
		return nil, &UnreachableError{path, errors.New("no answer: too many ask, or ask too often; try again in a second")}
	}
	return r, nil
}

// Close ends the connection; calls under way fail.
func (c *Conn) Close() error { return c.conn.Close() }

// TimedOut says that a call failed because its time was over. The scheduler knows that time,
// and may say so before the context of the call ends here.
func TimedOut(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || status.Code(err) == codes.DeadlineExceeded
}

// UnreachableError says that no scheduler answers at Path, and what to do.
type UnreachableError struct {
	Path string
	Err  error
}

func (e *UnreachableError) Error() string {
	next := "is nvshare-scheduler running?"
	switch {
	case errors.Is(e.Err, fs.ErrPermission):
		next = "use sudo, or be in the group of nvshare-scheduler --control-group"
	case errors.Is(e.Err, fs.ErrNotExist):
		next = "is nvshare-scheduler running, with this run directory?"
	case errors.Is(e.Err, syscall.ECONNREFUSED):
		next = "nvshare-scheduler has ended without cleaning up; start it again"
	}
	return fmt.Sprintf("connect %s: %v (%s)", e.Path, e.Err, next)
}

func (e *UnreachableError) Unwrap() error { return e.Err }

// Dial connects to the scheduler whose run directory is runDir. The error is an
// *UnreachableError.
func Dial(ctx context.Context, runDir string) (*Conn, error) {
	path := SocketPath(runDir)
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, unreachable(path, err)
	}
	server := 0
	if cred, err := PeerOf(conn.(*net.UnixConn)); err == nil {
		server = int(cred.Pid)
	}
	c := ttrpc.NewClient(conn)
	return &Conn{NewControlClient(c), server, c}, nil
}

func unreachable(path string, err error) error {
	var sys syscall.Errno
	if errors.As(err, &sys) {
		err = sys // the path is in UnreachableError's own text
	}
	return &UnreachableError{path, err}
}

// PeerOf returns who is at the other end of a connection, as the kernel says.
func PeerOf(conn *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	if failed := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); failed != nil {
		return nil, failed
	}
	return cred, err
}
