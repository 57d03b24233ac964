// SPDX-License-Identifier: Apache-2.0

package node

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

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/page"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// Conn is one tenant connection.
type Conn struct {
	Sock    *net.UnixConn
	Peer    *peer.Peer
	Account *admission.Account
	spin    atomic.Int64 // sched.Time until which read spins for the next frame

	// The loop's own:
	Client   *Client                          // nil before REGISTER
	Reg      wire.Register                    // what it registered with
	CanMove  bool                             // the shim can move memory
	Copies   bool                             // it understands COPIER
	Slices   bool                             // the shim understands SLICE
	Suspends bool                             // the shim understands SUSPEND
	IsAway   bool                             // the process said that it waits for SUSPEND (over)
	Again    bool                             // the process says that it was registered before
	Page     *page.Page                       // the client's own once it has attached
	Channels [wire.MaxChannels]*Attachment    // attached over this connection
	Waiting  [wire.MaxChannels]*PendingAttach // ATTACH not answered yet
	Failed   [wire.MaxChannels]bool           // ATTACH was answered with an error
	Unknown  map[uint16]wire.UUID             // by channel: because that GPU is not known; see unknown.go
	Dead     bool                             // closed by us; frames still queued are ignored
}

// Receive waits for a packet. After lookOut it spins for a while before it sleeps.
func (c *Conn) Receive(b []byte) (n, flags int, err error) {
	if until := base.Time(c.spin.Swap(0)); until != 0 {
		raw, err := c.Sock.SyscallConn()
		if err != nil {
			return 0, 0, err
		}
		for loop.Now() < until {
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
	n, _, flags, _, err = c.Sock.ReadMsgUnix(b, nil)
	return n, flags, err
}

// LookOut has the connection's reader spin until then or the next frame.
func (c *Conn) LookOut(until base.Time) {
	c.spin.Store(int64(until))
	c.Sock.SetReadDeadline(time.Unix(1, 0)) // wakes it if it sleeps
}

// send never blocks. It fails if the peer does not read what it gets, or is
// gone. oob is nil or a control message.
func (c *Conn) send(f *wire.Frame, oob []byte) error {
	f.Version = wire.Version
	b := f.Encode()
	raw, err := c.Sock.SyscallConn()
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

// Refuse tells the peer why its connection is closed next, if that can be sent.
func (c *Conn) Refuse(code uint32, text string) {
	f := wire.Frame{Type: wire.TypeRefused, Code: code}
	f.Refused.SetText(text)
	_ = c.send(&f, nil)
}

// Send sends to a client, if it is connected. If that fails, the connection is
// closed now, and lost after the current event.
func (n *Node) Send(c *Conn, f *wire.Frame, oob []byte) {
	if c == nil || c.Dead {
		return
	}
	if err := c.send(f, oob); err != nil {
		if errors.Is(err, unix.EAGAIN) {
			n.Tell(c.Subject(), logrus.WarnLevel, fmt.Sprintf("disconnect a client that does not read: %v", err))
		} else { // it is gone, or going
			n.LogOf(c.Subject()).WithError(err).Debug("connection ended")
		}
		n.ShutDown(c)
	}
}

// ShutDown closes the connection from our side.
func (n *Node) ShutDown(c *Conn) {
	if !c.Dead {
		c.Dead = true
		c.Sock.Close()
		n.Broken = append(n.Broken, c)
	}
}

// ProtocolError refuses and closes a connection.
func (n *Node) ProtocolError(c *Conn, err error) {
	n.Malformed++
	n.Tell(c.Subject(), logrus.WarnLevel, fmt.Sprintf("disconnect a client that broke the protocol: %v", err))
	c.Refuse(wire.ErrProtocol, strings.TrimPrefix(err.Error(), wire.ErrFrame.Error()+": "))
	n.ShutDown(c)
}
