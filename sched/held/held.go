// SPDX-License-Identifier: Apache-2.0

// Package held says when processes that have no shim may be on a GPU, so that they keep
// the core limit of their tenant: their channels are on for a part of each period. It is
// pure: whoever uses it has the clock, and carries out what it says.
//
// What it guarantees: over any time the processes are on for the limit's part of it, and
// two periods of that more at most. The time that it takes to switch them counts as theirs.
package held

import "time"

const (
	// Period is one time on and one off, where the limit leaves each at least Shortest.
	Period   = 100 * time.Millisecond
	Shortest = 5 * time.Millisecond
	// floor is which part of the limit they have in any case, in percent, whatever the
	// tenant's other processes use: nobody stands still for ever.
	floor = 10
	// maxDebt is what is owed at most, in periods: an order may fail for long.
	maxDebt = 10
	// least is between two steps: a percent of it is some nanoseconds.
	least = time.Microsecond
)

// Account is of the processes of one tenant on one GPU. Times are since whenever.
type Account struct {
	limit   time.Duration // percent
	period  time.Duration
	balance time.Duration
	others  time.Duration // may still be charged for others
	at      time.Duration
	on      bool // they may be
	want    bool
}

// New returns the account of processes that are on. limit: percent, 1 to 99.
func New(limit int, at time.Duration) *Account {
	p := time.Duration(limit)
	return &Account{limit: p, period: max(Period, 100*Shortest/p, 100*Shortest/(100-p)), at: at, on: true, want: true}
}

// full is the balance at which they go on.
func (a *Account) full() time.Duration { return a.period * a.limit / 100 * (100 - a.limit) / 100 }

func (a *Account) advance(at time.Duration) {
	dt := max(at-a.at, 0)
	a.at += dt
	earned := dt * a.limit / 100
	a.balance += earned
	a.others = min(a.others+earned*(100-floor)/100, a.period)
	if a.on {
		a.balance -= dt
	}
	a.balance = min(max(a.balance, -maxDebt*a.period), a.full()*3/2) // what is late by half is not lost
}

// Charge is what the tenant's other processes used since the latest call.
func (a *Account) Charge(used time.Duration) {
	used = min(used, a.others)
	a.others -= used
	a.balance -= used
}

// Step says whether they are to be on, and until when nothing changes. To be off is true once
// IsOff is called.
func (a *Account) Step(at time.Duration) (on bool, until time.Duration) {
	a.advance(at)
	switch {
	case a.want && a.balance <= 0:
		a.want = false
	case !a.want && a.balance >= a.full():
		a.want, a.on = true, true // the order begins to have effect before it is answered
	}
	if a.want {
		return true, a.at + max(a.balance*100/(100-a.limit), least)
	}
	return false, a.at + max((a.full()-a.balance)*100/a.limit, least)
}

// IsOff notes that they are all off since now.
func (a *Account) IsOff(at time.Duration) {
	a.advance(at)
	a.on = a.want
}
