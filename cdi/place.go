// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// placedMode lets everyone execute what is placed on a host.
const placedMode = 0o755

// Place copies the file from to the path to, executable by everyone, and reports
// whether that changed anything. The file is replaced as a whole: processes that have
// mapped the old file keep it.
func Place(from, to string) (changed bool, err error) {
	data, err := os.ReadFile(from)
	if err != nil {
		return false, fmt.Errorf("read %s to place it on the host: %w", filepath.Base(to), err)
	}
	return place(data, to)
}

func place(data []byte, to string) (changed bool, err error) {
	dir := filepath.Dir(to)
	err = MakeDir(dir)
	var st unix.Statfs_t
	if err == nil && unix.Statfs(dir, &st) == nil && st.Flags&unix.ST_NOEXEC != 0 {
		err = fmt.Errorf("%s is mounted noexec, so that nobody could run or map it", dir)
	}
	if err == nil && HoldsFile(to, data, placedMode) {
		return false, nil
	}
	if err == nil {
		err = ReplaceFile(to, data, placedMode, nil)
	}
	if err != nil {
		return false, fmt.Errorf("place %s on the host: %w (choose a directory that is writable and not mounted noexec)", filepath.Base(to), err)
	}
	return true, nil
}

// shimVersion is the name of a directory with one shim: the beginning of its SHA-256.
var shimVersion = regexp.MustCompile(`^[0-9a-f]{16}$`)

const (
	// EmptyDir is the name of Paths.EmptyDir.
	EmptyDir = "empty"
	// keptShims is how many shims stay on a host. A container keeps the shim that it
	// was created with. Without that shim its new processes would run unarbitrated.
	keptShims = 16
)

// PlaceShim places a shim below libDir, in a directory that is named by the shim's
// contents, and has ShimLink lead there. So the path of a shim in use is never
// written again: cutting a mapped file short kills every process that maps it. The
// latest earlier shims stay, because running containers use them.
func PlaceShim(from, libDir string) (changed bool, err error) {
	data, err := os.ReadFile(from)
	if err != nil {
		return false, fmt.Errorf("read %s to place it on the host: %w", ShimFile, err)
	}
	sum := sha256.Sum256(data)
	version := hex.EncodeToString(sum[:8])
	if changed, err = place(data, filepath.Join(libDir, version, ShimFile)); err != nil {
		return changed, err
	}
	empty := filepath.Join(libDir, EmptyDir)
	if _, err := os.Stat(empty); err != nil {
		changed = true
	}
	if err := MakeDir(empty); err != nil {
		return changed, fmt.Errorf("place %s on the host: %w", ShimFile, err)
	}
	link := filepath.Join(libDir, ShimLink)
	if target, err := os.Readlink(link); err != nil || target != version {
		if err := replaceLink(version, link); err != nil {
			return changed, fmt.Errorf("place %s on the host: %w", ShimFile, err)
		}
		changed = true
	}
	if changed {
		retireShims(libDir, version)
	}
	return changed, nil
}

// replaceLink makes a symbolic link, in the place of what has its name.
func replaceLink(target, link string) error {
	if info, err := os.Lstat(link); err == nil && info.IsDir() {
		return fmt.Errorf("%s is a directory: remove it, nvshare needs this name", link)
	}
	tmp := link + ".new"
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.Symlink(target, tmp); err != nil {
		return err
	}
	return os.Rename(tmp, link)
}

// retireShims removes all shims but the present one and the latest others.
func retireShims(libDir, present string) {
	type version struct {
		name   string
		placed time.Time
	}
	var old []version
	entries, _ := os.ReadDir(libDir)
	for _, e := range entries {
		if info, err := e.Info(); err == nil && e.IsDir() && shimVersion.MatchString(e.Name()) && e.Name() != present {
			old = append(old, version{e.Name(), info.ModTime()})
		}
	}
	slices.SortFunc(old, func(a, b version) int { return b.placed.Compare(a.placed) })
	for _, v := range old[min(len(old), keptShims-1):] {
		_ = os.RemoveAll(filepath.Join(libDir, v.name)) // tried again with the next shim
	}
}

// Shims lists what PlaceShim has made in libDir, in an order in which it can be
// removed. A missing directory has nothing.
func Shims(libDir string) (paths []string, err error) {
	entries, err := os.ReadDir(libDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read the directory of the shims: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(libDir, e.Name())
		switch {
		case e.IsDir() && shimVersion.MatchString(e.Name()):
			if file := filepath.Join(path, ShimFile); host("").exists(file) {
				paths = append(paths, file)
			}
			paths = append(paths, path)
		case e.Name() == EmptyDir, e.Name() == ShimLink && e.Type() == fs.ModeSymlink:
			paths = append(paths, path)
		}
	}
	return paths, nil
}

// lowerFileSystems are those that surely can be below an overlay. An overlay itself
// can be once, and who knows what is below it.
var lowerFileSystems = []int64{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.TMPFS_MAGIC, unix.F2FS_SUPER_MAGIC}

// EmptyDirFor returns Paths.EmptyDir for the shims in libDir, a path of the host
// whose root is at hostRoot; "" and a reason: an overlay is not sure to work there.
func EmptyDirFor(hostRoot, libDir string) (dir, why string) {
	dir = filepath.Join(libDir, EmptyDir)
	if strings.ContainsAny(dir, `:,\`) {
		return "", "the path has characters that mount options cannot have"
	}
	if text, err := os.ReadFile("/proc/filesystems"); err != nil || !strings.Contains(string(text), "\toverlay\n") {
		return "", "the kernel has no overlay file systems loaded"
	}
	var st unix.Statfs_t
	if err := unix.Statfs(OnHost(hostRoot, dir), &st); err != nil {
		return "", fmt.Sprintf("%s: %v", dir, err)
	}
	if !slices.Contains(lowerFileSystems, int64(st.Type)) {
		return "", fmt.Sprintf("%s is on a file system (type %#x) that may not be below an overlay", dir, st.Type)
	}
	return dir, ""
}
