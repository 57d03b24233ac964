// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
	"github.com/nvshare/nvshare/tests/judge"
)

// hostileUsers is how many users do their worst, each with a process that gets the
// processor time that nobody else wants: what they do to others they do through the
// scheduler.
const hostileUsers = 40

// maxRSS is the memory that the scheduler may need under attack, MiB, without swapping.
const maxRSS = 64

const (
	attackEnv = "NVSHARE_TEST_ATTACK"
	socketEnv = "NVSHARE_TEST_SOCKET"
)

func TestMain(m *testing.M) {
	if what := os.Getenv(attackEnv); what != "" {
		attack(what, os.Getenv(socketEnv))
	}
	os.Exit(m.Run())
}

func encoded(f wire.Frame) []byte {
	f.Version = wire.Version
	b := f.Encode()
	return b[:]
}

// uuid0 is the UUID of GPU 0.
func uuid0() wire.UUID {
	b, err := hex.DecodeString(strings.ReplaceAll(strings.TrimPrefix(judge.UUID(0), "GPU-"), "-", ""))
	if err != nil {
		panic(err)
	}
	return wire.UUID(b)
}

// dial connects with a bare socket; -1: it cannot.
func dial(path string) int {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
	if err != nil {
		return -1
	}
	if unix.Connect(fd, &unix.SockaddrUnix{Name: path}) != nil {
		unix.Close(fd)
		return -1
	}
	return fd
}

// attack does one thing until it is killed.
func attack(what, path string) {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		lim.Cur = lim.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
	register := encoded(wire.Frame{Type: wire.TypeRegister, Code: wire.RegisterSwap, Register: wire.Register{MinVersion: 1, Channels: 1, Interposed: 300}})
	attach := encoded(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuid0()}})
	if what == "crowd" { // as many connections as it gets, and a loop of others
		for range 300 {
			if fd := dial(path); fd >= 0 {
				_ = unix.Send(fd, register, unix.MSG_NOSIGNAL)
			}
		}
		fmt.Println("ready")
		for {
			if fd := dial(path); fd >= 0 {
				unix.Close(fd)
			}
		}
	}
	frames := map[string][]wire.Frame{
		"release": {{Type: wire.TypeRelease, Epoch: 77, Code: wire.ReleaseIdle}, {Type: wire.TypeStats}},
		"attach":  {{Type: wire.TypeAttach, Channel: 1, Attach: wire.Attach{UUID: wire.UUID{1}}}},
		"reserve": {{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: 1 << 20, Least: 1}}, {Type: wire.TypeReserve}},
		"force":   {{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: 1 << 20}}, {Type: wire.TypeReserve, Code: wire.ReserveForce}},
		"moved":   {{Type: wire.TypeMoved, Code: wire.MovedStuck, Moved: wire.Moved{Resident: 1 << 20}}, {Type: wire.TypeMoved}},
	}[what]
	var packets [][]byte
	for _, f := range frames {
		packets = append(packets, encoded(f))
	}
	var b [256]byte
	for fd, i := -1, 0; ; i++ {
		if fd < 0 || unix.Send(fd, packets[i%len(packets)], unix.MSG_NOSIGNAL) != nil {
			unix.Close(fd)
			if fd = dial(path); fd >= 0 {
				_ = unix.Send(fd, register, unix.MSG_NOSIGNAL)
				_ = unix.Send(fd, attach, unix.MSG_NOSIGNAL)
			}
		}
		for fd >= 0 {
			if n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT); n <= 0 || err != nil {
				break
			}
		}
	}
}

// attacked starts hostile users who do one thing, until the function is called that
// attacked returns.
func (s *site) attacked(what string) (stop func()) {
	s.t.Helper()
	binary := filepath.Join(s.dir, "hostile")
	if _, err := os.Stat(binary); err != nil {
		data, err := os.ReadFile("/proc/self/exe")
		s.check(err)
		s.check(os.WriteFile(binary, data, 0o755))
	}
	var all []*exec.Cmd
	var ready []io.Reader
	stop = func() {
		for _, cmd := range all {
			_ = cmd.Process.Kill() // all of them first: who still attacks keeps the others from their end
		}
		for _, cmd := range all {
			_ = cmd.Wait()
		}
		all = nil
	}
	s.t.Cleanup(func() { stop() })
	for i := range uint32(hostileUsers) {
		cmd := exec.Command(binary)
		cmd.Env = []string{attackEnv + "=" + what, socketEnv + "=" + filepath.Join(s.dir, "run", wire.SocketName), "GOMAXPROCS=1"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Credential: &syscall.Credential{Uid: 3000 + i, Gid: 3000 + i}}
		out, err := cmd.StdoutPipe()
		s.check(err)
		ready = append(ready, out)
		s.check(cmd.Start())
		s.check(unix.SchedSetAttr(cmd.Process.Pid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0))
		all = append(all, cmd)
	}
	if what == "crowd" {
		for _, out := range ready { // who cannot connect any more is ready too
			_, err := out.Read(make([]byte, 8))
			s.check(err)
		}
	}
	return stop
}

