// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// What never happened, and what an older scheduler does not tell, is not there.
func TestHowLongTurnsTake(t *testing.T) {
	some := &api.Spread{Count: 3, P50Ns: int64(900 * time.Microsecond), P99Ns: int64(2500 * time.Microsecond)}
	for want, g := range map[string]*api.GPU{
		"":                             {},
		"3 drains p50 900µs p99 2.5ms": {Drains: some, HandOvers: &api.Spread{}},
		"3 hand-overs p50 900µs p99 2.5ms, 3 waits p50 900µs p99 2.5ms": {HandOvers: some, Waits: some},
	} {
		if got := tookOf(g); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

// A process has one line, in one table, whether memory is swapped or not.
func TestWideHasOneTableOfProcesses(t *testing.T) {
	for _, r := range []*api.StatusResponse{sample(), swapped()} {
		_, out, _ := ctl("status", "-o", "wide", "--run-dir", serve(t, &fake{status: r}))
		if swaps := r.Gpus[0].Swap != nil; strings.Count(out, " PID ") != 1 || strings.Count(out, " 1001 ") != 1 || strings.Contains(out, "KEPT") != swaps || strings.Contains(out, "WHY FIXED") != swaps {
			t.Errorf("swapping %v:\n%s", swaps, out)
		}
	}
}

// What tenants do is no reason while there are none.
func TestUnusedGPU(t *testing.T) {
	const reason = "tenants keep the GPU busy"
	for _, tc := range []struct {
		gpu  *api.GPU
		busy bool
	}{
		{&api.GPU{}, false},
		{&api.GPU{Clients: []*api.Client{{}}}, true},
		{&api.GPU{Others: &api.Others{Clients: 1}}, true},
	} {
		g := tc.gpu
		g.Mode, g.Way, g.WayReason, g.QuantumNs = api.Mode_MODE_AUTO, "turns", reason, 100e6
		if s := api.Sharing(g) + wayOf(g); strings.Contains(s, reason) != tc.busy || strings.Contains(s, "nobody uses it") == tc.busy {
			t.Errorf("%v: %s", g.Clients, s)
		}
	}
}

// One word for each way to share, in the status, its wide form and the events.
func TestWaysHaveOneName(t *testing.T) {
	const reason = "by time slices: every process can set its slice, and all memory fits"
	g := &api.GPU{Mode: api.Mode_MODE_AUTO, EffectiveMode: api.Mode_MODE_CONCURRENT, Way: "slices", WayReason: reason, Clients: []*api.Client{{}}}
	e := &api.Event{Type: api.EventType_EVENT_TYPE_MODE, Concurrent: true, Reason: reason}
	turns := &api.Event{Type: api.EventType_EVENT_TYPE_MODE, Reason: "tenants keep the GPU busy"}
	for got, want := range map[string]string{
		wayOf(g):         "shared by time slices (auto: every process can set its slice, and all memory fits)",
		eventText(e):     "shares by time slices: every process can set its slice, and all memory fits",
		eventText(turns): "takes turns: tenants keep the GPU busy",
		wayAndSetting(g): "slices (auto)",
		wayAndSetting(&api.GPU{Mode: api.Mode_MODE_EXCLUSIVE, EffectiveMode: api.Mode_MODE_EXCLUSIVE, Way: "turns"}):    "turns",
		wayAndSetting(&api.GPU{Mode: api.Mode_MODE_CONCURRENT, EffectiveMode: api.Mode_MODE_CONCURRENT, Way: "driver"}): "all at once",
		wayAndSetting(&api.GPU{Mode: api.Mode_MODE_CONCURRENT, EffectiveMode: api.Mode_MODE_EXCLUSIVE, Way: "turns"}):   "turns (off)",
	} {
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
