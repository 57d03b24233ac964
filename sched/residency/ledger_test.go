// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"math"
	"math/big"
	"slices"
	"testing"

	"github.com/nvshare/nvshare/sched/base"
	"pgregory.net/rapid"
)

const gib = 1 << 30

func TestLedger(t *testing.T) {
	type step struct {
		do   func(l *ledger) (Standing, bool)
		want Standing
		ok   bool
	}
	reserve := func(id base.ClientID, total, least uint64) func(*ledger) (Standing, bool) {
		return func(l *ledger) (Standing, bool) { return l.reserve("c", id, total, least, false) }
	}
	force := func(id base.ClientID, total uint64) func(*ledger) (Standing, bool) {
		return func(l *ledger) (Standing, bool) { return l.reserve("c", id, total, 0, true) }
	}
	limit := func(n uint64) func(*ledger) (Standing, bool) {
		return func(l *ledger) (Standing, bool) { l.setLimit("c", n); return l.reservedBy("c", 0), true }
	}
	drop := func(id base.ClientID) func(*ledger) (Standing, bool) {
		return func(l *ledger) (Standing, bool) { had := l.drop("c", id); return l.reservedBy("c", 0), had }
	}
	for name, steps := range map[string][]step{
		"no limit": {
			{reserve(1, 5*gib, 5*gib), Standing{5 * gib, 5 * gib, 0}, true},
			{reserve(2, 1<<60, 1), Standing{1 << 60, 1<<60 + 5*gib, 0}, true},
		},
		"shared by the processes of a container": {
			{limit(8 * gib), Standing{0, 0, 8 * gib}, true},
			{reserve(1, 5*gib, 5*gib), Standing{5 * gib, 5 * gib, 8 * gib}, true},
			{reserve(2, 5*gib, 5*gib), Standing{0, 5 * gib, 8 * gib}, false},
			{reserve(2, 5*gib, 1*gib), Standing{3 * gib, 8 * gib, 8 * gib}, true}, // what is left
			{reserve(1, 5*gib, 5*gib), Standing{5 * gib, 8 * gib, 8 * gib}, true}, // repeated
			{reserve(1, 2*gib, 0), Standing{2 * gib, 5 * gib, 8 * gib}, true},
			{reserve(2, 6*gib, 6*gib), Standing{6 * gib, 8 * gib, 8 * gib}, true},
		},
		"death returns everything": {
			{limit(8 * gib), Standing{0, 0, 8 * gib}, true},
			{reserve(1, 8*gib, 8*gib), Standing{8 * gib, 8 * gib, 8 * gib}, true},
			{drop(1), Standing{0, 0, 8 * gib}, true},
			{drop(1), Standing{0, 0, 8 * gib}, false},
			{reserve(2, 8*gib, 8*gib), Standing{8 * gib, 8 * gib, 8 * gib}, true},
		},
		"forced over the limit": {
			{limit(8 * gib), Standing{0, 0, 8 * gib}, true},
			{reserve(2, 1*gib, 0), Standing{1 * gib, 1 * gib, 8 * gib}, true},
			{force(1, 9*gib), Standing{9 * gib, 10 * gib, 8 * gib}, true},
			{reserve(2, 2*gib, 1), Standing{1 * gib, 10 * gib, 8 * gib}, false},
			{reserve(1, 10*gib, 1), Standing{9 * gib, 10 * gib, 8 * gib}, false}, // not cut to what would be left, either
			{reserve(1, 6*gib, 6*gib), Standing{6 * gib, 7 * gib, 8 * gib}, true},
			{reserve(2, 3*gib, 2*gib), Standing{2 * gib, 8 * gib, 8 * gib}, true},
		},
		"a limit that changes": {
			{reserve(1, 5*gib, 5*gib), Standing{5 * gib, 5 * gib, 0}, true},
			{limit(4 * gib), Standing{0, 5 * gib, 4 * gib}, true},
			{reserve(1, 5*gib, 5*gib), Standing{5 * gib, 5 * gib, 4 * gib}, true}, // has it
			{reserve(1, 5*gib+1, 1), Standing{5 * gib, 5 * gib, 4 * gib}, false},
			{reserve(2, 1, 1), Standing{0, 5 * gib, 4 * gib}, false},
			{limit(6 * gib), Standing{0, 5 * gib, 6 * gib}, true},
			{reserve(1, 7*gib, 1), Standing{6 * gib, 6 * gib, 6 * gib}, true},
			{limit(0), Standing{0, 6 * gib, 0}, true},
			{reserve(1, 7*gib, 7*gib), Standing{7 * gib, 7 * gib, 0}, true},
		},
		"hostile values": {
			{force(1, math.MaxUint64), Standing{math.MaxUint64, math.MaxUint64, 0}, true},
			{force(2, math.MaxUint64), Standing{0, math.MaxUint64, 0}, true}, // no sum overflows
			{reserve(3, 1, 1), Standing{0, math.MaxUint64, 0}, false},
			{limit(math.MaxUint64), Standing{0, math.MaxUint64, math.MaxUint64}, true},
			{drop(1), Standing{0, 0, math.MaxUint64}, true},
			{reserve(3, math.MaxUint64, math.MaxUint64), Standing{math.MaxUint64, math.MaxUint64, math.MaxUint64}, true},
			{reserve(3, 1, math.MaxUint64), Standing{1, 1, math.MaxUint64}, true}, // least above total: less is always granted
			{reserve(3, 0, 0), Standing{0, 0, math.MaxUint64}, true},
		},
		"nothing of nothing": {
			{reserve(1, 0, 0), Standing{}, true},
			{force(1, 0), Standing{}, true},
			{limit(0), Standing{}, true},
			{drop(7), Standing{}, false},
		},
	} {
		l := newLedger()
		for i, s := range steps {
			got, ok := s.do(l)
			if got != s.want || ok != s.ok {
				t.Errorf("%s, step %d: %+v %v, want %+v %v", name, i+1, got, ok, s.want, s.ok)
			}
			if err := l.check(); err != nil {
				t.Errorf("%s, step %d: %v", name, i+1, err)
			}
		}
	}
}

