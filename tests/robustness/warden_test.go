// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
)

// startWarden starts the program by which processes without a shim are held.
func (s *site) startWarden() *exec.Cmd {
	s.t.Helper()
	s.put("nvshare-warden")
	cmd := exec.Command(filepath.Join(s.dir, "nvshare-warden"), "--simgpu", s.dir+"/sim", "--dir", s.dir+"/warden")
	cmd.Env = s.env()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log, err := os.OpenFile(filepath.Join(s.dir, "warden.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	s.check(err)
	defer log.Close()
	cmd.Stderr = log
	s.check(cmd.Start())
	s.warden = cmd
	s.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		s.guardEnds()
	})
	return cmd
}

// guardEnds waits for the guard of a warden that has ended, which writes to the directory until then.
func (s *site) guardEnds() {
	lock, err := os.Open(s.dir + "/warden/lock")
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	s.check(err)
	defer lock.Close()
	s.until("the guard has ended", func() error { return unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) })
}

// mayCopy skips where the kernel lets this user copy no descriptor of another process.
func mayCopy(t *testing.T) {
	t.Helper()
	child := exec.Command("sleep", "infinity")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	pidfd, err := unix.PidfdOpen(child.Process.Pid, 0)
	if err == nil {
		defer unix.Close(pidfd)
		var fd int
		if fd, err = unix.PidfdGetfd(pidfd, 0, 0); err == nil {
			unix.Close(fd)
		}
	}
	if err != nil {
		t.Skipf("SKIPPED: pidfd_getfd of a child: %v: the kernel, Yama or a seccomp profile does not let this user trace", err)
	}
}

// bare is a process in whose environment nothing of nvshare is, of a user.
func bare(uid uint32) func(*exec.Cmd) {
	return func(cmd *exec.Cmd) {
		var env []string
		for _, e := range cmd.Env {
			if !strings.HasPrefix(e, "LD_PRELOAD=") && !strings.HasPrefix(e, "NVSHARE_SCHEDULER_LOSS=") && !strings.HasPrefix(e, "NVSHARE_RUN_DIR=") {
				env = append(env, e)
			}
		}
		cmd.Env = env
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
}

// part returns which part of the GPU's time a tenant's process has over a time.
func (s *site) part(x *tenant, length time.Duration) float64 {
	s.t.Helper()
	before, _ := s.worked(x)
	from := judge.Now()
	time.Sleep(length) // what is measured
	after, _ := s.worked(x)
	return float64(after-before) / float64(judge.Now()-from)
}

// how says how the status describes a process without a shim; "": not at all.
func (s *site) how(x *tenant) (text string) {
	s.t.Helper()
	r, err := s.status()
	if err != nil { // the scheduler has just begun
		return ""
	}
	for _, u := range r.Unmanaged {
		if int(u.Pid) == x.cmd.Process.Pid {
			return fmt.Sprintf("%q", u.Held)
		}
	}
	return ""
}

// A process without a shim keeps the core limit of its tenant, alone and beside others, while
// the warden is there. One of a tenant that has no limit is let alone.
func TestCoreLimitWithoutTheShim(t *testing.T) {
	t.Parallel()
	const limited, other, limit = 2001, 2002, 30
	mayCopy(t)
	s := newSite(t)
	s.letAllEnter()
	s.check(os.Chmod(filepath.Join(s.dir, "sim", "run"), 0o777))
	warden := s.startWarden()
	s.startScheduler("--warden", s.dir+"/warden/warden.sock")
	s.limit(limited, limit)
	x := s.startTenant("x", ahead, bare(limited))
	s.until("it is held", func() error {
		if how := s.how(x); !strings.Contains(how, "held from outside") {
			return fmt.Errorf("it is %s", how)
		}
		return nil
	})
	check := func(when string) {
		t.Helper()
		s.between(when+", it", x, 5*time.Second, 0.05, (limit+4)/100.) // a machine that does much else is late
	}
	check("alone")
	free := s.startTenant("free", bare(other))
	s.until("the other process is seen", func() error {
		if s.how(free) == "" {
			return errors.New("it is not")
		}
		return nil
	})
	check("beside another")
	if how := s.how(free); how != `""` {
		t.Errorf("a process whose tenant has no limit is %s", how)
	}
	if text, _ := os.ReadFile(s.dir + "/warden/off.json"); strings.Contains(string(text), fmt.Sprintf(`"pid":%d,`, free.cmd.Process.Pid)) {
		t.Errorf("a process whose tenant has no limit was off: %s", text)
	}
	s.check(free.cmd.Process.Kill())

	s.check(warden.Process.Kill())
	_ = warden.Wait()
	s.until("it is not held without the warden", func() error {
		r, err := s.status()
		s.check(err)
		if r.WardenProblem == "" || s.part(x, 100*time.Millisecond) < 0.9 {
			return errors.New(r.WardenProblem)
		}
		return nil
	})
	s.startWarden()
	s.until("it is held again", func() error {
		if how := s.how(x); !strings.Contains(how, "were on for") {
			return fmt.Errorf("it is %s", how)
		}
		return nil
	})
	check("with the next warden")
	s.limit(limited, 0)
	s.until("it has no limit", func() error {
		if got := s.part(x, 100*time.Millisecond); got < 0.9 {
			return fmt.Errorf("it has %.1f %%", 100*got)
		}
		return nil
	})
}

// limit sets the core limit of a user's processes; 0: none.
func (s *site) limit(uid, percent uint32) {
	s.t.Helper()
	s.until("a limit is set", func() error {
		conn, err := api.Dial(s.t.Context(), filepath.Join(s.dir, "run"))
		if err != nil {
			return err
		}
		defer conn.Close()
		_, err = conn.SetShare(s.t.Context(), &api.SetShareRequest{Uid: &uid, CoreLimit: &percent})
		return err
	})
}
