// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/segments"
)

// node is a simulated GPU with one process that uses it, and with the program.
type node struct {
	*testing.T
	checkpoint.Runner
	faults string // a file: which calls fail
	busy   *exec.Cmd
	says   *bufio.Scanner
}

// program compiles nvshare-checkpoint once for all tests, beside the simulated GPU, and returns where.
var program = sync.OnceValues(func() (string, error) {
	path := filepath.Join(filepath.Dir(os.Getenv("NVSHARE_TEST_SIMGPU")), "checkpoint", checkpoint.Name)
	build := exec.Command("go", "build", "-o", path, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// newNode needs what `make simgpu` builds.
func newNode(t *testing.T) *node {
	t.Helper()
	simgpu := os.Getenv("NVSHARE_TEST_SIMGPU")
	if simgpu == "" {
		t.Skip("NVSHARE_TEST_SIMGPU is not set")
	}
	dir := t.TempDir()
	n := &node{T: t, faults: filepath.Join(dir, "checkpoint")}
	path, err := program()
	n.check(err)
	n.Program = path
	n.Env = []string{"NVSHARE_SIMGPU_DIR=" + dir, "LD_LIBRARY_PATH=" + simgpu}
	n.check(os.WriteFile(filepath.Join(dir, "config"), []byte("gpus=2\nmemory_mib=64\n"), 0o644))
	n.busy = exec.Command(filepath.Join(filepath.Dir(simgpu), "bin", "cuda-busy"), "--tenant", "a", "--kernel-us", "500", "--depth", "4", "--report-ms", "10")
	n.busy.Env = append(os.Environ(), n.Env...)
	n.busy.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	r, err := n.busy.StdoutPipe()
	n.check(err)
	n.says = bufio.NewScanner(r)
	n.check(n.busy.Start())
	t.Cleanup(func() { _ = n.busy.Process.Kill(); _ = n.busy.Wait() })
	n.works()
	return n
}

func (n *node) check(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

// works waits for a sign of life.
func (n *node) works() {
	n.Helper()
	if !n.says.Scan() {
		n.Fatal("the process has ended")
	}
}

func (n *node) pid() int { return n.busy.Process.Pid }

func (n *node) fails(what string) {
	n.Helper()
	n.check(os.WriteFile(n.faults, []byte(what+"\n"), 0o644))
}

func (n *node) is(want checkpoint.State) {
	n.Helper()
	if got, err := n.State(context.Background(), n.pid()); err != nil || got != want {
		n.Fatalf("the process is %v (%v), not %v", got, err, want)
	}
}

func (n *node) done(_ checkpoint.Times, err error) { n.Helper(); n.check(err) }

func errOf(_ checkpoint.Times, err error) error { return err }

func (n *node) refused(err error, step string, code int) *checkpoint.Error {
	n.Helper()
	var e *checkpoint.Error
	if !errors.As(err, &e) || e.Step != step || e.Code != code {
		n.Fatalf("%+v, want %s to fail with %d", err, step, code)
	}
	return e
}

// A process goes off and comes back, also on another GPU. What is repeated does no harm.
func TestOffAndOn(t *testing.T) {
	n, ctx := newNode(t), context.Background()
	n.is(checkpoint.Running)
	uuids := []string{"GPU-51600000-0000-4000-8000-000000000000", "GPU-51600000-0000-4000-8000-000000000001"}
	for _, pairs := range [][]checkpoint.Pair{nil, {{Old: uuids[0], New: uuids[1]}, {Old: uuids[1], New: uuids[0]}}} {
		for range 2 {
			n.done(n.Off(ctx, n.pid()))
			n.is(checkpoint.Checkpointed)
		}
		for range 2 {
			n.done(n.On(ctx, n.pid(), pairs))
			n.is(checkpoint.Running)
		}
		n.works()
	}
	e := n.refused(errOf(n.Off(ctx, os.Getpid())), "state", 1)
	if !strings.Contains(e.Error(), "CUDA error 1: invalid argument") {
		t.Error(e)
	}
}

// A call that fails leaves the process running, or checkpointed.
func TestRefused(t *testing.T) {
	n, ctx := newNode(t), context.Background()
	n.fails("checkpoint 801")
	n.refused(errOf(n.Off(ctx, n.pid())), "checkpoint", 801)
	n.is(checkpoint.Running)
	n.works()
	n.fails("restore 2")
	n.done(n.Off(ctx, n.pid()))
	if e := n.refused(errOf(n.On(ctx, n.pid(), nil)), "restore", 2); e.State != checkpoint.Checkpointed {
		t.Error(e)
	}
	n.fails("restore fail")
	// The program's calls fail from then on, so it may have ended before its state is asked for.
	if e := n.refused(errOf(n.On(ctx, n.pid(), nil)), "restore", 999); e.State != checkpoint.Failed && e.State != checkpoint.Unknown {
		t.Error(e)
	}
}

// A call that hangs is ended. The next program goes on from where that one was.
func TestHangs(t *testing.T) {
	n, ctx := newNode(t), context.Background()
	n.fails("checkpoint hang")
	n.Limit = 500 * time.Millisecond
	var e *checkpoint.Error
	for state := checkpoint.Running; state == checkpoint.Running; { // on a slow machine it is ended before the call
		if _, err := n.Off(ctx, n.pid()); !errors.As(err, &e) || !e.Timeout {
			t.Fatal(err)
		}
		var err error
		state, err = (&checkpoint.Runner{Program: n.Program, Env: n.Env}).State(ctx, n.pid())
		n.check(err)
	}
	n.Limit = 0
	n.is(checkpoint.Locked)
	n.fails("")
	n.done(n.Off(ctx, n.pid()))
	n.is(checkpoint.Checkpointed)
	n.done(n.On(ctx, n.pid(), nil))
	n.works()
}

// A program that was made ready does one operation after the other, and ends with who asks.
func TestServes(t *testing.T) {
	n, ctx := newNode(t), context.Background()
	s := n.serve()
	for _, op := range []string{"off", "state", "on", "on"} {
		s.asks(checkpoint.Request{Op: op})
		s.answered()
	}
	s.in.Close()
	n.check(s.cmd.Wait())
	n.works()

	n.Expect(1)
	took, err := n.Off(ctx, n.pid())
	if n.check(err); len(took) != 3 || took[0].Name != "start" || took[1].Name != "lock" || took[2].Took <= 0 {
		t.Errorf("took %v", took)
	}
	n.done(n.On(ctx, n.pid(), nil))
	n.Expect(0)
}

// server is a program that serves, as a scheduler starts it.
type server struct {
	*node
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers *bufio.Scanner
}

func (n *node) serve(args ...string) *server {
	n.Helper()
	s := &server{node: n, cmd: exec.Command(n.Program, append([]string{"serve"}, args...)...)}
	s.cmd.Env = append(os.Environ(), n.Env...)
	var err error
	s.in, err = s.cmd.StdinPipe()
	n.check(err)
	out, err := s.cmd.StdoutPipe()
	n.check(err)
	s.answers = bufio.NewScanner(out)
	n.check(s.cmd.Start())
	n.Cleanup(func() { _ = s.cmd.Process.Kill() })
	return s
}

func (s *server) asks(q checkpoint.Request) {
	s.Helper()
	q.PID = s.pid()
	s.check(json.NewEncoder(s.in).Encode(q))
}

// answered reads to the end of an operation.
func (s *server) answered() {
	s.Helper()
	if !s.answers.Scan() || strings.Contains(s.answers.Text(), "error") {
		s.Errorf("answered: %q", s.answers.Text())
	}
}

// await polls: what others do sends nothing to wait for.
func (n *node) await(ok func() bool) {
	for !ok() {
		time.Sleep(time.Millisecond)
	}
}

// A scheduler that starts brings a process back that an earlier one's program still takes off: it waits
// for that.
func TestExcludes(t *testing.T) {
	n := newNode(t)
	lock := []string{"--lock", filepath.Join(t.TempDir(), "lock")}
	n.check(os.WriteFile(lock[1], nil, 0o600))
	n.fails("lock wait")
	before, after := n.serve(lock...), n.serve(lock...)
	before.asks(checkpoint.Request{Op: "off"})
	n.await(func() bool { _, err := os.Stat(filepath.Join(filepath.Dir(n.faults), "hangs")); return err == nil })
	before.in.Close()
	after.asks(checkpoint.Request{Op: "on"})
	n.await(func() bool {
		locks, err := os.ReadFile("/proc/locks")
		n.check(err)
		return regexp.MustCompile(fmt.Sprintf(`-> POSIX .* %d `, after.cmd.Process.Pid)).Match(locks)
	})
	n.fails("")
	before.answered()
	after.answered()
	n.is(checkpoint.Running)
	n.works()
}

// What nobody waits for any more is not begun: another scheduler may have brought the process back since.
func TestBeginsNothing(t *testing.T) {
	n := newNode(t)
	s := n.serve()
	n.check(s.cmd.Process.Signal(syscall.SIGSTOP))
	s.asks(checkpoint.Request{Op: "off"})
	s.in.Close()
	n.check(s.cmd.Process.Signal(syscall.SIGCONT))
	if err := s.cmd.Wait(); err == nil {
		t.Error("it is done")
	}
	n.is(checkpoint.Running)
}

// An operation ends at its limit, though nobody ends it.
func TestEndsItself(t *testing.T) {
	n := newNode(t)
	n.fails("lock hang")
	s := n.serve()
	s.asks(checkpoint.Request{Op: "off", Limit: time.Second})
	if err := s.cmd.Wait(); s.cmd.ProcessState.ExitCode() != exitFailed {
		t.Errorf("it ends with %v", err)
	}
}

// Without the driver, or the program, it says so.
func TestNoDriver(t *testing.T) {
	n := newNode(t)
	if _, err := (&checkpoint.Runner{}).State(context.Background(), 1); !errors.Is(err, checkpoint.ErrNone) {
		t.Error(err)
	}
	out, err := exec.Command(n.Program, "off", "1", "--library", "/nonexistent/libcuda.so.1").Output()
	if err == nil || !strings.Contains(string(out), "load the driver's library") {
		t.Errorf("%s, %v", out, err)
	}
	for _, args := range [][]string{{"off"}, {"off", "x"}, {"sleep", "1"}, {"serve", "1"}} {
		var exit *exec.ExitError
		if err := exec.Command(n.Program, args...).Run(); !errors.As(err, &exit) || exit.ExitCode() != exitUsage {
			t.Errorf("%v: %v", args, err)
		}
	}
}

// Help is no failure, and requests that cannot be read are one.
func TestExitStatus(t *testing.T) {
	n := newNode(t)
	for _, c := range []struct {
		args, in string
		want     int
		says     string
	}{
		{"--help", "", 0, "brings it back"},
		{"--version", "", 0, "version"},
		{"serve", "", 0, ""},
		{"serve", "off 1", exitFailed, "read a request"},
		{"off", "", exitUsage, "Run nvshare-checkpoint --help"},
		{"--nothing", "", exitUsage, "Run nvshare-checkpoint --help"},
	} {
		cmd := exec.Command(n.Program, c.args)
		cmd.Stdin = strings.NewReader(c.in)
		out, _ := cmd.CombinedOutput()
		if got := cmd.ProcessState.ExitCode(); got != c.want || !strings.Contains(string(out), c.says) {
			t.Errorf("%s: status %d, want %d and %q: %s", c.args, got, c.want, c.says, out)
		}
	}
}

// A process that may have memory in a file is not restored by hand where nobody can look: its memory
// would be zeros.
func TestWholeByHand(t *testing.T) {
	const env = "NVSHARE_TEST_WHOLE"
	if os.Getenv(env) == "" { // without rights
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestWholeByHand$", "-test.v")
		cmd.Env = append(os.Environ(), env+"=1")
		if os.Geteuid() == 0 {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	fd, err := unix.MemfdCreate(segments.Name, unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(fd, 4096); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	if err := (&driver{}).whole(os.Getpid()); err == nil || !strings.Contains(err.Error(), "is not known") {
		t.Errorf("by hand: %v", err)
	}
	if err := (&driver{serves: true}).whole(os.Getpid()); err != nil {
		t.Errorf("a scheduler without rights: %v", err)
	}
}
