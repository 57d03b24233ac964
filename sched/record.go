// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"github.com/nvshare/nvshare/sched/base"
)

// What outlives a restart of the caller: the epochs that were given, and who holds a
// grant or may be given one.

// unrecorded is more than the number of latency grants of one Step. They are given
// before they are recorded, so their epochs may have been used before a restart.
const unrecorded = 10_000

// records are what was handed out as a Persist, and the epochs after that.
type records struct {
	epoch     base.Epoch // of the latest grant, or of the next one if that is fixed
	restarted bool       // no epoch was given out yet since a restart, see takeEpoch
	persisted Persist
}

func newRecords(last base.Epoch, way Way) records {
	return records{epoch: last, restarted: last != 0, persisted: Persist{Epoch: last, Way: way}}
}

// takeEpoch returns the epoch of the next grant.
func (r *records) takeEpoch() base.Epoch {
	if r.restarted {
		r.restarted = false
		r.epoch += unrecorded
	}
	r.epoch = base.NextEpoch(r.epoch)
	return r.epoch
}

// settle brings up to date what was persisted and what the pages say.
func (c *GPU) settle() {
	c.chooseNext()
	if r := c.record(); r != c.persisted {
		c.persist(r)
	}
	c.noticeAll()
}

// record returns what a restart would have to know now.
func (c *GPU) record() Persist {
	p := Persist{Epoch: c.epoch, Unrecorded: c.holdOff != 0, Way: c.wayNow()}
	if c.open.n+c.latency.n+c.beside.n+c.closing.n >= MaxRecorded {
		p.Unrecorded = true
		return p
	}
	n := 0
	for _, l := range [...]*list{&c.open, &c.latency, &c.beside, &c.closing} {
		for cl := l.head; cl != nil; cl = cl.next {
			if cl.grant.claimed { // under any epoch that the client likes
				p.Unrecorded = true
			} else {
				p.Holders[n] = Holder{cl.id, min(cl.grant.epoch, c.epoch), cl.grant.shared || cl.grant.kind != turnGrant} // a client may claim any epoch
				n++
			}
		}
	}
	if c.next != nil {
		p.Holders[n] = Holder{c.next.id, c.nextEpoch, c.inCohort(c.next.tenant)}
	}
	return p
}

// covers says whether p says all that q says.
func covers(p, q Persist) bool {
	if p.Epoch < q.Epoch || q.Unrecorded && !p.Unrecorded {
		return false
	}
	if p.Unrecorded {
		return true
	}
	for _, h := range q.Holders {
		if h.Client == 0 {
			break
		}
		found := false
		for _, g := range p.Holders {
			found = found || g == h
		}
		if !found {
			return false
		}
	}
	return true
}

func (c *GPU) persist(p Persist) {
	c.persisted = p
	c.do(p)
}