// Accounts know nothing of each other.
func TestLedgerAccountsAreApart(t *testing.T) {
	l := newLedger()
	l.setLimit("a", 1)
	l.reserve("a", 1, 5, 0, true)
	if r, ok := l.reserve("b", 1, 5, 5, false); !ok || r != (Standing{5, 5, 0}) {
		t.Errorf("the neighbour got %+v, %v", r, ok)
	}
	if old := l.setLimit("a", 2); old != 1 {
		t.Errorf("the old limit was %d", old)
	}
	if got := l.names(); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("accounts %q", got)
	}
}

// model is the ledger as one would explain it, with numbers that cannot
// overflow: a list of what each client has.
type model struct {
	reserved map[string]map[base.ClientID]*big.Int
	limit    map[string]uint64
	excess   map[string]bool // over the limit by right: forced, or it was lowered
}

func (m *model) used(account string) *big.Int {
	sum := new(big.Int)
	for _, n := range m.reserved[account] {
		sum.Add(sum, n)
	}
	return sum
}

// TestLedgerAnyHistory compares the ledger with the model after any sequence
// of calls, with values that are hostile at times.
func TestLedgerAnyHistory(t *testing.T) {
	top := new(big.Int).SetUint64(math.MaxUint64)
	rapid.Check(t, func(t *rapid.T) {
		l := newLedger()
		m := &model{map[string]map[base.ClientID]*big.Int{"a": {}, "b": {}}, map[string]uint64{}, map[string]bool{}}
		values := rapid.OneOf(rapid.Uint64Range(0, 20), rapid.Uint64Range(math.MaxUint64-20, math.MaxUint64), rapid.Uint64(),
			rapid.SampledFrom([]uint64{1 << 63, 1<<63 - 1}))
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			account := rapid.SampledFrom([]string{"a", "b"}).Draw(t, "account")
			id := base.ClientID(rapid.IntRange(1, 4).Draw(t, "client"))
			have := m.reserved[account][id]
			if have == nil {
				have = new(big.Int)
			}
			switch rapid.IntRange(0, 9).Draw(t, "kind") {
			default:
				total, least := values.Draw(t, "total"), values.Draw(t, "least")
				force := rapid.IntRange(0, 3).Draw(t, "force") == 0
				got, ok := l.reserve(account, id, total, least, force)

				want := new(big.Int).SetUint64(total)
				wantOK := true
				if want.Cmp(have) > 0 {
					bound := top
					if n := m.limit[account]; n != 0 && !force {
						bound = new(big.Int).SetUint64(n)
					}
					left := new(big.Int).Sub(bound, new(big.Int).Sub(m.used(account), have))
					if left.Sign() < 0 {
						left.SetUint64(0)
					}
					switch {
					case want.Cmp(left) <= 0:
					case force:
						want = left
					case left.Cmp(new(big.Int).SetUint64(least)) >= 0 && left.Cmp(have) >= 0:
						want = left
					default:
						want, wantOK = have, false
					}
					if force {
						m.excess[account] = true
					}
				}
				m.reserved[account][id] = want
				if ok != wantOK || want.Cmp(new(big.Int).SetUint64(got.Total)) != 0 || got.Limit != m.limit[account] {
					t.Fatalf("reserve %s %d total %d least %d force %v, had %v: got %+v %v, want %v %v", account, id, total, least, force, have, got, ok, want, wantOK)
				}
			case 0:
				if had := l.drop(account, id); had != (have.Sign() > 0) {
					t.Fatalf("drop %s %d: %v, it had %v", account, id, had, have)
				}
				delete(m.reserved[account], id)
			case 1, 2:
				limit := values.Draw(t, "limit")
				if old := l.setLimit(account, limit); old != m.limit[account] {
					t.Fatalf("the limit of %s was %d, want %d", account, old, m.limit[account])
				}
				m.limit[account] = limit
				m.excess[account] = true // until it is back under it
			}
			if err := l.check(); err != nil {
				t.Fatal(err)
			}
			all := new(big.Int).Add(m.used("a"), m.used("b"))
			if all.Cmp(top) > 0 {
				all = top
			}
			if new(big.Int).SetUint64(l.total()).Cmp(all) != 0 {
				t.Fatalf("all have %d, want %v", l.total(), all)
			}
			for _, account := range []string{"a", "b"} {
				r, used := l.reservedBy(account, 0), m.used(account)
				if used.Cmp(new(big.Int).SetUint64(r.Used)) != 0 || r.Limit != m.limit[account] {
					t.Fatalf("account %s stands at %+v, want %v of %d", account, r, used, m.limit[account])
				}
				if r.Limit == 0 || r.Used <= r.Limit {
					m.excess[account] = false
				} else if !m.excess[account] {
					t.Fatalf("account %s has %d of %d, and nobody was forced", account, r.Used, r.Limit)
				}
			}
		}
		for _, account := range []string{"a", "b"} {
			l.setLimit(account, 0)
			for id := range base.ClientID(5) {
				l.drop(account, id)
			}
		}
		if left := l.names(); len(left) != 0 {
			t.Fatalf("left behind: %q", left)
		}
	})
}

func BenchmarkReserve(b *testing.B) {
	l := newLedger()
	l.setLimit("c", 1<<40)
	for i := range 256 {
		l.reserve("c", base.ClientID(i+1), gib, 0, false)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		l.reserve("c", 7, uint64(gib+i%2), 0, false)
	}
}
