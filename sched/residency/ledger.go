// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"

	"github.com/nvshare/nvshare/sched/base"
)

// ledger keeps what the processes of each account have reserved of one GPU's
// memory, and the limit of each account, which holds for their sum. An account
// is a container, or what else the caller keeps limits by. Sizes are bytes.
//
// A sum is above its limit only where the memory existed before anybody could
// refuse it: it was forced, or the limit was lowered. Nothing more is granted
// then until enough is given back. Any value is safe, up to 2^64-1.
//
// A ledger holds one number for each client that has something reserved, and
// one for each limit.
type ledger struct {
	accounts map[string]*ledgerAccount // those with a limit, or with something reserved
	ceiling  uint64                    // of each account, beside its limit; 0: none
	fallback uint64                    // the limit of accounts that have none of their own; 0: none

	high, low uint64 // the sum of what all have, in 128 bits
}

// ledgerAccount is what one account has.
type ledgerAccount struct {
	limit    uint64 // 0: none
	used     uint64 // the sum of reserved
	reserved map[base.ClientID]uint64
}

// Standing is what a client and its account have reserved of a GPU's memory, bytes.
type Standing struct {
	Total uint64 `always:"total=%v"` // it has
	Used  uint64 `always:"used=%v"`  // all clients of its account have
	Limit uint64 `text:"limit=%v"`   // of the account; 0: none
}

func (s Standing) String() string { return base.Fields(s) }

// newLedger returns a ledger in which nobody has anything.
func newLedger() *ledger { return &ledger{accounts: map[string]*ledgerAccount{}} }

// reserve makes total what a client has reserved. More than it has is granted
// as far as the account's limit goes, if that is at least `least`; else nothing
// changes and ok is false. Less is always granted, and so is everything with
// force: that memory exists already.
func (l *ledger) reserve(account string, id base.ClientID, total, least uint64, force bool) (s Standing, ok bool) {
	m := l.accounts[account]
	if m == nil {
		m = &ledgerAccount{}
	}
	have := m.reserved[id]
	if total > have {
		others := m.used - have
		bound := cmp.Or(m.limit, l.fallback)
		if l.ceiling != 0 && (bound == 0 || bound > l.ceiling) {
			bound = l.ceiling
		}
		if bound == 0 || force {
			bound = math.MaxUint64 // sums stay exact
		}
		room := bound - min(others, bound)
		if total > room && !force && room < max(least, have) {
			return l.reservedBy(account, id), false
		}
		total = min(total, room)
	}
	m.used += total - have
	var carry uint64
	l.low, carry = bits.Add64(l.low, total, 0)
	l.high += carry
	l.low, carry = bits.Sub64(l.low, have, 0)
	l.high -= carry
	switch {
	case total == 0:
		delete(m.reserved, id)
	case m.reserved == nil:
		m.reserved = map[base.ClientID]uint64{id: total}
	default:
		m.reserved[id] = total
	}
	l.keep(account, m)
	return l.reservedBy(account, id), true
}

// drop returns what a client has; it is dead, or another program now. It
// reports whether that was anything.
func (l *ledger) drop(account string, id base.ClientID) bool {
	had := l.reservedBy(account, id).Total != 0
	l.reserve(account, id, 0, 0, false)
	return had
}

// setCeiling bounds what each account can reserve, whatever its limit; 0: nothing
// does.
func (l *ledger) setCeiling(ceiling uint64) { l.ceiling = ceiling }

// setLimit changes the limit of an account, 0: to none, and returns the old
// one. What is reserved stays, also above a lower limit.
func (l *ledger) setLimit(account string, limit uint64) (old uint64) {
	m := l.accounts[account]
	if m == nil {
		m = &ledgerAccount{}
	}
	old, m.limit = m.limit, limit
	l.keep(account, m)
	return old
}

// keep remembers an account as long as there is something to remember.
func (l *ledger) keep(account string, m *ledgerAccount) {
	if m.limit == 0 && len(m.reserved) == 0 {
		delete(l.accounts, account)
	} else {
		l.accounts[account] = m
	}
}

// reservedBy returns where a client stands; with client 0, where its account
// does.
func (l *ledger) reservedBy(account string, id base.ClientID) Standing {
	m := l.accounts[account]
	if m == nil {
		return Standing{Limit: l.fallback}
	}
	return Standing{Total: m.reserved[id], Used: m.used, Limit: cmp.Or(m.limit, l.fallback)}
}

// total returns what all accounts have together, 2^64-1 if it is more.
func (l *ledger) total() uint64 {
	if l.high != 0 {
		return math.MaxUint64
	}
	return l.low
}

// names returns the names of all accounts with a limit or with something
// reserved, in order.
func (l *ledger) names() []string { return slices.Sorted(maps.Keys(l.accounts)) }

// check returns an error that names a broken invariant, which is a bug
// in this package, or nil. It costs O(clients) and changes nothing.
func (l *ledger) check() error {
	var high, low uint64
	for name, m := range l.accounts {
		if m.limit == 0 && len(m.reserved) == 0 {
			return fmt.Errorf("account %s has neither a limit nor anything reserved", name)
		}
		var sum, carry uint64
		for id, n := range m.reserved {
			if n == 0 {
				return fmt.Errorf("account %s remembers client %d, which has nothing", name, id)
			}
			if sum, carry = bits.Add64(sum, n, 0); carry != 0 {
				return fmt.Errorf("account %s has more than can be counted", name)
			}
		}
		if sum != m.used {
			return fmt.Errorf("account %s: its clients have %d bytes, counted %d", name, sum, m.used)
		}
		if low, carry = bits.Add64(low, sum, 0); carry != 0 {
			high++
		}
	}
	if high != l.high || low != l.low {
		return fmt.Errorf("all accounts have %d·2^64+%d bytes, counted %d·2^64+%d", high, low, l.high, l.low)
	}
	return nil
}
