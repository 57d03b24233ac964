//go:build compat

// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
)

// patience bounds each wait of a case. It is long, because a machine may be slow.
const patience = 5 * time.Minute

var (
	build  string // where make has put what is tested
	shim   string
	run    string // the scheduler's directory of sockets
	sim    string // the simulated node that the scheduler arbitrates
	apart  string // a simulated node without a scheduler, for processes without the shim
	images = os.Getenv("NVSHARE_COMPAT") == "full"

	passed, failed, skipped atomic.Int32
)

func built(name ...string) string {
	return filepath.Join(append([]string{build}, name...)...)
}

func program(name string) string { return built("compat", name) }

func TestMain(m *testing.M) {
	build = os.Getenv("NVSHARE_BUILD")
	if build == "" {
		build = "../../.build"
	}
	build, _ = filepath.Abs(build)
	shim = built("lib/libnvshare.so")
	code := m.Run()
	fmt.Printf("compat: %d passed, %d failed, %d skipped\n", passed.Load(), failed.Load(), skipped.Load())
	os.Exit(code)
}

// check runs and counts one case.
func check(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) {
		t.Cleanup(func() {
			switch {
			case t.Skipped():
				skipped.Add(1)
				fmt.Printf("compat: skipped: %s (go test -v says why)\n", name)
			case t.Failed():
				failed.Add(1)
			default:
				passed.Add(1)
			}
		})
		f(t)
	})
}

// TestCompat runs all cases. Programs with the shim share one GPU with each other and with
// a rival that always has work. Then the simulated GPU's record says whether two ever had
// the GPU at once.
func TestCompat(t *testing.T) {
	if images {
		fetch(t)
	}
	start(t)
	t.Run("managed", func(t *testing.T) {
		ways(t)
		besideOthers(t)
		roots(t)
		arm64(t)
		if images {
			releases(t)
		}
	})
	check(t, "no two had the GPU at once", func(t *testing.T) {
		trace, err := judge.ReadLog(filepath.Join(sim, "log"))
		if err != nil {
			t.Fatal(err)
		}
		if trace.Lost > 0 {
			t.Fatalf("the log has lost %d records", trace.Lost)
		}
		report := judge.Judge(trace, judge.Options{Until: judge.Now()})
		for _, gpu := range report.GPUs {
			if o := gpu.Overlaps; o.Count > 0 {
				t.Errorf("%s: %d overlaps, %v in all, the first: %+v", gpu.GPU, o.Count, time.Duration(o.Total), *o.First)
			}
		}
	})
	t.Run("unmanaged", unmanaged)
	t.Run("architecture", arm64Tests)
	t.Run("runtime", func(t *testing.T) {
		if images {
			runtimes(t)
		}
	})
}

// start makes two simulated nodes, a scheduler on one of them, and the rival.
func start(t *testing.T) {
	for _, file := range []string{shim, built("simgpu/libcuda.so.1"), built("bin/nvshare-scheduler"), program("probe")} {
		if _, err := os.Stat(file); err != nil {
			t.Fatalf("%v (make test-compat builds it)", err)
		}
	}
	// Processes of other users work here too.
	dir, err := os.MkdirTemp("", "nvshare-compat-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	run, sim, apart = filepath.Join(dir, "run"), filepath.Join(dir, "gpu", "run"), filepath.Join(dir, "apart")
	for _, d := range []string{run, sim, apart} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{dir, sim, apart} {
		os.Chmod(d, 0o777)
	}
	if err := os.Symlink(built("simgpu"), filepath.Join(dir, "gpu", "lib")); err != nil {
		t.Fatal(err)
	}
	log := must(os.Create(filepath.Join(dir, "scheduler.log")))(t)
	scheduler := exec.Command(built("bin/nvshare-scheduler"), "--run-dir", run, "--simgpu", filepath.Join(dir, "gpu"), "--anti-thrash", "on", "--tq", "20ms")
	scheduler.Stderr = log
	scheduler.Env = []string{"PATH=" + os.Getenv("PATH")}
	background(t, scheduler)
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the scheduler said:\n%s", text)
		}
	})
	await(t, "the scheduler answers", func() error {
		_, err := status()
		return err
	})
	rival := exec.Command(built("bin/cuda-busy"), "--seconds", "0", "--kernel-us", "500", "--depth", "8", "--tenant", "rival")
	rival.Env = environment(shim)
	rival.Stderr = os.Stderr
	background(t, rival)
	await(t, "the rival holds the GPU", func() error {
		c, err := client(rival.Process.Pid)
		if err == nil && c.Grants == 0 {
			err = fmt.Errorf("the rival has no grant yet")
		}
		return err
	})
}

