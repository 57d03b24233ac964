// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// systemd must understand each line of the units, because it ignores other lines.
func TestUnits(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("there is no systemd-analyze here")
	}
	units, err := filepath.Glob("../../deployments/systemd/nvshare-*")
	if err != nil || len(units) == 0 {
		t.Fatalf("units: %v, %v", units, err)
	}
	dir := t.TempDir()
	args := []string{"verify", "--man=no"}
	for _, unit := range units {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		// A program that is not installed is an error too, so /bin/true replaces it.
		changed := strings.ReplaceAll(string(text), "ExecStart=/usr/local/sbin/nvshare-", "ExecStart=/bin/true ")
		if changed == string(text) && filepath.Ext(unit) == ".service" {
			t.Errorf("%s starts nothing from /usr/local/sbin, where install puts it", unit)
		}
		file := filepath.Join(dir, filepath.Base(unit))
		if err := os.WriteFile(file, []byte(changed), 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, file)
	}
	out, err := exec.Command("systemd-analyze", args...).CombinedOutput()
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "nvshare") { // systemd-analyze checks the machine's units too
			t.Error(line)
		}
	}
	if err != nil && !t.Failed() {
		t.Logf("systemd-analyze: %v\n%s", err, out)
	}
}

// The plugin's unit permits what the plugin does on some nodes only, or at some moments
// only: what it lacks there, no other test may notice.
func TestPluginUnitPermits(t *testing.T) {
	text, err := os.ReadFile("../../deployments/systemd/nvshare-plugin.service")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ setting, word, to string }{
		{"CapabilityBoundingSet", "CAP_KILL", "end a container of another user (--audit stop)"},
		{"RestrictAddressFamilies", "AF_NETLINK", "hear what the kernel says of GPUs (cdi/watch.go)"},
	} {
		_, value, _ := strings.Cut(string(text), "\n"+c.setting+"=")
		value, _, _ = strings.Cut(value, "\n")
		if !slices.Contains(strings.Fields(value), c.word) {
			t.Errorf("%s=%s: the plugin needs %s to %s", c.setting, value, c.word, c.to)
		}
	}
}
