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
	dropIns(t, dir)
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

// dropIns puts all drop-ins beside the units in dir, where each of them says that it belongs.
func dropIns(t *testing.T, dir string, only ...string) {
	t.Helper()
	files, err := filepath.Glob("../../deployments/systemd/*.conf")
	if err != nil || len(files) < 3 {
		t.Fatalf("drop-ins: %v, %v", files, err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		if len(only) > 0 && !slices.Contains(only, name) {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, unit, _ := strings.Cut(string(text), "install -D -m 644 "+name+" /etc/systemd/system/")
		unit, _, found := strings.Cut(unit, ".d/"+name+"\n")
		if !found {
			t.Errorf("%s does not say how it is installed", name)
			continue
		}
		if err := os.MkdirAll(filepath.Join(dir, unit+".d"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, unit+".d", name), text, 0o644); err != nil {
			t.Fatal(err)
		}
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
	} {
		_, value, _ := strings.Cut(string(text), "\n"+c.setting+"=")
		value, _, _ = strings.Cut(value, "\n")
		if !slices.Contains(strings.Fields(value), c.word) {
			t.Errorf("%s=%s: the plugin needs %s to %s", c.setting, value, c.word, c.to)
		}
	}
}
