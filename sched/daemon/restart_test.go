// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

const nobody = 65534

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// openToAll lets every user reach a directory made by t.TempDir.
func openToAll(t *testing.T, dir string) {
	t.Helper()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// schedulerProcess is a scheduler that can be killed. It says so on standard
// output when clients can connect.
func schedulerProcess(dir string) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	o := testOptions(dir)
	o.Log.Logger.SetOutput(os.Stderr)
	o.Log.Logger.SetLevel(logrus.ErrorLevel)
	d, err := New(o)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	if n, err := strconv.Atoi(os.Getenv(roleWhatEnv)); err == nil { // open files, in proportion
		d.Desk = admission.New((n-(neededFiles-2*node.MaxConnections))/2, 0)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(n), Max: uint64(n)}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	fmt.Println("ready")
	if err := d.Run(ctx); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// startProcess runs a scheduler in a process of its own, as a user.
func startProcess(t *testing.T, dir string, uid uint32) *exec.Cmd {
	t.Helper()
	return startProcessBy(t, dir, func(cmd *exec.Cmd) {
		if uid != 0 {
			cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
		}
	})
}

// logErrorsTo has a scheduler process write what it logs as errors to a file.
func logErrorsTo(t *testing.T, path string) func(*exec.Cmd) {
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return func(cmd *exec.Cmd) { cmd.Stderr = f }
}

func startProcessBy(t *testing.T, dir string, change func(*exec.Cmd)) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"=scheduler", roleDirEnv+"="+dir)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	change(cmd)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	buf := make([]byte, 256)
	n, err := out.Read(buf)
	if string(buf[:n]) != "ready\n" {
		t.Fatalf("scheduler process: %q, %v", buf[:n], err)
	}
	return cmd
}

// A scheduler that is killed leaves its holder's gate open, and the next one
// finds the holder, though another client asks first.
func TestSchedulerIsKilled(t *testing.T) {
	dir := t.TempDir()
	cmd := startProcess(t, dir, 0)
	s := &scheduler{t: t, dir: dir}
	pa, a, e := newHolder(t, s)
	pb, _ := newClient(t, s)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	a.expectClosed()
	if a.page.Word(0) != uint32(e) {
		t.Error("the holder's gate shut with the scheduler's death")
	}
	_ = cmd.Wait()

	s = start(t, dir, nil) // over the stale sockets
	b := pb.connect().register(wire.RegisterReconnect).attach(0, gpuA, 0, wire.AttachWant)
	r := s.status()
	if stateOf(r, b.id) != api.ClientState_CLIENT_STATE_WAITING || b.page.Word(0) != wire.WordClosed {
		t.Errorf("the second client while the holder is not back: %v", r.Gpus[0])
	}
	again := pa.connect().register(wire.RegisterReconnect).attach(0, gpuA, e, 0)
	if again.page.Word(0) != uint32(e) {
		t.Errorf("the holder is back with %d, its new word is %d", e, again.page.Word(0))
	}
	again.release(e)
	if e2 := b.granted(); e2 <= e {
		t.Errorf("epoch %d after %d", e2, e)
	}
}

func TestRestartAfterSIGTERM(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	cmd := startProcessBy(t, dir, logErrorsTo(t, log))
	_, a, e := newHolder(t, &scheduler{t: t, dir: dir})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the scheduler ends with %v", err)
	}
	if a.page.Word(0) != uint32(e) {
		t.Error("the holder's gate shut at the scheduler's end")
	}
	if text := readFile(t, log); text != "" {
		t.Errorf("an end in good order is no error: %s", text)
	}
	for _, name := range []string{"tenant/scheduler.sock", "control.sock"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); !os.IsNotExist(err) {
			t.Errorf("%s is left behind (%v)", name, err)
		}
	}
	if st := readState(t, dir).GPUs[gpuA.UUID]; len(st.Holders) == 0 {
		t.Error("the state file forgot the holder")
	}
}

