// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/warden/order"
)

// A process can put its own channels on again, by the driver. The driver's samples show one that does, and its
// container is stopped for as long as it had the GPU too much.

const (
	maxFreeze = 10 * time.Second // of a container, for what its process had too much
	maxOwed   = time.Minute      // what is kept of that for later
	// A suspect is kept off until testLooks are proof, for testFor at most. One that had the GPU then, or of which nothing
	// was proved, is again after testAgain, another one not before testPause.
	testLooks                     = 2
	testFor, testAgain, testPause = 5 * time.Second, 2 * time.Second, 5 * time.Minute
)

// judge has the container of a process that puts its channels on by itself be stopped, once it has had too much for
// long enough, and returns whether it does.
func (x *holding) judge(part, on, before float64, others bool, span time.Duration) (stopped bool) {
	s := &x.samples
	if others && max(on, before) > 0 {
		x.owe(time.Duration((part - on) * float64(span)))
		if s.seemed(part, max(on, before)); (s.suspect >= suspectAt || s.excess > 0) && x.tested == 0 && loop.Now() >= x.nextTest {
			x.test()
		}
		return false
	}
	x.proofs++
	s.had(part, max(on, before))
	if x.debt += time.Duration((part - on) * float64(span)); s.excess == 0 {
		x.debt, x.cheats = 0, false
	}
	if s.excess >= freezeAt && x.mayFreeze() {
		x.freeze()
		return true
	}
	if s.excess >= cheatAt && !x.cheats {
		x.cheats = true
		x.w.Log.Warnf("GPU %d: process %d puts its channels on by itself: they are taken off again and again", x.gpu.Index, x.peer.PID)
	}
	return false
}

// owe adds to what it had too much and was not stopped for.
func (x *holding) owe(d time.Duration) { x.owed = min(max(x.owed+d, 0), maxOwed) }

// test keeps the process off, to see whether it is. Its grant ends when it is off.
func (x *holding) test() {
	x.tested, x.proofs, x.samples.suspect = loop.Now().Add(testFor), 0, 0
	x.revoked = x.epoch != 0
	x.w.Step(x.gpu, sched.Withdraw{Client: x.id})
	x.drive()
}

// endTest lets it want the GPU again, if the test is over: also where the driver says nothing more.
func (x *holding) endTest() {
	t := loop.Now()
	if x.tested == 0 || t < x.tested && x.proofs < testLooks {
		return
	}
	x.tested, x.nextTest = 0, t.Add(testAgain)
	if x.proofs >= testLooks && x.samples.excess == 0 {
		x.nextTest, x.owed = t.Add(testPause), 0
	}
	if x.epoch == 0 && !x.idle {
		x.w.Step(x.gpu, sched.Request{Client: x.id})
	}
	x.drive()
}

// mayFreeze says whether its container can be stopped, and others would not wait then for one in it: for a client that
// has a grant, or for a process that is held and has the GPU alone.
func (x *holding) mayFreeze() bool {
	if x.peer.Container == "" || x.noFreeze {
		return false
	}
	for _, g := range x.w.Order {
		granted, held := 0, false
		for _, c := range g.Core.Snapshot(loop.Now()).Clients {
			if c.Epoch == 0 || c.ID == x.id {
				continue
			}
			granted++
			if cl := x.w.Clients[c.ID]; cl != nil && cl.Container == x.peer.Container {
				return false
			}
			if p := x.w.Held[c.ID]; p != nil && p.Container == x.peer.Container {
				held = true
			}
		}
		if held && granted == 1 {
			return false
		}
	}
	return true
}

// freeze has its container be stopped for what it had too much.
func (x *holding) freeze() {
	x.owe(x.debt)
	x.freezes = min(x.owed, maxFreeze).Round(time.Millisecond)
	x.owe(-x.freezes)
	x.leave()
	x.samples.excess, x.cheats, x.debt, x.frozen = 0, false, 0, loop.Now().Add(x.freezes)
	x.drive()
}

// tellFreeze is for once it is stopped.
func (x *holding) tellFreeze() {
	if x.freezes == 0 {
		return
	}
	text := fmt.Sprintf("process %d puts its channels on by itself, again and again: its container is stopped for %v", x.peer.PID, x.freezes)
	x.freezes = 0
	x.w.Tell(node.Subject{Peer: x.peer}, logrus.WarnLevel, fmt.Sprintf("GPU %d: %s", x.gpu.Index, text))
	x.w.History.AddCaused(x.w.EventOf(time.Now(), x.gpu, 0, &history.Event{Kind: api.EventType_EVENT_TYPE_WARNING, Peer: x.peer, Names: x.w.Names[x.peer.Container], Text: text}))
}

// driveFrozen has its container be stopped still, or go on.
func (x *holding) driveFrozen() {
	if loop.Now() < x.frozen && x.mayFreeze() {
		x.do(order.Freeze, 0, func(r order.Result) {
			switch {
			case r.Gone:
				x.end()
			case r.Error != "": // then it is taken off again and again, as before
				x.w.Log.Warnf("GPU %d: the container of process %d cannot be stopped: %s", x.gpu.Index, x.peer.PID, r.Error)
				x.noFreeze, x.frozen, x.samples.excess, x.on = true, 0, freezeAt, false // as far as we know
				x.look()
			default:
				x.tellFreeze()
			}
		})
		return
	}
	x.owe(max(x.frozen.Sub(loop.Now()), 0)) // it goes on before its time
	x.frozen = 0
	x.do(order.On, 0, func(order.Result) { x.on = true; x.look() })
}
