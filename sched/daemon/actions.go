// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/wire"
)

// checkPause is the least time between two checks of the cores' invariants:
// they cost O(clients).
const checkPause = time.Second

// step gives an event to a GPU's core and carries out the answer.
func (d *Daemon) step(g *node.GPU, ev base.Event) {
	g.Post(d.decide(g, ev))
	d.flush(g)
	d.stepGangs()
	d.memory.MakeArenas(g)
}

// stepGangs steps the GPUs where a gang's turn goes on because of another GPU.
func (d *Daemon) stepGangs() {
	for len(d.toStep) > 0 {
		uuid := d.toStep[0]
		d.toStep = d.toStep[1:]
		g := d.Order[slices.IndexFunc(d.Order, func(g *node.GPU) bool { return g.UUID == uuid })]
		g.Post(d.decide(g, sched.GangMoved{}))
		d.flush(g)
		d.memory.MakeArenas(g)
	}
	if d.checkAlways {
		if err := d.Cores.Check(); err != nil && d.invariantErr == nil {
			d.invariantErr = err
		}
	}
}

// stepAttach is step for an ATTACH: its answer comes after the page says
// whether the client goes on under its grant, and before a new GRANT.
func (d *Daemon) stepAttach(g *node.GPU, att *node.Attachment, ev sched.Attach, answer wire.Frame) {
	acts := d.decide(g, ev)
	att.Client.Page.SetStill(att.Channel, g.Core.Still())
	at := 0
	if len(acts) > at {
		if room, ok := acts[at].(residency.Room); ok && room.Client == ev.Client {
			at++
		}
	}
	if len(acts) > at {
		if adopt, ok := acts[at].(sched.Adopt); ok {
			at++
			answer.Epoch = uint64(adopt.Epoch)
		}
	}
	g.Post(acts[:at])
	g.Outbox = append(g.Outbox, node.Work{Att: att, Answer: &answer})
	g.Post(acts[at:])
	d.flush(g)
	d.stepGangs()
	d.memory.MakeArenas(g)
}

// decide runs the core. The actions are valid until the next call.
func (d *Daemon) decide(g *node.GPU, ev base.Event) []base.Action {
	t := loop.Now()
	if g.Core.AsksHost(ev) {
		d.memory.ObserveHost()
	}
	acts := g.Core.Step(t, ev)
	acts = slices.DeleteFunc(acts, func(a base.Action) bool {
		other, ok := a.(sched.StepGPU)
		if ok {
			d.toStep = append(d.toStep, other.GPU)
		}
		return ok
	})
	d.Reach(node.AtDecided)
	if t >= d.nextCheck || d.checkAlways {
		d.nextCheck = t.Add(checkPause)
		if err := g.Core.Check(); err != nil && d.invariantErr == nil {
			d.invariantErr = err
			d.Log.WithError(err).Errorf("bug in nvshare-scheduler: GPU %d after %s", g.Index, base.Text(ev))
		}
	}
	return acts
}

// flush carries out the outbox in order. If the state file cannot be written
// the rest waits, except what concerns memory: a grant that is not recorded could
// be given twice after a restart.
func (d *Daemon) flush(g *node.GPU) {
	if d.persistErr != nil {
		g.Outbox = node.WithoutEnded(g.Outbox)
	}
	kept := g.Outbox[:0]
	for i := range g.Outbox {
		w := g.Outbox[i]
		switch {
		case len(kept) == 0 && d.carryOut(g, &w), len(kept) > 0 && w.Att == nil && d.memory.CarryOutMemory(g, w.Action):
		default:
			kept = append(kept, w)
		}
	}
	if g.Outbox = kept; len(kept) > 0 {
		g.Retry.Set(loop.Now().Add(persistRetry))
	}
}

