// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

const gpu = "GPU-x"

func proc(name string) Process { return Process{Tenant: name[:1], ID: name} }

// trace reads "a1 0-10 b1 10-20": a process, and when it occupied the GPU. A process is
// named by its tenant's letter and a digit; "a1 !5" means that a1 died at 5.
func trace(t testing.TB, script string) Trace {
	t.Helper()
	var tr Trace
	words := strings.Fields(script)
	for i := 0; i+1 < len(words); i += 2 {
		p := proc(words[i])
		var from, to int64
		if n, _ := fmt.Sscanf(words[i+1], "!%d", &to); n == 1 {
			tr.Lives = append(tr.Lives, Life{Process: p, Exit: to})
			continue
		}
		if n, _ := fmt.Sscanf(words[i+1], "%d-%d", &from, &to); n != 2 {
			t.Fatalf("bad word %q", words[i+1])
		}
		tr.Intervals = append(tr.Intervals, Interval{gpu, p, Kernel, from, from, to, to - from, 1})
	}
	return tr
}

func TestOverlaps(t *testing.T) {
	for _, c := range []struct {
		name, script string
		count        int
		total        int64
		first        string // "a1 0-10 b1 5-15"
	}{
		{"alone", "a1 0-10 a1 20-30", 0, 0, ""},
		{"in turns", "a1 0-10 b1 10-20 a1 20-30", 0, 0, ""},
		{"by one", "a1 0-10 b1 9-20", 1, 1, "a1 0-10 b1 9-20"},
		{"own work may overlap", "a1 0-10 a1 5-15 a1 15-20 b1 20-30", 0, 0, ""},
		{"two processes of one tenant", "a1 0-10 a2 5-15", 1, 5, "a1 0-10 a2 5-15"},
		{"inside", "a1 0-100 b1 10-20 b1 30-40", 2, 20, "a1 0-100 b1 10-20"},
		{"three at once count their time once", "a1 0-10 b1 2-8 c1 4-12", 2, 8, "a1 0-10 b1 2-8"},
		{"any order", "b1 9-20 a1 0-10", 1, 1, "a1 0-10 b1 9-20"},
		{"work of the dead does not count", "a1 0-100 a1 !10 b1 10-20", 0, 0, ""},
		{"but until its death it does", "a1 0-100 a1 !10 b1 8-20", 1, 2, "a1 0-10 b1 8-20"},
		{"same moment", "a1 0-10 b1 0-10", 1, 10, "a1 0-10 b1 0-10"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := Judge(trace(t, c.script), Options{})
			if len(r.GPUs) != 1 {
				t.Fatalf("%d GPUs, want 1", len(r.GPUs))
			}
			got := r.GPUs[0].Overlaps
			first := ""
			if p := got.First; p != nil {
				first = fmt.Sprintf("%s %d-%d %s %d-%d", p[0].Process.ID, p[0].Begin, p[0].End,
					p[1].Process.ID, p[1].Begin, p[1].End)
			}
			if got.Count != c.count || got.Total != c.total || first != c.first || r.Overlaps() != c.count {
				t.Errorf("got %d, %d ns, %q; want %d, %d ns, %q", got.Count, got.Total, first, c.count, c.total, c.first)
			}
		})
	}
}

// The sweep finds the same overlaps as counting moment by moment.
func TestOverlapTotalIsWhatCountingGives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var tr Trace
		for i := range rapid.IntRange(1, 12).Draw(t, "n") {
			from := rapid.Int64Range(0, 40).Draw(t, fmt.Sprintf("from%d", i))
			to := from + rapid.Int64Range(1, 15).Draw(t, fmt.Sprintf("length%d", i))
			p := proc(rapid.SampledFrom([]string{"a1", "a2", "b1", "c1"}).Draw(t, fmt.Sprintf("p%d", i)))
			tr.Intervals = append(tr.Intervals, Interval{gpu, p, Kernel, from, from, to, to - from, 1})
		}
		var want int64
		for now := int64(0); now < 60; now++ {
			at := map[Process]bool{}
			for _, iv := range tr.Intervals {
				if iv.Submit <= now && now < iv.End {
					at[iv.Process] = true
				}
			}
			if len(at) > 1 {
				want++
			}
		}
		got := Judge(tr, Options{}).GPUs[0].Overlaps
		if got.Total != want || (got.Count > 0) != (want > 0) {
			t.Fatalf("got %d ns in %d overlaps, want %d ns", got.Total, got.Count, want)
		}
	})
}

