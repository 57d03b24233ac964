// SPDX-License-Identifier: Apache-2.0

// Package suites tests run.sh, which is make test: no suite outlives its tests, and what one
// leaves behind or does not end keeps nobody from the summary; and alone.sh, by which C tests run.
package suites

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// patience bounds each run of run.sh: reached only if it hangs.
const patience = 2 * time.Minute

// makefile has a suite for each way in which tests end, and in which they don't. What leaves
// something behind writes the process's number to left first.
const makefile = `
ok:
	@echo this one is ok
fails:
	@echo this one fails; exit 3
leaves:
	@setsid sleep 1000 & echo $$! >left
	@echo this one has left a process
hangs:
	@sh -c 'trap "" TERM; echo $$$$ >left; echo this one hangs; while :; do sleep 1; done'
waits:
	@echo this one waits; while [ ! -e go-on ]; do sleep 0.02; done
`

// run is what run.sh printed, with what it left in its directory.
type run struct {
	dir, printed string
	pid, status  int
}

// start starts run.sh on suites of the makefile above. What it prints can be read from out.
func start(t *testing.T, env []string, suites ...string) (cmd *exec.Cmd, dir string, out *os.File) {
	t.Helper()
	dir = t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "Makefile"), []byte(makefile), 0o644); err != nil {
		t.Fatal(err)
	}
	script, err := filepath.Abs("run.sh")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	cmd = exec.CommandContext(ctx, "sh", append([]string{script, filepath.Join(dir, "log"), "1"}, suites...)...)
	// A pipe, as that of a CI: it ends once nobody holds it any more.
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = out.Close() })
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, in, in
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "MAKELEVEL=", "BESIDE=", "AT_END=", "BOUNDS=", "GRACE=", "PROGRESS=")
	cmd.Env = append(cmd.Env, env...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = in.Close()
	// Not what the test is about: nothing of it is left, also if run.sh does not do its work.
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if pid := left(dir); pid > 0 {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	return cmd, dir, out
}

// left is the process that a suite left behind: 0 for none.
func left(dir string) int {
	text, _ := os.ReadFile(filepath.Join(dir, "left"))
	pid, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return pid
}

// runs waits for all that run.sh prints.
func runs(t *testing.T, env []string, suites ...string) run {
	t.Helper()
	cmd, dir, out := start(t, env, suites...)
	if err := out.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	if _, err := bufio.NewReader(out).WriteTo(&all); err != nil {
		t.Fatalf("run.sh, or what a suite left behind, still holds its output: %v\n%s", err, all.String())
	}
	_ = cmd.Wait()
	return run{dir: dir, printed: all.String(), pid: cmd.Process.Pid, status: cmd.ProcessState.ExitCode()}
}

// row fails the test unless the summary has a row of the suite with that result.
func (r run) row(t *testing.T, suite, result string) {
	t.Helper()
	for line := range strings.Lines(r.printed) {
		if f := strings.Fields(line); len(f) >= 4 && f[0] == suite && f[1] == result {
			return
		}
	}
	t.Errorf("the summary does not say that %s is %s:\n%s", suite, result, r.printed)
}

func (r run) says(t *testing.T, what ...string) {
	t.Helper()
	for _, w := range what {
		if !strings.Contains(r.printed, w) {
			t.Errorf("run.sh does not say %q:\n%s", w, r.printed)
		}
	}
}

// ended fails the test while the process that the suite left behind runs.
func (r run) ended(t *testing.T) {
	t.Helper()
	pid := left(r.dir)
	if pid == 0 {
		t.Fatalf("the suite has left no process, so the test proves nothing:\n%s", r.printed)
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err == nil && !strings.Contains(string(stat), ") Z ") {
		t.Errorf("process %d of the suite still runs: %s", pid, stat)
	}
}

// noCgroup fails the test if a cgroup of this run is left.
func (r run) noCgroup(t *testing.T) {
	t.Helper()
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && filepath.Base(path) == fmt.Sprintf("nvshare-tests-%d", r.pid) {
			t.Errorf("cgroup %s is left", path)
		}
		return nil
	})
}

