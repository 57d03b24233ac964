// SPDX-License-Identifier: Apache-2.0

package rundir

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

// TenantDir is what containers get to see of the run directory. The directory is
// mounted, not the socket, so that a new scheduler's socket shows up in it.
const TenantDir = "tenant"

// maxSocketPath is what fits in sockaddr_un beside the final NUL, bytes.
const maxSocketPath = 107

// Dir is a run directory that this process has.
type Dir struct {
	Tenants *net.UnixListener // SOCK_SEQPACKET
	Control net.Listener
	path    string
	lock    *os.File
	made    []entry
}

// tenantSocket and controlSocket are the paths of the sockets.
func (d *Dir) tenantSocket() string  { return filepath.Join(d.path, TenantDir, wire.SocketName) }
func (d *Dir) controlSocket() string { return filepath.Join(d.path, api.SocketName) }

// entry is a directory or a socket as it was when the directory was opened.
type entry struct {
	path string
	info os.FileInfo
}

// Open makes the directory if needed, locks it and opens the sockets. It fails
// if another scheduler has the directory.
func Open(path string) (d *Dir, err error) {
	if err := makeDirs(path); err != nil {
		return nil, err
	}
	d = &Dir{path: path}
	defer func() {
		if err != nil {
			d.Close()
			d = nil
		}
	}()
	if d.lock, err = lockFile(filepath.Join(path, "lock")); err != nil {
		return d, err
	}
	if err := errors.Join(removeStale(d.tenantSocket(), unix.SOCK_SEQPACKET), removeStale(d.controlSocket(), unix.SOCK_STREAM)); err != nil {
		return d, err
	}
	if err := d.note(path); err != nil {
		return d, err
	}
	if err := d.listenTenants(); err != nil {
		return d, err
	}
	return d, d.listenControl()
}

func (d *Dir) listenTenants() error {
	l, err := listen(d.tenantSocket(), unix.SOCK_SEQPACKET, 0o666)
	if err != nil {
		return err
	}
	if d.Tenants != nil {
		d.Tenants.Close()
	}
	d.Tenants = l.(*net.UnixListener)
	if err := d.note(d.tenantSocket()); err != nil {
		return err
	}
	return replaceLink(filepath.Join(TenantDir, wire.SocketName), filepath.Join(d.path, wire.SocketName))
}

func (d *Dir) listenControl() error {
	l, err := listen(d.controlSocket(), unix.SOCK_STREAM, 0o600)
	if err != nil {
		return err
	}
	if d.Control != nil {
		d.Control.Close()
	}
	d.Control = l
	return d.note(d.controlSocket())
}

// note remembers a path as it is now, and nothing else of the path.
func (d *Dir) note(path string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("open the run directory: %w", err)
	}
	d.made = append(slices.DeleteFunc(d.made, func(e entry) bool { return e.path == path }), entry{path, info})
	return nil
}

// there reports whether the entry is the one that this process made.
func (e entry) there() bool {
	info, err := os.Lstat(e.path)
	return err == nil && os.SameFile(info, e.info)
}

// Mend listens anew where somebody has deleted or replaced a socket: nobody could
// connect, or whoever put another socket there would get the connections. It replaces
// the listeners of these sockets, and says which. It returns an error if it cannot, or
// if the directory itself is not the one that was opened: nothing can be recorded then.
func (d *Dir) Mend() (tenants, control bool, err error) {
	for _, e := range slices.Clone(d.made) { // the directory first
		if e.there() {
			continue
		}
		again := fmt.Errorf("%s was deleted or replaced: start nvshare-scheduler again, which makes the run directory anew", e.path)
		switch e.path {
		case d.tenantSocket():
			if err = makeDirs(d.path); err == nil {
				err = remove(e.path)
			}
			if err == nil {
				err = d.listenTenants()
			}
			tenants = true
		case d.controlSocket():
			if err = remove(e.path); err == nil {
				err = d.listenControl()
			}
			control = true
		default:
			return tenants, control, again
		}
		if err != nil {
			return tenants, control, fmt.Errorf("%w (%w)", again, err)
		}
	}
	return tenants, control, nil
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Close removes the sockets, so that clients see at once that nobody listens,
// and lets the next scheduler in. Other files stay.
func (d *Dir) Close() {
	for _, e := range d.made {
		if e.info.Mode()&os.ModeSocket != 0 && e.there() {
			os.Remove(e.path)
		}
	}
	d.Abandon()
}

// Abandon ends like SIGKILL: the descriptors are closed, and the sockets stay.
func (d *Dir) Abandon() {
	if d.Tenants != nil {
		d.Tenants.Close()
	}
	if d.Control != nil {
		d.Control.Close()
	}
	if d.lock != nil {
		d.lock.Close()
	}
}

// makeDirs makes both directories, which every user can enter and only we can
// write. One that is there already keeps its mode, except our own TenantDir.
func makeDirs(dir string) error {
	fail := func(err error) error {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("make the run directory: %w (run as root, or choose another directory with --run-dir or %s)", err, wire.RunDirEnv)
		}
		return fmt.Errorf("make the run directory: %w", err)
	}
	_, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fail(err)
		}
		err = os.Chmod(dir, 0o755) // whatever the umask was
	}
	if err != nil {
		return fail(err)
	}
	if err := ours(dir, unix.S_IFDIR, true); err != nil {
		return fail(err)
	}
	tenant := filepath.Join(dir, TenantDir)
	if err := os.Mkdir(tenant, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fail(err)
	}
	if err := ours(tenant, unix.S_IFDIR, false); err != nil {
		return fail(err)
	}
	if err := os.Chmod(tenant, 0o755); err != nil {
		return fail(err)
	}
	return nil
}

