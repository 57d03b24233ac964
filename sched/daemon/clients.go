// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/page"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// client is one process, from its first REGISTER to its death. It may have
// several connections, of which it uses GPUs over at most one: the latest with
// an ATTACH that is more than a question.
type client struct {
	*peer.Peer
	id       sched.ClientID
	conn     *conn         // nil: none, or lost
	page     *page.Page    // of the latest conn; nil: it has used no GPU yet
	reg      wire.Register // of the latest conn
	attached map[*gpu]*attachment
	canMove  bool // its shim can move memory; of the latest conn
	from     *gpu // it may have left this GPU for another one: its next ATTACH says; see migrate.go
	away     absence
	bringing bringing
	file     *file          // with its memory; nil: that is in host memory
	named    *api.Container // its container's names when they were last known: the end of a process may come after they are forgotten
}

// attachment is a client's use of one GPU.
type attachment struct {
	client  *client
	gpu     *gpu
	page    *page.Page // of the connection over which it attached, with the channel
	channel uint16
	ordinal uint32
	stats   wire.Stats
	told    wire.Notice

	fixed     wire.Fixed // why nothing of its memory can be moved
	fixedTold uint16     // the reasons that were told, by bit
	answered  bool       // ATTACHED was sent
	reserves  bool       // it reserves memory: its shim holds memory limits
	outside   outside
	held      bool // by a drained GPU: the core does not know what the client wants
	moves     bool // its tenant leaves the GPU for another one: the same
	wants     bool // while either is so
}

// slotOn returns the client's attachment to a GPU if its page has a slot for it; nil: it uses
// no such GPU, or has registered again and is yet to attach there.
func (cl *client) slotOn(g *gpu) *attachment {
	if att := cl.attached[g]; att != nil && cl.page != nil && att.page == cl.page {
		return att
	}
	return nil
}

// pendingAttach is an ATTACH that waits for a search for GPUs.
type pendingAttach struct {
	conn     *conn
	frame    wire.Frame
	reserves []wire.Frame // that came meanwhile
}

// refuseUnknown notes that a connection was refused because its process could
// not be identified.
func (d *Daemon) refuseUnknown(err error) {
	d.refused++
	level := logrus.DebugLevel // it ended as soon as it had connected
	for _, known := range []error{peer.ErrOtherPIDNamespace, peer.ErrHidden} {
		if !errors.Is(err, known) {
			continue
		}
		if d.identifyErr == nil {
			level = logrus.ErrorLevel
		}
		d.identifyErr = known
	}
	d.log.WithError(err).Log(level, "refuse a connection: cannot identify the process")
}

// frame handles one frame that is well-formed and in order by itself.
func (d *Daemon) frame(c *conn, f *wire.Frame) {
	if c.dead {
		return
	}
	d.reach(atFrame)
	d.traffic.Messages[f.Type]++
	switch f.Type {
	case wire.TypeRegister:
		d.register(c, f)
		return
	case wire.TypeAttach:
		d.attach(c, f, false)
		return
	case wire.TypeSuspended:
		d.extraWork += uint64(len(d.clients)) / clientsPerWork // it is looked for who leaves next
		d.suspended(c, f)
		return
	}
	att := c.channels[f.Channel]
	if p := c.waiting[f.Channel]; att == nil && p != nil {
		d.frameEarly(c, p, f)
		return
	}
	if att == nil && c.failed[f.Channel] {
		return // sent before it read our answer
	}
	if att == nil {
		d.notAttached(c, f)
		return
	}
	switch f.Type {
	case wire.TypeRequest:
		if att.held || att.moves {
			att.wants = true
			return
		}
		d.step(att.gpu, sched.Request{Client: c.client.id})
	case wire.TypeRelease:
		if f.Epoch == 0 && f.Code == uint32(sched.Exit) {
			att.wants = false
			d.step(att.gpu, sched.Withdraw{Client: c.client.id})
			return
		}
		d.step(att.gpu, sched.Release{
			Client:    c.client.id,
			Epoch:     sched.Epoch(f.Epoch),
			Reason:    sched.Reason(f.Code), // the numbers are the same, see TestReasons
			Preempted: f.Released.Flags&wire.ReleasedPreempted != 0,
			Calls:     f.Released.Calls,
		})
		d.considerLeaving(c.client)
	case wire.TypeStats:
		called := f.Stats.Calls != att.stats.Calls
		att.stats = f.Stats
		if called && att.gpu.core.SuspendsIdle() {
			d.step(att.gpu, sched.Called{Client: c.client.id})
		}
	case wire.TypeUtil:
		d.step(att.gpu, sched.Utilization{Client: c.client.id, Samples: int(f.Util.Samples), Busy: int(f.Util.Busy), Calls: int(f.Util.Calls)})
	case wire.TypeControls:
		d.step(att.gpu, sched.Controls{
			Client: c.client.id, Slices: sched.Control(f.Controls.Slices), Channels: sched.Control(f.Controls.Channels), // the numbers are the same
			Groups: int(f.Controls.Groups), Bare: int(f.Controls.Bare), Driver: f.Controls.DriverVersion(),
		})
	case wire.TypeReserve:
		d.reserve(att, f)
	case wire.TypeMoved:
		d.moved(att, f)
		d.sleepAgain(c.client, att.gpu)
		d.considerLeaving(c.client)
	}
}

