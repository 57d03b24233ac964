// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/wire"
)

// checkPause is the least time between two checks of the cores' invariants:
// they cost O(clients).
const checkPause = time.Second

// step gives an event to a GPU's core and carries out the answer.
func (d *Daemon) step(g *gpu, ev sched.Event) {
	g.post(d.decide(g, ev))
	d.flush(g)
	d.stepGangs()
	d.makeArenas(g)
}

// stepGangs steps the GPUs where a gang's turn goes on because of another GPU.
func (d *Daemon) stepGangs() {
	for len(d.toStep) > 0 {
		uuid := d.toStep[0]
		d.toStep = d.toStep[1:]
		g := d.order[slices.IndexFunc(d.order, func(g *gpu) bool { return g.UUID == uuid })]
		g.post(d.decide(g, sched.GangMoved{}))
		d.flush(g)
		d.makeArenas(g)
	}
	if d.checkAlways {
		if err := d.cores.Check(); err != nil && d.invariantErr == nil {
			d.invariantErr = err
		}
	}
}

// stepAttach is step for an ATTACH: its answer comes after the page says
// whether the client goes on under its grant, and before a new GRANT.
func (d *Daemon) stepAttach(g *gpu, att *attachment, ev sched.Attach, answer wire.Frame) {
	acts := d.decide(g, ev)
	at := 0
	if len(acts) > at {
		if room, ok := acts[at].(sched.Room); ok && room.Client == ev.Client {
			at++
		}
	}
	if len(acts) > at {
		if adopt, ok := acts[at].(sched.Adopt); ok {
			at++
			answer.Epoch = uint64(adopt.Epoch)
		}
	}
	g.post(acts[:at])
	g.outbox = append(g.outbox, work{att: att, answer: &answer})
	g.post(acts[at:])
	d.flush(g)
	d.stepGangs()
	d.makeArenas(g)
}

// decide runs the core. The actions are valid until the next call.
func (d *Daemon) decide(g *gpu, ev sched.Event) []sched.Action {
	t := now()
	if g.core.AsksHost(ev) {
		d.observeHost()
	}
	acts := g.core.Step(t, ev)
	acts = slices.DeleteFunc(acts, func(a sched.Action) bool {
		other, ok := a.(sched.StepGPU)
		if ok {
			d.toStep = append(d.toStep, other.GPU)
		}
		return ok
	})
	d.reach(atDecided)
	if t >= d.nextCheck || d.checkAlways {
		d.nextCheck = t.Add(checkPause)
		if err := g.core.Check(); err != nil && d.invariantErr == nil {
			d.invariantErr = err
			d.log.WithError(err).Errorf("bug in nvshare-scheduler: GPU %d after %v", g.Index, ev)
		}
	}
	return acts
}

// flush carries out the outbox in order. If the state file cannot be written
// the rest waits, except what concerns memory: a grant that is not recorded could
// be given twice after a restart.
func (d *Daemon) flush(g *gpu) {
	if d.persistErr != nil {
		g.outbox = withoutEnded(g.outbox)
	}
	kept := g.outbox[:0]
	for i := range g.outbox {
		w := g.outbox[i]
		switch {
		case len(kept) == 0 && d.carryOut(g, &w), len(kept) > 0 && w.att == nil && d.carryOutMemory(g, w.action):
		default:
			kept = append(kept, w)
		}
	}
	if g.outbox = kept; len(kept) > 0 {
		g.retry.Set(now().Add(persistRetry))
	}
}

