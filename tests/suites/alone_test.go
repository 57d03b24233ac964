// SPDX-License-Identifier: Apache-2.0

package suites

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// What a test makes in its TMPDIR and starts is gone when it ends, also if it fails, and nothing
// leads it to the machine's nvshare.
func TestAlone(t *testing.T) {
	for how, status := range map[string]int{"exit 0": 0, "exit 7": 7, "kill -KILL $$": 128 + int(syscall.SIGKILL)} {
		t.Run(how, func(t *testing.T) {
			out := t.TempDir()
			cmd := exec.Command("./alone.sh", "sh", "-c", `
mktemp -d >"$0/folder"
setsid sleep 1000 & echo $! >"$0/left"
echo "$NVSHARE_RUN_DIR" >"$0/run"
env | grep -e NVSHARE_DEBUG -e NVSHARE_SIMGPU_DEVICES -e CUDA_VISIBLE_DEVICES >"$0/settings"
`+how, out)
			cmd.Env = append(os.Environ(), "NVSHARE_RUN_DIR=/run/nvshare", "NVSHARE_DEBUG=1", "NVSHARE_SIMGPU_DEVICES=0", "CUDA_VISIBLE_DEVICES=0")
			said, err := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != status {
				t.Errorf("status %d, want that of the command, %d: %v\n%s", code, status, err, said)
			}
			r := run{dir: out, printed: string(said)}
			r.ended(t)
			read := func(name string) string {
				text, err := os.ReadFile(filepath.Join(out, name))
				if err != nil {
					t.Fatalf("%v\n%s", err, said)
				}
				return strings.TrimSpace(string(text))
			}
			if folder := read("folder"); folder == "" || !strings.HasPrefix(read("run"), filepath.Dir(folder)+"/") {
				t.Errorf("NVSHARE_RUN_DIR is %s, not below TMPDIR, %s", read("run"), filepath.Dir(folder))
			} else if _, err := os.Stat(filepath.Dir(folder)); !os.IsNotExist(err) {
				t.Errorf("%s is left: %v", filepath.Dir(folder), err)
			}
			if set := read("settings"); set != "" {
				t.Errorf("the test sees settings of its caller: %s", set)
			}
		})
	}
}
