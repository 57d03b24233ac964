// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

const (
	someone = 3000  // a user with subordinate numbers
	subuid  = 70000 // the first of them
)

// inNamespaces is a process of someone in its user namespace, or, nested, in one within that,
// as a subordinate number. Root writes the map of numbers, as newuidmap does.
func inNamespaces(t *testing.T, nested bool) *exec.Cmd {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root to be another user and to map its subordinate numbers")
	}
	as := &syscall.Credential{Uid: someone, Gid: someone}
	probe := exec.Command("unshare", "--user", "--map-root-user", "true")
	if probe.SysProcAttr = (&syscall.SysProcAttr{Credential: as}); probe.Run() != nil {
		t.Skip("users may not make user namespaces here")
	}
	inner := "exec setpriv --reuid 1 --regid 1 --clear-groups sh -c 'echo there; exec sleep 1000000'"
	if nested {
		inner = "exec setpriv --reuid 1 --regid 1 --clear-groups unshare --user sh -c 'echo there; exec sleep 1000000'"
	}
	cmd := exec.Command("unshare", "--user", "sh", "-c", "echo made; read go; "+inner)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Credential: as}
	in, inErr := cmd.StdinPipe()
	out, outErr := cmd.StdoutPipe()
	if err := errors.Join(inErr, outErr, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	lines := bufio.NewReader(out)
	await := func(want string) {
		if line, err := lines.ReadString('\n'); line != want+"\n" {
			t.Fatalf("%q, %v, want %q", line, err, want)
		}
	}
	await("made")
	for _, file := range []string{"uid_map", "gid_map"} {
		text := fmt.Sprintf("0 %d 1\n1 %d 1000\n", someone, subuid)
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/%s", cmd.Process.Pid, file), []byte(text), 0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := in.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	await("there")
	return cmd
}

// A user is one tenant as each of the numbers that it has in its own user namespaces.
func TestUserNamespaceCountsToItsOwner(t *testing.T) {
	f := newFinder(t)
	for _, nested := range []bool{false, true} {
		p, err := f.Look(int32(inNamespaces(t, nested).Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		if p.Container != "" {
			t.Skip("the test runs in a container: all users count as one")
		}
		if want := AccountOfUser(someone); p.Account != want || p.UID != someone {
			t.Errorf("nested %t: account %q of user %d, want %q", nested, p.Account, p.UID, want)
		}
	}
}

// Where the kernel does not say whose a namespace is, or a file has brought the number out of
// it, the session and the table of subordinate numbers do.
func TestUserBehindANumber(t *testing.T) {
	table := filepath.Join(t.TempDir(), "subuid")
	if err := os.WriteFile(table, fmt.Appendf(nil, "garbage\n:::\nroot:100000:1000\n%d:%d:1000\n# comment\n4000:%d\n", someone, subuid, subuid), 0o600); err != nil {
		t.Fatal(err)
	}
	told, err := newUsers()
	if err != nil {
		t.Fatal(err)
	}
	told.subuid = table
	silent := told
	silent.own.Ino = 0 // the kernel's answers never lead to that namespace
	blind := silent
	blind.subuid = "/nonexistent"
	within, outside := inNamespaces(t, false).Process.Pid, sleeper(t, subuid).Process.Pid
	session := func(uid uint32) *uint32 { return &uid }
	for name, tc := range map[string]struct {
		users     users
		pid       int
		uid       uint32
		session   *uint32
		delegated bool
		want      uint32
	}{
		"the kernel says":                        {told, within, subuid, session(2000), false, someone},
		"the kernel does not, the table does":    {silent, within, subuid, nil, false, someone},
		"only the session does":                  {blind, within, subuid, session(someone), false, someone},
		"nothing does":                           {blind, within, subuid, nil, false, subuid},
		"a set-user-ID file":                     {told, outside, subuid, session(someone), false, someone},
		"the same without a session":             {silent, outside, subuid, nil, false, someone},
		"a directory given to a number":          {blind, outside, subuid, session(someone), true, someone},
		"another user, by way of root":           {told, outside, 4000, session(someone), false, 4000},
		"a subordinate number that is a user's":  {told, outside, subuid, session(subuid), false, subuid},
		"root":                                   {told, within, 0, session(someone), false, 0},
		"a number that root gives to containers": {told, outside, 100001, nil, false, 100001},
		"one after the end":                      {told, outside, subuid + 1000, nil, false, subuid + 1000},
		"root's session":                         {blind, within, subuid, session(0), false, subuid},
	} {
		if got, err := tc.users.behind(int32(tc.pid), tc.uid, tc.session, tc.delegated); err != nil || got != tc.want {
			t.Errorf("%s: user %d, %v; want %d", name, got, err, tc.want)
		}
	}
}

// A session counts only where root made its directory.
func TestSession(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to make another user's directories")
	}
	mount := t.TempDir()
	h := hierarchies{"": mount}
	for dir, uid := range map[string]int{
		"user.slice/user-3000.slice": 0, "user.slice/user-3000.slice/user@3000.service/user-4000.slice": 3000, "theirs/user-4000.slice": 3000,
	} {
		dir = filepath.Join(mount, dir)
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chown(dir, uid, uid)); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]int{ // -1: none
		"/user.slice/user-3000.slice":                                      3000,
		"/user.slice/user-3000.slice/user@3000.service/user-4000.slice":    3000,
		"/theirs/user-4000.slice":                                          -1,
		"/not/there/user-4000.slice":                                       -1,
		"/system.slice/cron.service":                                       -1,
		"/user.slice/user-99999999999.slice":                               -1,
		"/../../user.slice/user-5000.slice/session-1.scope":                5000,
		"/../../user.slice/user-5000.slice/user@5000.service/user-1.slice": 5000,
	} {
		got := -1
		if uid := h.sessionOf("0::" + path + "\n"); uid != nil {
			got = int(*uid)
		}
		if got != want {
			t.Errorf("%s: session of %d, want %d", path, got, want)
		}
	}
	if uid := (hierarchies{}).sessionOf(strings.Repeat("\x00:", 100)); uid != nil {
		t.Errorf("garbage: session of %d", *uid)
	}
}
