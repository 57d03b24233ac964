// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// Who runs the script in a clone, or asks it what it can do, gets an answer and no results.
func TestRunOutsideABundle(t *testing.T) {
	text, err := os.ReadFile("run.sh")
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), "run.sh")
	if err := os.WriteFile(script, text, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args, says string
		fails      bool
	}{
		{"--help", "\n  migrate ", false},
		{"-h", "\n  servers ", false},
		{"gemm", "make gpu-bundle", true},
		{"", "make gpu-bundle", true},
	} {
		out, err := exec.Command("sh", append([]string{script}, strings.Fields(c.args)...)...).CombinedOutput()
		if (err != nil) != c.fails || !strings.Contains(string(out), c.says) {
			t.Errorf("run.sh %s: %v\n%s", c.args, err, out)
		}
		if left, _ := os.ReadDir(filepath.Dir(script)); len(left) != 1 {
			t.Errorf("run.sh %s left %v", c.args, left)
		}
	}
}

// A bundle is for hosts with a GPU: the simulated one has to be put there.
func TestSimulatedGPUIsNotInABundle(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stderr := os.Stderr
	os.Stderr = w
	b := &bench{bundle: t.TempDir(), simulated: true}
	status := b.run(t.Context(), t.TempDir(), nil)
	os.Stderr = stderr
	w.Close()
	said, err := io.ReadAll(r)
	if err != nil || status != 1 || !strings.Contains(string(said), "cp -a .build/simgpu "+b.bundle) {
		t.Errorf("status %d, %v\n%s", status, err, said)
	}
}
