// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/wire"
)

// client is one process, from its first REGISTER to its death.
type client struct {
	*peer
	id       sched.ClientID
	conn     *conn      // nil: connection lost
	page     *grantPage // of the latest connection; nil: not connected yet
	reg      wire.Register
	attached map[*gpu]*attachment
}

// attachment is a client's use of one GPU.
type attachment struct {
	client  *client
	gpu     *gpu
	channel uint16
	ordinal uint32
	stats   wire.Stats
	told    wire.Notice
}

// account counts what a container, or a user outside containers, has.
type account struct {
	conns, clients int
	rate           *rate
}

// pendingAttach is an ATTACH that waits for a search for GPUs.
type pendingAttach struct {
	conn  *conn
	frame wire.Frame
}

func (d *Daemon) logOf(c *conn) *logrus.Entry {
	fields := logrus.Fields{"pid": c.peer.pid, "command": c.peer.command}
	if c.peer.container != "" {
		fields["container"] = c.peer.container
	}
	if c.client != nil {
		fields["client"] = c.client.id
	}
	return d.log.WithFields(fields)
}

// tell writes a line that a tenant causes, as often as it likes.
func (d *Daemon) tell(c *conn, level logrus.Level, text string) {
	if !d.tenantLog.takeIf(time.Now()) {
		level = logrus.DebugLevel
	}
	d.logOf(c).Log(level, text)
}

func (d *Daemon) accountOf(p *peer) *account {
	key := p.account
	a := d.counts[key]
	if a == nil {
		a = &account{rate: newRate()}
		d.counts[key] = a
	}
	return a
}

func (d *Daemon) dropAccount(p *peer) {
	if a := d.counts[p.account]; a != nil && a.conns == 0 && a.clients == 0 {
		delete(d.counts, p.account)
	}
}

// takeIn is admit's part in the loop: is there room for one more connection?
func (d *Daemon) takeIn(c *conn) bool {
	a := d.accountOf(c.peer)
	text := ""
	switch {
	case a.conns >= maxPerContainer:
		text = fmt.Sprintf("%d connections of this container or user", a.conns)
	case len(d.conns)+len(d.clients) >= d.maxConns:
		text = fmt.Sprintf("%d connections on this node", len(d.conns))
	default:
		a.conns++
		c.rate = a.rate
		d.conns[c] = struct{}{}
		return true
	}
	d.dropAccount(c.peer)
	d.refuseAtLimit(c, text)
	return false
}

func (d *Daemon) refuseAtLimit(c *conn, text string) {
	d.refused++
	d.logOf(c).Debugf("refuse a connection: there are %s already", text)
	c.refuse(wire.ErrTooMany, text)
}

// refuseUnknown notes that a connection was refused because its process could
// not be identified.
func (d *Daemon) refuseUnknown(err error) {
	d.refused++
	level := logrus.DebugLevel // it ended as soon as it had connected
	if errors.Is(err, errOtherPIDNamespace) {
		if d.identifyErr == nil {
			level = logrus.ErrorLevel
		}
		d.identifyErr = err
	}
	d.log.WithError(err).Log(level, "refuse a connection: cannot identify the process")
}

// frame handles one frame that is well-formed and in order by itself.
func (d *Daemon) frame(c *conn, f *wire.Frame) {
	if c.dead {
		return
	}
	switch f.Type {
	case wire.TypeRegister:
		d.register(c, f)
		return
	case wire.TypeAttach:
		d.attach(c, f, false)
		return
	}
	att := c.channels[f.Channel]
	if p := c.waiting[f.Channel]; att == nil && p != nil {
		if f.Type == wire.TypeRequest {
			p.frame.Code |= wire.AttachWant
		}
		return
	}
	if att == nil && c.failed[f.Channel] {
		return // sent before it read our answer
	}
	if att == nil {
		d.protocolError(c, fmt.Errorf("%w: %v on channel %d, which is not attached", wire.ErrFrame, f.Type, f.Channel))
		return
	}
	switch f.Type {
	case wire.TypeRequest:
		d.step(att.gpu, sched.Request{Client: c.client.id})
	case wire.TypeRelease:
		d.step(att.gpu, sched.Release{
			Client: c.client.id,
			Epoch:  sched.Epoch(f.Epoch),
			Reason: sched.Reason(f.Code), // the numbers are the same, see TestReasons
		})
	case wire.TypeStats:
		att.stats = f.Stats
	}
}

