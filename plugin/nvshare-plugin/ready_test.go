// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/plugin"
)

// led is closed, as where a plugin leads.
func led() chan struct{} {
	leads := make(chan struct{})
	close(leads)
	return leads
}

// published writes as publish does until the test ends, or until end, which returns when nothing is
// written any more.
func published(t *testing.T, runDir string, leads <-chan struct{}, h *plugin.Health, alive func()) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := publish(ctx, runDir, leads, h, alive, quiet())
	end = func() {
		cancel()
		<-ended
	}
	t.Cleanup(end)
	return end
}

// --ready says whether the plugin gives GPUs, and why not.
func TestReady(t *testing.T) {
	run := t.TempDir()
	ready := func() error { return execute("--ready", "--run-dir", run) }
	if err := ready(); err == nil || !strings.Contains(err.Error(), "does not run") {
		t.Errorf("without a plugin: %v", err)
	}
	var h plugin.Health
	end := published(t, run, led(), &h, func() {})
	until(t, "a plugin without problems to be ready", ready)
	h.Waits("runtime", "no runtime yet")
	h.Problem("node", errors.New("disk\nfull"))
	until(t, "the reasons", func() error {
		if err := ready(); err == nil || err.Error() != "disk; full\nno runtime yet" {
			return fmt.Errorf("ready says %v", err)
		}
		return nil
	})
	h.Waits("runtime", "")
	h.Problem("node", nil)
	until(t, "the plugin to be ready again", ready)
	end()
	file := filepath.Join(run, readyFile)
	if _, err := os.Stat(file); err == nil {
		t.Error("the file stays")
	}
	write(t, file, "")
	past := time.Now().Add(-2 * readyLife)
	if err := os.Chtimes(file, past, past); err != nil {
		t.Fatal(err)
	}
	if err := ready(); err == nil || !strings.Contains(err.Error(), "hangs") {
		t.Errorf("a plugin that hangs: %v", err)
	}
}

// In a pod, --ready is about the plugin of that pod: one that replaces another is ready once
// the runtime asks it, whatever the other one says.
func TestReadyOfThisPod(t *testing.T) {
	run, namespace := t.TempDir(), filepath.Join(t.TempDir(), "namespace")
	write(t, namespace, "nvshare-system")
	pod := func() error { return isReady(run, namespace) }
	host := func() error { return isReady(run, namespace+".absent") }
	write(t, filepath.Join(run, readyFile), "mnt:[1]\n") // the other one
	if err := pod(); !errors.Is(err, errNotThere) {
		t.Errorf("before this pod's plugin has said anything: %v", err)
	}
	if err := host(); err != nil {
		t.Errorf("outside of pods: %v", err)
	}
	var h plugin.Health
	h.Waits("runtime", "not registered yet")
	leads := make(chan struct{})
	published(t, run, leads, &h, func() {})
	until(t, "its reason", func() error {
		if err := pod(); err == nil || err.Error() != "not registered yet" {
			return fmt.Errorf("ready says %v", err)
		}
		return nil
	})
	h.Waits("runtime", "")
	until(t, "it to be ready beside the other one", pod)
	close(leads)
	until(t, "it to lead", func() error {
		if text, err := os.ReadFile(filepath.Join(run, readyFile)); err != nil || string(text) != mountNamespace()+"\n" {
			return fmt.Errorf("%q, %v", text, err)
		}
		return errors.Join(pod(), host())
	})
	if _, err := os.Stat(filepath.Join(run, nextFile)); err == nil {
		t.Error("what it said beside the other one is still there")
	}
}

// --live fails only for a plugin that is stuck: not before it has said anything, not where it
// gives no GPUs, and not where it could not write.
func TestLive(t *testing.T) {
	run := t.TempDir()
	live := func() error { return execute("--live", "--run-dir", run) }
	if err := live(); err != nil {
		t.Errorf("before the plugin has said anything: %v", err)
	}
	var h plugin.Health
	h.Waits("runtime", "the runtime restarts")
	inside, free := make(chan struct{}), make(chan struct{})
	published(t, run, led(), &h, func() {
		select {
		case inside <- struct{}{}:
			<-free
		case <-free:
		}
	})
	file := filepath.Join(run, readyFile)
	until(t, "the plugin to say something", func() error {
		_, err := os.Stat(file)
		return err
	})
	if err := live(); err != nil {
		t.Errorf("a plugin that is not ready: %v", err)
	}
	h.Waits("runtime", "")
	<-inside // and stays
	past := time.Now().Add(-2 * readyLife)
	if err := os.Chtimes(file, past, past); err != nil {
		t.Fatal(err)
	}
	if err := live(); err == nil || !strings.Contains(err.Error(), "hangs") {
		t.Errorf("a plugin that is stuck: %v", err)
	}
	full := func(string) error { return errors.New("no space") }
	if err := isLive(run, filepath.Join(run, "none"), full); err != nil {
		t.Errorf("a plugin that cannot write: %v", err)
	}
	if left, err := os.ReadDir(run); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	close(free)
	until(t, "the plugin to go on", live)
}
