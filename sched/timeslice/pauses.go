// SPDX-License-Identifier: Apache-2.0

package timeslice

import "time"

// pausesKept is how many of a client's pauses are remembered.
const pausesKept = 8

// Pauses are the latest times in which a client had nothing to do.
type Pauses struct {
	took [pausesKept]time.Duration
	n    int // all so far
}

// Note takes in another one.
func (p *Pauses) Note(d time.Duration) {
	p.took[p.n%pausesKept] = d
	p.n++
}

// latest returns them, not in order.
func (p *Pauses) latest() []time.Duration { return p.took[:min(p.n, pausesKept)] }

// below counts those that were shorter than d.
func (p *Pauses) below(d time.Duration) (n int) {
	for _, took := range p.latest() {
		if took < d {
			n++
		}
	}
	return n
}

// MostBelow says whether most of them were.
func (p *Pauses) MostBelow(d time.Duration) bool { return 2*p.below(d) > len(p.latest()) }

// ManyBelow says whether most were, and there were enough to know.
func (p *Pauses) ManyBelow(d time.Duration) bool { return 2*p.below(d) > pausesKept }

// Longest is the longest of them, and least at least.
func (p *Pauses) Longest(least time.Duration) time.Duration {
	for _, took := range p.latest() {
		least = max(least, took)
	}
	return least
}

// WorthWaiting returns for how long it is worth to wait for a client, by how long it has
// paused and what moving costs. A few pauses do not say how long the longest is. So if it
// is worth to wait for the longest known one, or this pause is longer, the client has as
// long as moving takes.
func (p *Pauses) WorthWaiting(paused, cost time.Duration) time.Duration {
	known, best, least := 0, time.Duration(0), time.Duration(0)
	for _, took := range p.latest() {
		if took > paused {
			known++
			least += cost // without waiting
		}
	}
	if known == 0 {
		if p.n == 0 {
			return max(cost/2-paused, 0)
		}
		return max(cost-paused, 0) // this pause is longer than all before
	}
	for _, took := range p.latest() {
		wait := took + took/8 - paused
		if took <= paused || wait > cost {
			continue
		}
		loss := time.Duration(0)
		for _, q := range p.latest() {
			switch {
			case q <= paused:
			case q-paused <= wait:
				loss += q - paused
			default:
				loss += wait + cost
			}
		}
		if loss < least {
			best, least = wait, loss
		}
	}
	if best > 0 && p.Longest(0) <= paused+best {
		return max(best, cost-paused)
	}
	return best
}
