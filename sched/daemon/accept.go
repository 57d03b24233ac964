// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// acceptor is the part of net.UnixListener that accept needs.
type acceptor interface {
	AcceptUnix() (*net.UnixConn, error)
}

// accept takes connections until the listener is closed. It identifies one peer
// at a time, so that a flood of connections waits in the kernel's backlog.
func (d *Daemon) accept(ctx context.Context, from acceptor, admit func(context.Context, *net.UnixConn)) {
	defer d.yieldToOthers()()
	const minPause, maxPause = 5 * time.Millisecond, time.Second
	pause := minPause
	for {
		sock, err := from.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of descriptors or memory. Those who are connected are still served.
			d.log.WithError(err).Warnf("accept a client: trying again in %v", pause)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
				return
			}
			pause = min(2*pause, maxPause)
			continue
		}
		pause = minPause
		admit(ctx, sock)
	}
}

// yieldToOthers gives this goroutine a thread of its own that runs after the other
// threads of this process, until back is called. So clients that are connected do
// not wait for those that connect.
func (d *Daemon) yieldToOthers() (back func()) {
	const self = 0
	runtime.LockOSThread()
	raw, err := unix.Getpriority(unix.PRIO_PROCESS, self)
	nice := 20 - raw
	if err == nil {
		err = unix.Setpriority(unix.PRIO_PROCESS, self, nice+acceptNice)
	}
	if err != nil {
		d.log.WithError(err).Debug("accept clients at the priority of all else")
	}
	return func() {
		if unix.Setpriority(unix.PRIO_PROCESS, self, nice) == nil {
			runtime.UnlockOSThread()
		} // else only root may; the thread ends with the goroutine
	}
}

// admit identifies the peer and starts to serve the connection, within the limits. It
// never waits for the loop, which may have much to do.
func (d *Daemon) admit(ctx context.Context, sock *net.UnixConn) {
	c := &conn{sock: sock}
	refuse := func(code uint32, text string, note func()) {
		d.try(note) // else there is more to do than to write lines
		c.refuse(code, text)
		sock.Close()
	}
	pid, gone := peer.Knocks(sock)
	if gone {
		sock.Close()
		return
	}
	if err := d.desk.Knock(pid, time.Now()); err != nil {
		refuse(wire.ErrTooMany, err.Error(), func() {})
		return
	}
	var err error
	if c.peer, err = d.peers.Identify(sock); err != nil {
		refuse(wire.ErrInternal, "cannot identify your process", func() { d.refuseUnknown(err) })
		return
	}
	if c.account, err = d.desk.Connect(c.peer.Account, time.Now()); err != nil {
		refuse(wire.ErrTooMany, err.Error(), func() {
			d.tell(c.subject(), logrus.WarnLevel, "refuse a connection: "+err.Error())
		})
		c.peer.Close()
		return
	}
	d.Go(func() {
		if d.ask(ctx, func() { d.enter(c) }) != nil {
			c.peer.Close()
			sock.Close()
			return
		}
		err := d.read(c)
		d.inTurn(c.account, func() { d.hangUp(c, err) })
	})
}

// enter takes a connection into the books. That its process is known shows that others' are not
// hidden any more, unless the process is of the scheduler's own user.
func (d *Daemon) enter(c *conn) {
	d.conns[c] = struct{}{}
	if errors.Is(d.identifyErr, peer.ErrHidden) && c.peer.UID != uint32(os.Geteuid()) {
		d.identifyErr = nil
		d.log.Info("processes are known again")
	}
}

// inTurn is do for what an account causes: accounts are served in turn.
func (d *Daemon) inTurn(a *admission.Account, f func()) bool {
	select {
	case a.Turn() <- struct{}{}:
	case <-d.Ended():
		return false
	}
	return d.Do(func() {
		f()
		<-a.Turn()
	})
}

// serve handles a frame, and charges its sender for what that has cost beyond the frame.
func (d *Daemon) serve(c *conn, f *wire.Frame) {
	before := d.work()
	d.frame(c, f)
	if cost := d.work() - before; cost > 0 {
		c.account.Charge(int(cost), time.Now())
	}
}

// work is what all frames so far have cost beyond their number, in units of about a
// frame that does little.
func (d *Daemon) work() uint64 {
	sum := d.extraWork
	for _, g := range d.order {
		sum += g.core.Work()
	}
	return sum
}

// read passes frames to the loop until the connection ends, and says why it
// did: an error that wraps wire.ErrFrame if the peer broke the protocol.
func (d *Daemon) read(c *conn) error {
	// One byte more than a frame shows that a packet was longer. There is no
	// room for descriptors, so the kernel drops those a peer sends.
	var buf [wire.FrameSize + 1]byte
	c.sock.SetReadDeadline(time.Now().Add(d.registerTimeout))
	registered := false
	for {
		n, flags, err := c.receive(buf[:])
		if err != nil {
			if registered && errors.Is(err, os.ErrDeadlineExceeded) {
				c.sock.SetReadDeadline(time.Time{}) // lookOut woke us
				continue
			}
			return err
		}
		if n == 0 {
			return io.EOF
		}
		if flags&unix.MSG_TRUNC != 0 {
			n = len(buf)
		}
		f, err := wire.Decode(buf[:n])
		if err != nil {
			return err
		}
		if !f.Type.FromClient() || (f.Type == wire.TypeRegister) == registered {
			return fmt.Errorf("%w: %v out of order", wire.ErrFrame, f.Type)
		}
		if !registered {
			registered = true
			c.sock.SetReadDeadline(time.Time{})
		}
		cost := 1
		if f.Type == wire.TypeRegister {
			cost = registerCost
		}
		wait := c.account.Charge(cost, time.Now())
		if f.Type == wire.TypeRegister {
			wait = max(wait, c.account.AwaitArena(time.Now()))
		}
		if wait > 0 {
			select {
			case <-time.After(wait):
			case <-d.Ended():
				return net.ErrClosed
			}
		}
		if !d.inTurn(c.account, func() { d.serve(c, &f) }) {
			return net.ErrClosed
		}
	}
}
