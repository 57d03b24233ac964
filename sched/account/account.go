// SPDX-License-Identifier: Apache-2.0

// Package account bills tenants for their time on one GPU. It is pure arithmetic. The account of a
// tenant has three parts:
//
// Virtual time is time on the GPU, divided by the tenant's part of it. The tenant that is behind is
// granted first. One that wants nothing falls behind by one turn at most.
//
// Credit, of a tenant with a limit, fills with the limit's part and is emptied by use. Without credit
// its grants are revoked, until there is enough for a slice. Less than none is a debt.
//
// Patience is for how long a latency tenant may still have the GPU while others want it: its own, and
// a common one. A tenant without both waits until one of them is half full, or nobody else wants the GPU.
//
// What is billed does not depend on how often Bill is called. No time is billed twice, or saved up
// beyond a slice, a window of Tuning, or PatienceMax. Nothing overflows. CreditEnds and PatienceEnds say
// when an account comes to its end if the rates stay: Bill finds nothing left then.
package account

import (
	"cmp"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

const (
	// One is the whole of a GPU, in the unit of part.
	One = 1_000_000
	// MinPart keeps virtual time finite.
	MinPart = 100

	// MaxSlice is the longest slice. A slice is what a tenant's limit allows in slicePeriod, within minSlice and MaxSlice. A
	// tenant that is alone pauses until it has one again when its credit is used up. What it
	// gets differs from its limit by a slice and a drain at most, over any time: by 0.7 points
	// over five seconds.
	slicePeriod = 100 * time.Millisecond
	minSlice    = 5 * time.Millisecond
	MaxSlice    = 25 * time.Millisecond

	// PatiencePercent, PatienceMax, PatienceOwed: latency tenants together go before batch tenants for half of the time, and for a
	// quarter of a second more if they have left that unused. What drains take beyond that
	// is owed, up to a second.
	PatiencePercent = 50
	PatienceMax     = 250 * time.Millisecond
	PatienceOwed    = time.Second

	// maxDebt bounds the debt of a tenant with a process that is fenced for ever.
	maxDebt = 24 * time.Hour
)

// Account is the time of one tenant.
type Account struct {
	billedAt base.Time
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

// Rates say how an account is billed. They have not changed since it was last billed.
type Rates struct {
	Open, Closing, Fenced int           // the tenant's grants: gate open, drained, fenced
	Gets                  int           // permille of the GPU under each open grant
	Own                   int           // permille of its turn: the others of its cohort have the rest
	Part                  int64         // of the GPU, for virtual time, of One; 0: the grants do not count for that
	Limit                 int           // percent; 0: none
	Latency               bool          // it is a latency tenant
	Use                   int           // permille of its turn that its limit is charged; 0: what it gets
	Slice                 time.Duration // see Slice
	Waits                 bool          // a client of the tenant waits for a grant, or its grant is paused
	KeepsOut              bool          // it is a latency tenant that has the GPU while others want it
	Patience              time.Duration // by which its own has filled, if it is a latency tenant
	Common                time.Duration // patience of all latency tenants, now
	Tuning                Tuning
}

// New returns the account of a tenant that has not used anything.
func New(now base.Time, vt int64, credit time.Duration) Account {
	return Account{billedAt: now, vt: vt, credit: credit, patience: PatienceMax}
}

// Slice is what a tenant with a limit gets at once if nobody else wants it; least is what it has at
// least.
func Slice(limit int, least time.Duration) time.Duration {
	return max(min(slicePeriod*time.Duration(limit)/100, MaxSlice), minSlice, least)
}

// Bill charges the account for the time since it was last billed.
func (a *Account) Bill(now base.Time, r Rates) {
	from := a.billedAt
	dt := now.Sub(from)
	if dt <= 0 {
		return
	}
	a.billedAt = now
	open := base.Portion(dt, r.Open*r.Gets, 1000)
	drain := base.Portion(dt, r.Closing*(100-r.Tuning.DropTail), 100)
	turn := open + drain
	onGPU := base.Portion(turn, r.Own, 1000)
	fenced := base.Portion(dt, r.Fenced, 1)
	charge := onGPU + fenced
	if charge > 0 {
		a.used = max(a.used, a.used+charge) // 292 years are all that fit
		a.got.spread(from, now, charge)
	}
	if r.Waits && r.Open+r.Closing == 0 {
		a.waited.spread(from, now, dt)
		if a.capped {
			a.limitedFor += dt
		}
	}
	if turn > 0 && r.Part > 0 {
		a.vt += base.Scale(int64(min(turn, maxDebt)), One, r.Part) // bounded, as weeks divided by a small part overflow
	}
	if r.Limit > 0 {
		used := charge
		if r.Use > 0 {
			used = base.Portion(open, r.Use, 1000) + drain + fenced
		}
		a.billCredit(dt, used, r)
	}
	if r.Latency {
		a.billPatience(dt, charge, r)
	}
}

// limitUse returns at how many permille of the time Bill charges a limit. whole: it rounds nothing, but
// where a part of drains is forgiven.
func (r Rates) limitUse() (permille int, whole bool) {
	open, drain, fenced := r.Open*r.Gets, 10*r.Closing*(100-r.Tuning.DropTail), 1000*r.Fenced
	if r.Use > 0 {
		return open*r.Use/1000 + drain + fenced, false
	}
	return (open+drain)*r.Own/1000 + fenced, r.Gets == 1000 && r.Own == 1000
}

// Charge bills the account for time that was forgiven before.
func (a *Account) Charge(now base.Time, d time.Duration, r Rates) {
	a.used += d
	a.got.spread(now, now+1, d)
	if r.Part > 0 {
		a.vt += base.Scale(int64(min(d, maxDebt)), One, r.Part)
	}
	if r.Limit > 0 {
		a.credit = max(a.credit-d, -maxDebt)
		a.capped = a.capped || a.credit <= 0
	}
}

// Refund gives the limit back what it was charged for the latest time.
func (a *Account) Refund(d time.Duration, r Rates) {
	if r.Limit > 0 {
		use, _ := r.limitUse()
		a.credit += base.Portion(d, use, 1000)
		a.Uncap(r.Slice)
	}
}

func (a *Account) billCredit(dt, charge time.Duration, r Rates) {
	limit := time.Duration(r.Limit)
	top := r.Slice
	if charge > 0 || r.Waits {
		top = max(top, r.Tuning.Window*limit/100)
	}
	// What is used meanwhile makes room for what fills it: dt may be minutes.
	a.credit = max(min(a.credit+base.Portion(dt, r.Limit, 100)-charge, max(top, a.credit)), -maxDebt)
	switch {
	case a.credit <= 0:
		a.capped = true
	case a.credit >= r.Slice:
		a.capped = false
	}
}

func (a *Account) billPatience(dt, charge time.Duration, r Rates) {
	a.patience += r.Patience
	if r.KeepsOut {
		a.patience -= min(dt, charge)
	}
	a.patience = base.Clamp(a.patience, -PatienceOwed, PatienceMax)
	a.JudgePatience(r.Common)
}

// SpendPatience takes from the tenant's own patience what it has used.
func (a *Account) SpendPatience(d, common time.Duration) {
	a.patience = max(a.patience-d, -PatienceOwed)
	a.JudgePatience(common)
}

// JudgePatience says whether a latency tenant is out of patience, by its own and the common one.
func (a *Account) JudgePatience(common time.Duration) {
	switch {
	case a.patience <= 0 && common <= 0:
		a.demoted = true
	case a.patience >= PatienceMax/2 || common >= PatienceMax/2:
		a.demoted = false
	}
}

// BackAt returns when there is credit for a slice, if nothing is charged.
func (a *Account) BackAt(limit int, slice time.Duration) base.Time {
	return a.billedAt.Add(((slice-a.credit)*100 + time.Duration(limit) - 1) / time.Duration(limit))
}

// CreditEnds returns when the tenant will have used up its credit; false if never.
func (a *Account) CreditEnds(now base.Time, r Rates) (base.Time, bool) {
	if r.Limit == 0 {
		return 0, false
	}
	use, whole := r.limitUse()
	left := a.credit
	if left > 0 && !whole {
		left += 3 // Bill rounds down three times
	}
	at, ok := a.usedUp(now, left, r.Limit, use)
	if s := base.Time(r.Tuning.Sample); s > 0 && ok && a.credit > 0 {
		at = (at + s - 1) / s * s
	}
	return at, ok
}

// PatienceEnds returns when a latency tenant that keeps others out will have used up its own
// patience, of which so many percent of the time fill it; false if never.
func (a *Account) PatienceEnds(now base.Time, fill int) (base.Time, bool) {
	return a.usedUp(now, a.patience, fill, 1000)
}

// usedUp returns when a tenant will have nothing left of what it has, if that is filled
// at a percentage of the time, and used at so many permille of it; false if never. Rounding up
// has Bill, which rounds down, come to nothing then.
func (a *Account) usedUp(now base.Time, left time.Duration, fill, use int) (base.Time, bool) {
	switch {
	case left <= 0:
		return now, true
	case use <= 10*fill:
		return 0, false
	}
	rate := time.Duration(use - 10*fill)
	return a.billedAt.Add((left*1000 + rate - 1) / rate), true
}

// Settle is for a grant that has ended: a part of the debt is forgiven, and less credit than a quarter of
// a slice is not worth a turn.
func (a *Account) Settle(slice time.Duration, t Tuning) {
	if a.credit < 0 {
		a.credit = a.credit * time.Duration(100-t.DropCarry) / 100
	}
	a.capped = a.capped || a.credit < slice/4
}

// SetLimit is for a tenant that has another limit now; had: it had one before.
func (a *Account) SetLimit(had bool, slice time.Duration) {
	if !had {
		a.credit = 0
	}
	a.credit = min(a.credit, slice)
	a.capped = a.credit < 0 || a.capped && a.credit < slice
	a.credit = cmp.Or(a.credit, slice)
}

// DropLimit is for a tenant that has no limit any more.
func (a *Account) DropLimit() { a.capped, a.credit = false, 0 }

// DropPatience is for a tenant that is no latency tenant any more.
func (a *Account) DropPatience() { a.demoted, a.patience = false, PatienceMax }

// Uncap lets a tenant go on that has credit for a slice.
func (a *Account) Uncap(slice time.Duration) { a.capped = a.capped && a.credit < slice }

// SetVT changes the virtual time.
func (a *Account) SetVT(vt int64) { a.vt = vt }

// VT returns the virtual time.
func (a *Account) VT() int64 { return a.vt }

// Credit returns what is left of the limit; below 0: a debt.
func (a *Account) Credit() time.Duration { return a.credit }

// Capped says whether the tenant has used up its limit, and waits until it has a slice again.
func (a *Account) Capped() bool { return a.capped }

// Demoted says whether a latency tenant has used up its patience.
func (a *Account) Demoted() bool { return a.demoted }

// Patience returns what is left of a latency tenant's own patience.
func (a *Account) Patience() time.Duration { return a.patience }

// BilledAt returns when the account was last billed.
func (a *Account) BilledAt() base.Time { return a.billedAt }

// Used returns the time on the GPU so far, and LimitedFor for how long the tenant's limit kept it away.
func (a *Account) Used() time.Duration { return a.used }

// LimitedFor: see Used.
func (a *Account) LimitedFor() time.Duration { return a.limitedFor }

// Lately returns, in permille of the latest seconds, what the tenant got, and for how long it waited.
func (a *Account) Lately(now base.Time) (got, waited int) {
	return a.got.permille(now), a.waited.permille(now)
}

// Bounds of Tuning's fields. The windows and intervals of the seeds' documents
// lie within.
const (
	DefaultWindow = 500 * time.Millisecond
	MinWindow     = 50 * time.Millisecond
	MaxWindow     = 20 * time.Second
	MaxSample     = time.Second
)

// Tuning says how time is accounted. The zero Tuning is the default, and the
// most exact.
type Tuning struct {
	// Window is what a limit allows a tenant to catch up on: what it could not
	// use of it for having to wait, over that long at most. 0: DefaultWindow.
	Window time.Duration `always:"window=%v"`
	// Sample is how often a holder's use is compared with its limit. 0: at
	// the very moment that it reaches it.
	Sample time.Duration `always:"sample=%v"`
	// DropCarry is the percentage of an overshoot that is forgiven when a
	// grant ends. 0: all of it is a debt.
	DropCarry int `always:"dropcarry=%v"`
	// DropTail is the percentage of the time from a revoke to the release that
	// is not billed. 0: all of it is.
	DropTail int `always:"droptail=%v"`
}

// Clamped returns the tuning within the bounds.
func (t Tuning) Clamped() Tuning {
	t.Window = base.Clamp(cmp.Or(t.Window, DefaultWindow), MinWindow, MaxWindow)
	t.Sample = base.Clamp(t.Sample, 0, MaxSample)
	t.DropCarry = base.Clamp(t.DropCarry, 0, 100)
	t.DropTail = base.Clamp(t.DropTail, 0, 100)
	return t
}

func (t Tuning) String() string { return base.Fields(t) }