func (d *Daemon) register(c *conn, f *wire.Frame) {
	if f.Register.MinVersion > wire.Version {
		d.refused++
		text := fmt.Sprintf("protocol %d..%d, scheduler speaks %d", f.Register.MinVersion, f.Version, wire.Version)
		d.tell(c, logrus.WarnLevel, "refuse a client: "+text)
		c.refuse(wire.ErrVersion, text)
		d.shutDown(c)
		return
	}
	cl := d.byProc[c.peer.process]
	if cl == nil {
		a := d.accountOf(c.peer)
		if a.clients >= maxPerContainer || len(d.clients) >= maxClients {
			d.refuseAtLimit(c, fmt.Sprintf("%d processes in this container, %d in all", a.clients, len(d.clients)))
			d.shutDown(c)
			return
		}
		cl = d.addClient(c.peer)
	} else {
		// The same process over a new connection, after a lost one or after
		// exec. What it holds it says in ATTACH; until then it is lost.
		if cl.conn != nil {
			old := cl.conn
			d.shutDown(old)
			d.loseClient(old)
		}
		c.peer.pidfd.Close() // the client has one
	}
	c.client = cl
	page, fd, err := newGrantPage(cl.id)
	if err != nil {
		d.tell(c, logrus.ErrorLevel, fmt.Sprintf("refuse a client: %v", err))
		c.refuse(wire.ErrInternal, "no grant page")
		d.shutDown(c)
		return
	}
	defer fd.Close()
	if cl.page != nil {
		cl.page.unmap() // its gates were shut when its connection was lost
	}
	cl.page, cl.conn, cl.reg = page, c, f.Register
	what := "registered"
	if f.Code&wire.RegisterReconnect != 0 {
		what = "registered again"
	}
	d.tell(c, logrus.InfoLevel, fmt.Sprintf("%s, shim %s, %d entry points interposed", what, shimVersion(cl.reg.ShimVersion), cl.reg.Interposed))
	if cl.reg.Bypassed > 0 {
		d.tell(c, logrus.WarnLevel, fmt.Sprintf("%d entry points of CUDA bypass the shim: its work may not be arbitrated", cl.reg.Bypassed))
	}
	d.send(c, &wire.Frame{
		Type:    wire.TypeWelcome,
		Welcome: wire.Welcome{ClientID: uint64(cl.id), PageSize: wire.PageSize, Slots: wire.MaxChannels},
	}, unix.UnixRights(int(fd.Fd())))
}

// addClient gives a process its id and watches for its death.
func (d *Daemon) addClient(p *peer) *client {
	d.nextID++
	cl := &client{peer: p, id: d.nextID, attached: map[*gpu]*attachment{}}
	d.clients[cl.id] = cl
	d.byProc[p.process] = cl
	d.accountOf(p).clients++
	d.wg.Add(1)
	go func() {
		defer d.wg.Done()
		err := awaitDeath(p.pidfd)
		if err == nil {
			d.do(func() { d.bury(cl) })
			return
		}
		select {
		case <-d.ended: // and so closed the pidfd
		default:
			d.log.WithError(err).Errorf("watch process %d: its death will not be noticed", p.pid)
		}
	}()
	return cl
}