// frameEarly handles a frame for a GPU that is still searched for.
func (d *Daemon) frameEarly(c *conn, p *pendingAttach, f *wire.Frame) {
	switch {
	case p.frame.Code&wire.AttachObserve != 0:
		d.notAttached(c, f)
	case f.Type == wire.TypeRequest:
		p.frame.Code |= wire.AttachWant
	case f.Type == wire.TypeReserve && len(p.reserves) == maxEarlyReserves:
		d.protocolError(c, fmt.Errorf("%w: RESERVE %d times before the answer", wire.ErrFrame, maxEarlyReserves+1))
	case f.Type == wire.TypeReserve:
		p.reserves = append(p.reserves, *f)
	}
}

func (d *Daemon) notAttached(c *conn, f *wire.Frame) {
	d.protocolError(c, fmt.Errorf("%w: %v on channel %d, which is not attached", wire.ErrFrame, f.Type, f.Channel))
}

func (d *Daemon) register(c *conn, f *wire.Frame) {
	if f.Register.MinVersion > wire.Version {
		d.refused++
		text := fmt.Sprintf("protocol %d..%d, scheduler speaks %d", f.Register.MinVersion, f.Version, wire.Version)
		d.tell(c.subject(), logrus.WarnLevel, "refuse a client: "+text)
		c.refuse(wire.ErrVersion, text)
		d.shutDown(c)
		return
	}
	cl := d.byProc[c.peer.Process]
	if cl == nil {
		if has := len(d.byAccount[c.peer.Account]); !admission.Allows(has, maxClients-len(d.clients)) {
			text := fmt.Sprintf("%d processes on this node at most", maxClients)
			if has >= admission.MaxPerAccount {
				text = fmt.Sprintf("%d processes per container or user at most", has)
			}
			d.desk.Refuse(time.Now(), text)
			d.tell(c.subject(), logrus.WarnLevel, "refuse a process: "+text)
			c.refuse(wire.ErrTooMany, text)
			d.shutDown(c)
			return
		}
		cl = d.addClient(c.peer)
	} else {
		// The same process over another connection: it only asks, or it uses
		// GPUs over this one from its first ATTACH on.
		c.peer.Close() // the client has one
	}
	c.client, c.reg, c.again = cl, f.Register, f.Code&wire.RegisterReconnect != 0
	c.canMove = f.Code&wire.RegisterSwap != 0
	c.slices, c.copies = f.Code&wire.RegisterSlices != 0, f.Code&wire.RegisterCopier != 0
	c.suspends, c.isAway = f.Code&wire.RegisterSuspend != 0, f.Code&wire.RegisterAway != 0
	page, fd, err := page.New(uint64(cl.id))
	if err != nil {
		d.tell(c.subject(), logrus.ErrorLevel, fmt.Sprintf("refuse a client: %v", err))
		c.refuse(wire.ErrInternal, "no grant page")
		d.shutDown(c)
		return
	}
	defer fd.Close()
	c.page = page
	d.reach(beforeWelcome)
	d.send(c, &wire.Frame{
		Type:    wire.TypeWelcome,
		Welcome: wire.Welcome{ClientID: uint64(cl.id), PageSize: wire.PageSize, Slots: wire.MaxChannels},
	}, unix.UnixRights(int(fd.Fd())))
	d.reach(afterWelcome)
}

