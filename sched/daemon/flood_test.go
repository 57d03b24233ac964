// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/rundir"
	"github.com/nvshare/nvshare/sched/wire"
)

const (
	floodConnects = 10_000
	// maxRSS is what the scheduler may need under attack, MiB; the test binary
	// that plays it is a few larger.
	maxRSS = 64
)

// raced says whether the race detector is in this binary, with which a program needs 5 to
// 10 times the memory (its documentation).
func raced() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// meek attackers get the processor time that nobody else wants: what they do to
// others they do through the scheduler.
const meek = "meek "

// twoUsers skips where this process and the user nobody are not two tenants, or
// cannot be made to be.
func twoUsers(t *testing.T, dir string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to be two users")
	}
	if own := ownContainer(t); own != "" {
		t.Skip("the test runs in a container: all users count as one")
	}
	openToAll(t, dir)
}

// attacker runs in a process of its own, as another user. It does one thing
// until it is killed, and says on standard output when the worst has begun.
func attacker(dir, what string) {
	if rest, ok := strings.CutPrefix(what, meek); ok { // every thread of the next program is
		runtime.LockOSThread()
		if err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Setenv(roleWhatEnv, rest)
		fmt.Println(syscall.Exec("/proc/self/exe", os.Args, os.Environ()))
		os.Exit(1)
	}
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &lim) == nil {
		lim.Cur = lim.Max
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
	}
	connect := func() int {
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET, 0)
		if err != nil {
			return -1
		}
		if unix.Connect(fd, &unix.SockaddrUnix{Name: filepath.Join(dir, wire.SocketName)}) != nil {
			unix.Close(fd)
			return -1
		}
		return fd
	}
	attach := encoded(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuB)}})
	ready := func() { fmt.Println("ready") }
	switch what {
	case "nothing": // but burn what the others need too, outside the scheduler
		burn := func() {
			for {
				_ = unix.Getppid()
			}
		}
		go burn()
		ready()
		burn()
	case "connects": // and says nothing, or half a frame
		var open []int
		for i := range floodConnects {
			if fd := connect(); fd >= 0 {
				if i%2 == 0 {
					_ = unix.Send(fd, []byte("half"), unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
				}
				open = append(open, fd)
			}
			if len(open) > 900 {
				for _, fd := range open[:600] {
					unix.Close(fd)
				}
				open = slices.Clone(open[600:])
			}
			if i == 100 {
				ready()
			}
		}
		fmt.Println("done")
		select {}
	case "registers": // and never reads
		ready()
		for {
			if fd := connect(); fd >= 0 {
				_ = unix.Send(fd, encoded(registerFrame()), unix.MSG_NOSIGNAL)
				_ = unix.Send(fd, attach, unix.MSG_NOSIGNAL)
				unix.Close(fd)
			}
		}
	case "views": // asks for the status, reads no answer, and hangs up
		ready()
		for open := []int{}; ; {
			fd, _ := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			if unix.Connect(fd, &unix.SockaddrUnix{Name: filepath.Join(dir, api.ViewName)}) != nil {
				unix.Close(fd)
				continue
			}
			if open = append(open, fd); len(open) == 500 {
				for _, fd := range open {
					unix.Close(fd)
				}
				open = open[:0]
			}
		}
	case "frames":
		fd := connect()
		_ = unix.Send(fd, encoded(registerFrame()), unix.MSG_NOSIGNAL)
		_ = unix.Send(fd, attach, unix.MSG_NOSIGNAL)
		frames := [][]byte{
			encoded(wire.Frame{Type: wire.TypeRequest}),
			encoded(wire.Frame{Type: wire.TypeRelease, Epoch: 77, Code: wire.ReleaseIdle}),
			encoded(wire.Frame{Type: wire.TypeStats}),
			encoded(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: 1 << 40, Least: 1}}),
		}
		ready()
		var b [256]byte
		for i := 0; ; i++ {
			if unix.Send(fd, frames[i%len(frames)], unix.MSG_NOSIGNAL) != nil {
				unix.Close(fd)
				fd = connect()
				_ = unix.Send(fd, encoded(registerFrame()), unix.MSG_NOSIGNAL)
				_ = unix.Send(fd, attach, unix.MSG_NOSIGNAL)
			}
			for {
				n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_DONTWAIT)
				if n <= 0 || err != nil {
					break
				}
			}
		}
	case "descriptors": // sends its own along with each frame
		fd := connect()
		_ = unix.Send(fd, encoded(registerFrame()), unix.MSG_NOSIGNAL)
		_ = unix.Send(fd, attach, unix.MSG_NOSIGNAL)
		for range 2000 {
			if err := unix.Sendmsg(fd, encoded(wire.Frame{Type: wire.TypeStats}), unix.UnixRights(fd, 0, 1, 2), nil, unix.MSG_NOSIGNAL); err != nil {
				break
			}
		}
		ready()
		select {}
	case "knocks":
		for _, name := range []string{"control.sock", "tenant/../control.sock"} {
			fd, _ := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			err := unix.Connect(fd, &unix.SockaddrUnix{Name: filepath.Join(dir, name)})
			if !errors.Is(err, unix.EACCES) {
				fmt.Printf("%s: %v\n", name, err)
				os.Exit(0)
			}
		}
		for _, name := range []string{"state.json", "settings.json", "shares.json", "limits.json"} {
			if f, err := os.Open(filepath.Join(dir, name)); err == nil {
				fmt.Printf("%s can be read\n", name)
				f.Close()
				os.Exit(0)
			}
		}
		if os.WriteFile(filepath.Join(dir, rundir.TenantDir, "x"), nil, 0o600) == nil || os.Remove(filepath.Join(dir, rundir.TenantDir, wire.SocketName)) == nil {
			fmt.Println("the tenants' directory can be written to")
			os.Exit(0)
		}
		ready()
	}
}

