//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The demo, as make demo SIM=1 runs it: everything holds, with two pods and, where there is
// podman, a third container.
func TestDemo(t *testing.T) {
	const patience = 5 * time.Minute
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	program := filepath.Join(t.TempDir(), "demo")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	cmd := exec.CommandContext(ctx, program, "--build-dir", "../../.build")
	cmd.Env = append(os.Environ(), "SIM=1")
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // it cleans up
	cmd.WaitDelay = time.Minute
	out, err := cmd.CombinedOutput()
	tenants := []string{"train-a  CRI pod", "train-b  CRI pod"}
	if _, err := exec.LookPath("podman"); err == nil {
		tenants = append(tenants, "train-c  podman")
	}
	for _, want := range append(tenants, "0 overlaps", "train-b killed while it held the GPU", "large-a and large-b had turns, with 384Mi each on a GPU of 512Mi", "everything held") {
		if err != nil || !strings.Contains(string(out), want) {
			t.Fatalf("the demo: %v, or it does not say %q:\n%s", err, want, out)
		}
	}
}