// takeOver makes c the connection over which its process uses GPUs. What the
// process holds it says in the ATTACH that follows; until then it is lost.
func (d *Daemon) takeOver(c *conn) {
	cl := c.client
	if cl.conn == c {
		return
	}
	if old := cl.conn; old != nil { // from before an exec, or half lost
		d.shutDown(old)
		d.loseClient(old)
	}
	if cl.page != nil {
		cl.page.Unmap() // its gates were shut when its connection was lost
	}
	cl.conn, cl.page, cl.reg, cl.canMove = c, c.page, c.reg, c.canMove
	what := "registered again"
	if !c.again {
		what = "registered"
		d.dropUse(cl, sched.Exec{Client: cl.id}) // what an earlier program of this process had
	}
	d.traffic.Registrations++
	d.noteClient(cl, api.EventType_EVENT_TYPE_REGISTER, 0)
	d.tell(c.subject(), logrus.InfoLevel, fmt.Sprintf("%s, shim %s, %d entry points interposed", what, shimVersion(cl.reg.ShimVersion), cl.reg.Interposed))
	if cl.reg.Bypassed > 0 {
		d.tell(c.subject(), logrus.WarnLevel, fmt.Sprintf("%d entry points of CUDA bypass the shim: its work may not be arbitrated", cl.reg.Bypassed))
		d.traffic.Bypasses++
		d.noteClient(cl, api.EventType_EVENT_TYPE_BYPASS, cl.reg.Bypassed)
	}
	d.awayRegistered(cl)
}

// addClient gives a process its id and watches for its death.
func (d *Daemon) addClient(p *peer.Peer) *client {
	d.nextID++
	cl := &client{Peer: p, id: d.nextID, attached: map[*gpu]*attachment{}}
	d.clients[cl.id] = cl
	d.byProc[p.Process] = cl
	if d.byAccount[p.Account] == nil {
		d.byAccount[p.Account] = map[*client]struct{}{}
	}
	d.byAccount[p.Account][cl] = struct{}{}
	d.desk.SetProcesses(len(d.clients))
	d.wg.Go(func() {
		err := p.AwaitDeath()
		if err == nil {
			d.do(func() { d.bury(cl) })
			return
		}
		select {
		case <-d.ended: // and so closed the pidfd
		default:
			d.log.WithError(err).Errorf("watch process %d: its death will not be noticed", p.PID)
		}
	})
	return cl
}

// bury removes a client whose process is dead.
func (d *Daemon) bury(cl *client) {
	if d.clients[cl.id] != cl {
		return
	}
	d.reach(beforeBury)
	defer d.reach(afterBury)
	if cl.conn != nil {
		c := cl.conn
		cl.conn = nil
		d.shutDown(c)
	}
	if cl.page != nil {
		d.noteClient(cl, api.EventType_EVENT_TYPE_END, 0)
	}
	// A child that the process forked may still map the page: its gates are shut
	// before others are granted the GPU.
	for _, att := range cl.attached {
		cl.page.Shut(att.channel)
	}
	d.dropUse(cl, sched.Gone{Client: cl.id})
	delete(d.strayed, cl)
	cl.away.next.Stop()
	if cl.bringing.copier != nil { // a child, or another process, may have its end of the socket
		cl.bringing.copier.End()
	}
	d.dropFile(cl)
	d.dropHeld(func(p peer.Process) bool { return p == cl.Process })
	delete(d.clients, cl.id)
	delete(d.byProc, cl.Process)
	delete(d.byAccount[cl.Account], cl)
	if len(d.byAccount[cl.Account]) == 0 {
		delete(d.byAccount, cl.Account)
		delete(d.outOfMemory, cl.Account)
	}
	d.desk.SetProcesses(len(d.clients))
	cl.Close()
	level := logrus.DebugLevel // it only asked
	if cl.page != nil {
		level = logrus.InfoLevel
		cl.page.Unmap()
		cl.page = nil
	}
	d.tell(cl.subject(), level, "process has ended")
	d.goOn(cl) // an order of resume waits for the other processes only
	d.nextLeaves()
	d.hostIsFree()
}

