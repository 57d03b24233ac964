// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
)

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
		t.add(nil, "driver", "core limits of programs without the library: nvshare-warden takes their channels off the GPU")
		without = "all else that a program without the library does"
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
			if u.Uuid == g.Uuid && !strings.HasPrefix(u.Held, "held ") {
				unmanaged++
			}
		}
		for _, c := range g.Clients {
			if c.Bypassed > 0 {
				bypassing++
			}
		}
		note(g, unmanaged, "without the library")
		note(g, count(g, api.ClientState_CLIENT_STATE_FENCED), "fenced, beside the holder")
		note(g, bypassing, "with calls that go around the library")
	}
	return now
}
