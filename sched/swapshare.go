// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// maxStretch bounds how long turns become because of what moving took.
const maxStretch = time.Minute

// Tenants that cannot use each other's pauses gain nothing by moving: turns become so long
// that moving takes an easyPart of its share, up to easyStretch, and up to easyRound
// divided by the number of those that wait to move. A server's users would wait as long: so
// while a tenant wants the GPU that had a pause of longIdle, turns last for a restedPart of the
// time since then at most, if the share does not demand more.
const (
	easyPart    = 7
	easyStretch = 10 * time.Second
	easyRound   = 20 * time.Second
	restedPart  = 6
)

// maxSwapShare leaves half of the time for work.
const maxSwapShare = 50

func clampShareOfSwap(percent int) int { return base.Clamp(percent, 0, maxSwapShare) }

// stretchFor returns for how long nobody is to move after moving has taken that long, so
// that moving takes its share of the time, percent.
func stretchFor(moved time.Duration, percent int) time.Duration {
	moved = min(moved, maxStretch)
	return min(moved*time.Duration(100-percent)/time.Duration(percent), maxStretch)
}

// leastStretch returns how long the turn lasts at least of one that moved for so long.
func (c *GPU) leastStretch(moved time.Duration) time.Duration {
	if c.swapShare == 0 {
		return min(c.quantum, maxStretch)
	}
	return stretchFor(moved, c.swapShare)
}

// owe puts off further moving because of what moving took: for as long as the share
// demands, or as an easyPart of the share would if that is not long, nor too long for those that
// have paused. Without a share the quantum says for how long, also for a tenant with a limit.
func (c *GPU) owe(t *tenant, moved time.Duration) {
	least, until := c.quantum, c.quantum
	t.stretch = c.leastStretch(moved)
	if c.swapShare != 0 {
		easy := min(stretchFor(moved, max(c.swapShare/easyPart, 1)), easyStretch, easyRound/time.Duration(max(len(c.deferred.items), 1)), c.bears(t))
		for _, other := range c.deferred.items {
			easy = min(easy, c.bears(other))
		}
		least, until = t.stretch, max(t.stretch, easy)
	}
	c.leastUntil = max(c.leastUntil, c.now.Add(least))
	c.owedUntil = max(c.owedUntil, c.now.Add(until))
}

// bears returns how long the turns of others may be that a tenant waits for, and its own.
func (c *GPU) bears(t *tenant) time.Duration {
	if t.restedAt == 0 {
		return maxStretch
	}
	return c.now.Sub(t.restedAt) / restedPart
}
