// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"net"
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
	if n, err := strconv.Atoi(os.Getenv(roleWhatEnv)); err == nil { // open files
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(n), Max: uint64(n)}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	o := testOptions(dir)
	o.Log.Logger.SetOutput(os.Stderr)
	o.Log.Logger.SetLevel(logrus.ErrorLevel)
	d, err := New(o)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
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

func TestLoadState(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state.json")
	if s, err := loadState(path, "boot"); err != nil || len(s.GPUs) != 0 || s.BootID != "boot" {
		t.Errorf("missing file: %+v, %v", s, err)
	}
	s := &state{Version: stateVersion, BootID: "boot", GPUs: map[string]*gpuState{
		"GPU-1": {Epoch: 1<<60 + 1, Holders: []holderState{{PID: 5, StartTime: 6, Epoch: 7}}},
		"GPU-2": {Epoch: 3, Unrecorded: true},
	}}
	if err := s.save(path); err != nil {
		t.Fatal(err)
	}
	same, err := loadState(path, "boot")
	if err != nil || same.GPUs["GPU-1"].Epoch != 1<<60+1 || same.GPUs["GPU-1"].Holders[0] != (holderState{5, 6, 7}) || !same.GPUs["GPU-2"].Unrecorded {
		t.Errorf("read back %+v, %v", same.GPUs["GPU-1"], err)
	}
	other, err := loadState(path, "another boot")
	if err != nil || other.GPUs["GPU-1"].Epoch != 1<<60+1 || other.GPUs["GPU-1"].Holders != nil || other.GPUs["GPU-2"].Unrecorded {
		t.Errorf("after a reboot %+v, %v", other.GPUs["GPU-1"], err)
	}
}

// An upgrade happens while a tenant holds: the file of version 1 is read.
func TestUpgradeFromVersion1(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, nil)
	pa, _, e := newHolder(t, s)
	pb, _ := newClient(t, s)
	s.stop()
	st := readState(t, dir)
	h := st.GPUs[gpuA.UUID].Holders[0]
	old := fmt.Sprintf(`{"version":1,"boot_id":%q,"gpus":{%q:{"epoch":%d,"holder":{"pid":%d,"starttime":%d}},%q:{"epoch":7}}}`,
		st.BootID, gpuA.UUID, e, h.PID, h.StartTime, gpuB.UUID)
	if err := os.WriteFile(filepath.Join(dir, "state.json"), []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	s = start(t, dir, nil)
	if s.cautious {
		t.Error("a file of version 1 makes the start cautious")
	}
	b := pb.connect().register(wire.RegisterReconnect).attach(0, gpuA, 0, wire.AttachWant)
	if r := s.status(); stateOf(r, b.id) != api.ClientState_CLIENT_STATE_WAITING {
		t.Errorf("state %v while the holder of before lives", stateOf(r, b.id))
	}
	again := pa.connect().register(wire.RegisterReconnect).attach(0, gpuA, e, 0)
	if again.page.Word(0) != uint32(e) {
		t.Error("the holder may not go on")
	}
	again.release(e)
	if e2 := b.granted(); e2 <= e {
		t.Errorf("epoch %d after %d", e2, e)
	}
	if st := readState(t, dir); st.Version != stateVersion {
		t.Errorf("the file has version %d still", st.Version)
	}
}

