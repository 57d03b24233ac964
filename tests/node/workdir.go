// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// cgroupGone bounds the wait until the kernel lets cgroups be removed whose processes
// have just been killed. That takes as long as those processes need to end.
const cgroupGone = time.Minute

// makeWorkDir creates dir and returns its lock. The directory counts as in use until
// the lock is closed.
func makeWorkDir(dir string) (*os.File, error) {
	for _, d := range []string{dir, filepath.Join(dir, "private"), filepath.Join(dir, "log")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return nil, err
		}
	}
	f, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

// removeWorkDir removes dir and its cgroups; with keepLog it leaves dir/log for the
// next run to remove.
func removeWorkDir(dir string, keepLog bool) error {
	err := removeCgroups(filepath.Base(dir))
	if !keepLog {
		return errors.Join(err, os.RemoveAll(dir))
	}
	fmt.Fprintf(os.Stderr, "logs are in %s until the next run\n", filepath.Join(dir, "log"))
	return errors.Join(err, os.RemoveAll(filepath.Join(dir, "private")))
}

// sweep removes what killed runs left behind. A work directory whose lock is free is
// not in use.
func sweep(parent, prefix string) {
	dirs, _ := filepath.Glob(filepath.Join(parent, prefix+"[0-9]*"))
	for _, dir := range dirs {
		f, err := os.Open(filepath.Join(dir, "lock"))
		if err != nil {
			continue
		}
		if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			_ = removeWorkDir(dir, false)
		}
		f.Close()
	}
}

// cgroupName is the parent of all cgroups of a node, at the root of each
// hierarchy.
func cgroupName(dirBase string) string { return "nvshare-" + dirBase }

// removeCgroups removes the cgroups of a node from every hierarchy.
func removeCgroups(dirBase string) error {
	roots, err := cgroupRoots()
	if err != nil {
		return err
	}
	var errs []error
	for _, root := range roots {
		for _, prefix := range []string{"", "slurm_"} { // slurmd makes one with the name of its node, which is this one's
			errs = append(errs, RemoveCgroup(filepath.Join(root, prefix+cgroupName(dirBase))))
		}
	}
	return errors.Join(errs...)
}

// cgroupRoots lists the roots of all hierarchies, of v1, v2 or both. Other directories
// that somebody left in the top directory are none.
func cgroupRoots() ([]string, error) {
	roots := []string{cgroupRoot}
	entries, err := os.ReadDir(cgroupRoot)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if _, err := os.Stat(filepath.Join(cgroupRoot, e.Name(), "cgroup.procs")); err == nil && e.IsDir() {
			roots = append(roots, filepath.Join(cgroupRoot, e.Name()))
		}
	}
	return roots, nil
}

// RemoveCgroup removes a tree of empty cgroups, children first. The files in
// them are the kernel's and vanish with their directory.
func RemoveCgroup(top string) error {
	for deadline := time.Now().Add(cgroupGone); ; time.Sleep(20 * time.Millisecond) {
		var dirs []string
		err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		if err != nil {
			return err
		}
		var last error
		for i := len(dirs) - 1; i >= 0; i-- {
			if err := os.Remove(dirs[i]); err != nil && !errors.Is(err, fs.ErrNotExist) {
				last = err
			}
		}
		if last == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("remove cgroup %s: %w (a process is still in it?)", strings.TrimPrefix(top, cgroupRoot), last)
		}
	}
}
