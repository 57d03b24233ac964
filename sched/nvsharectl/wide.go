// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// printWide prints every column, every process, where memory is, and what enforces the rules.
func printWide(io streams, r *api.StatusResponse) {
	printHealth(io, r, math.MaxInt)
	gpus := table{head: []string{"GPU", "NAME", "UUID", "HOLDER", "FOR", "WAITING", "LONGEST", "TQ", "WAY", "MEMORY", "GRANTS", "FENCED"}}
	tenants := table{head: []string{"GPU", "TENANT", "STATE", "FOR", "GETS", "WAITED", "WAIT p50/p99", "LONGEST WAIT", "DEBT", "SHARE", "MEMORY", "OOM", "PROCESSES"}}
	clients := table{head: []string{"GPU", "STATE", "PROCESS", "PID", "FOR", "GRANTS", "HELD", "CALLS", "MEMORY", "BYPASSED", "SLICES", "PREEMPTED"}}
	swaps := swapTable()
	swapping := slices.ContainsFunc(r.Gpus, func(g *api.GPU) bool { return g.Swap != nil })
	if swapping {
		clients.head = append(clients.head, placeHead...)
	}
	var notes []string
	for _, g := range r.Gpus {
		addSwap(&swaps, g)
		holder, held := holderOf(g)
		fenced := count(g, api.ClientState_CLIENT_STATE_FENCED)
		gpus.add(map[int]string{11: alarm(fenced > 0)},
			fmt.Sprint(g.Index), g.Name, g.Uuid, holder, held,
			fmt.Sprint(count(g, api.ClientState_CLIENT_STATE_WAITING)), longestWaiting(g),
			time.Duration(g.QuantumNs).String(), wayAndSetting(g), memoryOf(g, "/"),
			fmt.Sprint(g.Grants), fmt.Sprint(fenced))
		for _, text := range []string{drainedOf(g), wayOf(g), tookOf(g), promisedOf(g), limitsOf(g), g.Hint, othersOf(g)} {
			if text != "" {
				notes = append(notes, fmt.Sprintf("GPU %d: %s", g.Index, text))
			}
		}
		for _, t := range tenantsOf(g) {
			t.addWide(&tenants, g)
		}
		for _, c := range g.Clients {
			since := "-"
			if c.SinceNs != 0 {
				since = short(c.SinceNs)
			}
			colours := map[int]string{1: stateColour[c.State], 9: alarm(c.Bypassed > 0)}
			cells := []string{fmt.Sprint(g.Index), doing(c), api.Who(c), fmt.Sprint(c.Pid), since, fmt.Sprint(c.Grants), short(c.HeldNs),
				fmt.Sprint(c.Calls), size(c.MemoryBytes), fmt.Sprint(c.Bypassed), slicesOf(c), fmt.Sprint(c.Preemptions)}
			if swapping {
				cells = addPlace(cells, colours, g, c)
			}
			clients.add(colours, cells...)
		}
	}
	for i, t := range []table{gpus, handTable(r), tenants, swaps, clients, enforcement(r)} {
		if len(t.rows) == 0 {
			continue
		}
		fmt.Fprintln(io.out)
		t.print(io)
		if i == 0 {
			for _, note := range notes {
				fmt.Fprintln(io.out, printable(note))
			}
		}
	}
}

// tookOf says how long turns take to begin and to end.
func tookOf(g *api.GPU) string {
	var parts []string
	for _, s := range []struct {
		name string
		took *api.Spread
	}{{"drains", g.Drains}, {"hand-overs", g.HandOvers}, {"waits", g.Waits}} {
		if s.took.GetCount() > 0 {
			parts = append(parts, fmt.Sprintf("%d %s p50 %s p99 %s", s.took.Count, s.name, brief(s.took.P50Ns), brief(s.took.P99Ns)))
		}
	}
	return strings.Join(parts, ", ")
}

func (t *tenant) addWide(to *table, g *api.GPU) {
	state, since, colour := t.state()
	memory, memoryColour := t.ofLimit("/")
	if away := t.away(); away > 0 {
		memory += ", " + size(away) + " away"
	}
	to.add(map[int]string{2: colour, 10: memoryColour, 11: alarm(t.use.OutOfMemory > 0)},
		fmt.Sprint(g.Index), t.name(), state, since, t.got(), t.waited(), halfAndMost(t.use.Waits), short(t.longestWait()),
		t.debt(), t.share(), memory, fmt.Sprint(t.use.OutOfMemory), fmt.Sprint(len(t.clients)))
}

// enforcement lists what is enforced by what, and who is known to run unarbitrated now.
func enforcement(r *api.StatusResponse) table {
	t := table{head: []string{"ENFORCED BY", "WHAT"}}
	t.add(nil, "library", "turns, core limits, memory limits, swapping; by libnvshare.so in each program")
	t.add(nil, "kernel", "which tenant a process belongs to, that it has ended, which GPUs it can open")
	hardware := "one process does not read another's GPU memory"
	if gpus := gpusInSlices(r); len(gpus) > 0 {
		hardware = "time slices, as the library sets them (GPU " + strings.Join(gpus, ", ") + "); " + hardware
	}
	t.add(nil, "hardware", hardware)
	without := "a program without the library"
	if r.Warden {
		t.add(nil, "driver", "turns, time slices, core limits and memory limits of programs without the library, and fences: nvshare-warden, from outside")
		without = "swapping and suspension of a program without the library"
	} else if r.WardenProblem != "" {
		without += " (cooperative: " + r.WardenProblem + ")"
	}
	t.add(nil, "nobody", without+"; one that starts while there is no scheduler, unless NVSHARE_SCHEDULER_LOSS=closed")
	for _, what := range unarbitrated(r) {
		t.add(map[int]string{1: red}, "nobody", what)
	}
	return t
}

// gpusInSlices names the GPUs that tenants share by the GPU's own time slices.
func gpusInSlices(r *api.StatusResponse) (gpus []string) {
	for _, g := range r.Gpus {
		if g.Way == "slices" {
			gpus = append(gpus, fmt.Sprint(g.Index))
		}
	}
	return gpus
}

// unarbitrated says what the scheduler knows to run without regard to turns.
func unarbitrated(r *api.StatusResponse) (now []string) {
	note := func(g *api.GPU, n int, what string) {
		if n > 0 {
			now = append(now, fmt.Sprintf("now, GPU %d: %d %s", g.Index, n, what))
		}
	}
	for _, g := range r.Gpus {
		unmanaged, bypassing := 0, 0
		for _, u := range r.Unmanaged {
			if u.Uuid == g.Uuid && !api.IsHeld(u.Held) {
				unmanaged++
			}
		}
		fenced := 0
		for _, c := range g.Clients {
			if c.State == api.ClientState_CLIENT_STATE_FENCED && !api.IsHeld(c.Held) {
				fenced++
			}
			if c.Bypassed > 0 {
				bypassing++
			}
		}
		note(g, unmanaged, "without the library")
		note(g, fenced, "fenced, beside the holder")
		note(g, bypassing, "with calls that go around the library")
	}
	return now
}