func TestDecodeState(t *testing.T) {
	gpu := func(body string) string { return `{"version":2,"boot_id":"x","gpus":{"GPU-1":` + body + `}}` }
	for text, want := range map[string]string{
		`{"version":3,"boot_id":"x"}`:                       "a newer nvshare-scheduler wrote it: version 3",
		`{"version":0,"boot_id":"x"}`:                       "damaged: version 0",
		`{"version":-1,"boot_id":"x"}`:                      "damaged: version -1",
		`{"boot_id":"x"}`:                                   "damaged: version 0",
		`{"version":2}`:                                     "no boot id",
		`{"version":1}`:                                     "no boot id",
		`{"version":"2","boot_id":"x"}`:                     "damaged",
		`[]`:                                                "damaged",
		`{"version":2,"boot_id":"x"}}`:                      "damaged",
		gpu(`{"epoch":-1}`):                                 "damaged",
		gpu(`{"epoch":4611686018427387905}`):                "epoch 4611686018427387905",
		gpu(`{"epoch":9,"holders":[{"pid":0,"epoch":9}]}`):  "holder",
		gpu(`{"epoch":9,"holders":[{"pid":5,"epoch":0}]}`):  "holder",
		gpu(`{"epoch":9,"holders":[{"pid":5,"epoch":10}]}`): "holder",
		gpu(`{"epoch":9,"holders":[` + strings.Repeat(`{"pid":5,"epoch":9},`, 70) + `{"pid":5,"epoch":9}]}`): "71 holders",
		`{"version":1,"boot_id":"x","gpus":{"GPU-1":{"epoch":9,"holder":{"pid":-5}}}}`:                       "holder",
		`{"version":1,"boot_id":"x","gpus":{"GPU-1":null}}`:                                                  "null",
	} {
		if s, err := decodeState([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.100s: %+v, %v, want %q", text, s, err, want)
		}
	}
	for _, text := range []string{`{"version":2,"boot_id":"x"}`, gpu(`{"epoch":0}`), gpu(`{"epoch":9,"later":[1]}`) + "  \n\n"} {
		if _, err := decodeState([]byte(text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

func TestSecondScheduler(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, nil)
	_, err := New(testOptions(dir))
	if err == nil || !strings.Contains(err.Error(), "another nvshare-scheduler runs") || !strings.Contains(err.Error(), dir) {
		t.Errorf("error %v", err)
	}
	s.status() // the first one is unharmed
	newProc(t, dir, 0).connect().register(0)

	// Its lock file deleted, it still answers.
	if err := os.Remove(filepath.Join(dir, "lock")); err != nil {
		t.Fatal(err)
	}
	if _, err := New(testOptions(dir)); err == nil || !strings.Contains(err.Error(), "another nvshare-scheduler runs") {
		t.Errorf("error %v", err)
	}
	newProc(t, dir, 0).connect().register(0)
}

func TestStaleSockets(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, tenantDir), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, network := range map[string]string{"tenant/scheduler.sock": "unixpacket", "control.sock": "unix", "scheduler.sock": "unix"} {
		l, err := net.ListenUnix(network, &net.UnixAddr{Name: filepath.Join(dir, name), Net: network})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
	}
	s := start(t, dir, nil)
	_, c := newClient(t, s)
	c.request().granted()
	for name, want := range map[string]os.FileMode{
		"tenant":                os.ModeDir | 0o755,
		"tenant/scheduler.sock": os.ModeSocket | 0o666,
		"control.sock":          os.ModeSocket | 0o600,
		"scheduler.sock":        os.ModeSymlink | 0o777,
	} {
		if st, err := os.Lstat(filepath.Join(dir, name)); err != nil || st.Mode() != want {
			t.Errorf("%s: mode %v, %v, want %v", name, st.Mode(), err, want)
		}
	}
	if link, _ := os.Readlink(filepath.Join(dir, "scheduler.sock")); link != "tenant/scheduler.sock" {
		t.Errorf("link to %q: must be relative, for other mount points", link)
	}
}

func TestRunDirErrors(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	inTheWay := filepath.Join(dir, "way")
	if err := os.MkdirAll(filepath.Join(inTheWay, "tenant", "scheduler.sock"), 0o755); err != nil {
		t.Fatal(err)
	}
	linked := filepath.Join(dir, "linked")
	if err := errors.Join(os.Mkdir(linked, 0o755), os.Symlink("/", filepath.Join(linked, "tenant"))); err != nil {
		t.Fatal(err)
	}
	for runDir, want := range map[string]string{
		linked:   "not a directory of ours",
		file:     "make the run directory",
		inTheWay: "not a socket",
		filepath.Join(dir, strings.Repeat("x", 100)): "shorter --run-dir",
	} {
		if _, err := New(testOptions(runDir)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %q", runDir, err, want)
		}
	}
}

// A directory that somebody made for us keeps its mode; it could be any.
func TestRunDirModes(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	fresh, given := filepath.Join(t.TempDir(), "a", "run"), t.TempDir()
	if err := os.Chmod(given, 0o711); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]os.FileMode{fresh: 0o755, given: 0o711} {
		start(t, dir, nil).stop()
		for path, want := range map[string]os.FileMode{dir: want, filepath.Join(dir, tenantDir): 0o755} {
			if st, err := os.Stat(path); err != nil || st.Mode().Perm() != want {
				t.Errorf("%s: mode %v, %v, want %v", path, st.Mode(), err, want)
			}
		}
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
	if got := formatUUID(uuidOf(gpuB)); got != gpuB.UUID {
		t.Errorf("%s became %s", gpuB.UUID, got)
	}
	for _, bad := range []string{"", "GPU-", "51600000-0000-4000-8000-000000000000", "GPU-5160", "MIG-GPU-51600000-0000-4000-8000-000000000000/1/0", gpuA.UUID + "00"} {
		if _, err := parseUUID(bad); err == nil {
			t.Errorf("%q accepted", bad)
		}
	}
	if u, err := parseUUID("MIG-" + gpuB.UUID[len("GPU-"):]); err != nil || u != uuidOf(gpuB) {
		t.Errorf("a MIG device: %v, %v", u, err)
	}
}
