// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// systemd must understand each line of the units: it ignores what it does not,
// with a line in the journal.
func TestUnits(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("there is no systemd-analyze here")
	}
	units, err := filepath.Glob("../../deployments/systemd/*.service")
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
		// Programs that are not installed here are an error too.
		changed := strings.ReplaceAll(string(text), "ExecStart=/usr/local/sbin/nvshare-", "ExecStart=/bin/true ")
		if changed == string(text) {
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
		if strings.Contains(line, "nvshare") { // it looks at the machine's units too
			t.Error(line)
		}
	}
	if err != nil && !t.Failed() {
		t.Logf("systemd-analyze: %v\n%s", err, out)
	}
}