// usersCount skips where the users of the test are not accounts of their own.
func (s *site) usersCount() {
	s.t.Helper()
	if os.Getuid() != 0 {
		s.t.Skip("needs root to be several users")
	}
	r, err := s.status()
	s.check(err)
	for _, c := range r.Gpus[0].Clients {
		if c.Container.Id != "" {
			s.t.Skip("the test runs in a container: all users count as one")
		}
	}
}

// client returns what the status says of a tenant's process.
func (s *site) client(x *tenant) (*api.Client, error) {
	r, err := s.status()
	if err != nil {
		return nil, err
	}
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			if x.cmd.Process.Pid == int(c.Pid) {
				return c, nil
			}
		}
	}
	return nil, fmt.Errorf("%s is not attached", x.name)
}

// grants returns how many grants a tenant has had.
func (s *site) grants(x *tenant) (uint64, error) {
	c, err := s.client(x)
	return c.GetGrants(), err
}

// expectTurns waits until each tenant has had more turns.
func (s *site) expectTurns(n uint64, tenants ...*tenant) {
	s.t.Helper()
	for _, x := range tenants {
		first, known := uint64(0), false
		s.until(fmt.Sprintf("%s has %d turns", x.name, n), func() error {
			now, err := s.grants(x)
			if err != nil {
				return err
			}
			if !known {
				first, known = now, true
			}
			if now < first+n {
				return fmt.Errorf("%d so far", now-first)
			}
			return nil
		})
	}
}

// Forty users take all the connections that they get, and connect and hang up in a loop.
// Processes that start meanwhile take turns like everybody: none runs beside a holder.
func TestNewcomersAreNotCrowdedOut(t *testing.T) {
	s := newSite(t)
	theirs := s.openTo(2000)
	s.startScheduler()
	first := []*tenant{s.startTenant("a"), s.startTenant("b")}
	s.awaitAttached(2)
	s.usersCount()
	stop := s.attacked("crowd")
	s.until("connections are refused", func() error {
		r, err := s.status()
		if err == nil && (r.Refused == 0 || !strings.Contains(strings.Join(r.Problems, "\n"), "processes were refused")) {
			err = fmt.Errorf("%d are, problems %q", r.Refused, r.Problems)
		}
		return err
	})
	began := judge.Now()
	open := func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "NVSHARE_SCHEDULER_LOSS=open") }
	var newcomers []*tenant
	for i := range 5 {
		newcomers = append(newcomers, s.startTenant(fmt.Sprintf("n%d", i), theirs, open))
	}
	s.awaitAttached(7)
	s.expectTurns(2, slices.Concat(first, newcomers)...)
	s.expectAlone(began)
	s.expectAlive()
	stop()
}

// Forty users send each kind of frame as fast as they can. Their neighbours go on, and
// the scheduler stays small.
func TestHostileFrames(t *testing.T) {
	for _, c := range []struct{ more, attacks []string }{
		{nil, []string{"release", "attach", "reserve"}},
		{[]string{"--swap-memory", "64Mi"}, []string{"reserve", "force", "moved"}},
	} {
		more := c.more
		t.Run(fmt.Sprint("scheduler", more), func(t *testing.T) {
			s := newSite(t)
			s.openTo(2000)
			s.startScheduler(more...)
			a, b := s.startTenant("a"), s.startTenant("b")
			s.awaitAttached(2)
			s.usersCount()
			alone := s.measure(a, b)
			s.expectTurns(turns(), a, b)
			alone.log("alone", 2)
			for _, what := range c.attacks {
				began := judge.Now()
				stop := s.attacked(what)
				s.awaitSeen(2 + hostileUsers)
				t.Logf("%s: the attackers came within %v", what, time.Duration(judge.Now()-began).Round(time.Millisecond))
				attacked := s.measure(a, b)
				s.expectTurns(turns(), a, b)
				attacked.log(what, hostileUsers)
				stop()
				s.expectAlone(began)
				s.awaitAttached(2)
			}
			if mib := s.schedulerRSS(); mib > maxRSS && more == nil {
				t.Errorf("the scheduler needed %d MiB, more than %d", mib, maxRSS)
			}
			s.expectAlive()
		})
	}
}

// awaitSeen waits until n processes have been attached. They need not be at the same
// time: the scheduler disconnects an attacker that got no processor time to read.
func (s *site) awaitSeen(n int) {
	s.t.Helper()
	seen := map[uint32]bool{}
	s.until(fmt.Sprintf("%d processes have been attached", n), func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		for _, c := range r.Gpus[0].Clients {
			seen[c.Pid] = true
		}
		if len(seen) < n {
			return fmt.Errorf("%d have", len(seen))
		}
		return nil
	})
}

// schedulerRSS is the most memory that the scheduler has had, MiB.
func (s *site) schedulerRSS() int {
	s.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.scheduler.Process.Pid))
	s.check(err)
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.Fields(value)[0])
			s.check(err)
			return kib >> 10
		}
	}
	s.check(errors.New("no VmHWM"))
	return 0
}