// attach handles ATTACH; searched: after a search for GPUs.
func (d *Daemon) attach(c *conn, f *wire.Frame, searched bool) {
	answer := wire.Frame{Type: wire.TypeAttached, Channel: f.Channel}
	observe := f.Code&wire.AttachObserve != 0
	fail := func(code uint32) {
		c.failed[f.Channel] = !observe
		answer.Code = code
		d.send(c, &answer, nil)
	}
	if d.clients[c.client.id] != c.client {
		d.shutDown(c) // the process is dead, another one has its socket
		return
	}
	if f.Channel >= c.reg.Channels || c.channels[f.Channel] != nil || c.waiting[f.Channel] != nil {
		fail(wire.ErrChannel)
		return
	}
	if observe && f.Code&wire.AttachPlace != 0 && f.Attach.UUID == (wire.UUID{}) { // it does not know where it began
		answer.Attached.UUID = d.placeOf(c.peer.Account)
		d.send(c, &answer, nil)
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
		if !observe {
			d.noteUnknown(c, f.Channel, f.Attach.UUID)
		}
		fail(wire.ErrUnknownGPU)
		return
	}
	if observe {
		c.page.SetLimits(f.Channel, g.limits(c.peer.Account, 0))
		if f.Code&wire.AttachPlace != 0 {
			answer.Attached.UUID = d.placeOf(c.peer.Account)
		}
		d.send(c, &answer, nil)
		return
	}
	for _, other := range c.channels {
		if other != nil && other.gpu == g {
			fail(wire.ErrChannel)
			return
		}
	}
	d.takeOver(c)
	moved := d.arrive(c.client, g)
	att := &attachment{client: c.client, gpu: g, page: c.page, channel: f.Channel, ordinal: f.Attach.Ordinal}
	want := f.Code&wire.AttachWant != 0
	if d.holds(g, c.client, c.again, f.Epoch) {
		att.held, att.wants, want = true, want, false
		d.noteHeld(g, c.client)
		d.tell(c.subject(), logrus.InfoLevel, fmt.Sprintf("GPU %d is drained: the client waits until it is undrained", g.Index))
	}
	c.client.attached[g] = att
	c.channels[f.Channel] = att
	maps.DeleteFunc(c.unknown, func(channel uint16, uuid wire.UUID) bool { return channel == f.Channel || uuid == f.Attach.UUID })
	if m := d.migrations[c.client.Account]; m != nil && m.from == g && m.phase <= departs {
		if m.phase == departs {
			d.keepOff(att, want)
			want = false
		}
		if !slices.Contains(m.clients, c.client) {
			m.clients, m.count = append(m.clients, c.client), m.count+1
		}
	}
	c.page.SetLimits(f.Channel, g.limits(c.client.Account, c.client.id))
	delete(g.restored, c.client.id)
	d.showMemoryMode(g, c.client, att.channel)
	if g.swap != nil && g.swap.members[c.client.id] == nil {
		d.addMember(g, c.client)
	}
	d.stepAttach(g, att, sched.Attach{
		Client:  c.client.id,
		Tenant:  c.client.Account,
		Share:   d.shareOf(g, c.client.Account),
		Held:    sched.Epoch(f.Epoch),
		Want:    want,
		CanMove: c.client.canMove,
		Again:   c.again,
	}, answer)
	if m := g.memberOf(c.client.id); m != nil {
		if moved {
			d.step(g, sched.ArenaChanged{Client: c.client.id, Bytes: m.arena.Bytes()})
		}
		d.foundFiled(m)
		m.arena.Flush() // what an earlier connection may have lost
		g.swap.arenas.Prepare()
	}
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
			d.logOf(c.subject()).WithError(err).Debug("connection ended")
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
		d.traffic.Disconnects++
		c.account.Disconnect()
		if c.client == nil {
			c.peer.Close()
			continue
		}
		d.loseClient(c)
		if c.client.page != c.page && c.page != nil {
			c.page.Unmap() // of one that only asked
		}
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
	if cl.away.step == preparing {
		d.awayStep(cl, present) // it says itself how far it got
	}
	d.logOf(c.subject()).Debug("connection lost")
	for _, att := range c.channels {
		if att != nil {
			d.step(att.gpu, sched.Lost{Client: cl.id})
		}
	}
	d.reach(afterLost)
}

func shimVersion(v uint32) string {
	return fmt.Sprintf("%d.%d.%d", v>>16, v>>8&0xff, v&0xff)
}
