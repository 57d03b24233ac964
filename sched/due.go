// SPDX-License-Identifier: Apache-2.0

package sched

// dues says what tenants get of the GPU in the long run while those that want it now
// go on wanting it, also those that their core limit keeps away at this moment: what each
// was promised, and as much of the rest as its weight says, up to its limit. What a limit
// leaves is for the others.
type dues struct {
	wanting       []*tenant
	rest, weights int64 // of tenants below their limits: what weights share out, of one
	here          int64 // the dues of those that no limit keeps away at this moment, of one
	cohort        int64 // the dues of those of these that are of the cohort, of one
}

func (c *GPU) dues() dues {
	var d dues
	for _, t := range c.tenants {
		if t.wants() {
			d.wanting = append(d.wanting, t)
		}
	}
	d.share()
	return d
}

// wants says whether the tenant counts among those that want the GPU.
func (t *tenant) wants() bool { return t.active || t.place == throttled }

// duesNow returns what dues are now. Where limits count they are worked out again when a tenant
// or a share has changed.
func (c *GPU) duesNow() *dues {
	d := &c.dueCache.now
	switch {
	case c.limited == 0 && c.throttled.top() == nil && !c.cohort.on: // this costs the same beside any number of tenants
		c.dueCache.stale = true
		d.rest, d.weights, d.here = max(one-int64(c.requests)*one/100, 0), int64(c.weights), one
	case c.dueCache.stale:
		c.dueCache.stale = false
		c.looked += uint64(len(c.tenants))
		*d = c.dues()
		d.here, d.cohort = 0, 0
		for _, t := range d.wanting {
			if t.active {
				d.here += d.of(t)
				if !t.apart {
					d.cohort += d.of(t)
				}
			}
		}
	}
	return d
}

// part returns the part of the GPU by which a tenant's virtual time passes, of one: its due, or
// what would be its due if it wanted the GPU and had no limit. The parts of others do not change
// while a limit keeps a tenant away. If what it was promised went to them by their weights
// meanwhile, those that were promised much would get too little.
func (c *GPU) part(t *tenant) int64 {
	d := c.duesNow()
	rest, weights := d.with(t)
	request, weight := int64(t.share.Request)*one/100, int64(t.share.Weight)
	if t.wants() && t.limited() && d.of(t) == t.most() {
		rest, weights = rest+t.most()-request, weights+weight
	}
	return min(max(request+max(rest, 0)*weight/weights, minPart), one)
}

// with returns rest and weights as they are if the tenant, which may want nothing, wants the GPU.
func (d *dues) with(t *tenant) (rest, weights int64) {
	if t.wants() {
		return d.rest, d.weights
	}
	return max(d.rest-int64(t.share.Request)*one/100, 0), d.weights + int64(t.share.Weight)
}

// share works out rest and weights.
func (d *dues) share() {
	capped := map[*tenant]bool{}
	for more := true; more; {
		more = false
		d.rest, d.weights = one, 0
		for _, t := range d.wanting {
			if capped[t] {
				d.rest -= t.most()
			} else {
				d.rest -= int64(t.share.Request) * one / 100
				d.weights += int64(t.share.Weight)
			}
		}
		d.rest = max(d.rest, 0)
		for _, t := range d.wanting {
			if !capped[t] && d.of(t) >= t.most() && t.limited() {
				capped[t], more = true, true
			}
		}
	}
}

// most is what its limit allows a tenant, of one.
func (t *tenant) most() int64 {
	if t.limited() {
		return int64(t.share.Limit) * one / 100
	}
	return one
}

// of returns what a tenant gets that is among those that want the GPU, of one.
func (d *dues) of(t *tenant) int64 {
	if d.weights == 0 { // all are at their limits
		return t.most()
	}
	return min(int64(t.share.Request)*one/100+d.rest*int64(t.share.Weight)/d.weights, t.most())
}

// permille returns what a tenant gets if it wants the GPU beside those that do.
func (d *dues) permille(t *tenant) int {
	if !t.active && t.place != throttled {
		beside := dues{wanting: append(d.wanting[:len(d.wanting):len(d.wanting)], t)}
		beside.share()
		d = &beside
	}
	return int(max(d.of(t), minPart) * 1000 / one)
}
