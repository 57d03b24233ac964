// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/web"
	"github.com/nvshare/nvshare/sched/wire"
)

// acceptor is the part of net.UnixListener that accept needs.
type acceptor interface {
	AcceptUnix() (*net.UnixConn, error)
}

// accept takes connections until the listener is closed. It identifies one peer
// at a time, so that a flood of connections waits in the kernel's backlog.
func (d *Daemon) accept(ctx context.Context, from acceptor, admit func(context.Context, *net.UnixConn)) {
	// So clients that are connected do not wait for those that connect.
	back, err := loop.Yield(func(nice int) int { return nice + acceptNice })
	defer back()
	if err != nil {
		d.Log.WithError(err).Debug("accept clients at the priority of all else")
	}
	const minPause, maxPause = 5 * time.Millisecond, time.Second
	pause := minPause
	for {
		sock, err := from.AcceptUnix()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of descriptors or memory. Those who are connected are still served.
			d.Log.WithError(err).Warnf("accept a client: trying again in %v", pause)
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

// admit identifies the peer and starts to serve the connection, within the limits. It
// never waits for the loop, which may have much to do.
func (d *Daemon) admit(ctx context.Context, sock *net.UnixConn) {
	c := &node.Conn{Sock: sock}
	if refused := d.letIn(c); refused != nil {
		d.Try(refused.note) // else there is more to do than to write lines
		if refused.text != "" {
			c.Refuse(refused.code, refused.text)
		}
		sock.Close()
		return
	}
	d.Go(func() {
		if d.Ask(ctx, func() { d.enter(c) }) != nil {
			c.Peer.Close()
			sock.Close()
			return
		}
		err := d.read(c)
		d.inTurn(c.Account, func() { d.hangUp(c, err) })
	})
}

// refusal says why nobody serves a connection.
type refusal struct {
	code uint32
	text string // "": whoever connected is gone
	note func() // in the loop
}

// letIn finds out whose a connection is, and counts it; it returns nil if there may be one more.
func (d *Daemon) letIn(c *node.Conn) *refusal {
	pid, gone := peer.Knocks(c.Sock)
	if gone {
		return &refusal{note: func() {}}
	}
	if err := d.Desk.Knock(pid, time.Now()); err != nil {
		return &refusal{wire.ErrTooMany, err.Error(), func() {}}
	}
	var err error
	if c.Peer, err = d.Peers.Identify(c.Sock); err != nil {
		return &refusal{wire.ErrInternal, "cannot identify your process", func() { d.refuseUnknown(err) }}
	}
	if c.Account, err = d.Desk.Connect(c.Peer.Account, time.Now()); err != nil {
		c.Peer.Close()
		return &refusal{wire.ErrTooMany, err.Error(), func() { d.Tell(c.Subject(), logrus.WarnLevel, "refuse a connection: "+err.Error()) }}
	}
	return nil
}

// enter takes a connection into the books. That its process is known shows that others' are not
// hidden any more, unless the process is of the scheduler's own user.
func (d *Daemon) enter(c *node.Conn) {
	d.conns[c] = struct{}{}
	if errors.Is(d.identifyErr, peer.ErrHidden) && c.Peer.UID != uint32(os.Geteuid()) {
		d.identifyErr = nil
		d.Log.Info("processes are known again")
	}
}

// inTurn is Do for what an account causes: accounts are served in turn.
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
func (d *Daemon) serve(c *node.Conn, f *wire.Frame) {
	before := d.work()
	d.frame(c, f)
	if cost := d.work() - before; cost > 0 {
		c.Account.Charge(int(cost), time.Now())
	}
}

// work is what all frames so far have cost beyond their number, in units of about a
// frame that does little.
func (d *Daemon) work() uint64 {
	sum := d.ExtraWork
	for _, g := range d.Order {
		sum += g.Core.Work()
	}
	return sum
}

// read passes frames to the loop until the connection ends, and says why it
// did: an error that wraps wire.ErrFrame if the peer broke the protocol.
func (d *Daemon) read(c *node.Conn) error {
	// One byte more than a frame shows that a packet was longer. There is no
	// room for descriptors, so the kernel drops those a peer sends.
	var buf [wire.FrameSize + 1]byte
	c.Sock.SetReadDeadline(time.Now().Add(d.registerTimeout))
	registered := false
	for {
		n, flags, err := c.Receive(buf[:])
		if err != nil {
			if registered && errors.Is(err, os.ErrDeadlineExceeded) {
				c.Sock.SetReadDeadline(time.Time{}) // LookOut woke us
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
			c.Sock.SetReadDeadline(time.Time{})
		}
		cost := 1
		if f.Type == wire.TypeRegister {
			cost = registerCost
		}
		wait := c.Account.Charge(cost, time.Now())
		if f.Type == wire.TypeRegister {
			wait = max(wait, c.Account.AwaitArena(time.Now()))
		}
		if wait > 0 {
			select {
			case <-time.After(wait):
			case <-d.Ended():
				return net.ErrClosed
			}
		}
		if !d.inTurn(c.Account, func() { d.serve(c, &f) }) {
			return net.ErrClosed
		}
	}
}

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
		caller, err := api.PeerOf(sock)
		if err == nil {
			err = server.Serve(context.WithValue(ctx, callerKey{}, caller.Uid), &only{sock: sock})
		}
		if !errors.Is(err, net.ErrClosed) { // not taken
			d.Log.WithError(err).Debug("control socket: a connection is not served")
			sock.Close()
		}
	}
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

// portPause is the time between two attempts to open a port that another process has.
const portPause = time.Second

// port is where something is served over HTTP.
type port struct {
	listen func() (server, error)
	server server // nil: the port is not open yet
	err    error  // why
}

type server interface {
	Serve(context.Context)
	Close()
}

// openPorts opens the ports of metrics and of the page, if they were configured. Whoever has
// one of them, perhaps to annoy, does not keep the scheduler from starting: that is a problem
// that status shows, until the port can be opened.
func (d *Daemon) openPorts() error {
	if d.own.MetricsAddr != "" {
		d.ports = append(d.ports, &port{listen: func() (server, error) { return metrics.Listen(d.metricsOptions(), metricsSource{d}) }})
	}
	if d.own.WebAddr != "" {
		d.ports = append(d.ports, &port{listen: func() (server, error) {
			p, err := web.Listen(d.own.WebAddr, d.own.WebTokenFile, pageSource{d})
			return webPage{p, d.Log}, err
		}})
	}
	for _, p := range d.ports {
		switch s, err := p.listen(); {
		case err == nil:
			p.server = s
		case errors.Is(err, unix.EADDRINUSE):
			p.err = err
			d.Log.Errorf("%v; trying again until the port is free", err)
		default:
			return err
		}
	}
	return nil
}

// closePorts closes what is open and not served yet.
func (d *Daemon) closePorts() {
	for _, p := range d.ports {
		if p.server != nil {
			p.server.Close()
		}
	}
}

// servePort answers until ctx is done, once the port is open.
func (d *Daemon) servePort(ctx context.Context, p *port) {
	for p.server == nil {
		select {
		case <-ctx.Done():
			return
		case <-time.After(portPause):
			if s, err := p.listen(); err == nil {
				p.server = s
			}
		}
	}
	d.Do(func() { p.err = nil })
	p.server.Serve(ctx)
}

type webPage struct {
	*web.Page
	log *logrus.Entry
}

// Serve answers until ctx is done.
func (p webPage) Serve(ctx context.Context) {
	p.log.Infof("page: http://%s/", p.Addr())
	if err := p.Page.Serve(ctx); err != nil && ctx.Err() == nil {
		p.log.WithError(err).Error("page: no longer served")
	}
}

// pageSource answers the page from the loop.
type pageSource struct{ d *Daemon }

func (s pageSource) Status(ctx context.Context) (r *api.StatusResponse, err error) {
	err = s.d.Ask(ctx, func() { r = s.d.overview().status })
	return r, err
}

func (s pageSource) Events(ctx context.Context, req *api.EventsRequest) (*api.EventsResponse, error) {
	return controlService(s).Events(ctx, req)
}

func (d *Daemon) metricsOptions() metrics.Options {
	o := metrics.Options{Addr: d.own.MetricsAddr, Processes: d.own.MetricsProcesses, DCGM: d.own.MetricsDCGM, Log: d.Log}
	if d.Opts.Sample != nil {
		o.Sample = func(ctx context.Context) ([]metrics.GPUSample, error) {
			defer d.Try(func() { d.watch.Rest() }) // else the next look does
			return d.Opts.Sample(ctx)
		}
	}
	return o
}

// metricsSource answers the exporter from the loop.
type metricsSource struct{ d *Daemon }

func (s metricsSource) Snapshot(ctx context.Context) (found *metrics.Snapshot, err error) {
	err = s.d.Ask(ctx, func() { found = s.d.snapshot() })
	return found, err
}

func (d *Daemon) snapshot() *metrics.Snapshot {
	o := d.overview()
	s := &metrics.Snapshot{Status: o.status, Own: o.own, Traffic: d.Traffic, Managed: d.managed()}
	for _, g := range o.status.Gpus { // one may have been found since
		s.Turns = append(s.Turns, d.FindGPU(g.Uuid).Turns)
	}
	return s
}

// managed are the pids of those that are on GPUs by our doing: clients, and what runs for them.
func (d *Daemon) managed() map[uint32]bool {
	all := make(map[uint32]bool, len(d.Clients))
	for _, cl := range d.Clients {
		all[uint32(cl.PID)] = true
	}
	if d.overlap != nil { // the driver counts what members do to their MPS server
		for _, group := range d.overlap.States() {
			all[uint32(group.Server)] = true
		}
	}
	return all
}
