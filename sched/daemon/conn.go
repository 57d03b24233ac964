// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/page"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// conn is one tenant connection.
type conn struct {
	sock    *net.UnixConn
	peer    *peer.Peer
	account *admission.Account
	spin    atomic.Int64 // sched.Time until which read spins for the next frame

	// The loop's own:
	client   *client                          // nil before REGISTER
	reg      wire.Register                    // what it registered with
	canMove  bool                             // the shim can move memory
	copies   bool                             // it understands COPIER
	slices   bool                             // the shim understands SLICE
	suspends bool                             // the shim understands SUSPEND
	isAway   bool                             // the process said that it waits for SUSPEND (over)
	again    bool                             // the process says that it was registered before
	page     *page.Page                       // the client's own once it has attached
	channels [wire.MaxChannels]*attachment    // attached over this connection
	waiting  [wire.MaxChannels]*pendingAttach // ATTACH not answered yet
	failed   [wire.MaxChannels]bool           // ATTACH was answered with an error
	unknown  map[uint16]wire.UUID             // by channel: because that GPU is not known; see unknown.go
	dead     bool                             // closed by us; frames still queued are ignored
}

// receive waits for a packet. After lookOut it spins for a while before it sleeps.
func (c *conn) receive(b []byte) (n, flags int, err error) {
	if until := sched.Time(c.spin.Swap(0)); until != 0 {
		raw, err := c.sock.SyscallConn()
		if err != nil {
			return 0, 0, err
		}
		for now() < until {
			var recvErr error
			if err := raw.Control(func(fd uintptr) {
				n, _, flags, _, recvErr = unix.Recvmsg(int(fd), b, nil, unix.MSG_DONTWAIT)
			}); err != nil {
				return 0, 0, err
			}
			if recvErr != unix.EAGAIN && recvErr != unix.EINTR {
				return n, flags, recvErr
			}
			runtime.Gosched()
		}
	}
	n, _, flags, _, err = c.sock.ReadMsgUnix(b, nil)
	return n, flags, err
}

// lookOut has the connection's reader spin until then or the next frame.
func (c *conn) lookOut(until sched.Time) {
	c.spin.Store(int64(until))
	c.sock.SetReadDeadline(time.Unix(1, 0)) // wakes it if it sleeps
}

// send never blocks. It fails if the peer does not read what it gets, or is
// gone. oob is nil or a control message.
func (c *conn) send(f *wire.Frame, oob []byte) error {
	f.Version = wire.Version
	b := f.Encode()
	raw, err := c.sock.SyscallConn()
	if err != nil {
		return err
	}
	var sendErr error
	if err := raw.Write(func(fd uintptr) bool {
		for {
			sendErr = unix.Sendmsg(int(fd), b[:], oob, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			if sendErr != unix.EINTR {
				return true
			}
		}
	}); err != nil {
		return err
	}
	if sendErr != nil {
		return fmt.Errorf("send %v: %w", f.Type, sendErr)
	}
	return nil
}

// refuse tells the peer why its connection is closed next, if that can be sent.
func (c *conn) refuse(code uint32, text string) {
	f := wire.Frame{Type: wire.TypeRefused, Code: code}
	f.Refused.SetText(text)
	_ = c.send(&f, nil)
}

// send sends to a client, if it is connected. If that fails, the connection is
// closed now, and lost after the current event.
func (n *node) send(c *conn, f *wire.Frame, oob []byte) {
	if c == nil || c.dead {
		return
	}
	if err := c.send(f, oob); err != nil {
		if errors.Is(err, unix.EAGAIN) {
			n.tell(c.subject(), logrus.WarnLevel, fmt.Sprintf("disconnect a client that does not read: %v", err))
		} else { // it is gone, or going
			n.logOf(c.subject()).WithError(err).Debug("connection ended")
		}
		n.shutDown(c)
	}
}

// shutDown closes the connection from our side.
func (n *node) shutDown(c *conn) {
	if !c.dead {
		c.dead = true
		c.sock.Close()
		n.broken = append(n.broken, c)
	}
}

// protocolError refuses and closes a connection.
func (n *node) protocolError(c *conn, err error) {
	n.malformed++
	n.tell(c.subject(), logrus.WarnLevel, fmt.Sprintf("disconnect a client that broke the protocol: %v", err))
	c.refuse(wire.ErrProtocol, strings.TrimPrefix(err.Error(), wire.ErrFrame.Error()+": "))
	n.shutDown(c)
}
