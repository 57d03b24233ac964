// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// finding is what -o json says of a check.
type finding struct{ Check, Level, Text string }

// doctor finds that the parts of a bed work.
func TestDoctor(t *testing.T) {
	b := newBed(t)
	cmd := exec.CommandContext(t.Context(), filepath.Join(b.Dir, "nvsharectl"), "doctor", "--shim", b.Shim(), "-o", "json")
	cmd.Env = b.Env
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	text, _ := cmd.Output() // this host has no CDI spec, which is a fault
	var all []finding
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatalf("%v: %s%s", err, text, complaints.String())
	}
	want := map[string]bool{"driver": true, "scheduler": true, "socket": true, "shim": true}
	for _, f := range all {
		t.Logf("%s %s: %s", f.Level, f.Check, f.Text)
		if want[f.Check] && f.Level != "PASS" {
			t.Errorf("%+v", f)
		}
		delete(want, f.Check)
	}
	if len(want) > 0 {
		t.Errorf("not looked at: %v", want)
	}
}

// doctor test runs its two programs on the simulated GPU, with their limits and with more
// memory than the GPU has, and finds that all holds. What depends on the speed of the
// machine is not judged here.
func TestDoctorTest(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("LEFT OUT: doctor test gives its programs limits, which needs root")
	}
	b := newBed(t, "--anti-thrash", "on", "--tq", "20ms", "--swap-memory", "1Gi", "--gpu-memory", "336Mi")
	cmd := exec.CommandContext(t.Context(), filepath.Join(b.Dir, "nvsharectl"), "doctor", "test", "--shim", b.Shim(), "--time", "2", "-o", "json")
	cmd.Env = b.Env
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	text, _ := cmd.Output() // the status is that of all checks, also of those that are not judged
	var all []finding
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatalf("%v: %s%s", err, text, complaints.String())
	}
	found := map[string]string{}
	for _, f := range all {
		t.Logf("%s %s: %s", f.Level, f.Check, f.Text)
		found[f.Check] = f.Level
	}
	for _, check := range []string{"shim", "controls", "memory", "swap"} {
		if found[check] != "PASS" {
			t.Errorf("%s: %q", check, found[check])
		}
	}
	for _, check := range []string{"share", "limit"} {
		if found[check] == "" {
			t.Errorf("%s was not tried", check)
		}
	}
}
