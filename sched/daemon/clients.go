// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/page"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/timeslice"
	"github.com/nvshare/nvshare/sched/wire"
)

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
	d.Log.WithError(err).Log(level, "refuse a connection: cannot identify the process")
}

// frame handles one frame that is well-formed and in order by itself.
func (d *Daemon) frame(c *node.Conn, f *wire.Frame) {
	if c.Dead {
		return
	}
	d.Reach(node.AtFrame)
	switch f.Type {
	case wire.TypeRegister:
		d.register(c, f)
		return
	case wire.TypeAttach:
		d.attach(c, f, false)
		return
	case wire.TypeSuspended:
		d.ExtraWork += uint64(len(d.Clients)) / node.ClientsPerWork // it is looked for who leaves next
		d.away.Suspended(c, f)
		return
	}
	att := c.Channels[f.Channel]
	if p := c.Waiting[f.Channel]; att == nil && p != nil {
		d.frameEarly(c, p, f)
		return
	}
	if att == nil && c.Failed[f.Channel] {
		return // sent before it read our answer
	}
	if att == nil {
		d.notAttached(c, f)
		return
	}
	if att.GPU.IsStuck() {
		d.dropStuck(c, att.GPU)
		return
	}
	d.frameOf(c, att, f)
}

// frameOf is for a frame of an attached channel.
func (d *Daemon) frameOf(c *node.Conn, att *node.Attachment, f *wire.Frame) {
	switch f.Type {
	case wire.TypeRequest:
		if att.Held || att.Moves {
			att.Wants = true
			return
		}
		d.step(att.GPU, sched.Request{Client: c.Client.ID})
	case wire.TypeRelease:
		if f.Epoch == 0 && f.Code == uint32(sched.Exit) {
			att.Wants = false
			d.step(att.GPU, sched.Withdraw{Client: c.Client.ID, Exits: true})
			return
		}
		d.step(att.GPU, sched.Release{
			Client:    c.Client.ID,
			Epoch:     base.Epoch(f.Epoch),
			Reason:    sched.Reason(f.Code), // the numbers are the same, see TestReasons
			Preempted: f.Released.Flags&wire.ReleasedPreempted != 0,
			Calls:     f.Released.Calls,
		})
		d.away.ConsiderLeaving(c.Client)
	case wire.TypeStats:
		called := f.Stats.Calls != att.Stats.Calls
		att.Stats = f.Stats
		if called && att.GPU.Core.SuspendsIdle() {
			d.step(att.GPU, sched.Called{Client: c.Client.ID})
		}
	case wire.TypeUtil:
		d.step(att.GPU, timeslice.Utilization{Client: c.Client.ID, Samples: int(f.Util.Samples), Busy: int(f.Util.Busy), Calls: int(f.Util.Calls)})
	case wire.TypeControls:
		d.step(att.GPU, sched.Controls{
			Client: c.Client.ID, Slices: sched.Control(f.Controls.Slices), Channels: sched.Control(f.Controls.Channels), // the numbers are the same
			Groups: int(f.Controls.Groups), Bare: int(f.Controls.Bare), Driver: f.Controls.DriverVersion(),
		})
	case wire.TypeReserve:
		d.memory.Reserve(att, f)
	case wire.TypeMoved:
		d.memory.Moved(att, f)
		d.away.SleepAgain(c.Client, att.GPU)
		d.away.ConsiderLeaving(c.Client)
	}
}

