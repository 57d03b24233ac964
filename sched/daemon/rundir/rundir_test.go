// SPDX-License-Identifier: Apache-2.0

package rundir

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// other is a user that is not the one of the test.
const other = 3000

func open(t *testing.T, path string) *Dir {
	t.Helper()
	d, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

// answers reports whether somebody listens.
func answers(network, path string) bool {
	c, err := net.Dial(network, path)
	if err == nil {
		c.Close()
	}
	return err == nil
}

func TestOneScheduler(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	d := open(t, path)
	_, err := Open(path, Options{})
	if err == nil || !strings.Contains(err.Error(), "another nvshare-scheduler runs") || !strings.Contains(err.Error(), path) {
		t.Errorf("a second one: %v", err)
	}
	// The first one's lock file is deleted, but it still answers.
	if err := os.Remove(filepath.Join(path, "lock")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path, Options{}); err == nil || !strings.Contains(err.Error(), "another nvshare-scheduler runs") {
		t.Errorf("without its lock: %v", err)
	}
	if !answers("unixpacket", filepath.Join(path, "scheduler.sock")) || !answers("unix", filepath.Join(path, "control.sock")) {
		t.Error("the first one does not answer any more")
	}
	d.Close()
	for _, socket := range []string{"tenant/scheduler.sock", "control.sock"} {
		if _, err := os.Lstat(filepath.Join(path, socket)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left behind: %v", socket, err)
		}
	}
	open(t, path)
}

// What a killed scheduler left behind is in nobody's way.
func TestAfterAKill(t *testing.T) {
	path := t.TempDir()
	open(t, path).Abandon()
	for _, socket := range []string{"tenant/scheduler.sock", "control.sock"} {
		if _, err := os.Lstat(filepath.Join(path, socket)); err != nil {
			t.Fatal(err)
		}
	}
	open(t, path)
	for name, want := range map[string]os.FileMode{
		"tenant":                os.ModeDir | 0o755,
		"tenant/scheduler.sock": os.ModeSocket | 0o666,
		"control.sock":          os.ModeSocket | 0o600,
		"scheduler.sock":        os.ModeSymlink | 0o777,
		"lock":                  0o600,
	} {
		if st, err := os.Lstat(filepath.Join(path, name)); err != nil || st.Mode() != want {
			t.Errorf("%s: mode %v, %v, want %v", name, st.Mode(), err, want)
		}
	}
	if link, _ := os.Readlink(filepath.Join(path, "scheduler.sock")); link != "tenant/scheduler.sock" {
		t.Errorf("link to %q: must be relative, for other mount points", link)
	}
}

// A directory that somebody made for us keeps its mode; it could be any.
func TestModes(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	fresh, given := filepath.Join(t.TempDir(), "a", "run"), t.TempDir()
	if err := os.Chmod(given, 0o711); err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]os.FileMode{fresh: 0o755, given: 0o711} {
		open(t, dir)
		for path, want := range map[string]os.FileMode{dir: want, filepath.Join(dir, TenantDir): 0o755} {
			if st, err := os.Stat(path); err != nil || st.Mode().Perm() != want {
				t.Errorf("%s: mode %v, %v, want %v", path, st.Mode(), err, want)
			}
		}
	}
}

// What is not ours, or not what it should be, is refused, and what to do is said.
func TestRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		make func(dir string) error
		want string
		root bool // only root can make that
	}{
		"a file": {func(dir string) error {
			return errors.Join(os.Remove(dir), os.WriteFile(dir, nil, 0o600))
		}, "not a directory of ours", false},
		"a link": {func(dir string) error {
			return errors.Join(os.Mkdir(dir+".real", 0o755), os.Remove(dir), os.Symlink(dir+".real", dir))
		}, "is a symbolic link, not a directory of ours", false},
		"another user's directory": {func(dir string) error {
			return os.Chown(dir, other, other)
		}, "it belongs to user 3000", true},
		"everybody's directory": {func(dir string) error {
			return os.Chmod(dir, 0o777)
		}, "may be changed by everybody", false},
		"another user's tenant directory": {func(dir string) error {
			return errors.Join(os.Mkdir(dir+"/tenant", 0o755), os.Chown(dir+"/tenant", other, other))
		}, "it belongs to user 3000", true},
		"another user's lock": {func(dir string) error {
			return errors.Join(os.WriteFile(dir+"/lock", nil, 0o666), os.Chown(dir+"/lock", other, other))
		}, "lock is not a regular file of ours: it belongs to user 3000", true},
		"a link as tenant directory": {func(dir string) error {
			return os.Symlink("/", dir+"/tenant")
		}, "is a symbolic link, not a directory of ours", false},
		"a link as lock": {func(dir string) error {
			return os.Symlink("elsewhere", dir+"/lock")
		}, "lock is a symbolic link, not a regular file of ours", false},
		"a pipe as lock": {func(dir string) error {
			return unix.Mkfifo(dir+"/lock", 0o600)
		}, "lock is not a regular file of ours", false},
		"a directory as socket": {func(dir string) error {
			return os.MkdirAll(dir+"/tenant/scheduler.sock", 0o755)
		}, "not a socket", false},
	} {
		if tc.root && os.Getuid() != 0 {
			continue
		}
		dir := filepath.Join(t.TempDir(), "run")
		if err := errors.Join(os.Mkdir(dir, 0o755), tc.make(dir)); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if d, err := Open(dir, Options{}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
			if err == nil {
				d.Close()
			}
		}
		if _, err := os.Lstat(filepath.Join(filepath.Dir(dir), "elsewhere")); err == nil {
			t.Errorf("%s: a link was followed", name)
		}
	}
	if _, err := Open(filepath.Join(t.TempDir(), strings.Repeat("x", 100)), Options{}); err == nil || !strings.Contains(err.Error(), "shorter --run-dir") {
		t.Errorf("a long path: %v", err)
	}
}

