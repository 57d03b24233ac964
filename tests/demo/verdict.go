// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// What the verdict demands. Nothing here measures how fast the machine is.
const (
	leastShare   = 0.5              // of an even share, while all tenants run
	longestWait  = 10 * time.Second // the scheduler's grace period: nobody had to be fenced
	regrantAfter = 10 * time.Second
)

// times are the moments of the demo, by the clock of the GPU's record, ns.
type times struct {
	shared int64 // all tenants have begun
	longer int64 // the quantum has been changed
	killed int64
	end    int64
}

// now reads the clock of the record: CLOCK_MONOTONIC for the simulated GPU, and time
// since the epoch for a real GPU.
func (d *demo) now() int64 {
	if d.simulated {
		return judge.Now()
	}
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_REALTIME, &ts); err != nil {
		panic(fmt.Sprintf("clock_gettime(CLOCK_REALTIME): %v", err))
	}
	return ts.Nano()
}

func (d *demo) evidence() (judge.Trace, error) {
	if d.simulated {
		return judge.ReadLog(filepath.Join(node.SimGPU, "run", "log"))
	}
	files, err := filepath.Glob(filepath.Join(d.node.Records, "*.jsonl"))
	if err != nil {
		return judge.Trace{}, err
	}
	return judge.ReadRecords(files...)
}

// verdict judges and prints what the GPU recorded, and reports whether everything held.
func (d *demo) verdict(t times, victim tenant, large string) (bool, error) {
	trace, err := d.evidence()
	if err != nil {
		return false, err
	}
	whole := judge.Judge(trace, judge.Options{Since: t.shared, Until: t.end})
	if len(whole.GPUs) != 1 {
		return false, fmt.Errorf("the record shows work on %d GPUs, want 1", len(whole.GPUs))
	}
	gpu := whole.GPUs[0].GPU
	together := judge.Judge(trace, judge.Options{Since: t.shared, Until: t.killed})
	before := judge.Judge(trace, judge.Options{Since: t.shared, Until: t.longer})
	after := judge.Judge(trace, judge.Options{Since: t.longer, Until: t.killed})

	var b strings.Builder
	held := true
	say := func(ok bool, format string, args ...any) {
		mark := "ok    "
		if !ok {
			mark, held = "FAILED", false
		}
		fmt.Fprintf(&b, "  %s  %s\n", mark, fmt.Sprintf(format, args...))
	}

	fmt.Fprintf(&b, "\nVerdict, from %s's own record of what ran when (%s)\n\n", map[bool]string{true: "the simulated GPU", false: "the GPU"}[d.simulated], gpu)
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  TENANT\tENGINE\tGRANTS\tSHARE\tMEAN TURN\tLONGEST WAIT\t")
	even := 1 / float64(len(d.tenants))
	for _, x := range d.tenants {
		u := usage(together, x.name)
		fmt.Fprintf(w, "  %s\t%s\t%d\t%.1f %%\t%v\t%v\t\n", x.name, x.engine, usage(whole, x.name).Turns,
			100*u.Share, round(turn(u)), round(time.Duration(u.LongestWait)))
	}
	w.Flush()
	fmt.Fprintln(&b)

	overlaps := whole.GPUs[0].Overlaps
	say(overlaps.Count == 0, "%d overlaps: never two tenants on the GPU at the same time", overlaps.Count)
	if overlaps.First != nil {
		fmt.Fprintf(&b, "          the first: %+v\n", *overlaps.First)
	}
	say(whole.Lost == 0, "the record is complete (%d entries lost)", whole.Lost)
	least, most, wait := 1.0, 0.0, int64(0)
	for _, x := range d.tenants {
		u := usage(together, x.name)
		least, most, wait = min(least, u.Share), max(most, u.Share), max(wait, u.LongestWait)
	}
	say(least >= leastShare*even, "shares while all ran: %.1f to %.1f %%, even would be %.1f %%", 100*least, 100*most, 100*even)
	say(wait < int64(longestWait), "longest wait of a tenant: %v", round(time.Duration(wait)))
	a, z := turn(usage(before, d.tenants[0].name)), turn(usage(after, d.tenants[0].name))
	// Only shown: a tenant without work ends its turn early.
	fmt.Fprintf(&b, "          time quantum %v, then %v: mean turn of %s %v, then %v\n", defaultQuantum, longQuantum, d.tenants[0].name, round(a), round(z))
	next, found := judge.Regrant(trace, gpu, victim.name, t.killed)
	// On a real GPU the last stamps of a killed program are lost.
	agrees := next.Held || !d.simulated
	say(found && agrees && next.Gap < int64(regrantAfter), "%s killed while it held the GPU (%s); %s went on after %v",
		victim.name, map[bool]string{true: "the record agrees", false: "the record has nothing on that"}[next.Held],
		next.Next.Tenant, time.Duration(next.Gap).Round(10*time.Microsecond))
	if large != "" {
		say(true, "%s", large)
	}
	verdict := "everything held"
	if !held {
		verdict = "NOT everything held"
	}
	fmt.Fprintf(&b, "\n  %s\n", verdict)
	d.screen.print(b.String())
	return held, nil
}

func usage(r judge.Report, tenant string) judge.Usage {
	for _, g := range r.GPUs {
		for _, u := range g.Tenants {
			if u.Tenant == tenant {
				return u
			}
		}
	}
	return judge.Usage{}
}

// turn is a tenant's mean turn.
func turn(u judge.Usage) time.Duration {
	return time.Duration(u.Occupied / int64(max(1, u.Turns)))
}

func round(d time.Duration) time.Duration { return d.Round(time.Millisecond) }
