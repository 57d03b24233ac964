// SPDX-License-Identifier: Apache-2.0

package cdi

import (
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
// does not exist yet. /proc, where the driver shows its GPUs, announces nothing: a GPU that goes, and
// MIG devices whose device nodes were there before, need a look now and then as well. What can't be
// watched is said to o.Log.
func Watch(ctx context.Context, o Options, dirs ...string) <-chan struct{} {
	changed, events := make(chan struct{}, 1), make(chan struct{}, 1)
	w, err := newInotify(events)
	if err != nil {
		o.log().Warnf("files are looked at now and then only: %v", err)
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
