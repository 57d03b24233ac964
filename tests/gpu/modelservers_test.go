// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

const asProgram = "NVSHARE_TEST_GPU_PROGRAM"

// TestMain runs the program in place of the tests where a test asks for that: its node executes
// it again.
func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// runStep runs a step on the simulated GPU, and reads what it leaves.
func runStep(t *testing.T, file string, result any, args ...string) {
	t.Helper()
	simgpu := asRoot(t)
	interpreter := "/usr/bin/python3" // which any user may execute
	if _, err := os.Stat(interpreter); err != nil {
		interpreter = python(t)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	results := t.TempDir()
	cmd := exec.Command(self, append([]string{"-bundle", filepath.Dir(simgpu), "-results", results, "-simulated"}, args...)...)
	cmd.Env = append(os.Environ(), asProgram+"=1", "PYTHON="+interpreter)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	data, err := os.ReadFile(filepath.Join(results, file))
	if err == nil {
		err = json.Unmarshal(data, result)
	}
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// More servers than the GPU has memory for answer, and each as the first one did; natively some start.
func TestModelServersOnSimulatedGPU(t *testing.T) {
	var r suspendResult
	runStep(t, "suspend.json", &r, "-simulated-mib", "320", "-only", "servers", "-servers", "8", "-server-gpu-mib", "0", "-rate", "8", "-quick", "suspend")
	m := r.Servers
	if m.N != 8 || m.Requests != 24 || len(m.Answers) != 24 || len(m.Errors) > 0 || m.Wrong > 0 || m.Dropped != "" {
		t.Errorf("%+v", m)
	}
	if m.Natives < 1 || m.Natives >= 8 || m.Refused == "" || m.Fit != m.Natives {
		t.Errorf("%d servers started natively, %d fit, the next one: %s", m.Natives, m.Fit, m.Refused)
	}
	if len(m.First["suspended"]) == 0 { // all were, before the first request
		t.Errorf("nobody was suspended: %v", m.First)
	}
}

func TestAnswersAreCompared(t *testing.T) {
	m := &servers{First: map[string][]float64{}}
	for _, a := range []answer{{where: "resident", tokens: "1\n2\n"}, {where: "resident", tokens: "1\n2\n"}, {where: "swapped", tokens: "1\n3\n"}, {err: errors.New("none")}} {
		m.add(a)
	}
	if m.Wrong != 1 || len(m.Errors) != 1 || len(m.Answers) != 3 || len(m.First["resident"]) != 2 {
		t.Errorf("%+v", m)
	}
}