// A scheduler learns that its directory or a socket is gone, and leaves alone what others have
// in a directory that is not its own any more.
func TestCheck(t *testing.T) {
	for name, breakIt := range map[string]func(dir string) error{
		"deleted":              os.RemoveAll,
		"renamed":              func(dir string) error { return os.Rename(dir, dir+".old") },
		"no tenants' socket":   func(dir string) error { return os.Remove(dir + "/tenant/scheduler.sock") },
		"no directory of them": func(dir string) error { return os.RemoveAll(dir + "/tenant") },
		"a directory in its place": func(dir string) error {
			return errors.Join(os.Remove(dir+"/tenant/scheduler.sock"), os.Mkdir(dir+"/tenant/scheduler.sock", 0o755))
		},
		"no control socket": func(dir string) error { return os.Remove(dir + "/control.sock") },
		"no status socket":  func(dir string) error { return os.Remove(dir + "/tenant/status.sock") },
	} {
		dir := filepath.Join(t.TempDir(), "run")
		d := open(t, dir)
		if err := d.Check(); err != nil {
			t.Errorf("%s: before: %v", name, err)
		}
		if err := breakIt(dir); err != nil {
			t.Fatal(err)
		}
		if err := d.Check(); err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v", name, err)
		}
	}
	dir := filepath.Join(t.TempDir(), "run")
	d := open(t, dir)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	open(t, dir)
	d.Close()
	if !answers("unixpacket", dir+"/scheduler.sock") || !answers("unix", dir+"/control.sock") {
		t.Error("the end of the first scheduler removed the sockets of the second")
	}
}

// systemdsSocket listens as systemd does, for a scheduler that may come and go.
func systemdsSocket(t *testing.T, path string, kind int) func() *os.File {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 16))
	}
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), path)
	t.Cleanup(func() { f.Close() })
	return func() *os.File {
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		return os.NewFile(uintptr(fd), path)
	}
}

// Whoever connects between two schedulers is served by the second one.
func TestSocketOfSystemd(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	path := filepath.Join(dir, TenantDir, "scheduler.sock")
	pass := systemdsSocket(t, path, unix.SOCK_SEQPACKET)
	link := filepath.Join(t.TempDir(), "link") // /var/run is one
	if err := os.Symlink(filepath.Dir(dir), link); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{dir, filepath.Join(link, "run")} {
		early, err := net.Dial("unixpacket", path)
		if err != nil {
			t.Fatalf("while no scheduler runs: %v", err)
		}
		defer early.Close()
		if _, err := early.Write([]byte("early")); err != nil {
			t.Fatal(err)
		}
		d, err := Open(dir, Options{Tenants: pass()})
		if err != nil {
			t.Fatal(err)
		}
		c, err := d.Listener(Tenants).Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		text := make([]byte, 16)
		if n, err := c.Read(text); err != nil || string(text[:n]) != "early" {
			t.Errorf("%q, %v", text[:n], err)
		}
		if err := d.Check(); err != nil {
			t.Error(err)
		}
		d.Close()
		if !answers("unixpacket", path) || answers("unix", filepath.Join(dir, "control.sock")) {
			t.Error("after the end: only systemd's socket should be there")
		}
		// That connection waits for the next scheduler, too.
		next, err := Open(dir, Options{Tenants: pass()})
		if err != nil {
			t.Fatal(err)
		}
		if c, err := next.Listener(Tenants).Accept(); err == nil {
			c.Close()
		}
		next.Close()
	}
	// Somebody has deleted the path: nobody could connect to systemd's socket.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	d, err := Open(dir, Options{Tenants: pass()})
	if err != nil {
		t.Fatal(err)
	}
	if !answers("unixpacket", path) {
		t.Error("nobody answers at a path that was deleted before the start")
	}
	d.Close()

	for name, f := range map[string]*os.File{
		"a stream":   systemdsSocket(t, path, unix.SOCK_STREAM)(),
		"other path": systemdsSocket(t, filepath.Join(t.TempDir(), "x"), unix.SOCK_SEQPACKET)(),
	} {
		if d, err := Open(dir, Options{Tenants: f}); err == nil || !strings.Contains(err.Error(), "ListenSequentialPacket="+path) {
			t.Errorf("%s: %v", name, err)
			if err == nil {
				d.Close()
			}
		}
	}
}

