// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func lockOf(t *testing.T, runDir string, who holder) *leaderLock {
	t.Helper()
	s := openLeaderLock(runDir, who, quiet())
	t.Cleanup(s.Close)
	return s
}

// A node has one plugin. Another installation is refused, with both sides' names and tiers;
// a plugin that replaces the first one waits for its end.
func TestLeaderLock(t *testing.T) {
	runDir := filepath.Join(t.TempDir(), "run")
	first := holder{"namespace nvshare-system", "annotations"}
	has := lockOf(t, runDir, first)
	if taken, err := has.take(); !taken || err != nil {
		t.Fatalf("the first one: %v, %v", taken, err)
	}
	for _, other := range []holder{{"namespace other", "resource claims"}, {"namespace other", "annotations"}, {"this host's service", "resource claims"}} {
		taken, err := lockOf(t, runDir, other).take()
		if taken || err == nil {
			t.Fatalf("%v beside %v: %v, %v", other, first, taken, err)
		}
		for _, want := range []string{first.installation + ", and gives GPUs by " + first.tier, other.installation + ", and would give them by " + other.tier} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q lacks %q", err, want)
			}
		}
	}

	next := lockOf(t, runDir, holder{first.installation, "resource claims"})
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
	if _, err := lockOf(t, runDir, first).take(); err != nil {
		t.Errorf("the first one, back again: %v", err)
	}
	if _, err := lockOf(t, runDir, holder{"namespace other", "annotations"}).take(); err == nil || !strings.Contains(err.Error(), "gives GPUs by resource claims") {
		t.Errorf("another one beside the successor: %v", err)
	}
	next.Close()
	if taken, err := lockOf(t, runDir, holder{"namespace other", "annotations"}).take(); !taken || err != nil {
		t.Errorf("another one, later: %v, %v", taken, err)
	}
}

// A user without any right can open what is readable, and lock it.
func TestLeaderLockIsRootsOnly(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir, err := os.MkdirTemp("/tmp", "leader")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	who := holder{"this host's service", "annotations"}
	first := lockOf(t, dir, who)
	if taken, err := first.take(); !taken || err != nil {
		t.Fatal(taken, err)
	}
	first.Close()
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{dir, filepath.Join(dir, files[0].Name())} {
		cmd := exec.Command("sh", "-c", `exec 3<"$0" && flock -x 3 && echo locked && exec cat`, path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		cmd.Dir = "/"
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		_, _ = bufio.NewReader(out).ReadString('\n') // locked, or it cannot
		next := lockOf(t, dir, who)
		if taken, err := next.take(); !taken || err != nil {
			t.Errorf("a user without rights has locked %s: the lock is taken %v, %v", path, taken, err)
		}
		next.Close()
		in.Close()
		_ = cmd.Wait()
	}
}

// A plugin that cannot see whether there is another one does its work.
func TestLeaderLockThatNobodyCanHave(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, "")
	if taken, err := lockOf(t, file, holder{}).take(); !taken || err != nil {
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