func (d *Daemon) carryOut(g *gpu, w *work) bool {
	if w.att != nil {
		if c := w.att.client.conn; c != nil && c.channels[w.att.channel] == w.att {
			d.reach(beforeAttached)
			d.send(c, w.answer, nil)
			w.att.answered = true
			d.reach(afterAttached)
		}
		return true
	}
	if d.log.Logger.IsLevelEnabled(logrus.DebugLevel) {
		d.log.Debugf("GPU %d: %v", g.Index, w.action)
	}
	switch a := w.action.(type) {
	case sched.Persist:
		return d.persist(g, a)
	case sched.Grant:
		if att := d.attachmentOf(g, a.Client); att != nil {
			flags, onPage := grantFlags(a.Concurrent), uint32(0)
			if a.Latency {
				onPage |= wire.GrantLatency
			}
			if a.Shared {
				onPage |= wire.GrantShared
			}
			d.atWork(att.client)
			d.reach(beforeGrant)
			att.client.page.Open(att.channel, uint64(a.Epoch), flags|onPage, uint64(a.Quantum), uint64(now()))
			d.reach(inGrant)
			d.send(att.client.conn, &wire.Frame{
				Type: wire.TypeGrant, Channel: att.channel, Epoch: uint64(a.Epoch), Code: flags,
				Grant: wire.Grant{QuantumNs: uint64(a.Quantum)},
			}, nil)
			d.reach(afterGrant)
		}
	case sched.Revoke:
		if att := d.attachmentOf(g, a.Client); att != nil {
			d.reach(beforeRevoke)
			att.client.page.Shut(att.channel)
			d.reach(inRevoke)
			d.send(att.client.conn, &wire.Frame{
				Type: wire.TypeRevoke, Channel: att.channel, Epoch: uint64(a.Epoch),
				Revoke: wire.Revoke{GraceNs: uint64(a.Grace), Waiters: uint32(a.Waiters)},
			}, nil)
			d.reach(afterRevoke)
			d.expectRelease(g, att.client)
		}
	case sched.StepOne:
		if att := d.attachmentOf(g, a.Client); att != nil {
			d.send(att.client.conn, &wire.Frame{
				Type: wire.TypeRevoke, Channel: att.channel, Code: wire.RevokeStep, Epoch: uint64(a.Epoch),
				Revoke: wire.Revoke{GraceNs: uint64(a.Grace)},
			}, nil)
		}
	case sched.Slice:
		if att := d.attachmentOf(g, a.Client); att != nil && att.client.conn != nil && att.client.conn.slices {
			d.send(att.client.conn, &wire.Frame{Type: wire.TypeSlice, Channel: att.channel, Slice: wire.Slice{Ns: uint64(a.D)}}, nil)
		}
	case sched.Pause:
		if att := d.attachmentOf(g, a.Client); att != nil {
			d.reach(beforePause)
			att.client.page.Close(att.channel) // nobody waits on it yet
			d.reach(afterPause)
		}
	case sched.Resume:
		if att := d.attachmentOf(g, a.Client); att != nil {
			d.reach(beforeResume)
			att.client.page.Reopen(att.channel, uint64(a.Epoch))
			d.reach(afterResume)
		}
	case sched.Stand:
		if att := d.attachmentOf(g, a.Client); att != nil {
			att.client.page.Stand(att.channel, a.On && !att.moves)
		}
	case sched.Close:
		if att := d.attachmentOf(g, a.Client); att != nil {
			d.reach(beforeClose)
			att.client.page.Shut(att.channel)
			d.reach(afterClose)
		}
	case sched.Adopt:
		if att := d.attachmentOf(g, a.Client); att != nil {
			flags := grantFlags(a.Concurrent)
			if a.Shared {
				flags |= wire.GrantShared
			}
			d.reach(beforeAdopt)
			att.client.page.Open(att.channel, uint64(a.Epoch), flags, uint64(g.quantum), uint64(now()))
			d.reach(afterAdopt)
		}
	case sched.ModeChosen:
		// A holder keeps its grant when turns end. Its page must say so, or the shim
		// goes on bounding the work ahead of the GPU, for nobody.
		if a.Mode == sched.Concurrent {
			for _, cl := range d.clients {
				if att := cl.slotOn(g); att != nil {
					cl.page.Share(att.channel)
				}
			}
		}
	case sched.Fence:
		d.fence(g, a)
	case sched.Notice:
		d.reach(beforeNotice)
		d.notice(g, a)
		d.reach(afterNotice)
	case sched.Released:
		d.unfence(g, a.Client)
		d.reach(afterReleased)
	default:
		d.carryOutMemory(g, a)
	}
	d.observe(g, w.action)
	return true
}

// expectRelease prepares the hand-over that a revoke leads to: the release is
// looked out for, and so is the grant by the client that gets it. Both would
// otherwise sleep when it comes, and waking up is most of a hand-over's time. Where others hold
// the GPU too, this release hands nothing over, and all their readers would spin at once.
func (d *Daemon) expectRelease(g *gpu, holder *client) {
	if d.own.Spin == 0 || holder.conn == nil || holder.conn.dead {
		return
	}
	next := d.attachmentOf(g, g.core.Next())
	if next == nil {
		return // nobody gains: anti-thrash was turned on
	}
	recorded := d.state.GPUs[g.UUID]
	if recorded.Unrecorded || slices.ContainsFunc(recorded.Holders, func(h state.Holder) bool {
		return h.PID != holder.PID && h.PID != next.client.PID
	}) {
		return
	}
	next.client.page.Announce(next.channel)
	holder.conn.lookOut(now().Add(d.own.Spin))
}

func grantFlags(concurrent bool) uint32 {
	if concurrent {
		return wire.GrantConcurrent
	}
	return 0
}

func (d *Daemon) persist(g *gpu, a sched.Persist) bool {
	s := d.state.GPUs[g.UUID]
	s.Epoch, s.Holders, s.Unrecorded, s.Way = a.Epoch, s.Holders[:0], a.Unrecorded, a.Way
	for _, h := range a.Holders {
		if cl := d.clients[h.Client]; cl != nil {
			s.Holders = append(s.Holders, state.Holder{PID: cl.PID, StartTime: cl.Start, Epoch: h.Epoch})
		}
	}
	d.extraWork += persistCost
	d.reach(beforePersist)
	err := d.state.Save(d.statePath(), func() { d.reach(inPersist) })
	d.reach(afterPersist)
	switch {
	case err != nil && d.persistErr == nil:
		d.log.WithError(err).Error("no grants until the state file can be written")
		d.watchRunDir()
	case err == nil && d.persistErr != nil:
		d.log.Info("the state file can be written again")
	}
	d.persistErr = err
	return err == nil
}

func (d *Daemon) notice(g *gpu, a sched.Notice) {
	att := d.attachmentOf(g, a.Client)
	if att == nil {
		return
	}
	n := wire.Notice{Waiters: shown(a.Leave, a.Waiters), Present: shown(a.Bound, a.Present)}
	old := att.told
	att.told = n
	att.client.page.Hint(att.channel, n.Waiters, n.Present)
	att.client.page.SetPatient(att.channel, a.Patient)
	if (n.Waiters == 0) != (old.Waiters == 0) || (n.Present == 0) != (old.Present == 0) {
		d.send(att.client.conn, &wire.Frame{Type: wire.TypeNotice, Channel: att.channel, Notice: n}, nil)
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
