// SPDX-License-Identifier: Apache-2.0

package sched

import "time"

// In mode Auto the core chooses. Turns are what serves tenants best that keep
// the GPU busy, and the only way once memory is short. Where turns end after a
// moment because their tenants have nothing to do, passing the GPU on costs more
// than using it together.
const (
	reasonSet    = "as set"
	reasonTurns  = "tenants keep the GPU busy: turns cost less than mixing"
	reasonMemory = "memory is short: more than 90 % is reserved"
	reasonSwap   = "more memory is reserved than the GPU has: tenants take turns, and what one lacks is moved out of the others"
	reasonShares = "tenants have limits, requests or priorities"
	reasonShort  = "turns are short: passing the GPU on costs more than sharing it"

	autoWindow = time.Second      // of looking at turns
	autoTrial  = 10 * time.Second // of concurrent mode, before it looks again
	// shortTurns a second, given back early while somebody waited, are too
	// many: at some 0.3 ms each that is 5 % of the GPU.
	shortTurns = 160
)

// auto is what mode Auto knows.
type auto struct {
	reason          string
	reserved, total uint64 // memory, bytes
	swap            bool   // what is reserved beyond the total is moved out
	since           Time   // start of the window
	short           int    // turns in it that were given back early while somebody waited
	until           Time   // end of concurrent mode; 0: exclusive
}

func (a *auto) deadline(c *Core) (Time, bool) { return a.until, c.mode == Auto && a.until != 0 }

func (a *auto) memoryShort() bool { return a.total > 0 && !a.swap && a.reserved > a.total/10*9 }

// overfull says whether clients cannot all have their memory on the GPU.
func (a *auto) overfull() bool { return a.swap && a.reserved > a.total }

// lookAtMode chooses the mode anew if that is due.
func (c *Core) lookAtMode() {
	a := &c.auto
	switch {
	case c.mode == Exclusive:
		return
	case c.mode == Concurrent && a.overfull():
		c.setEffective(Exclusive, reasonSwap) // at the same time they would wait for each other
		return
	case c.mode == Concurrent:
		c.setEffective(Concurrent, reasonSet)
		return
	}
	exclusive := func(reason string) {
		a.since, a.short, a.until = c.now, 0, 0
		c.setEffective(Exclusive, reason)
	}
	switch {
	case a.overfull():
		exclusive(reasonSwap)
	case a.memoryShort():
		exclusive(reasonMemory)
	case c.special > 0:
		exclusive(reasonShares)
	case a.until != 0:
		if c.now >= a.until {
			exclusive(reasonTurns)
		}
	case c.now.Sub(a.since) >= autoWindow:
		if float64(a.short) >= shortTurns*c.now.Sub(a.since).Seconds() {
			a.until = c.now.Add(autoTrial)
			c.setEffective(Concurrent, reasonShort)
			return
		}
		exclusive(reasonTurns)
	case a.reason != reasonTurns:
		exclusive(reasonTurns)
	}
}
