// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
)

// The program of doctor test waits for a word, and that of helm test for none.
func TestProbeBegins(t *testing.T) {
	for name, tc := range map[string]struct {
		probeFlags
		in   string
		says string // "": it begins
	}{
		"told to begin":        {probeFlags{}, "\n", ""},
		"nobody says":          {probeFlags{}, "", "EOF"},
		"alone":                {probeFlags{alone: true}, "", ""},
		"alone, to its limit":  {probeFlags{alone: true, total: 8 << 30}, "", ""},
		"alone, without limit": {probeFlags{alone: true, total: 1 << 30}, "", "not held"},
	} {
		err := tc.begin(probed{Total: 8 << 30}, strings.NewReader(tc.in))
		if (err != nil) != (tc.says != "") || err != nil && !strings.Contains(err.Error(), tc.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// doctor test judges by what the programs themselves saw.
func TestTrialJudges(t *testing.T) {
	ran := func(kernels int) probed { return probed{Kernels: kernels, Seconds: 5} } // of 1 ms
	for name, tc := range map[string]struct {
		free, limited int
		share, limit  level
	}{
		"as promised":      {3600, 1200, pass, pass},
		"not arbitrated":   {4900, 4900, fail, fail},
		"above its limit":  {2400, 2400, pass, fail},
		"one starves":      {4900, 10, fail, pass},
		"somebody else is": {2000, 1000, warn, pass},
	} {
		found := judgeShares(ran(tc.free), ran(tc.limited))
		if found[0].Level != tc.share || found[1].Level != tc.limit {
			t.Errorf("%s: %+v", name, found)
		}
	}
	for name, tc := range map[string]struct {
		probed
		want level
	}{
		"held":           {probed{Total: trialMemory, Got: trialMemory, Full: true}, pass},
		"not held":       {probed{Total: 16 << 30, Got: trialMemory + probePiece}, fail},
		"the wrong size": {probed{Total: 16 << 30, Got: trialMemory, Full: true}, fail},
	} {
		if f := judgeMemory(tc.probed); f.Level != tc.want {
			t.Errorf("%s: %+v", name, f)
		}
	}
	// A large GPU is not filled, and a full one is left alone.
	tr := &trial{self: "/nonexistent"}
	for name, tc := range map[string]struct {
		swap *api.Swap
		want level
	}{
		"off":       {nil, pass},
		"large":     {&api.Swap{ArenaLimitBytes: 200 << 30, CapacityBytes: 141 << 30}, pass},
		"in use":    {&api.Swap{ArenaLimitBytes: 2 << 30, CapacityBytes: 1 << 30, PromisedBytes: 1 << 29}, warn},
		"no arena":  {&api.Swap{ArenaLimitBytes: 1 << 20, CapacityBytes: 1 << 30}, warn},
		"no driver": {&api.Swap{ArenaLimitBytes: 2 << 30, CapacityBytes: 1 << 30}, fail},
	} {
		if f := tr.swapping(t.Context(), &api.GPU{Swap: tc.swap}); f.Level != tc.want {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// While the programs of the test run, the scheduler says what their shims hold, and what the
// driver lets them do.
func TestTrialAsksTheScheduler(t *testing.T) {
	self := filepath.Join(t.TempDir(), "nvsharectl")
	if err := os.WriteFile(self, []byte(`#!/bin/sh
case "$*" in *doctor-a*) pid=4711;; *) pid=4712;; esac
echo '{"pid":'$pid'}'
read line
sleep 0.3
echo '{"pid":'$pid',"kernels":2500,"seconds":5}'
`), 0o755); err != nil {
		t.Fatal(err)
	}
	works := &api.Controls{Slices: "works", Channels: "works", Driver: "580.159.04", Listed: true}
	of := func(slices, channels string) *api.Controls {
		return &api.Controls{Slices: slices, Channels: channels, Driver: "575.1"}
	}
	answer := func(change func(a, b *api.Client, r *api.StatusResponse)) *api.StatusResponse {
		a, b := &api.Client{Pid: 4711, Interposed: 42, Connected: true}, &api.Client{Pid: 4712, Interposed: 42, Connected: true}
		r := &api.StatusResponse{Gpus: []*api.GPU{{Uuid: "GPU-1", Clients: []*api.Client{a, {Pid: 1, Bypassed: 9, Controls: of("driver refused", "driver refused")}, b}}}}
		change(a, b, r)
		return r
	}
	type want struct {
		check string
		level level
		text  string
	}
	const known = "42 entry points interposed, none bypassed"
	for name, tc := range map[string]struct {
		change func(a, b *api.Client, r *api.StatusResponse)
		want   []want
	}{
		"all is well": {func(a, b *api.Client, _ *api.StatusResponse) { a.Controls, b.Controls = works, works }, []want{
			{"shim", pass, known},
			{"controls", pass, "time slices and preemption work in 2 processes"},
		}},
		"another driver": {func(a, b *api.Client, _ *api.StatusResponse) { a.Controls, b.Controls = of("works", "works"), works }, []want{
			{"controls", pass, "1 of them with a driver version that nvshare was not tested with"},
		}},
		"bypassed": {func(a, b *api.Client, _ *api.StatusResponse) { b.Interposed, b.Bypassed = 40, 2 }, []want{
			{"shim", fail, "doctor-b (pid 4712): 2 of 42 entry points bypass the shim"},
			{"controls", pass, "not tried yet in 2"},
		}},
		"not known": {func(a, _ *api.Client, r *api.StatusResponse) {
			a.Pid, a.Interposed = 4713, 0
			r.Unmanaged = []*api.Unmanaged{{Pid: 4711}}
		}, []want{
			{"shim", fail, "doctor-a (pid 4711): not known to the scheduler, and uses the GPU without nvshare"},
		}},
		"without a proof": {func(a, _ *api.Client, _ *api.StatusResponse) { a.Interposed = 0 }, []want{
			{"shim", fail, "doctor-a (pid 4711): its shim holds no entry point"},
		}},
		"refused and faked": {func(a, b *api.Client, _ *api.StatusResponse) {
			a.Controls, b.Controls = of("driver refused", "driver fakes it"), of("driver refused", "driver fakes it")
		}, []want{
			{"controls", warn, "the driver refused them in 2"},
		}},
		"unseen in one": {func(a, b *api.Client, _ *api.StatusResponse) {
			a.Controls, b.Controls = works, of("no channel groups seen", "works")
		}, []want{
			{"controls", warn, "work in 1 process; the driver refused them in 1"},
		}},
	} {
		bare := answer(func(*api.Client, *api.Client, *api.StatusResponse) {})
		f := &fake{status: bare, later: []*api.StatusResponse{bare, answer(tc.change)}}
		tr := &trial{self: self, runDir: serve(t, f), gpu: "0", time: 250 * time.Millisecond, patience: time.Minute}
		switch name {
		case "not known":
			f.later = f.later[1:]
		}
		all, err := tr.run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range tc.want {
			if !slices.ContainsFunc(all, func(f finding) bool {
				return f.Check == w.check && f.Level == w.level && strings.Contains(f.Text, w.text) && (f.Fix != "") == (w.level != pass)
			}) {
				t.Errorf("%s: no %+v in %+v", name, w, all)
			}
		}
	}
}

// Programs that take too long are named as that, whatever fails by it: a start, or the read of a pipe.
func TestTrialIsLate(t *testing.T) {
	dir := t.TempDir()
	slow, started := filepath.Join(dir, "slow"), filepath.Join(dir, "started")
	if err := errors.Join(unix.Mkfifo(started, 0o600),
		os.WriteFile(slow, []byte("#!/bin/sh\necho >"+started+"\nexec sleep 600\n"), 0o755)); err != nil {
		t.Fatal(err)
	}
	starts, err := os.OpenFile(started, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer starts.Close()
	for doing, programs := range map[string]int{"start": 0, "take their memory": 2} {
		ctx, cancel := context.WithCancel(t.Context())
		go func() { // their time is over once so many have started
			_, _ = io.ReadFull(starts, make([]byte, programs))
			cancel()
		}()
		if programs == 0 {
			<-ctx.Done()
		}
		tr := &trial{self: slow, patience: time.Minute}
		if _, _, err := tr.pair(ctx, 0, 0); err == nil || !strings.Contains(err.Error(), "did not finish in") || !strings.Contains(err.Error(), doing) {
			t.Errorf("%s: got %v", doing, err)
		}
	}
}

// A program that fails is quoted, and where it says nothing, its exit status is.
func TestTrialFails(t *testing.T) {
	file := filepath.Join(t.TempDir(), "fails")
	for says, want := range map[string]string{
		"nvsharectl: mkdir /sys/fs/cgroup/x: permission denied": "a program of the test has failed: mkdir /sys/fs/cgroup/x: permission denied",
		"Killed": "a program of the test has failed: exit status 7: Killed",
		"":       "a program of the test has failed: exit status 7",
	} {
		if err := os.WriteFile(file, []byte("#!/bin/sh\nprintf '"+says+"' >&2\nexit 7\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		tr := &trial{self: file, patience: time.Minute}
		if _, _, err := tr.pair(t.Context(), 0, 0); err == nil || err.Error() != want {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// A word that is not as it was written is found wherever it is.
func TestWrongWords(t *testing.T) {
	piece := make([]byte, 4096)
	for i := 0; i < len(piece); i += 4 {
		binary.NativeEndian.PutUint32(piece[i:], 0x80000007)
	}
	for _, wrong := range [][]int{nil, {0}, {2048}, {4095}, {0, 4, 4092}} {
		harmed := append([]byte(nil), piece...)
		for _, i := range wrong {
			harmed[i] ^= 1
		}
		if n := wrongWords(harmed, 0x80000007); n != len(wrong) {
			t.Errorf("%d words are wrong at %v, found %d", len(wrong), wrong, n)
		}
	}
	if n := wrongWords(piece, 0x80000008); n != 1024 {
		t.Errorf("another word everywhere: found %d", n)
	}
}
