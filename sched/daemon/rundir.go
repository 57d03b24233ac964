// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

// tenantDir is what containers get to see of the run directory. The directory
// is mounted, not the socket, so that a new scheduler's socket shows up in it.
const tenantDir = "tenant"

// maxSocketPath is what fits in sockaddr_un beside the final NUL, bytes.
const maxSocketPath = 107

func (d *Daemon) tenantSocket() string {
	return filepath.Join(d.opts.RunDir, tenantDir, wire.SocketName)
}

func (d *Daemon) controlSocket() string { return filepath.Join(d.opts.RunDir, api.SocketName) }

// openRunDir makes the directory if needed, locks it and opens the sockets.
func (d *Daemon) openRunDir() (err error) {
	dir := d.opts.RunDir
	if err := makeRunDir(dir); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			d.closeRunDir()
		}
	}()
	if d.lock, err = lockDir(filepath.Join(dir, "lock")); err != nil {
		return err
	}
	l, err := listen(d.tenantSocket(), unix.SOCK_SEQPACKET, 0o666)
	if err != nil {
		return err
	}
	d.tenants = l.(*net.UnixListener)
	if d.control, err = listen(d.controlSocket(), unix.SOCK_STREAM, 0o600); err != nil {
		return err
	}
	return replaceLink(filepath.Join(tenantDir, wire.SocketName), filepath.Join(dir, wire.SocketName))
}

// closeRunDir removes the sockets, so that clients see at once that nobody
// listens, and lets the next scheduler in. The state file stays.
func (d *Daemon) closeRunDir() {
	if d.tenants != nil {
		d.tenants.Close()
		os.Remove(d.tenantSocket())
	}
	if d.control != nil {
		d.control.Close()
		os.Remove(d.controlSocket())
	}
	if d.lock != nil {
		d.lock.Close()
	}
}

// makeRunDir makes both directories, which every user can enter and only we can
// write. One that is there already keeps its mode, except our own tenantDir.
func makeRunDir(dir string) error {
	fail := func(err error) error {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("make the run directory: %w (run as root, or choose another directory with --run-dir or %s)", err, wire.RunDirEnv)
		}
		return fmt.Errorf("make the run directory: %w", err)
	}
	_, err := os.Stat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fail(err)
		}
		err = os.Chmod(dir, 0o755) // whatever the umask was
	}
	if err != nil {
		return fail(err)
	}
	tenant := filepath.Join(dir, tenantDir)
	if err := os.Mkdir(tenant, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fail(err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(tenant, &st); err != nil {
		return fail(err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR || int(st.Uid) != os.Geteuid() {
		return fmt.Errorf("make the run directory: %s is not a directory of ours; remove it", tenant)
	}
	if err := os.Chmod(tenant, 0o755); err != nil {
		return fail(err)
	}
	return nil
}

// lockDir fails if a running scheduler has the lock. The kernel drops it with
// the process, so a file that was left behind means nothing.
func lockDir(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
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

// listen opens a socket that has its mode before anyone can connect, and puts
// it in the place of a stale one. One that answers is left alone.
func listen(path string, kind int, mode os.FileMode) (net.Listener, error) {
	if len(path) > maxSocketPath {
		return nil, fmt.Errorf("listen on %s: the path has %d bytes, %d are possible (choose a shorter --run-dir)", path, len(path), maxSocketPath)
	}
	fail := func(what string, err error) (net.Listener, error) {
		return nil, fmt.Errorf("listen on %s: %s: %w", path, what, err)
	}
	if err := removeStale(path, kind); err != nil {
		return nil, err
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
		return fmt.Errorf("listen on %s: there is something that is not a socket (%v); remove it", path, st.Mode())
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

// replaceLink makes name a symbolic link to target, at one stroke.
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
