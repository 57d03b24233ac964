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

// led is closed, as where a plugin has the seat.
func led() chan struct{} {
	leads := make(chan struct{})
	close(leads)
	return leads
}

// --ready says whether the plugin gives GPUs, and why not.
func TestReady(t *testing.T) {
	run := t.TempDir()
	ready := func() error { return execute("--ready", "--run-dir", run) }
	if err := ready(); err == nil || !strings.Contains(err.Error(), "does not run") {
		t.Errorf("without a plugin: %v", err)
	}
	var h plugin.Health
	ctx, cancel := context.WithCancel(context.Background())
	publish(ctx, run, led(), &h, quiet())
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
	cancel()
	file := filepath.Join(run, readyFile)
	until(t, "the file to go", func() error {
		if _, err := os.Stat(file); err == nil {
			return errors.New("it is there")
		}
		return nil
	})
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
	publish(t.Context(), run, leads, &h, quiet())
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