// environment is the environment of a process in a managed container; without preloads,
// of an unmanaged process.
func environment(preload ...string) []string {
	env := []string{"PATH=" + os.Getenv("PATH"), "HOME=/nonexistent", "LANG=C", "LD_LIBRARY_PATH=" + built("simgpu"), "NVSHARE_RUN_DIR=" + run}
	if len(preload) == 0 {
		return append(env, "NVSHARE_SIMGPU_DIR="+apart)
	}
	return append(env, "NVSHARE_SIMGPU_DIR="+sim, "LD_PRELOAD="+strings.Join(preload, ":"))
}

// background runs a command until the test ends.
func background(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
}

func status() (*api.StatusResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := api.Dial(ctx, run)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.Status(ctx, &api.StatusRequest{})
}

// client returns what the scheduler knows of a process.
func client(pid int) (*api.Client, error) {
	s, err := status()
	if err != nil {
		return nil, err
	}
	for _, gpu := range s.Gpus {
		for _, c := range gpu.Clients {
			if int(c.Pid) == pid {
				return c, nil
			}
		}
	}
	return nil, fmt.Errorf("the scheduler knows no process %d", pid)
}

func await(t *testing.T, what string, done func() error) {
	t.Helper()
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if err = done(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// begin starts a command, and kills it and its children after patience; stop ends this
// watch.
func begin(t *testing.T, cmd *exec.Cmd) *time.Timer {
	t.Helper()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return time.AfterFunc(2*patience, func() { syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
}

// output runs a command to its end and returns all that it printed.
func output(t *testing.T, cmd *exec.Cmd) (string, error) {
	t.Helper()
	var text bytes.Buffer
	cmd.Stdout, cmd.Stderr = &text, &text
	slow := begin(t, cmd)
	defer slow.Stop()
	err := cmd.Wait()
	return text.String(), err
}

// session is a program that has done its work and stays until its input ends.
type session struct {
	pid, calls int // as the program printed them
	end        func()
}

// work starts a program that prints the same line as probe.c, and waits for the line.
// When the session ends, the program must have succeeded and printed nothing else.
func work(t *testing.T, cmd *exec.Cmd) *session {
	t.Helper()
	var stderr bytes.Buffer
	var once sync.Once
	cmd.Stderr = &stderr
	stdin := must(cmd.StdinPipe())(t)
	stdout := must(cmd.StdoutPipe())(t)
	slow := begin(t, cmd)
	finish := func() (rest string, err error) {
		once.Do(func() {
			stdin.Close()
			var b []byte
			b, err = io.ReadAll(stdout)
			rest = string(b)
			if e := cmd.Wait(); e != nil {
				err = e
			}
			slow.Stop()
		})
		return
	}
	t.Cleanup(func() { finish() })
	s := &session{}
	lines := bufio.NewReader(stdout)
	line, err := lines.ReadString('\n')
	if err == nil {
		_, err = fmt.Sscanf(line, "worked %d %d\n", &s.pid, &s.calls)
	}
	if err != nil {
		_, ended := finish()
		t.Fatalf("%v: printed %q (%v), ended with %v, said %q", cmd.Args, line, err, ended, stderr.String())
	}
	s.end = func() {
		t.Helper()
		rest, err := finish()
		if err != nil || rest != "" || stderr.Len() > 0 {
			t.Errorf("%v: ended with %v, printed %q more, and said %q", cmd.Args, err, rest, stderr.String())
		}
	}
	return s
}

// managed checks that the program is a client of the scheduler, that each of its
// submissions went through the gate, that no entry point leads past the shim, and that it
// prints only its own output.
func managed(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	// The process's name in the judge's report.
	cmd.Env = append(cmd.Env, fmt.Sprintf("NVSHARE_SIMGPU_TENANT=%.19s", filepath.Base(t.Name())))
	s := work(t, cmd)
	await(t, fmt.Sprintf("%v: all %d submissions are counted", cmd.Args, s.calls), func() error {
		c, err := client(s.pid)
		switch {
		case err != nil:
			return err
		case c.Bypassed != 0 || c.Interposed == 0:
			t.Fatalf("%v: %d entry points lead to the shim, %d past it", cmd.Args, c.Interposed, c.Bypassed)
		case c.Grants == 0 || c.Calls < uint64(s.calls):
			return fmt.Errorf("%d grants, %d calls so far", c.Grants, c.Calls)
		}
		return nil
	})
	s.end()
}

// alone checks that the program works, and that the scheduler does not know it.
func alone(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	s := work(t, cmd)
	if c, err := client(s.pid); err == nil {
		t.Errorf("%v is a client: %+v", cmd.Args, c)
	}
	s.end()
}

// command has the environment of a managed process by default.
func command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = environment(shim)
	return cmd
}

// need skips the case if one of these programs is missing.
func need(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("there is no %s", name)
		}
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the case needs root")
	}
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
