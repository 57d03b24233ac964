// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/tests/judge"
)

const (
	tenants = 100
	// patience bounds each wait. It has to be longer than the slowest machine takes.
	patience = 5 * time.Minute
	// away is how long a restart leaves the node without a scheduler.
	away = 150 * time.Millisecond
	// restarts is the number of restarts of each kind, and of kills of holders.
	// restartsEnv sets another number.
	restarts    = 2
	kills       = 40
	restartsEnv = "NVSHARE_TEST_RESTARTS"
)

// site is a simulated GPU with tenants, and with a scheduler that comes and goes.
type site struct {
	t         *testing.T
	dir       string
	build     string
	warden    *exec.Cmd // the latest
	scheduler *exec.Cmd
	tenants   []*tenant
	cgroup    *memoryGroup // of the scheduler; nil: that of the test
	user      uint32       // who runs the scheduler; 0: the user of the test
	socket    *os.File     // of tenants, that the scheduler is started with; nil: it makes one
	run       int64        // of the scheduler whose event was read last
	since     uint64       // that event
}

type tenant struct {
	name string
	cmd  *exec.Cmd
	end  chan struct{} // closed when the process has ended
	err  error         // how the process ended
}

// newSite needs what `make shim simgpu` builds. Without that, a run must not seem to have
// tested anything, unless it was to be short.
func newSite(t *testing.T) *site {
	t.Helper()
	simgpu := os.Getenv("NVSHARE_TEST_SIMGPU")
	if simgpu == "" && testing.Short() {
		t.Skip("SKIPPED: NVSHARE_TEST_SIMGPU names no simulated GPU: make test-unit does")
	}
	if simgpu == "" {
		t.Fatal("NVSHARE_TEST_SIMGPU names no simulated GPU. In the repository's root: make shim simgpu, " +
			"then NVSHARE_TEST_SIMGPU=$PWD/.build/simgpu go test ./tests/robustness; go test -short leaves this out")
	}
	s := &site{t: t, dir: t.TempDir(), build: filepath.Dir(simgpu)}
	s.check(os.MkdirAll(filepath.Join(s.dir, "gpu"), 0o755))
	s.check(os.MkdirAll(filepath.Join(s.dir, "sim", "run"), 0o755))
	s.check(os.Symlink(simgpu, filepath.Join(s.dir, "sim", "lib")))
	s.configure("gpus=1\n")
	s.install()
	t.Cleanup(func() {
		for _, x := range s.tenants {
			_ = x.cmd.Process.Kill()
			<-x.end
		}
		if s.scheduler != nil {
			_ = s.scheduler.Process.Kill()
			_ = s.scheduler.Wait()
		}
	})
	return s
}

// configure writes the simulated GPU's configuration; call it before the first use.
func (s *site) configure(text string) {
	s.t.Helper()
	s.check(os.WriteFile(filepath.Join(s.dir, "sim", "run", "config"), []byte(text), 0o644))
}

func (s *site) check(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// programs builds the daemons once for all tests, beside the simulated GPU, and returns where.
var programs = sync.OnceValues(func() (dir string, err error) {
	dir = filepath.Join(filepath.Dir(os.Getenv("NVSHARE_TEST_SIMGPU")), "robustness")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for name, env := range map[string][]string{"nvshare-scheduler": nil, checkpoint.Name: {"CGO_ENABLED=0"}, "nvshare-warden": {"CGO_ENABLED=0"}} {
		cmd := exec.Command("go", "build", "-o", filepath.Join(dir, name), "../../sched/"+name)
		cmd.Env = append(os.Environ(), env...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("%v: %w\n%s", cmd.Args, err, out)
		}
	}
	return dir, nil
})

// install puts the scheduler into the place of the installed one, as a package does.
func (s *site) install() { s.put("nvshare-scheduler") }

func (s *site) put(program string) {
	s.t.Helper()
	dir, err := programs()
	s.check(err)
	path := filepath.Join(s.dir, program)
	// Not by this process: a test beside might start a program meanwhile, which has the
	// file open for writing until it is another program, and the kernel runs no such file.
	s.check(exec.Command("cp", filepath.Join(dir, program), path+".new").Run())
	s.check(os.Rename(path+".new", path))
}

// letAllEnter lets other users use what is in the site's directory.
func (s *site) letAllEnter() {
	s.t.Helper()
	for d := s.dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		s.check(os.Chmod(d, 0o755))
	}
}

func (s *site) env(extra ...string) []string {
	return append([]string{"PATH=/usr/bin:/bin", "HOME=/",
		"NVSHARE_RUN_DIR=" + s.dir + "/run",
		"NVSHARE_SIMGPU_DIR=" + s.dir + "/sim/run",
		"LD_LIBRARY_PATH=" + s.dir + "/sim/lib"}, extra...)
}

