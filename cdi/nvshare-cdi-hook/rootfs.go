// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi/ldcache"
)

const (
	etc       = "etc"
	cacheFile = "ld.so.cache"
	tmpPrefix = ".ld.so.cache.nvshare."
)

// inside resolves names as the container will see them, follows no magic link
// of /proc, and stays on the container's root file system: a volume mounted at
// /etc is the host's, and not ours to write.
const inside = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// updateCache adds libs to the dynamic linker's cache of the container with
// this root file system. It changes etc/ld.so.cache there and nothing else.
func updateCache(rootfs string, libs []string) error {
	flags, err := ldcache.FlagsFor(runtime.GOARCH)
	if err != nil {
		return err
	}
	root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the container's root file system: %w", &os.PathError{Op: "open", Path: rootfs, Err: err})
	}
	defer unix.Close(root)
	dir, err := unix.Openat2(root, etc, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC,
		Resolve: inside,
	})
	if err != nil {
		return fmt.Errorf("open /etc of the container in %s: %w", rootfs, err)
	}
	defer unix.Close(dir)

	cache, err := readCache(root)
	if err != nil {
		return err
	}
	cache.Add(flags, libs...)
	if err := writeCache(dir, cache.Bytes()); err != nil {
		return fmt.Errorf("write /etc/%s of the container in %s: %w", cacheFile, rootfs, err)
	}
	return nil
}

// readCache returns the container's cache. One that is missing, or that the
// dynamic linker would ignore, counts as empty. Only a regular file is opened: to
// open a device node or a FIFO of the image already has an effect.
func readCache(root int) (*ldcache.Cache, error) {
	path, err := unix.Openat2(root, etc+"/"+cacheFile, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC, // finds the file and opens nothing
		Resolve: inside,
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		return &ldcache.Cache{}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find /etc/%s of the container: %w", cacheFile, err)
	}
	defer unix.Close(path)
	var st unix.Stat_t
	if err := unix.Fstat(path, &st); err != nil {
		return nil, fmt.Errorf("look at /etc/%s of the container: %w", cacheFile, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return &ldcache.Cache{}, nil
	}
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", path)) // the file that was looked at
	if err != nil {
		return nil, fmt.Errorf("open /etc/%s of the container: %w", cacheFile, err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, ldcache.MaxSize+1))
	if err != nil {
		return nil, fmt.Errorf("read /etc/%s of the container: %w", cacheFile, err)
	}
	cache, err := ldcache.Parse(data)
	if err != nil {
		return &ldcache.Cache{}, nil
	}
	return cache, nil
}

// writeCache puts data in place of dir/ld.so.cache, whatever that is, in one
// step. Only plain names below the open directory are used.
func writeCache(dir int, data []byte) (err error) {
	tmp := tmpPrefix + strconv.Itoa(os.Getpid())
	fd, err := unix.Openat(dir, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
	if errors.Is(err, unix.EEXIST) { // left behind by an image that wants us to fail
		if err = unix.Unlinkat(dir, tmp, 0); err == nil {
			fd, err = unix.Openat(dir, tmp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
		}
	}
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = unix.Unlinkat(dir, tmp, 0)
		}
	}()
	f := os.NewFile(uintptr(fd), tmp)
	defer f.Close()
	if _, err := f.Write(data); err != nil {
		return err
	}
	if err := f.Chmod(0o644); err != nil { // the umask has no say
		return err
	}
	return unix.Renameat(dir, tmp, dir, cacheFile)
}
