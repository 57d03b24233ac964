// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// What a client has stays where it is when its tenant's limit is lowered: found in
// simulation, where its place was promised to others.
func TestLowerLimitLeavesWhatIsThere(t *testing.T) {
	c := New(Config{Memory: residency.Config{Swap: true, Capacity: 100}})
	refused := func(id base.ClientID, total uint64) (r residency.Refusal) {
		t.Helper()
		for _, a := range c.Step(0, residency.Reserve{Client: id, Total: total, Least: total}) {
			if a, ok := a.(residency.Reserved); ok {
				r = a.Refused
			}
		}
		return r
	}
	c.Step(0, Attach{Client: 1, Tenant: "a"}) // its memory never moves
	c.Step(0, Attach{Client: 2, Tenant: "b", CanMove: true})
	if r := refused(1, 60); r != residency.NotRefused {
		t.Fatalf("60 of 100: refused, %v", r)
	}
	c.Step(0, residency.SetTenantMemory{Tenant: "a", Limit: 10})
	if r := refused(2, 50); r != residency.NoPlace {
		t.Errorf("50 beside 60 that stay, on a GPU of 100: refused %q, want %v", r, residency.NoPlace)
	}
}

// A client that says it has more than it reserved is not believed: it keeps others from
// nothing but the slack.
func TestNobodyClaimsMemoryByAReport(t *testing.T) {
	c := New(Config{Memory: residency.Config{Swap: true, Capacity: oneGiB}})
	c.Step(0, Attach{Client: 1, Tenant: "liar", CanMove: true})
	c.Step(0, Attach{Client: 2, Tenant: "honest", CanMove: true})
	c.Step(0, residency.Reserve{Client: 1, Total: 1 << 20})
	c.Step(0, residency.Moved{Client: 1, Report: residency.Report{Resident: oneGiB, Fixed: oneGiB}})
	for _, a := range c.Step(0, residency.Reserve{Client: 2, Total: oneGiB / 2, Least: oneGiB / 2}) {
		if a, ok := a.(residency.Reserved); ok && a.Refused != residency.NotRefused {
			t.Errorf("half of the GPU: refused, %v, %v", a.Refused, a.Why)
		}
	}
	if n := c.MemorySnapshot().Promised; n > oneGiB/2+1<<20+oneGiB/1000 {
		t.Errorf("%d bytes are promised", n)
	}
	if err := c.Check(); err != nil {
		t.Error(err)
	}
}

// Memory that had to stay may leave once a tenant's is swapped again, but for what its process
// has pinned. The process need not say so once more.
func TestMemoryThatHadToStayMayLeave(t *testing.T) {
	c := New(Config{Memory: residency.Config{Swap: true, Capacity: 100}})
	c.Step(0, Attach{Client: 1, Tenant: "a", CanMove: true})
	c.Step(0, residency.Reserve{Client: 1, Total: 40})
	c.Step(0, Request{Client: 1})
	c.Step(0, residency.Moved{Client: 1, Epoch: 1, Report: residency.Report{Resident: 40, Fixed: 5}, Ready: true})
	c.Step(1, residency.SetTenantMemory{Tenant: "a", Keep: residency.Resident})
	if _, err := c.SuspendFits("a"); err == nil {
		t.Error("it may leave while it has to stay")
	}
	c.Step(2, residency.SetTenantMemory{Tenant: "a", Keep: residency.Swapped})
	if bytes, err := c.SuspendFits("a"); bytes != 35 {
		t.Errorf("%d bytes may leave, %v; want 35", bytes, err)
	}
	if err := c.Check(); err != nil {
		t.Error(err)
	}
}

