// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"slices"

	"github.com/nvshare/nvshare/sched"
)

// While the state file cannot be written, tenants come, ask and go as before, and each step adds
// to the outbox of its GPU. Most of these entries have no effect any more.

// shortOutbox is the length of an outbox up to which each search is cheap. A longer one is
// searched when it has doubled.
const shortOutbox = 256

// shrink drops from a GPU's outbox what is for nobody, what is taken back later, and what a
// later entry says anew. The rest stays in order, and ends in the same state.
func (d *Daemon) shrink(g *gpu) {
	if n := len(g.outbox); n > shortOutbox && n < g.shrinkAt {
		return
	}
	given, ended := map[sched.Epoch]bool{}, map[sched.Epoch]bool{}
	for _, w := range g.outbox {
		switch a := w.action.(type) {
		case sched.Grant:
			given[a.Epoch] = true
		case sched.Released:
			ended[a.Epoch] = given[a.Epoch]
		}
	}
	type said struct { // by a later entry
		kind   uint8
		client sched.ClientID
	}
	const (
		notice = iota
		slice
		stand
		closed
		paused // or resumed
		mode
		record
	)
	later := map[said]bool{}
	again := func(kind uint8, id sched.ClientID) bool {
		s := said{kind, id}
		was := later[s]
		later[s] = true
		return was
	}
	// opens says that what is said later of a client's gate is not said of what was before.
	opens := func(id sched.ClientID) {
		delete(later, said{closed, id})
		delete(later, said{paused, id})
	}
	void := func(w work) bool {
		if w.att != nil {
			if c := w.att.client.conn; c == nil || c.channels[w.att.channel] != w.att {
				return true
			}
			delete(later, said{kind: record})
			return false
		}
		id, drop := sched.ClientID(0), false
		switch a := w.action.(type) {
		case sched.Persist: // only another one follows
			return again(record, 0)
		case sched.ModeChosen:
			drop = again(mode, 0)
		case sched.Released:
			return ended[a.Epoch]
		case sched.Fence:
			return ended[a.Epoch]
		case sched.Grant:
			id, drop = a.Client, ended[a.Epoch]
		case sched.Revoke:
			id, drop = a.Client, ended[a.Epoch]
		case sched.StepOne:
			id, drop = a.Client, ended[a.Epoch]
		case sched.Adopt:
			id = a.Client
		case sched.Notice:
			id, drop = a.Client, again(notice, a.Client)
		case sched.Slice:
			id, drop = a.Client, again(slice, a.Client)
		case sched.Stand:
			id, drop = a.Client, again(stand, a.Client)
		case sched.Close:
			id, drop = a.Client, again(closed, a.Client)
			delete(later, said{paused, id})
		case sched.Pause:
			id, drop = a.Client, again(paused, a.Client)
		case sched.Resume:
			id, drop = a.Client, again(paused, a.Client)
			delete(later, said{closed, id})
		}
		if id != 0 {
			drop = drop || d.clients[id] == nil
		}
		if drop {
			return true
		}
		switch w.action.(type) {
		case sched.Grant, sched.Revoke, sched.Adopt:
			opens(id)
		}
		delete(later, said{kind: record})
		return false
	}
	kept := g.outbox[:0:0]
	for _, w := range slices.Backward(g.outbox) {
		if !void(w) {
			kept = append(kept, w)
		}
	}
	slices.Reverse(kept)
	g.outbox, g.shrinkAt = kept, 2*len(kept)
}
