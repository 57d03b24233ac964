// SPDX-License-Identifier: Apache-2.0

package rundir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

// TenantDir is what containers get to see of the run directory. The directory is
// mounted, not the socket, so that a new scheduler's socket shows up in it.
const TenantDir = "tenant"

// LockFile is locked (flock) by who has the directory, and by the number of a process (fcntl) by who
// checkpoints that: see package checkpoint.
const LockFile = "lock"

// maxSocketPath is what fits in sockaddr_un beside the final NUL, bytes.
const maxSocketPath = 107

// Socket is one of the sockets of a run directory.
type Socket int

// The sockets.
const (
	Tenants Socket = iota // SOCK_SEQPACKET
	View                  // SOCK_STREAM; the status for everybody
	Control               // the same
	Sockets               // how many there are
)

// below are the paths of the sockets in the run directory.
var below = [Sockets]string{filepath.Join(TenantDir, wire.SocketName), filepath.Join(TenantDir, api.ViewName), api.SocketName}

// Dir is a run directory that this process has.
type Dir struct {
	listeners [Sockets]*net.UnixListener
	path      string
	group     *int // of the control socket
	lock      *os.File
	made      []entry
}

// Listener returns that of a socket.
func (d *Dir) Listener(s Socket) *net.UnixListener { return d.listeners[s] }

func (d *Dir) at(s Socket) string { return filepath.Join(d.path, below[s]) }

func (s Socket) kind() int {
	if s == Tenants {
		return unix.SOCK_SEQPACKET
	}
	return unix.SOCK_STREAM
}

// entry is a directory or a socket as it was when the directory was opened.
type entry struct {
	path string
	info os.FileInfo
	ours bool // a socket that goes when the directory is closed
}

// Options say what is not as by default.
type Options struct {
	// Tenants is the listening socket of tenants that systemd made; nil: Open makes
	// one. Its path outlives this process, so clients that connect during a restart
	// wait for the next scheduler. Open closes the file.
	Tenants *os.File
	// ControlGroup is the number of a group whose members may use the control
	// socket; nil: only the owner and root may.
	ControlGroup *int
}

// Open makes the directory if needed, locks it and opens the sockets. It fails
// if another scheduler has the directory.
func Open(path string, o Options) (d *Dir, err error) {
	if o.Tenants != nil {
		defer o.Tenants.Close()
	}
	if err := makeDirs(path); err != nil {
		return nil, err
	}
	d = &Dir{path: path, group: o.ControlGroup}
	defer func() {
		if err != nil {
			d.Close()
			d = nil
		}
	}()
	if d.lock, err = lockFile(filepath.Join(path, LockFile)); err != nil {
		return d, err
	}
	given := o.Tenants
	if _, err := os.Lstat(d.at(Tenants)); err != nil {
		given = nil // somebody has deleted its path since, so nobody could connect
	}
	for s := range Sockets {
		if s != Tenants || given == nil {
			err = errors.Join(err, removeStale(d.at(s), s.kind()))
		}
	}
	if err == nil {
		err = d.note(path, false)
	}
	for s := range Sockets {
		if err == nil {
			err = d.listen(s, given)
		}
		given = nil
	}
	return d, err
}

// listen opens a socket, or takes the one that is given.
func (d *Dir) listen(s Socket, given *os.File) error {
	mode, group := os.FileMode(0o666), (*int)(nil)
	if s == Control {
		mode, group = 0o600, d.group
		if group != nil {
			mode = 0o660
		}
	}
	var l net.Listener
	var err error
	if given != nil {
		l, err = adopt(given, d.at(s))
	} else {
		l, err = listen(d.at(s), s.kind(), mode, group)
	}
	if err != nil {
		return err
	}
	d.listeners[s] = l.(*net.UnixListener)
	if err := d.note(d.at(s), given == nil); err != nil || s == Control {
		return err
	}
	return replaceLink(below[s], filepath.Join(d.path, filepath.Base(below[s])))
}

// note remembers a path as it is now.
func (d *Dir) note(path string, ours bool) error {
	info, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("open the run directory: %w", err)
	}
	d.made = append(d.made, entry{path, info, ours})
	return nil
}

// there reports whether the entry is the one that this process made.
func (e entry) there() bool {
	info, err := os.Lstat(e.path)
	return err == nil && os.SameFile(info, e.info)
}

// Check returns an error if somebody has deleted or replaced the directory or a socket: nothing could
// be recorded, nobody could connect, or whoever put another socket there would get the connections.
func (d *Dir) Check() error {
	for _, e := range d.made {
		if !e.there() {
			return fmt.Errorf("%s was deleted or replaced: start nvshare-scheduler again, which makes the run directory again", e.path)
		}
	}
	return nil
}

// Close removes the sockets, so that clients see at once that nobody listens,
// and lets the next scheduler in. Other files stay.
func (d *Dir) Close() {
	for _, e := range d.made {
		if e.ours && e.there() {
			os.Remove(e.path)
		}
	}
	d.Abandon()
}

// Abandon ends like SIGKILL: the descriptors are closed, and the sockets stay.
func (d *Dir) Abandon() {
	d.CloseSockets()
	if d.lock != nil {
		d.lock.Close()
	}
}

// CloseSockets has nobody connect any more.
func (d *Dir) CloseSockets() {
	for _, l := range d.listeners {
		if l != nil {
			l.Close()
		}
	}
}

