// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// twoSecondsLater is sample() after some work.
func twoSecondsLater() *api.StatusResponse {
	r := sample()
	r.UptimeNs += 2_000_000_000
	g := r.Gpus[0]
	g.Grants += 20
	g.Tenants[0].UsedNs += 500_000_000
	g.Clients[0].Calls += 3000
	g.Clients[0].Grants += 10
	g.Tenants[0].Grants = g.Clients[0].Grants
	g.Tenants[1].UsedNs += 994_000_000
	g.Clients[2].Calls = 1 // another process
	return r
}

func TestTop(t *testing.T) {
	later := twoSecondsLater()
	again := twoSecondsLater()
	again.UptimeNs += 1_000_000_000
	again.Problems = []string{"GPU 1: it is fenced"}
	for _, tc := range []struct {
		golden string
		args   []string
		code   int
	}{
		{"top.txt", []string{"top", "--once"}, exitOK},
		{"top.txt", []string{"top", "-n", "1"}, exitOK},
		{"top-twice.txt", []string{"top", "-n", "2"}, exitFailed},
		{"top-gpu1.txt", []string{"top", "--once", "--gpu", "1"}, exitOK},
	} {
		f := &fake{status: sample(), later: []*api.StatusResponse{later, again}}
		code, out, errs := ctl(append(tc.args, "-d", "10ms", "--run-dir", serve(t, f))...)
		if code != tc.code || errs != "" {
			t.Errorf("%v: exit %d, %q", tc.args, code, errs)
		}
		golden(t, tc.golden, out)
	}
}

// A scheduler that began anew has rates too.
func TestTopOfAnotherScheduler(t *testing.T) {
	fresh := sample()
	fresh.UptimeNs, fresh.Gpus[0].Tenants[0].UsedNs = 100_000_000_000, 61_200_000_000
	var out bytes.Buffer
	printTop(streams{out: &out}, sample(), fresh)
	if !strings.Contains(out.String(), "61.2%") { // 61.2 s of 100
		t.Errorf("got\n%s", out.String())
	}
}
