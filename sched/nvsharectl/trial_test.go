// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

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

// Programs that take too long are named as that, and not by what the end of their pipes says.
func TestTrialIsLate(t *testing.T) {
	slow := filepath.Join(t.TempDir(), "slow")
	if err := os.WriteFile(slow, []byte("#!/bin/sh\nexec sleep 600\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	tr := &trial{self: slow, patience: 300 * time.Millisecond}
	_, _, err := tr.pair(t.Context(), 0, 0)
	if err == nil || !strings.Contains(err.Error(), "did not finish in") || !strings.Contains(err.Error(), "take their memory") {
		t.Errorf("got %v", err)
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

// A test that a user has tried is tried again whole by root, for whom sudo drops the user's
// variables. Where root has tried it, doctor says more.
func TestTrialRemedy(t *testing.T) {
	tr := &trial{self: "/usr/bin/nvsharectl", runDir: "/tmp/run", simGPU: "/tmp/sim", gpu: "1", time: 5 * time.Second}
	for uid, want := range map[int]string{
		1000: "sudo nvsharectl doctor test --gpu 1 --run-dir /tmp/run --simgpu /tmp/sim",
		0:    "sudo nvsharectl doctor --run-dir /tmp/run --simgpu /tmp/sim",
	} {
		if got := tr.remedy(uid); got != want {
			t.Errorf("user %d: %q, want %q", uid, got, want)
		}
	}
}