func (s *site) startScheduler(more ...string) {
	s.t.Helper()
	cmd := exec.Command(filepath.Join(s.dir, "nvshare-scheduler"),
		append([]string{"--simgpu", s.dir + "/sim", "--anti-thrash", "on", "--tq", "20ms", "--grace", "30s"}, more...)...)
	cmd.Env = s.env()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if s.user != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: s.user, Gid: s.user}
	}
	if s.socket != nil { // as systemd passes it on
		cmd.Args = append([]string{"sh", "-c", `LISTEN_FDS=1 LISTEN_PID=$$ exec "$0" "$@"`}, append([]string{cmd.Path}, cmd.Args[1:]...)...)
		cmd.Path = "/bin/sh"
		cmd.ExtraFiles = []*os.File{s.socket}
	}
	if s.cgroup != nil {
		s.cgroup.run(cmd)
	}
	log, err := os.OpenFile(filepath.Join(s.dir, "scheduler.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	s.check(err)
	defer log.Close()
	cmd.Stderr = log
	s.check(cmd.Start())
	s.scheduler = cmd
}

// endScheduler waits until the scheduler has ended.
func (s *site) endScheduler(sig syscall.Signal) {
	s.t.Helper()
	s.check(s.scheduler.Process.Signal(sig))
	err := s.scheduler.Wait()
	s.scheduler = nil
	if sig == syscall.SIGTERM {
		s.check(err)
	}
}

// startTenant starts a process that uses the GPU without a pause.
func (s *site) startTenant(name string, change ...func(*exec.Cmd)) *tenant {
	s.t.Helper()
	x := &tenant{name: name, end: make(chan struct{})}
	x.cmd = exec.Command(filepath.Join(s.build, "bin", "cuda-busy"),
		"--tenant", name, "--kernel-us", "500", "--depth", "4", "--report-ms", "0")
	x.cmd.Env = s.env("LD_PRELOAD="+filepath.Join(s.build, "lib", "libnvshare.so"),
		"NVSHARE_SIMGPU_TENANT="+name, "NVSHARE_SCHEDULER_LOSS=closed")
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	x.cmd.Stderr = io.Discard
	for _, f := range change {
		f(x.cmd)
	}
	s.check(x.cmd.Start())
	if x.cmd.SysProcAttr.Credential == nil { // the limits of another user's process cannot be changed
		s.check(unix.Prlimit(x.cmd.Process.Pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil)) // signals must not leave core files behind
	}
	go func() {
		x.err = x.cmd.Wait()
		close(x.end)
	}()
	s.tenants = append(s.tenants, x)
	return x
}

func (s *site) status() (*api.StatusResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := api.Dial(ctx, filepath.Join(s.dir, "run"))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	r, err := conn.Status(ctx, &api.StatusRequest{})
	if err == nil && len(r.Gpus) == 0 {
		return nil, errors.New("the scheduler has found no GPU yet")
	}
	return r, err
}

// until polls, because scheduler and GPU send no event to the test.
func (s *site) until(what string, ok func() error) {
	s.t.Helper()
	for end := time.Now().Add(patience); ; {
		began := time.Now()
		err := ok()
		if err == nil {
			return
		}
		if time.Now().After(end) {
			s.t.Fatalf("never: %s: %v\n%s", what, err, s.log())
		}
		time.Sleep(min(max(5*time.Millisecond, 3*time.Since(began)), time.Second)) // who looks takes a quarter of a processor
	}
}

func (s *site) log() string {
	text, _ := os.ReadFile(filepath.Join(s.dir, "scheduler.log"))
	lines := strings.Split(string(text), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}

// awaitAttached waits until n tenants take turns.
func (s *site) awaitAttached(n int) {
	s.t.Helper()
	s.until(fmt.Sprintf("%d tenants are attached", n), func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		connected := 0
		for _, g := range r.Gpus {
			for _, c := range g.Clients {
				if c.Connected {
					connected++
				}
			}
		}
		if connected != n {
			return fmt.Errorf("%d are", connected)
		}
		return nil
	})
}

// holder returns the tenant that holds the GPU.
func (s *site) holder() *tenant {
	s.t.Helper()
	var found *tenant
	s.until("somebody holds the GPU", func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		for _, c := range r.Gpus[0].Clients {
			if c.State == api.ClientState_CLIENT_STATE_HOLDING {
				for _, x := range s.tenants {
					if x.cmd.Process.Pid == int(c.Pid) {
						found = x
						return nil
					}
				}
			}
		}
		return errors.New("nobody does")
	})
	return found
}

func (s *site) trace() judge.Trace {
	s.t.Helper()
	trace, err := judge.ReadLog(filepath.Join(s.dir, "sim", "run", "log"))
	s.check(err)
	return trace
}

// firstOf returns when a tenant other than the given one first submitted work after a
// time; 0: none has.
func firstOf(trace judge.Trace, since int64, except string) (at int64) {
	for _, iv := range trace.Intervals {
		if iv.Submit >= since && iv.Process.Tenant != except && (at == 0 || iv.Submit < at) {
			at = iv.Submit
		}
	}
	return at
}

