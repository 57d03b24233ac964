// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience bounds every wait in these tests. It only has to be longer than any
// machine takes.
const patience = 5 * time.Minute

func newFinder(t *testing.T) *Finder {
	t.Helper()
	f, err := NewFinder()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// sleeper is a process that does nothing until it is killed.
func sleeper(t *testing.T, uid uint32) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "1000000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if uid != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	// The kernel names a process a moment after its exec is said to be done.
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		name, err := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/comm")
		if err == nil && string(name) == "sleep\n" {
			return cmd
		}
		if time.Now().After(end) {
			t.Fatalf("the process is called %q, %v", name, err)
		}
	}
}

func process(t *testing.T, pid int) Process {
	t.Helper()
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		t.Fatal(err)
	}
	start, _, err := parseStat(string(stat))
	if err != nil {
		t.Fatal(err)
	}
	return Process{PID: int32(pid), Start: start}
}

func TestIdentify(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	file := os.NewFile(uintptr(fds[0]), "pair")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	p, err := newFinder(t).Identify(conn.(*net.UnixConn))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if want := process(t, os.Getpid()); p.Process != want || p.UID != uint32(os.Getuid()) || p.Account == "" || !strings.HasPrefix(filepath.Base(os.Args[0]), p.Command) {
		t.Errorf("%+v, want process %+v of user %d", p, want, os.Getuid())
	}
}

func TestFind(t *testing.T) {
	f := newFinder(t)
	cmd := sleeper(t, 0)
	want := process(t, cmd.Process.Pid)
	p, err := f.Find(want)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if p.Process != want || p.Command != "sleep" {
		t.Errorf("%+v, want %+v", p, want)
	}
	if other, err := f.Find(Process{want.PID, want.Start + 1}); err == nil {
		t.Errorf("found %+v, which started at another time", other)
	}
	died := make(chan error, 1)
	go func() { died <- p.AwaitDeath() }()
	if err := p.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-died:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("its death is not noticed")
	}
	if other, err := f.Find(want); err == nil {
		t.Errorf("found %+v, which is dead", other)
	}
	_ = cmd.Wait()
	if other, err := f.Find(want); err == nil {
		t.Errorf("found %+v, which is gone", other)
	}
}

// AwaitDeath does not outlive the Peer.
func TestCloseEndsAwaitDeath(t *testing.T) {
	p, err := newFinder(t).Find(process(t, sleeper(t, 0).Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- p.AwaitDeath() }()
	p.Close()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("a process that lives is said to be dead")
		}
	case <-time.After(patience):
		t.Fatal("still waiting")
	}
}

// A user cannot become a container by the name of a cgroup that was delegated
// to that user.
func TestDelegatedCgroup(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to make cgroups and another user's process")
	}
	const uid = 3000
	f := newFinder(t)
	id := strings.Repeat("0123456789abcdef", 4)
	for _, mount := range f.cgroups {
		base, err := os.MkdirTemp(mount, "nvshare-test-")
		if err != nil {
			continue
		}
		t.Cleanup(func() { os.Remove(base) })
		dir := filepath.Join(base, "docker-"+id+".scope")
		cmd := sleeper(t, uid)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { // after the process's end
			for end := time.Now().Add(patience); os.Remove(dir) != nil && time.Now().Before(end); time.Sleep(time.Millisecond) {
			}
		})
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0); err != nil {
			t.Logf("%s: %v", mount, err)
			continue // cpuset of v1 wants more
		}
		look := func() *Peer {
			p, err := f.Find(process(t, cmd.Process.Pid))
			if err != nil {
				t.Fatal(err)
			}
			p.Close()
			return p
		}
		if p := look(); p.Container != id || p.Account != ContainerAccount+id {
			t.Errorf("root's cgroup in %s: container %q, account %q", mount, p.Container, p.Account)
		}
		if err := os.Chown(dir, uid, uid); err != nil {
			t.Fatal(err)
		}
		if p := look(); p.Container != "" || p.Account != "user 3000" {
			t.Errorf("the user's cgroup in %s: container %q, account %q", mount, p.Container, p.Account)
		}
		return
	}
	t.Skip("no cgroup can be made here")
}

func TestParseStat(t *testing.T) {
	rest := " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 987654321 20 21"
	for name, tc := range map[string]struct {
		stat, command string
		start         uint64
		bad           bool
	}{
		"plain":           {"12 (python3)" + rest, "python3", 987654321, false},
		"hostile command": {"12 (a) S 1 (b)" + rest, "a) S 1 (b", 987654321, false},
		"empty":           {"", "", 0, true},
		"short":           {"12 (x) S 1 2", "", 0, true},
		"no brackets":     {"12 x" + rest, "", 0, true},
		"not a number":    {"12 (x)" + strings.Replace(rest, "987654321", "y", 1), "", 0, true},
	} {
		start, command, err := parseStat(tc.stat)
		if (err != nil) != tc.bad || !tc.bad && (start != tc.start || command != tc.command) {
			t.Errorf("%s: %d %q %v", name, start, command, err)
		}
	}
}

// Who knocks and goes is seen before anything is read about it, also if it has sent
// something.
func TestKnocks(t *testing.T) {
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: filepath.Join(t.TempDir(), "s"), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, leaves := range []bool{false, true} {
		for _, sends := range []bool{false, true} {
			there, err := net.DialUnix("unixpacket", nil, l.Addr().(*net.UnixAddr))
			if err != nil {
				t.Fatal(err)
			}
			if sends {
				if _, err := there.Write([]byte("frame")); err != nil {
					t.Fatal(err)
				}
			}
			if leaves {
				there.Close()
			}
			here, err := l.AcceptUnix()
			if err != nil {
				t.Fatal(err)
			}
			if pid, gone := Knocks(here); pid != int32(os.Getpid()) || gone != leaves {
				t.Errorf("leaves %t, sends %t: process %d, gone %t", leaves, sends, pid, gone)
			}
			here.Close()
			there.Close()
		}
	}
}