func TestControlGroup(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "run")
	group := os.Getgid()
	if os.Getuid() == 0 {
		group = other
	}
	d, err := Open(dir, Options{ControlGroup: &group})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	info, err := os.Lstat(filepath.Join(dir, "control.sock"))
	if err != nil {
		t.Fatal(err)
	}
	if gid := info.Sys().(*syscall.Stat_t).Gid; info.Mode().Perm() != 0o660 || int(gid) != group {
		t.Errorf("mode %v, group %d, want 0660 and %d", info.Mode(), gid, group)
	}
}

// Root prepares the directory of another user's scheduler, also after an upgrade from
// root's, and changes nothing outside of it.
func TestPrepare(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can give files away")
	}
	dir := filepath.Join(t.TempDir(), "run")
	open(t, dir).Close()
	outside := filepath.Join(t.TempDir(), "outside")
	if err := errors.Join(os.WriteFile(outside, nil, 0o600), os.Symlink(outside, filepath.Join(dir, "state.json"))); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Prepare(dir, other, other); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]uint32{dir: other, dir + "/tenant": other, dir + "/lock": other, dir + "/state.json": other, outside: 0} {
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		if got := info.Sys().(*syscall.Stat_t).Uid; got != want {
			t.Errorf("%s belongs to %d, want %d", path, got, want)
		}
	}
	fresh := filepath.Join(t.TempDir(), "run")
	if err := Prepare(fresh, other, other); err != nil {
		t.Fatal(err)
	}
	if info, err := os.Lstat(fresh + "/tenant"); err != nil || info.Sys().(*syscall.Stat_t).Uid != other {
		t.Errorf("a fresh one: %v", err)
	}
}

// A scheduler that takes over goes on as soon as the earlier one has ended, and waits for
// nothing else.
func TestAwait(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	never := func() { t.Error("it waits, though there is no scheduler") }
	if err := Await(context.Background(), path, never); err != nil {
		t.Errorf("without a directory: %v", err)
	}
	d := open(t, path)
	waits, ended := make(chan bool, 1), make(chan error, 1)
	go func() { ended <- Await(context.Background(), path, func() { waits <- true }) }()
	<-waits
	select {
	case err := <-ended:
		t.Errorf("it does not wait: %v", err)
	default:
	}
	d.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	open(t, path).Close()
	if err := Await(context.Background(), path, never); err != nil {
		t.Errorf("after the end: %v", err)
	}

	d = open(t, path)
	defer d.Close()
	ctx, cancel := context.WithCancel(context.Background())
	if err := Await(ctx, path, cancel); !errors.Is(err, context.Canceled) {
		t.Errorf("told to end while it waits: %v", err)
	}
}

// Directories that others keep to themselves, as those of overlap groups, hinder nobody. The
// container that prepares has CAP_CHOWN alone.
func TestPrepareAmongOthersDirectories(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can give files away")
	}
	dir := filepath.Join(t.TempDir(), "run")
	group, deep, theirs := filepath.Join(dir, "overlap"), filepath.Join(dir, "overlap", "0"), filepath.Join(dir, "overlap", "1000")
	for _, d := range []string{deep, theirs} {
		if err := os.MkdirAll(d, 0o711); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Chmod(group, 0o711), os.WriteFile(deep+"/file", nil, 0o600), os.Chown(theirs, 1000, 1000), os.Chmod(theirs, 0o700)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with this function, and its rights
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		only := [2]unix.CapUserData{{Effective: 1 << unix.CAP_CHOWN, Permitted: 1 << unix.CAP_CHOWN}}
		err := unix.Capset(&header, &only[0])
		for range 2 { // the next pod does it again
			if err == nil {
				err = Prepare(dir, other, other)
			}
		}
		ended <- err
	}()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{group, deep, deep + "/file", theirs} {
		if info, err := os.Lstat(path); err != nil || info.Sys().(*syscall.Stat_t).Uid != other {
			t.Errorf("%s is not given away (%v)", path, err)
		}
	}
}