// attack starts an attacker as the user nobody, and waits until it is at it.
func attack(t *testing.T, dir, what string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleEnv+"=attacker", roleDirEnv+"="+dir, roleWhatEnv+"="+what)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	buf := make([]byte, 256)
	if n, _ := out.Read(buf); string(buf[:n]) != "ready\n" {
		t.Fatalf("attacker %s: %s", what, buf[:n])
	}
	return cmd
}

// rss returns the most memory that a process has had, MiB, and its descriptors.
func rss(t *testing.T, pid int) (mib, fds int) {
	t.Helper()
	for line := range strings.Lines(readFile(t, fmt.Sprintf("/proc/%d/status", pid))) {
		if text, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.Fields(text)[0])
			if err != nil {
				t.Fatal(err)
			}
			mib = kib >> 10
		}
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return mib, len(entries)
}

// What another user does to the scheduler, its neighbours bear: they go on, it
// stays small, and keeps no descriptor of anybody's.
func TestFloods(t *testing.T) {
	dir := t.TempDir()
	twoUsers(t, dir)
	cmd := startProcessBy(t, dir, func(*exec.Cmd) {})
	pid := cmd.Process.Pid
	s := &scheduler{t: t, dir: dir}
	s.set(&api.SetRequest{QuantumNs: int64(sched.MinQuantum)})
	_, a, e := newHolder(t, s)
	_, b := newClient(t, s)
	// The other GPU's tenants: neither their turns nor their accounts are the
	// attackers'.
	turns := func(n int) (p50, p99 time.Duration) {
		var took []time.Duration
		for range n {
			b.request()
			a.expect(wire.TypeRevoke)
			began := time.Now()
			a.release(e)
			e = b.granted()
			took = append(took, time.Since(began))
			a, b = b, a
		}
		slices.Sort(took)
		return took[n/2], took[n*99/100]
	}
	most := maxRSS
	if raced() {
		most *= 10
	}
	turns(50)
	mib, fds := rss(t, pid)
	p50, p99 := turns(300)
	t.Logf("in peace: hand-over median %v, p99 %v; %d MiB, %d descriptors", p50, p99, mib, fds)
	for _, what := range []string{
		"nothing", "connects", "registers", "views", "frames", "descriptors",
		meek + "nothing", meek + "connects", meek + "registers", meek + "views", meek + "frames",
	} {
		evil := attack(t, dir, what)
		p50, p99 := turns(100)
		_ = evil.Process.Kill()
		_ = evil.Wait()
		mib, _ := rss(t, pid)
		t.Logf("%s: hand-over median %v, p99 %v; at most %d MiB", what, p50, p99, mib)
		if mib > most {
			t.Errorf("%s: the scheduler needed %d MiB, more than %d", what, mib, most)
		}
	}
	s.await(fmt.Sprintf("only the neighbours are left, and their %d descriptors or little more", fds), func(r *api.StatusResponse) bool {
		_, now := rss(t, pid)
		return r.Connections == 2 && r.Clients == 2 && now <= fds+4
	})
}

// Tenants cannot take the descriptors that the scheduler needs: who is there
// goes on, who comes is told, and when there is room again there is.
func TestFewDescriptors(t *testing.T) {
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	startProcessBy(t, dir, func(cmd *exec.Cmd) {
		logErrorsTo(t, log)(cmd)
		cmd.Env = append(cmd.Env, roleWhatEnv+"=100")
	})
	s := &scheduler{t: t, dir: dir}
	s.set(&api.SetRequest{QuantumNs: int64(sched.MinQuantum)})
	_, a, e := newHolder(t, s)
	_, b := newClient(t, s)
	var idle []*peerConn
	for range 100 {
		idle = append(idle, dialTenant(t, dir))
	}
	last := idle[len(idle)-1].expect(wire.TypeRefused)
	if last.Code != wire.ErrTooMany || !strings.Contains(last.Refused.String(), "connections on this node") {
		t.Errorf("refused with %d %q", last.Code, last.Refused.String())
	}
	for range 20 { // each is recorded in the state file
		b.request()
		a.expect(wire.TypeRevoke)
		a.release(e)
		e = b.granted()
		a, b = b, a
	}
	for _, c := range idle {
		c.Close()
	}
	s.await("there is room", func(r *api.StatusResponse) bool { return r.Connections == 2 })
	newClient(t, s)
	if text := readFile(t, log); text != "" {
		t.Errorf("errors: %s", text)
	}
}

// What is not for tenants is not for other users; in containers it is not even
// there, because only the tenants' directory is.
func TestOthersStayOut(t *testing.T) {
	dir := t.TempDir()
	twoUsers(t, dir)
	s := start(t, dir, nil)
	s.set(&api.SetRequest{QuantumNs: int64(time.Second)})
	_, a, _ := newHolder(t, s)
	attack(t, dir, "knocks")
	entries, err := os.ReadDir(filepath.Join(dir, rundir.TenantDir))
	if err != nil || len(entries) != 2 || entries[0].Name() != wire.SocketName || entries[1].Name() != api.ViewName {
		t.Errorf("containers see %v, %v", entries, err)
	}
	// One tenant's page has nothing of another's.
	a.send(wire.Frame{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: 123 << 20, Least: 123 << 20}})
	a.expect(wire.TypeReserved)
	other := newProc(t, dir, nobody).connect().register(0).attach(0, gpuA, 0, 0)
	if l := other.page.Limits(0); l != (wire.Limits{}) {
		t.Errorf("another user's page says %+v", l)
	}
	if l := a.page.Limits(0); l.Used != 123<<20 {
		t.Errorf("its own page says %+v", l)
	}
}
