// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func seatOf(t *testing.T, runDir string, who holder) *seat {
	t.Helper()
	s := openSeat(runDir, who, quiet())
	t.Cleanup(s.Close)
	return s
}

// A node has one plugin. Another installation is refused, with both sides' names and tiers;
// a plugin that replaces the first one waits for its end.
func TestSeat(t *testing.T) {
	runDir := filepath.Join(t.TempDir(), "run")
	first := holder{"namespace nvshare-system", "annotations"}
	has := seatOf(t, runDir, first)
	if taken, err := has.take(); !taken || err != nil {
		t.Fatalf("the first one: %v, %v", taken, err)
	}
	for _, other := range []holder{{"namespace other", "resource claims"}, {"namespace other", "annotations"}, {"this host's service", "resource claims"}} {
		taken, err := seatOf(t, runDir, other).take()
		if taken || err == nil {
			t.Fatalf("%v beside %v: %v, %v", other, first, taken, err)
		}
		for _, want := range []string{first.installation + ", and gives GPUs by " + first.tier, other.installation + ", and would give them by " + other.tier} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q lacks %q", err, want)
			}
		}
	}

	next := seatOf(t, runDir, holder{first.installation, "resource claims"})
	if taken, err := next.take(); taken || err != nil {
		t.Fatalf("its successor, while it runs: %v, %v", taken, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := next.wait(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("the successor is told to end: %v", err)
	}
	got := make(chan error, 1)
	go func() { got <- next.wait(context.Background()) }()
	has.Close()
	if err := <-got; err != nil {
		t.Errorf("the successor, at its end: %v", err)
	}
	if _, err := seatOf(t, runDir, first).take(); err != nil {
		t.Errorf("the first one, back again: %v", err)
	}
	if _, err := seatOf(t, runDir, holder{"namespace other", "annotations"}).take(); err == nil || !strings.Contains(err.Error(), "gives GPUs by resource claims") {
		t.Errorf("another one beside the successor: %v", err)
	}
	next.Close()
	if taken, err := seatOf(t, runDir, holder{"namespace other", "annotations"}).take(); !taken || err != nil {
		t.Errorf("another one, later: %v, %v", taken, err)
	}
}

// A plugin that cannot see whether there is another one does its work.
func TestSeatThatNobodyCanHave(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, "")
	if taken, err := seatOf(t, file, holder{}).take(); !taken || err != nil {
		t.Errorf("%v, %v", taken, err)
	}
}

func TestWhoIs(t *testing.T) {
	file := filepath.Join(t.TempDir(), "namespace")
	if w := whoIs(false, file); w != (holder{"this host's service", "annotations"}) {
		t.Errorf("outside of pods: %+v", w)
	}
	if err := os.WriteFile(file, []byte("gpus\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if w := whoIs(true, file); w != (holder{"namespace gpus", "resource claims"}) {
		t.Errorf("in a pod: %+v", w)
	}
}