func (d *Daemon) carryOut(g *node.GPU, w *node.Work) bool {
	if w.Att != nil {
		if c := w.Att.Client.Conn; c != nil && c.Channels[w.Att.Channel] == w.Att {
			d.Reach(node.BeforeAttached)
			d.Send(c, w.Answer, nil)
			w.Att.Answered = true
			d.Reach(node.AfterAttached)
		}
		return true
	}
	if d.Log.Logger.IsLevelEnabled(logrus.DebugLevel) {
		d.Log.Debugf("GPU %d: %s", g.Index, base.Text(w.Action))
	}
	if d.Failpoint == nil {
		return d.act(g, w)
	}
	d.Failpoint(node.Before(w.Action.Action()))
	done := d.act(g, w)
	d.Failpoint(node.After(w.Action.Action()))
	return done
}

// act carries out an action.
func (d *Daemon) act(g *node.GPU, w *node.Work) bool {
	switch a := w.Action.(type) {
	case sched.Persist:
		return d.persist(g, a)
	case sched.ModeChosen:
		d.modeChosen(g, a)
	case sched.Fence:
		d.fence(g, a)
	case sched.Released:
		if cl := d.Clients[a.Client]; cl != nil {
			d.watch.Unfence(g, cl)
		}
	default:
		if id, _ := w.Grant(); id == 0 {
			d.memory.CarryOutMemory(g, a)
		} else if att := d.AttachmentOf(g, id); att != nil {
			d.carryOutOn(att, a)
		} else {
			d.watch.CarryOut(g, id, a)
		}
	}
	d.observe(g, w.Action)
	return true
}

// carryOutOn carries out what is about a client's gate.
func (d *Daemon) carryOutOn(att *node.Attachment, action base.Action) {
	page, c := att.Client.Page, att.Client.Conn
	switch a := action.(type) {
	case sched.Grant:
		d.grant(att, a)
	case sched.Revoke:
		d.revoke(att, a)
	case sched.StepOne:
		d.Send(c, &wire.Frame{
			Type: wire.TypeRevoke, Channel: att.Channel, Code: wire.RevokeStep, Epoch: uint64(a.Epoch),
			Revoke: wire.Revoke{GraceNs: uint64(a.Grace)},
		}, nil)
	case sched.Slice:
		if c != nil && c.Says(wire.RegisterSlices) {
			d.Send(c, &wire.Frame{Type: wire.TypeSlice, Channel: att.Channel, Slice: wire.Slice{Ns: uint64(a.D)}}, nil)
		}
	case sched.Pause:
		page.Close(att.Channel) // nobody waits on it yet
	case sched.Resume:
		page.Reopen(att.Channel, uint64(a.Epoch))
	case sched.Stand:
		page.Stand(att.Channel, a.On && !att.Moves)
	case sched.Close:
		page.Shut(att.Channel)
	case sched.Adopt:
		page.Open(att.Channel, uint64(a.Epoch), grantFlags(a.Concurrent)|sharedFlag(a.Shared), uint64(att.GPU.Quantum), uint64(loop.Now()))
	case sched.Notice:
		d.notice(att, a)
	}
}

func (d *Daemon) grant(att *node.Attachment, a sched.Grant) {
	flags, onPage := grantFlags(a.Concurrent), sharedFlag(a.Shared)
	if a.Latency {
		onPage |= wire.GrantLatency
	}
	d.away.AtWork(att.Client)
	att.Client.Page.Open(att.Channel, uint64(a.Epoch), flags|onPage, uint64(a.Quantum), uint64(loop.Now()))
	d.Reach(node.InGrant)
	d.Send(att.Client.Conn, &wire.Frame{
		Type: wire.TypeGrant, Channel: att.Channel, Epoch: uint64(a.Epoch), Code: flags,
		Grant: wire.Grant{QuantumNs: uint64(a.Quantum)},
	}, nil)
}

