// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/judge"
)

// schedulerUser is the user of the scheduler on Kubernetes, see deployments/kubernetes.
const schedulerUser = 65529

// withoutRights has the scheduler run as a user of its own, who has no capability, while
// tenants run as the user of the test.
func (s *site) withoutRights() *site {
	s.t.Helper()
	if os.Getuid() != 0 {
		s.t.Skip("only root can start programs of other users")
	}
	s.letAllEnter()
	// The tree may be in a home directory, which no other user enters.
	lib := filepath.Join(s.dir, "sim", "lib")
	built, err := os.Readlink(lib)
	s.check(err)
	s.check(errors.Join(os.Remove(lib), os.CopyFS(lib, os.DirFS(built))))
	s.user = schedulerUser
	out, err := exec.Command(filepath.Join(s.dir, "nvshare-scheduler"), "prepare", "--run-dir", s.dir+"/run", "--owner", "65529:65529").CombinedOutput()
	if err != nil {
		s.t.Fatalf("prepare: %v\n%s", err, out)
	}
	return s
}

// expectNoRights fails if the scheduler has a capability.
func (s *site) expectNoRights() {
	s.t.Helper()
	text, err := os.ReadFile("/proc/" + strconv.Itoa(s.scheduler.Process.Pid) + "/status")
	s.check(err)
	for _, want := range []string{"Uid:\t65529\t65529\t65529\t65529\n", "CapPrm:\t0000000000000000\n", "CapEff:\t0000000000000000\n"} {
		if !strings.Contains(string(text), want) {
			s.t.Errorf("the scheduler's status lacks %q:\n%s", want, text)
		}
	}
}

// An upgrade drops nobody: while no scheduler runs, the holder goes on, and a newcomer
// waits at the socket that systemd keeps.
func TestUpgradeDropsNobody(t *testing.T) {
	t.Parallel()
	s := newSite(t).withoutRights()
	path := filepath.Join(s.dir, "run", "tenant", "scheduler.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	s.check(err)
	s.check(errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 64)))
	s.socket = os.NewFile(uintptr(fd), path)
	t.Cleanup(func() { s.socket.Close() })

	open := func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "NVSHARE_SCHEDULER_LOSS=open") } // the default
	s.startScheduler()
	s.startTenant("a", open)
	s.awaitAttached(1)
	s.expectNoRights()
	began := judge.Now()

	s.endScheduler(syscall.SIGTERM)
	ended := judge.Now()
	s.startTenant("b", open)
	s.until("the newcomer waits in the socket's queue", func() error {
		text, err := os.ReadFile("/proc/net/unix")
		if err == nil && strings.Count(string(text), path+"\n") < 3 { // the socket, a's next connection, b's first one
			err = errors.New("not yet")
		}
		return err
	})
	time.Sleep(away) // the newcomer waits all the time
	s.until("the holder goes on while no scheduler runs", func() error {
		if workOf(s.trace(), "a", ended, judge.Now()) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	up := judge.Now()
	s.startScheduler()
	s.awaitAttached(2)
	s.until("both have had a turn", func() error {
		trace := s.trace()
		now := judge.Now()
		if workOf(trace, "a", up, now) == 0 || workOf(trace, "b", up, now) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	if at := firstOf(s.trace(), began, "a"); at < up {
		t.Errorf("the newcomer ran %v before there was a scheduler", time.Duration(up-at))
	}
	s.expectAlone(began)
	s.expectAlive()
}