func TestRestoredHolderDies(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, nil)
	pa, _, e := newHolder(t, s)
	pb, _ := newClient(t, s)
	s.stop()
	s = start(t, dir, nil)
	b := pb.connect().register(wire.RegisterReconnect).attach(0, gpuA, 0, wire.AttachWant)
	if r := s.status(); stateOf(r, b.id) != api.ClientState_CLIENT_STATE_WAITING {
		t.Errorf("state %v while the old holder lives", stateOf(r, b.id))
	}
	pa.kill()
	if e2 := b.granted(); e2 <= e {
		t.Errorf("epoch %d after %d", e2, e)
	}
}

func TestRestoredHolderIsDeadAlready(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, nil)
	pa, _, e := newHolder(t, s)
	s.stop()
	pa.kill()
	s = start(t, dir, nil)
	_, b := newClient(t, s)
	if e2 := b.request().granted(); e2 <= e {
		t.Errorf("epoch %d after %d", e2, e)
	}
}

// A holder that lives but never comes back has its quantum and grace period.
func TestRestoredHolderStaysAway(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, nil)
	_, _, e := newHolder(t, s)
	s.stop()
	s = start(t, dir, func(o *Options) { o.Quantum, o.Grace = sched.MinQuantum, sched.MinGrace })
	_, b := newClient(t, s)
	if e2 := b.request().granted(); e2 <= e {
		t.Errorf("epoch %d after %d", e2, e)
	}
	if r := s.status(); r.Gpus[0].Fences != 1 || len(r.Problems) != 1 {
		t.Errorf("the absent holder is not reported: %v", r)
	}
}