func (d *Daemon) revoke(att *node.Attachment, a sched.Revoke) {
	att.Client.Page.Shut(att.Channel)
	d.Reach(node.InRevoke)
	d.Send(att.Client.Conn, &wire.Frame{
		Type: wire.TypeRevoke, Channel: att.Channel, Epoch: uint64(a.Epoch),
		Revoke: wire.Revoke{GraceNs: uint64(a.Grace), Waiters: uint32(a.Waiters)},
	}, nil)
	d.expectRelease(att.GPU, att.Client)
}

// modeChosen tells the pages of holders that turns have ended: they keep their grants, and their shims
// would go on bounding the work ahead of the GPU, for nobody.
func (d *Daemon) modeChosen(g *node.GPU, a sched.ModeChosen) {
	if a.Mode != sched.Concurrent {
		return
	}
	for _, cl := range d.Clients {
		if att := cl.SlotOn(g); att != nil {
			cl.Page.Share(att.Channel)
		}
	}
}

// expectRelease prepares the hand-over that a revoke leads to: the release is
// looked out for, and so is the grant by the client that gets it. Both would
// otherwise sleep when it comes, and waking up is most of a hand-over's time. Where others hold
// the GPU too, this release hands nothing over, and all their readers would spin at once.
func (d *Daemon) expectRelease(g *node.GPU, holder *node.Client) {
	if d.own.Spin == 0 || holder.Conn == nil || holder.Conn.Dead {
		return
	}
	next := d.AttachmentOf(g, g.Core.Next())
	if next == nil {
		return // nobody gains: anti-thrash was turned on
	}
	recorded := d.state.GPUs[g.UUID]
	if recorded.Unrecorded || slices.ContainsFunc(recorded.Holders, func(h state.Holder) bool {
		return h.PID != holder.PID && h.PID != next.Client.PID
	}) {
		return
	}
	next.Client.Page.Announce(next.Channel)
	holder.Conn.LookOut(loop.Now().Add(d.own.Spin))
}

func sharedFlag(shared bool) uint32 {
	if shared {
		return wire.GrantShared
	}
	return 0
}

func grantFlags(concurrent bool) uint32 {
	if concurrent {
		return wire.GrantConcurrent
	}
	return 0
}

func (d *Daemon) persist(g *node.GPU, a sched.Persist) bool {
	s := d.state.GPUs[g.UUID]
	s.Epoch, s.Holders, s.Unrecorded, s.Way = a.Epoch, s.Holders[:0], a.Unrecorded, a.Way
	for _, h := range a.Holders {
		if cl := d.Clients[h.Client]; cl != nil {
			s.Holders = append(s.Holders, state.Holder{PID: cl.PID, StartTime: cl.Start, Epoch: h.Epoch, Shared: h.Shared})
		}
	}
	d.ExtraWork += persistCost
	err := d.state.Save(d.statePath(), func() { d.Reach(node.InPersist) })
	switch {
	case err != nil && d.persistErr == nil:
		d.Log.WithError(err).Error("no grants until the state file can be written")
		d.watchRunDir()
	case err == nil && d.persistErr != nil:
		d.Log.Info("the state file can be written again")
	}
	d.persistErr = err
	return err == nil
}

func (d *Daemon) notice(att *node.Attachment, a sched.Notice) {
	n := wire.Notice{Waiters: shown(a.Leave, a.Waiters), Present: shown(a.Bound, a.Present)}
	old := att.Told
	att.Told = n
	att.Client.Page.Hint(att.Channel, n.Waiters, n.Present)
	att.Client.Page.SetPatient(att.Channel, a.Patient)
	if (n.Waiters == 0) != (old.Waiters == 0) || (n.Present == 0) != (old.Present == 0) {
		d.Send(att.Client.Conn, &wire.Frame{Type: wire.TypeNotice, Channel: att.Channel, Notice: n}, nil)
	}
}

// shown is what a page says instead of a number of others: clients go by whether it
// is zero.
func shown(on bool, others int) uint32 {
	if !on {
		return 0
	}
	return uint32(max(others, 1))
}
