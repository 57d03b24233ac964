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

// ledger keeps what the processes of each account have reserved of one GPU's memory, and the limit
// of each account, which holds for their sum. A sum is above its limit only where it was forced, or
// the limit was lowered: nothing more is granted then. Any value is safe, up to 2^64-1.
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
	m := cmp.Or(l.accounts[account], &ledgerAccount{})
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

// What a Reserve is answered, and when.

// fits says why a client cannot be promised so much; nil: it can. Where all fits, nothing more has to go to host
// memory: that it is short is no reason.
func (mem *Memory) fits(m *member, total uint64) error {
	arena, err := mem.rooms.fits(m.id, total, mem.believed(m))
	if err != nil || !mem.rooms.crosses(less(total, m.promised)) {
		return err
	}
	return mem.arenas.fits(arena + mem.arenas.needed - mem.needed)
}

// AsksHost says whether what an event does may depend on how much host memory there
// is: then Arenas.Observe comes before it.
func (v View) AsksHost(ev base.Event) bool {
	mem := v.mem
	if mem.rooms == nil {
		return false
	}
	switch ev := ev.(type) {
	case Reserve:
		m := mem.members[ev.Client]
		return m != nil && ev.Total > m.promised && mem.rooms.crosses(ev.Total-m.promised)
	case Moved:
		return ev.NoArena
	case SetTenantMemory:
		return v.Unplaced()
	}
	return false
}

// Unplaced says whether something was forced and had no place.
func (v View) Unplaced() bool {
	return v.mem.rooms != nil && v.mem.rooms.promised() < v.mem.ledger.total()
}

// Reserve answers a Reserve, at once or when there is room.
func (mem *Memory) Reserve(ev Reserve) {
	m := mem.members[ev.Client]
	if m == nil || !mem.turns.Connected(m.id) {
		return
	}
	before := mem.ledger.reservedBy(m.account, m.id)
	total, why := mem.placeable(m, ev, before.Total)
	answer := Reserved{Client: m.id, Serial: ev.Serial, Asked: ev.Total, Why: why}
	after := before
	if why != nil {
		mem.refused++
		answer.Refused = NoPlace
	} else {
		var ok bool
		after, ok = mem.ledger.reserve(m.account, m.id, total, min(ev.Least, total), ev.Force)
		if !ok {
			answer.Refused, answer.Asked = OverLimit, ev.Least
			if mem.cfg.Ceiling != 0 && (after.Limit == 0 || after.Limit > mem.cfg.Ceiling) && mem.rooms == nil {
				answer.Refused = OverCeiling
			}
		}
		if mem.rooms != nil {
			mem.promise(m, !ev.Force)
		}
	}
	if after.Used != before.Used {
		mem.do(LimitsChanged{m.account})
	}
	mem.changed()
	answer.Stands = View{mem}.Standing(m.account, m.id)
	if mem.rooms != nil {
		if answer.Refused == NotRefused && ev.Force {
			mem.rooms.force(m.id)
		}
		mem.tellRooms() // the room is there when the answer comes
		if answer.Refused == NotRefused && mem.awaitsRoom(m, &answer) {
			return
		}
	}
	mem.do(answer)
}

// placeable returns how much of a reservation there is a place for, on the GPU or in
// host memory: all, the least that is of use, or none, with an error.
func (mem *Memory) placeable(m *member, ev Reserve, has uint64) (total uint64, why error) {
	if mem.rooms == nil || ev.Force || ev.Total <= has {
		return ev.Total, nil
	}
	r := mem.rooms
	why = mem.fits(m, ev.Total)
	// What is asked for beside the least, for later, is no reason to promise more than fits.
	if why == nil && (!r.crosses(less(ev.Total, m.promised)) || r.crosses(less(cmp.Or(ev.Least, ev.Total), m.promised))) {
		return ev.Total, nil
	}
	if ev.Least < ev.Total && mem.fits(m, ev.Least) == nil {
		return ev.Least, nil
	}
	return 0, why
}

// awaitsRoom keeps the answer of a client whose memory never moves until others have
// made room, and reports whether it does.
func (mem *Memory) awaitsRoom(m *member, answer *Reserved) bool {
	if m.answer != nil || mem.rooms.clients[m.id].keep != Resident || mem.rooms.lacks(m.id) == 0 {
		return false
	}
	m.answer, m.until = answer, mem.now.Add(maxRoomWait)
	mem.awaiting = append(mem.awaiting, m)
	return true
}

// KeepFits says why the memory of a tenant's clients cannot be kept in a way; nil: it
// can.
func (v View) KeepFits(tenant string, keep Keep) error {
	r := v.mem.rooms
	if r == nil || keep != Resident {
		return nil
	}
	var kept []*occupant
	for _, m := range v.mem.membersOf(tenant) {
		if o := r.clients[m.id]; o.keep == Swapped {
			o.keep = Resident
			r.recount(o)
			kept = append(kept, o)
		}
	}
	err := r.placeable()
	for _, o := range kept {
		o.keep = Swapped
		r.recount(o)
	}
	return err
}