// makeDirs makes both directories, which every user can enter and only we can
// write. One that is there already keeps its mode, except our own TenantDir.
func makeDirs(dir string) error {
	fail := func(err error) error {
		if errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("make the run directory: %w (run as root, or choose another directory with --run-dir or %s)", err, api.RunDirEnv)
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
	if info, err := os.Lstat(dir); err != nil {
		return fail(err)
	} else if info.Mode()&0o002 != 0 && info.Mode()&fs.ModeSticky == 0 {
		return fail(fmt.Errorf("%s may be changed by everybody, who could put a socket in place of the scheduler's; chmod o-w it or name another directory with --run-dir", dir))
	}
	tenant := filepath.Join(dir, TenantDir)
	if os.Geteuid() != 0 && ours(tenant, unix.S_IFDIR, false) != nil && ours(tenant, unix.S_IFDIR, true) == nil {
		os.Remove(tenant) // root's plugin was faster; this fails if the directory is in use
	}
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

// Prepare makes the directory, and gives it and what is in it to a user who runs
// the scheduler. The group may write there too: the plugin is a member. Prepare needs
// root with CAP_CHOWN and no other capability. It follows no link out of the directory.
func Prepare(path string, uid, gid int) error {
	if err := os.MkdirAll(filepath.Join(path, TenantDir), 0o755); err != nil && !errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("make the run directory: %w", err) // no permission: it is the user's already, who makes the rest
	}
	root, err := os.OpenRoot(path)
	if err != nil {
		return fmt.Errorf("open the run directory: %w", err)
	}
	defer root.Close()
	// Without CAP_FOWNER only the owner may change a mode.
	if err := errors.Join(root.Lchown(".", os.Geteuid(), gid), root.Chmod(".", 0o775)); err != nil {
		return fmt.Errorf("let group %d write to %s: %w", gid, path, err)
	}
	return give(root, ".", uid, gid)
}

// give changes the owner of a file, or of a directory after what is in it: an attempt that
// was cut short is seen by the directory's owner. What another user keeps to himself stays
// his, as in the directories of overlap groups: without CAP_DAC_OVERRIDE root cannot list it.
func give(root *os.Root, name string, uid, gid int) error {
	fail := func(err error) error {
		if err == nil || errors.Is(err, fs.ErrNotExist) { // deleted meanwhile
			return nil
		}
		return fmt.Errorf("give %s to user %d: %w", filepath.Join(root.Name(), name), uid, err)
	}
	info, err := root.Lstat(name)
	if err != nil {
		return fail(err)
	}
	if info.IsDir() {
		entries, err := fs.ReadDir(root.FS(), name)
		closed := errors.Is(err, fs.ErrPermission) && int(info.Sys().(*syscall.Stat_t).Uid) != os.Geteuid()
		if err != nil && !closed {
			return fail(err)
		}
		for _, e := range entries {
			if err := give(root, path.Join(name, e.Name()), uid, gid); err != nil {
				return err
			}
		}
	}
	return fail(root.Lchown(name, uid, gid))
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

// awaitInterval is the time between looks of Await.
const awaitInterval = 20 * time.Millisecond

// Await waits until no running scheduler has the directory. Whatever else is wrong with the
// directory, Open says. waits is called once, if there is something to wait for.
func Await(ctx context.Context, path string, waits func()) error {
	for first := true; ; first = false {
		lock, err := lockFile(filepath.Join(path, LockFile))
		if err == nil {
			return lock.Close()
		}
		if !errors.Is(err, errTaken) {
			return nil
		}
		if first {
			waits()
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(awaitInterval):
		}
	}
}

var errTaken = errors.New("another nvshare-scheduler runs")

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
			return nil, fmt.Errorf("%w with the run directory %s (stop it, or choose another with --run-dir)", errTaken, filepath.Dir(path))
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// adopt serves a listening socket that systemd passed on.
func adopt(f *os.File, path string) (net.Listener, error) {
	fail := func(err error) (net.Listener, error) {
		return nil, fmt.Errorf("the socket that systemd passed on: %w (it needs ListenSequentialPacket=%s)", err, path)
	}
	fd := int(f.Fd())
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return fail(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return fail(err)
	}
	at, ok := name.(*unix.SockaddrUnix)
	if !ok || kind != unix.SOCK_SEQPACKET || !samePath(at.Name, path) {
		return fail(fmt.Errorf("it is not of sequential packets at %s", path))
	}
	// Clients then see this process as the one that listens.
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return fail(fmt.Errorf("listen: %w", err))
	}
	l, err := net.FileListener(f)
	if err != nil {
		return fail(err)
	}
	return l, nil
}

// samePath reports whether both lead to the same file: /var/run is often a link.
func samePath(a, b string) bool {
	infoA, errA := os.Lstat(a)
	infoB, errB := os.Lstat(b)
	return errA == nil && errB == nil && os.SameFile(infoA, infoB)
}

// listen opens a socket that has its mode, and its group if one is given, before
// anybody can connect.
func listen(path string, kind int, mode os.FileMode, group *int) (net.Listener, error) {
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
	if group != nil {
		if err := os.Lchown(path, -1, *group); err != nil {
			return fail("chown", fmt.Errorf("%w (the scheduler's user must be a member of the group)", err))
		}
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