func TestUsage(t *testing.T) {
	for _, c := range []struct {
		name, script string
		window       Options
		want         []Usage // of tenants
	}{
		{
			"turns and waits",
			"a1 0-10 a1 10-30 b1 40-50 a1 50-60 b1 90-100", Options{},
			[]Usage{
				{Tenant: "a", Busy: 40, Occupied: 40, Share: 2. / 3, Turns: 2, LongestTurn: 30, LongestWait: 40, Work: 3},
				{Tenant: "b", Busy: 20, Occupied: 20, Share: 1. / 3, Turns: 2, LongestTurn: 10, LongestWait: 40, Work: 2},
			},
		},
		{
			"a pause without another's turn is no wait",
			"a1 0-10 a1 80-90", Options{},
			[]Usage{{Tenant: "a", Busy: 20, Occupied: 20, Share: 1, Turns: 1, LongestTurn: 90, Work: 2}},
		},
		{
			"never again while others run: waits to the end",
			"a1 0-10 b1 10-500", Options{},
			[]Usage{
				{Tenant: "a", Busy: 10, Occupied: 10, Share: 10. / 500, Turns: 1, LongestTurn: 10, LongestWait: 490, Work: 1},
				{Tenant: "b", Busy: 490, Occupied: 490, Share: 490. / 500, Turns: 1, LongestTurn: 490, Work: 1},
			},
		},
		{
			"or to its death, where its work ends too",
			"a1 0-10 b1 10-50 a1 50-90 a1 !70 b1 70-90", Options{},
			[]Usage{
				{Tenant: "a", Busy: 30, Occupied: 30, Share: 30. / 90, Turns: 2, LongestTurn: 20, LongestWait: 40, Work: 2},
				{Tenant: "b", Busy: 60, Occupied: 60, Share: 60. / 90, Turns: 2, LongestTurn: 40, LongestWait: 20, Work: 2},
			},
		},
		{
			"processes of a tenant add up",
			"a1 0-10 b1 10-20 a2 20-30 b1 30-40 a1 40-50", Options{},
			[]Usage{
				{Tenant: "a", Busy: 30, Occupied: 30, Share: 30. / 50, Turns: 3, LongestTurn: 10, LongestWait: 30, Work: 3},
				{Tenant: "b", Busy: 20, Occupied: 20, Share: 20. / 50, Turns: 2, LongestTurn: 10, LongestWait: 10, Work: 2},
			},
		},
		{
			"a window cuts",
			"a1 0-100 b1 100-200 a1 200-300", Options{Since: 50, Until: 150},
			[]Usage{
				{Tenant: "a", Busy: 50, Occupied: 50, Share: .5, Turns: 1, LongestTurn: 50, LongestWait: 50, Work: 1},
				{Tenant: "b", Busy: 50, Occupied: 50, Share: .5, Turns: 1, LongestTurn: 50, Work: 1},
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := Judge(trace(t, c.script), c.window)
			if got := r.GPUs[0].Tenants; !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
}

// Queued work occupies the GPU from its submission, and keeps it busy from its start.
func TestQueueing(t *testing.T) {
	tr := Trace{Intervals: []Interval{
		{gpu, proc("a1"), Kernel, 0, 0, 100, 60, 3},
		{gpu, proc("b1"), Kernel, 50, 100, 150, 50, 1},
	}}
	g := Judge(tr, Options{}).GPUs[0]
	if g.Overlaps.Count != 1 || g.Overlaps.Total != 50 {
		t.Errorf("overlaps %+v, want one of 50 ns", g.Overlaps)
	}
	if b := g.Tenants[1]; b.Busy != 50 || b.Occupied != 100 {
		t.Errorf("b: %+v, want busy 50 and occupied 100", b)
	}
	if a := g.Tenants[0]; a.Busy != 60 || a.Work != 3 {
		t.Errorf("a: %+v, want busy 60 in 3 pieces", a)
	}
}

func TestGPUsAreJudgedApart(t *testing.T) {
	tr := trace(t, "a1 0-10")
	tr.Add(trace(t, "b1 0-10"))
	tr.Intervals[1].GPU = "GPU-y"
	r := Judge(tr, Options{})
	if len(r.GPUs) != 2 || r.GPUs[0].GPU != gpu || r.Overlaps() != 0 {
		t.Errorf("got %+v, want two GPUs in order and no overlap", r)
	}
	if r := Judge(Trace{}, Options{}); len(r.GPUs) != 0 {
		t.Errorf("no evidence gave %+v", r)
	}
}

func TestRegrant(t *testing.T) {
	tr := trace(t, "a1 0-100 a1 !40 b1 47-60 c1 60-70")
	h, ok := Regrant(tr, gpu, "a", 40)
	if !ok || !h.Held || h.Gap != 7 || h.Next != proc("b1") {
		t.Errorf("got %+v, %v; want b1 after 7 ns from a holder", h, ok)
	}
	if h, ok := Regrant(trace(t, "c1 0-10 a1 10-30 a1 !40 b1 47-60"), gpu, "a", 40); !ok || !h.Held || h.Gap != 7 {
		t.Errorf("a holder without work: %+v, %v; want held, 7 ns", h, ok)
	}
	if h, ok := Regrant(tr, gpu, "c", 45); !ok || h.Held || h.Gap != 2 {
		t.Errorf("a waiter's death: %+v, %v; want not held, 2 ns", h, ok)
	}
	if _, ok := Regrant(tr, gpu, "a", 71); ok {
		t.Error("nobody came after 71")
	}
}
