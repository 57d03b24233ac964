// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"math/bits"
	"time"
)

// The account of a tenant has three parts:
//
// Virtual time: time on the GPU, divided by the tenant's part of the GPU. The tenant
// that is behind is granted first, so that all get their parts. A tenant that wants
// nothing falls behind by one turn at most: idle time is not saved up.
//
// Credit: for a tenant with a limit, time that fills with the limit's part and is
// emptied by use. When nothing is left the tenant's grants are revoked, and it waits
// until there is enough for a slice. Credit may become negative, because a drain
// takes time, and a kernel's length where it can't be cut: that is the tenant's debt.
//
// Patience: for how long a latency tenant may still have the GPU while others want it.
// Each has its own, which fills with its part of what latency tenants may have together,
// and all have a common one, which whoever wants the GPU may use. A tenant is out of
// patience when both are empty, and waits until one of them is half full, or nobody else
// wants the GPU. Both may become negative, as credit may.
const (
	// one is the whole of a GPU, in the unit of part.
	one = 1_000_000
	// minPart keeps virtual time finite.
	minPart = 100

	// A slice is what a tenant's limit allows in slicePeriod, within minSlice and maxSlice. A
	// tenant that is alone pauses until it has one again when its credit is used up. What it
	// gets differs from its limit by a slice and a drain at most, over any time: by 0.7 points
	// over five seconds.
	slicePeriod = 100 * time.Millisecond
	minSlice    = 5 * time.Millisecond
	maxSlice    = 25 * time.Millisecond

	// Latency tenants together go before batch tenants for half of the time, and for a
	// quarter of a second more if they have left that unused. What drains take beyond that
	// is owed, up to a second.
	patiencePercent = 50
	patienceMax     = 250 * time.Millisecond
	patienceOwed    = time.Second

	// The more a tenant is ahead of those that wait, the shorter is its turn, down
	// to this part of the quantum.
	minTurnPart = 8

	// maxRound is how long a round of turns may take where shares are to be exact,
	// unless the quantum is longer.
	maxRound = 250 * time.Millisecond

	// maxDebt bounds the debt of a tenant with a process that is fenced for ever.
	maxDebt = 24 * time.Hour
)

// account is the time of one tenant.
type account struct {
	billedAt Time
	vt       int64 // virtual time, nanoseconds
	credit   time.Duration
	capped   bool // out of credit, and not back to a slice yet
	patience time.Duration
	demoted  bool // out of patience, and not back to half of it yet

	used   time.Duration
	got    recent // on the GPU
	waited recent // it wanted the GPU and did not have it

	limitedFor time.Duration // of what it waited so far, its core limit kept it away
}

// rates say how an account is billed. They have not changed since it was last billed.
type rates struct {
	open, closing, fenced int   // the tenant's grants, as in tenant
	gets                  int   // permille of the GPU under each open grant
	own                   int   // permille of its turn: the others of its cohort have the rest
	part                  int64 // as tenant's part, for virtual time; 0: the grants do not count for that
	share                 Share
	use                   int // permille of its turn that its limit is charged; 0: what it gets
	slice                 time.Duration
	waits                 bool          // a client of the tenant waits for a grant, or its grant is paused
	keepsOut              bool          // it is a latency tenant that has the GPU while others want it
	patience              time.Duration // by which its own has filled, if it is a latency tenant
	common                time.Duration // patience of all latency tenants, now
	tuning                Tuning
}

// bill charges the account for the time since it was last billed.
func (a *account) bill(now Time, r rates) {
	from := a.billedAt
	dt := now.Sub(from)
	if dt <= 0 {
		return
	}
	a.billedAt = now
	open := portion(dt, r.open*r.gets, 1000)
	drain := portion(dt, r.closing*(100-r.tuning.DropTail), 100)
	turn := open + drain
	onGPU := portion(turn, r.own, 1000)
	fenced := portion(dt, r.fenced, 1)
	charge := onGPU + fenced
	if charge > 0 {
		a.used = max(a.used, a.used+charge) // 292 years are all that fit
		a.got.spread(from, now, charge)
	}
	if r.waits && r.open+r.closing == 0 {
		a.waited.spread(from, now, dt)
		if a.capped {
			a.limitedFor += dt
		}
	}
	if turn > 0 && r.part > 0 {
		a.vt += scale(int64(min(turn, maxDebt)), one, r.part) // bounded, as weeks divided by a small part overflow
	}
	if r.share.limited() {
		used := charge
		if r.use > 0 {
			used = portion(open, r.use, 1000) + drain + fenced
		}
		a.billCredit(dt, used, r)
	}
	if r.share.Priority == Latency {
		a.billPatience(dt, charge, r)
	}
}

// limitUse returns at how many permille of the time bill charges a limit. whole: it rounds nothing, but
// where a part of drains is forgiven.
func (r rates) limitUse() (permille int, whole bool) {
	open, drain, fenced := r.open*r.gets, 10*r.closing*(100-r.tuning.DropTail), 1000*r.fenced
	if r.use > 0 {
		return open*r.use/1000 + drain + fenced, false
	}
	return (open+drain)*r.own/1000 + fenced, r.gets == 1000 && r.own == 1000
}

// charge bills the account for time that was forgiven before.
func (a *account) charge(now Time, d time.Duration, r rates) {
	a.used += d
	a.got.spread(now, now+1, d)
	if r.part > 0 {
		a.vt += scale(int64(min(d, maxDebt)), one, r.part)
	}
	if r.share.limited() {
		a.credit = max(a.credit-d, -maxDebt)
		a.capped = a.capped || a.credit <= 0
	}
}

func (a *account) billCredit(dt, charge time.Duration, r rates) {
	limit := time.Duration(r.share.Limit)
	top := r.slice
	if charge > 0 || r.waits {
		top = max(top, r.tuning.Window*limit/100)
	}
	// What is used meanwhile makes room for what fills it: dt may be minutes.
	a.credit = max(min(a.credit+portion(dt, r.share.Limit, 100)-charge, max(top, a.credit)), -maxDebt)
	switch {
	case a.credit <= 0:
		a.capped = true
	case a.credit >= r.slice:
		a.capped = false
	}
}

func (a *account) billPatience(dt, charge time.Duration, r rates) {
	a.patience += r.patience
	if r.keepsOut {
		a.patience -= min(dt, charge)
	}
	a.patience = min(a.patience, patienceMax)
	a.usePatience(0, r.common)
}

// usePatience takes from the tenant's own patience what it has used.
func (a *account) usePatience(d, common time.Duration) {
	a.patience = max(a.patience-d, -patienceOwed)
	switch {
	case a.patience <= 0 && common <= 0:
		a.demoted = true
	case a.patience >= patienceMax/2 || common >= patienceMax/2:
		a.demoted = false
	}
}

// backAt returns when there is credit for a slice, if nothing is charged.
func (a *account) backAt(limit int, slice time.Duration) Time {
	return a.billedAt.Add(((slice-a.credit)*100 + time.Duration(limit) - 1) / time.Duration(limit))
}

// mostScaled is 73 years in nanoseconds: sums of three fit.
const mostScaled = 1 << 61

// scale returns a·num/den, and mostScaled at most. Neither a nor num is below 0.
func scale(a, num, den int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(num))
	if hi >= uint64(den) {
		return mostScaled
	}
	q, _ := bits.Div64(hi, lo, uint64(den))
	return int64(min(q, mostScaled))
}

func portion(d time.Duration, num, den int) time.Duration {
	return time.Duration(scale(int64(d), int64(num), int64(den)))
}