// dropStuck disconnects a client of a GPU on which too much waits for the state file. It comes back,
// and is taken in when the file can be written.
func (d *Daemon) dropStuck(c *node.Conn, g *node.GPU) {
	d.Tell(c.Subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: disconnect a client: too much waits for the state file", g.Index))
	d.ShutDown(c)
}

// frameEarly handles a frame for a GPU that is still searched for.
func (d *Daemon) frameEarly(c *node.Conn, p *node.PendingAttach, f *wire.Frame) {
	switch {
	case p.Frame.Code&wire.AttachObserve != 0:
		d.notAttached(c, f)
	case f.Type == wire.TypeRequest:
		p.Frame.Code |= wire.AttachWant
	case f.Type == wire.TypeReserve && len(p.Reserves) == maxEarlyReserves:
		d.ProtocolError(c, fmt.Errorf("%w: RESERVE %d times before the answer", wire.ErrFrame, maxEarlyReserves+1))
	case f.Type == wire.TypeReserve:
		p.Reserves = append(p.Reserves, *f)
	}
}

func (d *Daemon) notAttached(c *node.Conn, f *wire.Frame) {
	d.ProtocolError(c, fmt.Errorf("%w: %v on channel %d, which is not attached", wire.ErrFrame, f.Type, f.Channel))
}

func (d *Daemon) register(c *node.Conn, f *wire.Frame) {
	if f.Register.MinVersion > wire.Version {
		d.refused++
		text := fmt.Sprintf("protocol %d..%d, scheduler speaks %d", f.Register.MinVersion, f.Version, wire.Version)
		d.Tell(c.Subject(), logrus.WarnLevel, "refuse a client: "+text)
		c.Refuse(wire.ErrVersion, text)
		d.ShutDown(c)
		return
	}
	cl := d.ByProc[c.Peer.Process]
	if cl == nil {
		if has := len(d.ByAccount[c.Peer.Account]); !admission.Allows(has, node.MaxClients-len(d.Clients)) {
			text := fmt.Sprintf("%d processes on this node at most", node.MaxClients)
			if has >= admission.MaxPerAccount {
				text = fmt.Sprintf("%d processes per container or user at most", has)
			}
			d.Desk.Refuse(time.Now(), text)
			d.Tell(c.Subject(), logrus.WarnLevel, "refuse a process: "+text)
			c.Refuse(wire.ErrTooMany, text)
			d.ShutDown(c)
			return
		}
		cl = d.AddClient(c.Peer)
	} else {
		// The same process over another connection: it only asks, or it uses
		// GPUs over this one from its first ATTACH on.
		c.Peer.Close() // the client has one
	}
	c.Client, c.Reg, c.Code = cl, f.Register, f.Code
	page, fd, err := page.New(uint64(cl.ID))
	if err != nil {
		d.Tell(c.Subject(), logrus.ErrorLevel, fmt.Sprintf("refuse a client: %v", err))
		c.Refuse(wire.ErrInternal, "no grant page")
		d.ShutDown(c)
		return
	}
	defer fd.Close()
	c.Page = page
	d.Reach(node.BeforeWelcome)
	d.Send(c, &wire.Frame{
		Type:    wire.TypeWelcome,
		Welcome: wire.Welcome{ClientID: uint64(cl.ID), PageSize: wire.PageSize, Slots: wire.MaxChannels},
	}, unix.UnixRights(int(fd.Fd())))
	d.Reach(node.AfterWelcome)
}

// takeOver makes c the connection over which its process uses GPUs. What the
// process holds it says in the ATTACH that follows; until then it is lost.
func (d *Daemon) takeOver(c *node.Conn) {
	cl := c.Client
	if cl.Conn == c {
		return
	}
	if old := cl.Conn; old != nil { // from before an exec, or half lost
		d.ShutDown(old)
		d.loseClient(old)
	}
	if cl.Page != nil {
		cl.Page.Unmap() // its gates were shut when its connection was lost
	}
	cl.Conn, cl.Page, cl.Reg, cl.CanMove = c, c.Page, c.Reg, c.Says(wire.RegisterSwap)
	what := "registered again"
	if !c.Says(wire.RegisterReconnect) {
		what = "registered"
		d.memory.DropUse(cl, sched.Exec{Client: cl.ID}) // what an earlier program of this process had
	}
	d.NoteClient(cl, api.EventType_EVENT_TYPE_REGISTER, 0)
	d.Tell(c.Subject(), logrus.InfoLevel, fmt.Sprintf("%s, shim %s, %d entry points interposed", what, node.ShimVersion(cl.Reg.ShimVersion), cl.Reg.Interposed))
	if cl.Reg.Bypassed > 0 {
		d.Tell(c.Subject(), logrus.WarnLevel, fmt.Sprintf("%d entry points of CUDA bypass the shim: some of its work may not be scheduled", cl.Reg.Bypassed))
		d.Traffic.Bypasses++
		d.NoteClient(cl, api.EventType_EVENT_TYPE_BYPASS, cl.Reg.Bypassed)
	}
	d.away.AwayRegistered(cl)
}

// bury removes a client whose process is dead.
func (d *Daemon) bury(cl *node.Client) {
	if d.Clients[cl.ID] != cl {
		return
	}
	d.Reach(node.BeforeBury)
	defer d.Reach(node.AfterBury)
	if cl.Conn != nil {
		c := cl.Conn
		cl.Conn = nil
		d.ShutDown(c)
	}
	if cl.Page != nil {
		d.NoteClient(cl, api.EventType_EVENT_TYPE_END, 0)
	}
	// A child that the process forked may still map the page: its gates are shut
	// before others are granted the GPU.
	for _, att := range cl.Attached {
		cl.Page.Shut(att.Channel)
	}
	d.memory.DropUse(cl, sched.Gone{Client: cl.ID})
	d.moves.ForgetClient(cl)
	d.settings.DropHeld(func(p peer.Process) bool { return p == cl.Process })
	delete(d.Clients, cl.ID)
	delete(d.ByProc, cl.Process)
	delete(d.ByAccount[cl.Account], cl)
	if len(d.ByAccount[cl.Account]) == 0 {
		delete(d.ByAccount, cl.Account)
		delete(d.memory.OutOfMemory, cl.Account)
	}
	d.Desk.SetProcesses(len(d.Clients))
	cl.Close()
	level := logrus.DebugLevel // it only asked
	if cl.Page != nil {
		level = logrus.InfoLevel
		cl.Page.Unmap()
		cl.Page = nil
	}
	d.Tell(cl.Subject(), level, "process has ended")
	d.away.ForgetClient(cl)
}

// attach handles ATTACH; searched: after a search for GPUs.
func (d *Daemon) attach(c *node.Conn, f *wire.Frame, searched bool) {
	answer := wire.Frame{Type: wire.TypeAttached, Channel: f.Channel}
	observe := f.Code&wire.AttachObserve != 0
	fail := func(code uint32) {
		c.Failed[f.Channel] = !observe
		answer.Code = code
		d.Send(c, &answer, nil)
	}
	if d.Clients[c.Client.ID] != c.Client {
		d.ShutDown(c) // the process is dead, another one has its socket
		return
	}
	if f.Channel >= c.Reg.Channels || c.Channels[f.Channel] != nil || c.Waiting[f.Channel] != nil {
		fail(wire.ErrChannel)
		return
	}
	if observe && f.Code&wire.AttachPlace != 0 && f.Attach.UUID == (wire.UUID{}) { // it does not know where it began
		answer.Attached.UUID = d.tenants.PlaceOf(c.Peer.Account)
		d.Send(c, &answer, nil)
		return
	}
	g := d.Gpus[f.Attach.UUID]
	if g == nil {
		if !searched && d.mayRediscover() {
			p := &node.PendingAttach{Conn: c, Frame: *f}
			c.Waiting[f.Channel] = p
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
		c.Page.SetLimits(f.Channel, d.memory.LimitsOn(g, c.Peer.Account, 0))
		if f.Code&wire.AttachPlace != 0 {
			answer.Attached.UUID = d.tenants.PlaceOf(c.Peer.Account)
		}
		d.Send(c, &answer, nil)
		return
	}
	for _, other := range c.Channels {
		if other != nil && other.GPU == g {
			fail(wire.ErrChannel)
			return
		}
	}
	if g.IsStuck() {
		d.dropStuck(c, g)
		return
	}
	d.attachTo(g, c, f, answer)
}

// attachTo has a client use a GPU over a channel.
func (d *Daemon) attachTo(g *node.GPU, c *node.Conn, f *wire.Frame, answer wire.Frame) {
	d.takeOver(c)
	moved := d.moves.Arrive(c.Client, g)
	att := &node.Attachment{Client: c.Client, GPU: g, Page: c.Page, Channel: f.Channel, Ordinal: f.Attach.Ordinal}
	want := f.Code&wire.AttachWant != 0
	if d.holds(g, c.Client, c.Says(wire.RegisterReconnect), f.Epoch) {
		att.Held, att.Wants, want = true, want, false
		d.noteHeld(g, c.Client)
		d.Tell(c.Subject(), logrus.InfoLevel, fmt.Sprintf("GPU %d is drained: the client waits until it is undrained", g.Index))
	}
	c.Client.Attached[g] = att
	c.Channels[f.Channel] = att
	maps.DeleteFunc(c.Unknown, func(channel uint16, uuid wire.UUID) bool { return channel == f.Channel || uuid == f.Attach.UUID })
	want = d.moves.JoinMove(att, want)
	c.Page.SetLimits(f.Channel, d.memory.LimitsOn(g, c.Client.Account, c.Client.ID))
	delete(g.Restored, c.Client.ID)
	d.memory.ShowMemoryMode(g, c.Client, att.Channel)
	if d.memory.Swaps[g] != nil && d.memory.MemberOf(g, c.Client.ID) == nil {
		d.memory.AddMember(g, c.Client)
	}
	d.stepAttach(g, att, sched.Attach{
		Client:  c.Client.ID,
		Tenant:  c.Client.Account,
		Share:   d.tenants.ShareOf(g, c.Client.Account),
		Held:    base.Epoch(f.Epoch),
		Want:    want,
		CanMove: c.Client.CanMove,
		Again:   c.Says(wire.RegisterReconnect),
		Cut:     f.Code&wire.AttachCut != 0,
	}, answer)
	if m := d.memory.MemberOf(g, c.Client.ID); m != nil {
		if moved {
			d.step(g, residency.ArenaChanged{Client: c.Client.ID, Bytes: m.Arena.Bytes()})
		}
		d.away.FoundFiled(m)
		m.Arena.Flush() // what an earlier connection may have lost
		d.memory.Swaps[g].Arenas.Prepare()
	}
}

// hangUp ends a connection whose reader has stopped.
func (d *Daemon) hangUp(c *node.Conn, err error) {
	switch {
	case c.Dead:
	case errors.Is(err, wire.ErrFrame):
		d.ProtocolError(c, err)
	case errors.Is(err, os.ErrDeadlineExceeded):
		d.refused++
		c.Refuse(wire.ErrProtocol, fmt.Sprintf("not registered within %v", d.registerTimeout))
		d.ShutDown(c)
	default:
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
			d.LogOf(c.Subject()).WithError(err).Debug("connection ended")
		}
		d.ShutDown(c)
	}
}

// dropBroken forgets the connections that were closed during an event. More
// may break meanwhile: telling one client of another's loss is a send.
func (d *Daemon) dropBroken() {
	for len(d.Broken) > 0 {
		c := d.Broken[0]
		d.Broken = d.Broken[1:]
		delete(d.conns, c)
		c.Account.Disconnect()
		if c.Client == nil {
			c.Peer.Close()
			continue
		}
		d.loseClient(c)
		if c.Client.Page != c.Page && c.Page != nil {
			c.Page.Unmap() // of one that only asked
		}
	}
}

// loseClient notes that a client's connection is lost. That proves nothing
// about its work; the cores decide.
func (d *Daemon) loseClient(c *node.Conn) {
	cl := c.Client
	if cl == nil || cl.Conn != c {
		return
	}
	cl.Conn = nil
	d.away.Lost(cl)
	d.LogOf(c.Subject()).Debug("connection lost")
	for _, att := range c.Channels {
		if att != nil {
			d.step(att.GPU, sched.Lost{Client: cl.ID})
		}
	}
	d.Reach(node.AfterLost)
}
