// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// quiet is how long nothing may happen before a change is reported: an
	// installation of the driver writes for a while.
	quiet = 200 * time.Millisecond
	// longest is how long reports wait for quiet.
	longest = 5 * time.Second
)

// Watch sends on the channel it returns when what Generate looks at may have
// changed, until ctx ends: GPUs, their device nodes, the driver's libraries, CDI
// specs, and any file in dirs. Compare Fingerprint to know. Several changes in a
// row are one. It sends once at the start, for what changed before.
//
// Files are watched through inotify, where they are made even if their directory
// does not exist yet, and the kernel's own messages through netlink
// (NETLINK_KOBJECT_UEVENT), because /proc, where the driver shows its GPUs,
// announces nothing. Nobody announces MIG devices whose device nodes were there
// before: look now and then as well. What can't be watched is said to o.Log.
func Watch(ctx context.Context, o Options, dirs ...string) <-chan struct{} {
	changed, events := make(chan struct{}, 1), make(chan struct{}, 1)
	w, err := newInotify(events)
	if err != nil {
		o.log().Warnf("files are looked at now and then only: %v", err)
	}
	if err := watchUevents(ctx, events, concernsGPUs); err != nil && o.SimDir == "" {
		o.log().Warnf("cannot read the kernel's messages about GPUs: %v", err)
	}
	arm := func() {
		if w == nil {
			return
		}
		if err := w.arm(o.watched(dirs)); err != nil {
			o.log().Warnf("some changes are noticed late: %v", err)
		}
	}
	arm()
	notify(changed)
	go func() {
		defer close(changed)
		if w != nil {
			defer w.close()
		}
		for {
			select {
			case <-ctx.Done():
				return
			case <-events:
			}
			settle(ctx, events)
			// First the watches of what is new, then the look: nothing that
			// happens from now on is missed.
			arm()
			notify(changed)
		}
	}()
	return changed
}

// settle waits until no event has come for a while.
func settle(ctx context.Context, events <-chan struct{}) {
	end := time.After(longest)
	for {
		select {
		case <-events:
		case <-time.After(quiet):
			return
		case <-end:
			return
		case <-ctx.Done():
			return
		}
	}
}

func notify(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default: // one is waiting already
	}
}

// In /dev files are written to all the time: there only names count.
const (
	watchNames = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_TO | unix.IN_MOVED_FROM |
		unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR
	watchFiles = watchNames | unix.IN_CLOSE_WRITE | unix.IN_ATTRIB
	watchOwn   = watchFiles | unix.IN_MODIFY // also who only cuts a file short
)

// watched returns the directories to watch and what for. For one that does not
// exist it is the nearest above it that does.
func (o Options) watched(dirs []string) map[string]uint32 {
	masks := map[string]uint32{}
	add := func(dir string, mask uint32) {
		for {
			if info, err := os.Stat(dir); err == nil && info.IsDir() {
				masks[dir] |= mask
				return
			}
			parent := filepath.Dir(dir)
			if parent == dir {
				return
			}
			dir, mask = parent, watchNames
		}
	}
	for _, dir := range o.specDirs() {
		add(dir, watchFiles)
	}
	for _, dir := range dirs {
		add(dir, watchOwn)
	}
	if o.SimDir != "" {
		add(filepath.Join(o.SimDir, "lib"), watchFiles)
		add(filepath.Join(o.SimDir, "run"), watchFiles)
		return masks
	}
	for _, place := range o.places() {
		add(OnHost(o.HostRoot, place.root+"/dev"), watchNames)
		if host(o.HostRoot).exists(place.root + capsDir) {
			add(OnHost(o.HostRoot, place.root+capsDir), watchNames)
		}
		for _, dir := range place.libraries {
			add(OnHost(o.HostRoot, place.root+dir), watchFiles)
		}
	}
	return masks
}

// inotify watches directories.
type inotify struct {
	file *os.File
	dirs map[string]uint32 // as armed
}

func newInotify(events chan<- struct{}) (*inotify, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify_init1: %w (see /proc/sys/fs/inotify/max_user_instances)", err)
	}
	w := &inotify{file: os.NewFile(uintptr(fd), "inotify"), dirs: map[string]uint32{}}
	go func() {
		buf := make([]byte, 64<<10)
		for {
			// Which file it was does not matter. An overflow is an event too.
			if _, err := w.file.Read(buf); err != nil {
				return // closed
			}
			notify(events)
		}
	}()
	return w, nil
}

// arm watches these directories. Those from before stay as they are; the kernel
// drops a watch when its directory goes.
func (w *inotify) arm(dirs map[string]uint32) error {
	var failed []string
	conn, err := w.file.SyscallConn()
	if err != nil {
		return err
	}
	for dir, mask := range dirs {
		var addErr error
		if err := conn.Control(func(fd uintptr) { _, addErr = unix.InotifyAddWatch(int(fd), dir, mask) }); err != nil {
			return err
		}
		if addErr != nil && addErr != unix.ENOENT && w.dirs[dir] != mask {
			failed = append(failed, fmt.Sprintf("%s: %v", dir, addErr))
		}
		w.dirs[dir] = mask
	}
	if len(failed) > 0 {
		slices.Sort(failed)
		return fmt.Errorf("watch %s (see /proc/sys/fs/inotify/max_user_watches)", strings.Join(failed, ", "))
	}
	return nil
}

func (w *inotify) close() { w.file.Close() }

// watchUevents reports what the kernel announces, if it is relevant.
func watchUevents(ctx context.Context, events chan<- struct{}, relevant func(message []byte) bool) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return fmt.Errorf("netlink socket for uevents: %w", err)
	}
	// Group 1 is the kernel's own; udev sends to another.
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: 1}); err != nil {
		unix.Close(fd)
		return fmt.Errorf("listen to uevents: %w", err)
	}
	file := os.NewFile(uintptr(fd), "uevents")
	conn, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return err
	}
	context.AfterFunc(ctx, func() { file.Close() })
	go func() {
		buf := make([]byte, 64<<10)
		for {
			var n int
			var from unix.Sockaddr
			var recvErr error
			if err := conn.Read(func(fd uintptr) bool {
				n, from, recvErr = unix.Recvfrom(int(fd), buf, 0)
				return recvErr != unix.EAGAIN && recvErr != unix.EINTR
			}); err != nil {
				return // closed
			}
			if recvErr == unix.ENOBUFS { // some were lost
				notify(events)
				continue
			}
			if recvErr != nil {
				return
			}
			// Root may send to the group too; the kernel is port 0.
			if sender, ok := from.(*unix.SockaddrNetlink); ok && sender.Pid == 0 && relevant(buf[:n]) {
				notify(events)
			}
		}
	}()
	return nil
}

// concernsGPUs looks at a kernel message: "add@/module/nvidia", then KEY=VALUE,
// all separated by zero bytes.
func concernsGPUs(message []byte) bool {
	var subsystem, device, driver string
	for field := range bytes.SplitSeq(message, []byte{0}) {
		key, value, _ := strings.Cut(string(field), "=")
		switch key {
		case "SUBSYSTEM":
			subsystem = value
		case "DEVPATH":
			device = value
		case "DRIVER":
			driver = value
		}
	}
	switch subsystem {
	case "module":
		return strings.HasPrefix(device, "/module/nvidia")
	case "pci":
		// When a driver lets go of a device, the message does not name it any
		// more. GPUs and others come and go rarely enough.
		return driver == "" || driver == "nvidia"
	case "drm", "nvidia":
		return true
	}
	return false
}