// ours returns an error unless the path is what kind says, no link to that, and
// belongs to this process's user, or to root where root may own it.
func ours(path string, kind uint32, orRoots bool) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	what := map[uint32]string{unix.S_IFDIR: "directory", unix.S_IFREG: "regular file"}[kind]
	switch {
	case st.Mode&unix.S_IFMT == unix.S_IFLNK:
		return fmt.Errorf("%s is a symbolic link, not a %s of ours; remove it or name another directory with --run-dir", path, what)
	case st.Mode&unix.S_IFMT != kind:
		return fmt.Errorf("%s is not a %s of ours; remove it or name another directory with --run-dir", path, what)
	case int(st.Uid) != os.Geteuid() && (st.Uid != 0 || !orRoots):
		return fmt.Errorf("%s is not a %s of ours: it belongs to user %d, who could change what is in it; remove it or name another directory with --run-dir", path, what, st.Uid)
	}
	return nil
}

// lockFile fails if a running scheduler has the lock. The kernel drops the lock
// with the process, so a file that was left behind means nothing.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err == nil || errors.Is(err, unix.ELOOP) {
		if wrong := ours(path, unix.S_IFREG, false); wrong != nil {
			f.Close() // nil: only an error
			return nil, fmt.Errorf("lock the run directory: %w", wrong)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("lock the run directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("another nvshare-scheduler runs with the run directory %s (stop it, or choose another with --run-dir)", filepath.Dir(path))
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// listen opens a socket that has its mode before anybody can connect.
func listen(path string, kind int, mode os.FileMode) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("listen on %s: the path has %d bytes, %d are possible (choose a shorter --run-dir)", path, len(path), maxSocketPath)
	}
	fail := func(what string, err error) (net.Listener, error) {
		return nil, fmt.Errorf("listen on %s: %s: %w", path, what, err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fail("socket", err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() // FileListener has its own copy
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return fail("bind", err)
	}
	if err := os.Chmod(path, mode); err != nil {
		return fail("chmod", err)
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return fail("listen", err)
	}
	l, err := net.FileListener(f)
	if err != nil {
		return fail("listen", err)
	}
	return l, nil
}

// removeStale removes a socket whose owner is dead. It fails if somebody
// answers at path, or if it is not a socket.
func removeStale(path string, kind int) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listen on %s: %w", path, err)
	}
	if st.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("listen on %s: it is not a socket (%v); remove it", path, st.Mode())
	}
	network := "unix"
	if kind == unix.SOCK_SEQPACKET {
		network = "unixpacket"
	}
	conn, err := net.Dial(network, path)
	if err == nil {
		conn.Close()
		return fmt.Errorf("another nvshare-scheduler runs: it answers on %s (stop it, or choose another --run-dir)", path)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("listen on %s: remove the stale socket: %w", path, err)
	}
	return nil
}

// replaceLink makes name a symbolic link to target, atomically.
func replaceLink(target, name string) error {
	if st, err := os.Lstat(name); err == nil && st.IsDir() {
		return fmt.Errorf("link %s: a directory is in the way; remove it", name)
	}
	tmp := name + ".new"
	os.Remove(tmp)
	if err := os.Symlink(target, tmp); err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if err := os.Rename(tmp, name); err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	return nil
}
