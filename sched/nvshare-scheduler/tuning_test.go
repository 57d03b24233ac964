// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/account"
)

func TestTuning(t *testing.T) {
	const window, sample, carry, tail = "NVSHARE_COMPUTE_WINDOW_MS", "NVSHARE_QUOTA_SAMPLE_INTERVAL_MS", "NVSHARE_QUOTA_CARRYOVER_PERCENT", "NVSHARE_DROP_TAIL_BILLING_PERCENT"
	for name, tc := range map[string]struct {
		env  map[string]string
		args string
		want account.Tuning
		says string // part of the error
	}{
		"nothing": {nil, "", account.Tuning{Window: 500 * time.Millisecond}, ""},
		"empty":   {map[string]string{window: ""}, "", account.Tuning{Window: 500 * time.Millisecond}, ""},
		"as recommended elsewhere": {map[string]string{window: "4000", sample: "20", carry: "0", tail: "70"}, "",
			account.Tuning{Window: 4 * time.Second, Sample: 20 * time.Millisecond, DropCarry: 100, DropTail: 30}, ""},
		"flags": {nil, "--compute-window-ms 20000 --quota-sample-interval-ms 1000 --quota-carryover-percent 25 --drop-tail-billing-percent 0",
			account.Tuning{Window: 20 * time.Second, Sample: time.Second, DropCarry: 75, DropTail: 100}, ""},
		"a flag goes before": {map[string]string{window: "nonsense"}, "--compute-window-ms 600", account.Tuning{Window: 600 * time.Millisecond}, ""},

		"nonsense":     {map[string]string{window: "soon"}, "", account.Tuning{}, `NVSHARE_COMPUTE_WINDOW_MS: "soon" is not a whole number from 500 to 20000`},
		"short window": {map[string]string{window: "499"}, "", account.Tuning{}, window},
		"long window":  {map[string]string{window: "20001"}, "", account.Tuning{}, window},
		"with a unit":  {map[string]string{window: "2s"}, "", account.Tuning{}, window},
		"sample":       {map[string]string{sample: "9"}, "", account.Tuning{}, sample + `: "9" is not a whole number from 10 to 1000, or 0`},
		"carry":        {map[string]string{carry: "101"}, "", account.Tuning{}, carry},
		"negative":     {map[string]string{tail: "-1"}, "", account.Tuning{}, tail},
		"of a flag":    {map[string]string{tail: "50"}, "--drop-tail-billing-percent 200", account.Tuning{}, "--drop-tail-billing-percent"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, env := range []string{window, sample, carry, tail} {
				t.Setenv(env, tc.env[env])
			}
			var f tuningFlags
			cmd := &cobra.Command{}
			f.add(cmd)
			if err := cmd.ParseFlags(strings.Fields(tc.args)); err != nil {
				t.Fatal(err)
			}
			got, err := f.tuning()
			if got != tc.want || (err == nil) != (tc.says == "") || err != nil && !strings.Contains(err.Error(), tc.says) {
				t.Errorf("%v, %v; want %v, %q", got, err, tc.want, tc.says)
			}
		})
	}
}

// Nonsense in the environment ends the program, before it touches anything.
func TestTuningIsRefusedAtTheStart(t *testing.T) {
	t.Setenv("NVSHARE_QUOTA_CARRYOVER_PERCENT", "all")
	status, _, err := execute("--run-dir", t.TempDir())
	if err == nil || status != exitUsage || !strings.Contains(err.Error(), "NVSHARE_QUOTA_CARRYOVER_PERCENT") {
		t.Errorf("status %d, %v", status, err)
	}
}

func TestSchedulingMode(t *testing.T) {
	for env, want := range map[string]string{"": "auto", "serial": "on", "concurrent": "off", "auto": "auto", "x": "x"} {
		t.Setenv("NVSHARE_SCHEDULING_MODE", env)
		if got := antiThrashDefault(); got != want {
			t.Errorf("%q: %s, want %s", env, got, want)
		}
	}
}

// What nobody has said is a default, also where somebody says the same.
func TestSettingsSaid(t *testing.T) {
	for _, tc := range []struct{ env, args, want string }{
		{"", "--grace 5", ""},
		{"", "--tq 100ms --swap-share none", "turn-length swap-share"},
		{"", "--anti-thrash auto", "anti-thrash"},
		{"auto", "", "anti-thrash"},
	} {
		t.Setenv("NVSHARE_SCHEDULING_MODE", tc.env)
		status := 0
		cmd := command(&status)
		if err := cmd.ParseFlags(strings.Fields(tc.args)); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(settingsSaid(cmd.Flags()), " "); got != tc.want {
			t.Errorf("%q %s: %q, want %q", tc.env, tc.args, got, tc.want)
		}
	}
}

func TestVariablesWithoutEffect(t *testing.T) {
	var b strings.Builder
	log := logrus.New()
	log.SetOutput(&b)
	warnWithout(log)
	if b.Len() != 0 {
		t.Errorf("nothing is set: %s", b.String())
	}
	t.Setenv("NVSHARE_DROP_LEAD_MS", "5")
	warnWithout(log)
	log.SetOutput(io.Discard)
	if n := strings.Count(b.String(), "has no effect"); n != 1 {
		t.Errorf("warned %d times: %s", n, b.String())
	}
}