// workOf counts the pieces of work that a tenant submitted in a period.
func workOf(trace judge.Trace, name string, from, to int64) (n int) {
	for _, iv := range trace.Intervals {
		if iv.Process.Tenant == name && iv.End > from && iv.Submit < to {
			n += iv.Count
		}
	}
	return n
}

// expectAlone fails if two tenants had the GPU at the same time.
func (s *site) expectAlone(since int64) {
	s.t.Helper()
	for _, g := range judge.Judge(s.trace(), judge.Options{Since: since}).GPUs {
		if g.Overlaps.Count != 0 {
			s.t.Errorf("%d overlaps, %v in all; first %+v", g.Overlaps.Count, time.Duration(g.Overlaps.Total), g.Overlaps.First)
		}
	}
}

// expectAlive fails if a tenant has ended.
func (s *site) expectAlive() {
	s.t.Helper()
	for _, x := range s.tenants {
		select {
		case <-x.end:
			s.t.Errorf("%s has ended: %v", x.name, x.err)
		default:
		}
	}
}

func report(t *testing.T, what string, took []time.Duration) {
	t.Helper()
	if len(took) == 0 {
		t.Fatalf("%s: never seen", what)
	}
	slices.Sort(took)
	t.Logf("%s: %d times, median %v, p99 %v, longest %v", what, len(took), took[len(took)/2], took[len(took)*99/100], took[len(took)-1])
}

// A hundred tenants share a GPU while the scheduler is stopped, killed and upgraded. The
// holder runs on meanwhile, no tenant ends, no two hold at the same time, and turns go on
// with the next scheduler. Then holders are killed by several signals.
func TestHundredTenants(t *testing.T) {
	s := newSite(t)
	s.startScheduler()
	for i := range tenants {
		s.startTenant(fmt.Sprintf("t%d", i))
	}
	s.awaitAttached(tenants)
	began := judge.Now()

	var regrants []time.Duration
	goesOn := 0
	rounds := restarts
	if n, err := strconv.Atoi(os.Getenv(restartsEnv)); err == nil {
		rounds = n
	}
	for range rounds {
		for _, how := range []string{"stop", "kill", "upgrade"} {
			sig := syscall.SIGTERM
			switch how {
			case "kill":
				sig = syscall.SIGKILL
			case "upgrade":
				s.install()
			}
			holder := s.holder()
			s.endScheduler(sig)
			ended := judge.Now()
			time.Sleep(away) // the outage
			up := judge.Now()
			s.startScheduler()
			s.awaitAttached(tenants)
			trace := s.trace()
			// The GPU may have passed on between the look and the scheduler's end.
			for _, x := range s.tenants {
				if workOf(trace, x.name, ended, up) > 0 {
					holder = x
				}
			}
			if workOf(trace, holder.name, ended, up) > 0 {
				goesOn++
			}
			s.until("another tenant's turn", func() error {
				at := firstOf(s.trace(), up, holder.name)
				if at == 0 {
					return errors.New("nobody else has had one")
				}
				regrants = append(regrants, time.Duration(at-up))
				return nil
			})
		}
	}
	s.expectAlive()
	s.expectAlone(began)
	report(t, "from a scheduler's start to the next turn", regrants)
	if goesOn == 0 {
		t.Error("no holder worked while there was no scheduler")
	}
	t.Logf("in %d of %d outages the holder worked on", goesOn, 3*rounds)

	s.holdersDie()
	s.expectAlone(began)

	for _, x := range s.tenants {
		s.check(x.cmd.Process.Signal(syscall.SIGTERM))
	}
	for _, x := range s.tenants {
		<-x.end
		if x.err != nil {
			t.Errorf("%s, in the end: %v", x.name, x.err)
		}
	}
}

// holdersDie kills the holder again and again, and measures the time to the next turn.
func (s *site) holdersDie() {
	s.t.Helper()
	// No SIGHUP: below nohup every process ignores that signal.
	signals := []syscall.Signal{unix.SIGKILL, unix.SIGSEGV, unix.SIGABRT, unix.SIGBUS, unix.SIGQUIT, unix.SIGALRM, unix.SIGILL, unix.SIGUSR1}
	var took []time.Duration
	for i := range kills {
		victim := s.holder()
		killed := judge.Now()
		s.check(victim.cmd.Process.Signal(signals[i%len(signals)]))
		<-victim.end
		s.tenants = slices.DeleteFunc(s.tenants, func(x *tenant) bool { return x == victim })
		s.until("another tenant's turn", func() error {
			h, ok := judge.Regrant(s.trace(), judge.UUID(0), victim.name, killed)
			if !ok {
				return errors.New("nobody else has had one")
			}
			if h.Held { // otherwise the tenant had released the GPU already
				took = append(took, time.Duration(h.Gap))
			}
			return nil
		})
	}
	report(s.t, "from the death of a holder to the next turn", took)
}