func TestResultsAndLogs(t *testing.T) {
	r := runs(t, nil, "ok", "fails")
	r.row(t, "ok", "ok")
	r.row(t, "fails", "FAILED")
	r.says(t, "ok: this one is ok\n", "fails: this one fails\n", "1 passed, 1 failed\n")
	if r.status != 1 {
		t.Errorf("status %d, want 1", r.status)
	}
	log, err := os.ReadFile(filepath.Join(r.dir, "log", "ok.log"))
	if err != nil || !strings.Contains(string(log), "this one is ok\n") {
		t.Errorf("the log has %q, %v", log, err)
	}
}

// A daemon that holds the suite's output, in a session of its own, is ended with the suite, and
// the summary names it. Only its cgroup finds it, which takes root and cgroup v2.
func TestWhatASuiteLeavesIsEnded(t *testing.T) {
	r := runs(t, []string{"BESIDE=leaves"}, "leaves", "ok")
	r.row(t, "leaves", "ok")
	r.row(t, "ok", "ok")
	if r.status != 0 {
		t.Errorf("status %d, want 0", r.status)
	}
	if strings.Contains(r.printed, "no cgroup can be made here") {
		t.Skip("SKIPPED: no cgroup can be made here")
	}
	r.says(t, "LEFT BEHIND", "sleep 1000")
	r.ended(t)
	r.noCgroup(t)
}

// A suite that does not end is ended at its bound, also if it ignores SIGTERM; the others run.
func TestASuiteThatHangsIsEndedAtItsBound(t *testing.T) {
	var r run
	for _, bound := range []string{"1s", "8s", "60s"} { // enough for it to begin, on any machine
		r = runs(t, []string{"BOUNDS=ok:60s hangs:" + bound, "GRACE=1"}, "hangs", "ok")
		r.row(t, "hangs", "FAILED")
		r.row(t, "ok", "ok")
		r.says(t, "hangs had not ended after "+bound, "1 passed, 1 failed\n")
		if strings.Contains(r.printed, "hangs: this one hangs\n") {
			break
		}
	}
	if r.status != 1 {
		t.Errorf("status %d, want 1", r.status)
	}
	r.ended(t)
	r.noCgroup(t)
}

// While suites are silent, run.sh says which run.
func TestProgress(t *testing.T) {
	cmd, dir, out := start(t, []string{"PROGRESS=0.1"}, "waits")
	if err := out.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	seen := 0
	var all strings.Builder
	for lines := bufio.NewScanner(out); lines.Scan(); {
		all.WriteString(lines.Text() + "\n")
		if strings.HasPrefix(lines.Text(), "=== make test: ") && strings.Contains(lines.Text(), "running: waits ") {
			if seen++; seen == 2 {
				if err := os.WriteFile(filepath.Join(dir, "go-on"), nil, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if err := cmd.Wait(); err != nil || seen < 2 {
		t.Errorf("%d lines of progress, %v:\n%s", seen, err, all.String())
	}
}

// Who ends run.sh ends its suites.
func TestASignalEndsTheSuites(t *testing.T) {
	cmd, dir, out := start(t, []string{"GRACE=1"}, "hangs")
	if err := out.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for lines := bufio.NewScanner(out); lines.Scan(); {
		all.WriteString(lines.Text() + "\n")
		if lines.Text() == "hangs: this one hangs" {
			if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = cmd.Wait()
	r := run{dir: dir, printed: all.String(), pid: cmd.Process.Pid, status: cmd.ProcessState.ExitCode()}
	if r.status != 143 {
		t.Errorf("status %d, want 143:\n%s", r.status, r.printed)
	}
	r.ended(t)
	r.noCgroup(t)
}