// A damaged state file may have named a living holder: the first grants wait,
// and epochs are above all that were given before.
func TestStateFileIsDamaged(t *testing.T) {
	for name, text := range map[string]string{
		"truncated":    `{"version":1,"boot_id":"x","gpus":{"GPU-51`,
		"garbage":      "\x00\xff\x17",
		"empty":        "",
		"a newer one":  `{"version":3}`,
		"null GPU":     `{"version":2,"boot_id":"x","gpus":{"` + gpuA.UUID + `":null}}`,
		"holder twice": `{"version":2,"boot_id":"x","gpus":{"` + gpuA.UUID + `":{"epoch":9,"holders":[{"pid":1,"starttime":2,"epoch":8},{"pid":1,"starttime":2,"epoch":9}]}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := start(t, dir, nil)
			_, _, e := newHolder(t, s)
			s.stop()
			if err := os.WriteFile(filepath.Join(dir, "state.json"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			var log strings.Builder
			s = start(t, dir, func(o *Options) {
				logTo(&log)(o)
				o.Quantum, o.Grace = sched.MinQuantum, 300*time.Millisecond
			})
			_, b := newClient(t, s)
			e2 := b.request().granted()
			if e2 <= e {
				t.Errorf("epoch %d after %d", e2, e)
			}
			if d := time.Since(s.started); d < 300*time.Millisecond {
				t.Errorf("granted %v after the start, the old holder may still run", d)
			}
			s.stop()
			if !strings.Contains(log.String(), "state file") {
				t.Errorf("nothing is said about the state file: %s", log.String())
			}
		})
	}
}

// What is no file of ours where the state file should be: no grant could be
// recorded, so the scheduler does not start. It says what to do.
func TestStateFileIsNoFile(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"pipe": func(path string) error { return unix.Mkfifo(path, 0o666) },
		"link": func(path string) error { return os.Symlink("elsewhere", path) },
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "state.json")
		if err := put(path); err != nil {
			t.Fatal(err)
		}
		if _, err := New(testOptions(dir)); err == nil || !strings.Contains(err.Error(), path+" is not a regular file; remove it") {
			t.Errorf("%s: %v", name, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		start(t, dir, nil).stop() // nothing else is in the way
	}
}

// A scheduler whose run directory, or a socket in it, is deleted ends with an error, so that
// whoever supervises it starts one that clients can reach: at once when it has something
// to record, else when it looks.
func TestRunDirIsDeleted(t *testing.T) {
	for name, tc := range map[string]struct {
		lose string
		act  func(*peerConn)
	}{
		"idle":         {"", func(*peerConn) {}},
		"as it grants": {"", func(c *peerConn) { c.request() }},
		"a socket":     {api.SocketName, func(*peerConn) {}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "run")
			d, err := New(testOptions(dir))
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			done := make(chan error, 1)
			go func() { done <- d.Run(ctx) }()
			c := newProc(t, dir, 0).connect().register(0).attach(0, gpuA, 0, 0)
			if err := os.RemoveAll(filepath.Join(dir, tc.lose)); err != nil {
				t.Fatal(err)
			}
			tc.act(c)
			select {
			case err := <-done:
				if err == nil || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "deleted") {
					t.Errorf("ends with %v", err)
				}
			case <-time.After(patience):
				cancel()
				t.Fatalf("still runs; ended by us: %v", <-done)
			}
		})
	}
}

func TestUnprivileged(t *testing.T) {
	uid := uint32(0) // then we are not root, and that is the test
	dir := filepath.Join(t.TempDir(), "run")
	if os.Getuid() == 0 {
		uid = nobody
		openToAll(t, filepath.Dir(dir))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(dir, nobody, nobody); err != nil {
			t.Fatal(err)
		}
		if err := unix.Access("/proc/self/exe", unix.X_OK); err != nil {
			t.Fatal(err)
		}
	}
	startProcess(t, dir, uid)
	c := newProc(t, dir, uid).connect().register(0).attach(0, gpuA, 0, wire.AttachWant)
	c.granted()
}

func TestReasons(t *testing.T) {
	for code, want := range map[uint32]sched.Reason{
		wire.ReleaseRevoked: sched.Revoked, wire.ReleaseIdle: sched.Idle, wire.ReleaseExit: sched.Exit,
	} {
		if sched.Reason(code) != want {
			t.Errorf("code %d is %v, want %v", code, sched.Reason(code), want)
		}
	}
}

func TestUUID(t *testing.T) {
	if got := uuidOf(gpuB).String(); got != gpuB.UUID {
		t.Errorf("%s became %s", gpuB.UUID, got)
	}
	for _, bad := range []string{"", "GPU-", "51600000-0000-4000-8000-000000000000", "GPU-5160", "MIG-GPU-51600000-0000-4000-8000-000000000000/1/0", gpuA.UUID + "00"} {
		if _, err := wire.ParseUUID(bad); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
	if u, err := wire.ParseUUID("MIG-" + gpuB.UUID[len("GPU-"):]); err != nil || u != uuidOf(gpuB) {
		t.Errorf("a MIG device: %v, %v", u, err)
	}
}

// A process that has connected again says anew which channel is which GPU. What concerns a GPU
// to which it is yet to attach is not written where another one has its slot now.
func TestSlotsOfAnEarlierConnection(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p := newProc(t, s.dir, 0)
	p.connect().register(0).attach(0, gpuA, 0, 0).attach(1, gpuB, 0, 0)
	c := p.connect().register(wire.RegisterReconnect).attach(0, gpuB, 0, 0)
	if _, err := dial(t, s).Set(t.Context(), &api.SetRequest{Gpu: "0", Mode: api.Mode_MODE_CONCURRENT}); err != nil {
		t.Fatal(err)
	}
	if flags := c.page.Flags(0); flags != 0 {
		t.Errorf("the slot of GPU 1 has flags %#x, which GPU 0's mode has set", flags)
	}
	c.attach(1, gpuA, 0, 0)
	if _, err := dial(t, s).Set(t.Context(), &api.SetRequest{Gpu: "1", Mode: api.Mode_MODE_CONCURRENT}); err != nil {
		t.Fatal(err)
	}
	if c.page.Flags(0) != wire.GrantConcurrent {
		t.Errorf("the slot of GPU 1 has flags %#x after a change of its mode", c.page.Flags(0))
	}
}