func TestDefaultLimit(t *testing.T) {
	for _, swap := range []bool{false, true} {
		c := New(Config{Memory: residency.Config{Swap: swap, Capacity: oneGiB, DefaultLimit: 100}})
		c.Step(0, residency.SetTenantMemory{Tenant: "own", Limit: 200})
		for id, tenant := range [...]string{1: "none", 2: "none", 3: "own"} {
			if id != 0 {
				c.Step(0, Attach{Client: base.ClientID(id), Tenant: tenant})
			}
		}
		for _, try := range []struct {
			id     base.ClientID
			total  uint64
			limit  uint64
			denied bool
		}{{1, 60, 100, false}, {2, 60, 100, true}, {2, 40, 100, false}, {3, 200, 200, false}} {
			for _, a := range c.Step(0, residency.Reserve{Client: try.id, Total: try.total, Least: try.total}) {
				if a, ok := a.(residency.Reserved); ok && ((a.Refused == residency.OverLimit) != try.denied || a.Stands.Limit != try.limit) {
					t.Errorf("swap %t: client %d asks for %d: refused %q, limit %d", swap, try.id, try.total, a.Refused, a.Stands.Limit)
				}
			}
		}
	}
}

// A process that has just come from another GPU, or back after a restart, has not said yet what it
// has on the GPU: until then it cannot leave or be resumed, and the reason says that this is for a moment.
func TestUnknownMemoryLeavesLater(t *testing.T) {
	c := New(Config{Memory: residency.Config{Swap: true, Capacity: 1 << 30}})
	c.Step(1, residency.RestoreMemory{Client: 1, Tenant: "a", CanMove: true, Bytes: 100 << 20})
	c.Step(2, Attach{Client: 1, Tenant: "a", CanMove: true, Again: true})
	for what, fits := range map[string]func() error{
		"suspend": func() error { _, err := c.SuspendFits("a"); return err },
		"resume":  func() error { _, err := c.ResumeFits("a"); return err },
		"depart":  func() error { return c.DepartFits("a") },
	} {
		if err := fits(); err == nil || !strings.Contains(err.Error(), "not said yet") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := c.SuspendFits("b"); !errors.Is(err, residency.ErrNothingMoves) {
		t.Errorf("nobody: %v", err)
	}
	c.Step(3, residency.Moved{Client: 1, Report: residency.Report{Resident: 100 << 20}})
	if err := c.DepartFits("a"); err != nil {
		t.Errorf("it has said so: %v", err)
	}
}

// A tenant whose pinned memory would leave the others no place does not arrive, and asking for
// that changes nothing.
func TestArriveFits(t *testing.T) {
	node := NewNode()
	node.Arenas.Bound(101, 0)
	c := New(Config{Node: node, Memory: residency.Config{Swap: true, Capacity: 100}})
	c.Step(0, Attach{Client: 1, Tenant: "here", CanMove: true})
	c.Step(0, residency.Reserve{Client: 1, Total: 60})
	before := c.MemorySnapshot()
	for _, try := range []struct {
		mover, other residency.Mover
		want         string
	}{
		{residency.Mover{Bytes: 40}, residency.Mover{}, ""},
		{residency.Mover{Bytes: 50, Fixed: 40}, residency.Mover{}, ""},
		{residency.Mover{Bytes: 50, Fixed: 41}, residency.Mover{}, "cannot be moved"},
		{residency.Mover{Bytes: 30, Fixed: 30}, residency.Mover{Bytes: 11, Fixed: 11}, "cannot be moved"},
		{residency.Mover{Bytes: 40}, residency.Mover{Bytes: 1}, ""},
		{residency.Mover{Bytes: 50}, residency.Mover{Bytes: 1}, "host memory"},
	} {
		err := c.ArriveFits("comes", map[base.ClientID]residency.Mover{2: try.mover}, map[base.ClientID]residency.Mover{3: try.other})
		if got := fmt.Sprint(err); err == nil && try.want != "" || err != nil && (try.want == "" || !strings.Contains(got, try.want)) {
			t.Errorf("%+v beside %+v: %v, want %q", try.mover, try.other, err, try.want)
		}
	}
	if err := c.Check(); err != nil || !reflect.DeepEqual(c.MemorySnapshot(), before) {
		t.Errorf("changed: %v", err)
	}
}

// A tenant comes back while the other one has the GPU at the same time. All fits that is promised, but for what
// the driver has for itself: the other one makes room in the end, or takes turns. Else the first has a grant for
// ever with which it can do nothing.
func TestDriverRefusesAtTheSameTime(t *testing.T) {
	out := runScript(t, `config quantum=100ms grace=1s mode=concurrent swapshare=10 swap=96 physical=100
0ms attach 1 tenant=a canmove
0ms reserve 1 total=60
0ms moved 1 resident=60
1ms suspend tenant=a
2ms moved 1 away=60
3ms attach 2 tenant=b want canmove
3ms reserve 2 total=40
3ms moved 2 epoch=1 resident=40
4ms request 1
5ms moved 1 epoch=2 resident=57 away=3 in=57 stuck nomemory
next
next
next
30s moved 1 epoch=2 resident=57 away=3 in=57 stuck nomemory
next
next
next
`)
	if !strings.Contains(out, "revoke 2") && !strings.Contains(out, "room 2 bytes=37 less") {
		t.Errorf("2 keeps all it has, and 1 waits for 3 of 60:\n%s", out)
	}
}

// As above, and a third tenant, which is idle, has a little to give: less than the first lacks. The shim of the first
// says that it is stuck once only, so the others take turns all the same, and the first gets its memory.
func TestDriverRefusesBesideAnIdleOne(t *testing.T) {
	for name, later := range map[string]string{
		"it leaves": `100ms moved 3 away=2 out=2
200ms moved 1 epoch=2 resident=52 away=6 in=52
`,
		"it does not answer": "next\nnext\nnext\n",
		"it dies":            "100ms gone 3\nnext\n",
		"the first one connects anew": `100ms lost 1
110ms attach 1 tenant=a held=2 canmove
120ms moved 1 epoch=2 resident=50 away=8 in=50
130ms moved 3 away=2 out=2
`,
		"its memory is taken from outside": `100ms moved 2 epoch=1 resident=30
100ms reserve 2 total=30
next
next
next
`,
	} {
		t.Run(name, func(t *testing.T) {
			out := runScript(t, `config quantum=100ms grace=1s mode=concurrent swapshare=10 swap=96 physical=100
0ms attach 1 tenant=a canmove
0ms reserve 1 total=58
0ms moved 1 resident=58
0ms attach 3 tenant=c canmove
0ms reserve 3 total=2
0ms moved 3 resident=2
1ms suspend tenant=a
2ms moved 1 away=58
3ms attach 2 tenant=b want canmove
3ms reserve 2 total=40
3ms moved 2 epoch=1 resident=40
4ms request 1
5ms moved 1 epoch=2 resident=50 away=8 in=50 stuck nomemory
`+later)
			if !strings.Contains(out, "revoke 2 epoch=1") {
				t.Errorf("2 keeps its grant, and 1 waits for 8 of 58:\n%s", out)
			}
		})
	}
}

// The same over a restart: the shim has said that it is stuck to the scheduler before, and does not say so again.
func TestDriverRefusesOverARestart(t *testing.T) {
	out := runScript(t, `config quantum=100ms grace=1s mode=concurrent swapshare=10 swap=96 physical=100 last=2 intact
0ms restore 2 epoch=1
0ms restore 1 epoch=2
0ms restorememory 2 tenant=b bytes=40 canmove
0ms restorememory 1 tenant=a bytes=58 canmove
1ms attach 2 tenant=b held=1 canmove again
1ms moved 2 epoch=1 resident=40
2ms attach 1 tenant=a held=2 canmove again
2ms moved 1 epoch=2 resident=50 away=8 in=50
next
next
next
`)
	if !strings.Contains(out, "revoke 2 epoch=1") {
		t.Errorf("2 keeps its grant, and 1 waits for 8 of 58:\n%s", out)
	}
}