// bury removes a client whose process is dead.
func (d *Daemon) bury(cl *client) {
	if d.clients[cl.id] != cl {
		return
	}
	if cl.conn != nil {
		c := cl.conn
		cl.conn = nil
		d.shutDown(c)
	}
	for _, g := range d.order {
		if cl.attached[g] != nil || g.restored == cl.id {
			d.step(g, sched.Gone{Client: cl.id})
			delete(cl.attached, g)
		}
	}
	delete(d.clients, cl.id)
	delete(d.byProc, cl.process)
	d.accountOf(cl.peer).clients--
	d.dropAccount(cl.peer)
	cl.pidfd.Close()
	if cl.page != nil {
		cl.page.unmap()
		cl.page = nil
	}
	d.tell(&conn{peer: cl.peer, client: cl}, logrus.InfoLevel, "process has ended")
}

// attach handles ATTACH; searched: after a search for GPUs.
func (d *Daemon) attach(c *conn, f *wire.Frame, searched bool) {
	answer := wire.Frame{Type: wire.TypeAttached, Channel: f.Channel}
	fail := func(code uint32) {
		c.failed[f.Channel] = true
		answer.Code = code
		d.send(c, &answer, nil)
	}
	if f.Channel >= c.client.reg.Channels || c.channels[f.Channel] != nil || c.waiting[f.Channel] != nil {
		fail(wire.ErrChannel)
		return
	}
	g := d.gpus[f.Attach.UUID]
	if g == nil {
		if !searched && d.mayRediscover() {
			p := &pendingAttach{conn: c, frame: *f}
			c.waiting[f.Channel] = p
			d.pending = append(d.pending, p)
			return
		}
		d.tell(c, logrus.WarnLevel, fmt.Sprintf("no GPU %s on this node: the client runs on it unarbitrated", formatUUID(f.Attach.UUID)))
		fail(wire.ErrUnknownGPU)
		return
	}
	for _, other := range c.channels {
		if other != nil && other.gpu == g {
			fail(wire.ErrChannel)
			return
		}
	}
	att := &attachment{client: c.client, gpu: g, channel: f.Channel, ordinal: f.Attach.Ordinal}
	c.client.attached[g] = att
	c.channels[f.Channel] = att
	if g.restored == c.client.id {
		g.restored = 0
	}
	d.stepAttach(g, att, sched.Attach{
		Client: c.client.id,
		Held:   sched.Epoch(f.Epoch),
		Want:   f.Code&wire.AttachWant != 0,
	}, answer)
}

// hangUp ends a connection whose reader has stopped.
func (d *Daemon) hangUp(c *conn, err error) {
	switch {
	case c.dead:
	case errors.Is(err, wire.ErrFrame):
		d.protocolError(c, err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		d.refused++
		c.refuse(wire.ErrProtocol, fmt.Sprintf("not registered within %v", d.registerTimeout))
		d.shutDown(c)
	default:
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
			d.logOf(c).WithError(err).Debug("connection ended")
		}
		d.shutDown(c)
	}
}

// dropBroken forgets the connections that were closed during an event. More
// may break meanwhile: telling one client of another's loss is a send.
func (d *Daemon) dropBroken() {
	for len(d.broken) > 0 {
		c := d.broken[0]
		d.broken = d.broken[1:]
		delete(d.conns, c)
		d.accountOf(c.peer).conns--
		d.dropAccount(c.peer)
		if c.client == nil {
			c.peer.pidfd.Close()
			continue
		}
		d.loseClient(c)
	}
}

// loseClient notes that a client's connection is lost. That proves nothing
// about its work; the cores decide.
func (d *Daemon) loseClient(c *conn) {
	cl := c.client
	if cl == nil || cl.conn != c {
		return
	}
	cl.conn = nil
	d.logOf(c).Debug("connection lost")
	for _, att := range c.channels {
		if att != nil {
			d.step(att.gpu, sched.Lost{Client: cl.id})
		}
	}
}

func shimVersion(v uint32) string {
	return fmt.Sprintf("%d.%d.%d", v>>16, v>>8&0xff, v&0xff)
}
