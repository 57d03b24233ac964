// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi/ldcache"
)

const (
	etc         = "etc"
	cacheFile   = "ld.so.cache"
	preloadFile = "ld.so.preload"
	confDir     = "ld.so.conf.d"
	confFile    = "00-nvshare.conf" // before the image's own directories
	tmpPrefix   = ".ld.so.nvshare."
	// maxPreload is how much of an image's own preloadFile is kept, bytes.
	maxPreload = 64 << 10
)

// inside resolves names as the container will see them, follows no magic link
// of /proc, and stays on the container's root file system: a volume mounted at
// /etc is the host's, and not ours to write.
const inside = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// inEtc calls change with the root file system of a container and its /etc, and says which file was
// to be changed if that fails.
func inEtc(rootfs, file string, change func(root, dir int) error) error {
	root, err := unix.Open(rootfs, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open the container's root file system: %w", &os.PathError{Op: "open", Path: rootfs, Err: err})
	}
	defer unix.Close(root)
	err = changeEtc(root, change)
	if errors.Is(err, unix.EROFS) {
		if other, failed := writable(root); failed == nil {
			defer unix.Close(other)
			err = changeEtc(other, change)
		}
	}
	if err != nil {
		return fmt.Errorf("change /etc/%s of the container in %s: %w", file, rootfs, err)
	}
	return nil
}

func changeEtc(root int, change func(root, dir int) error) error {
	dir, err := openDir(root, etc)
	if err != nil {
		return fmt.Errorf("open /etc: %w", err)
	}
	defer unix.Close(dir)
	return change(root, dir)
}

func openDir(root int, name string) (int, error) {
	return unix.Openat2(root, name, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: inside})
}

// writable returns a mount of its own, in no namespace, of a root file system that an engine has already
// mounted read-only, as crun before 1.28 does. The container's own mount stays as it is.
func writable(root int) (int, error) {
	fd, err := unix.OpenTree(root, "", unix.AT_EMPTY_PATH|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return -1, err
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY}); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// updateCache adds libs to the dynamic linker's cache of the container with
// this root file system, and has the container's own ldconfig find them too, which makes the cache
// anew when somebody installs a package.
func updateCache(rootfs string, libs []string) error {
	flags, err := ldcache.FlagsFor(runtime.GOARCH)
	if err != nil {
		return err
	}
	return inEtc(rootfs, cacheFile, func(root, dir int) error {
		data, err := read(root, cacheFile, ldcache.MaxSize+1)
		if err != nil {
			return err
		}
		cache, err := ldcache.Parse(data)
		if err != nil { // the dynamic linker would ignore it
			cache = &ldcache.Cache{}
		}
		cache.Add(flags, libs...)
		if err := replace(dir, cacheFile, cache.Bytes()); err != nil {
			return err
		}
		searched, err := openDir(root, etc+"/"+confDir)
		if errors.Is(err, unix.ENOENT) {
			return nil // its ldconfig, if it has one, reads nothing there
		}
		if err != nil {
			return fmt.Errorf("open %s: %w", confDir, err)
		}
		defer unix.Close(searched)
		var dirs []string
		for _, l := range libs {
			dirs = append(dirs, path.Dir(l)+"\n")
		}
		return replace(searched, confFile, []byte(strings.Join(slices.Compact(dirs), "")))
	})
}

// preload has all programs of the container load a library, also those that somebody starts without
// the environment: sshd, su and cron. What the image preloads itself stays, behind it.
func preload(rootfs, library string) error {
	return inEtc(rootfs, preloadFile, func(root, dir int) error {
		own, err := read(root, preloadFile, maxPreload+1)
		switch {
		case errors.Is(err, unix.EXDEV):
			return nil // a mount: the pod's, or that of a claim prepared by an earlier nvshare
		case err != nil:
			return err
		case len(own) > maxPreload:
			return errors.New("it is too long")
		case slices.Contains(strings.FieldsFunc(string(own), isSeparator), library):
			return nil
		}
		return replace(dir, preloadFile, append([]byte(library+"\n"), own...))
	})
}

// isSeparator tells whether the dynamic linker splits preloadFile at r.
func isSeparator(r rune) bool { return r == ':' || unicode.IsSpace(r) }

// read returns the beginning of a file in the container's etc. One that is missing, or is no
// regular file, counts as empty: to open a device node or a FIFO of the image already has an effect.
func read(root int, name string, most int64) ([]byte, error) {
	found, err := unix.Openat2(root, etc+"/"+name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC, // finds the file and opens nothing
		Resolve: inside,
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("find it: %w", err)
	}
	defer unix.Close(found)
	var st unix.Stat_t
	if err := unix.Fstat(found, &st); err != nil {
		return nil, fmt.Errorf("look at it: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, nil
	}
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", found)) // the file that was looked at
	if err != nil {
		return nil, fmt.Errorf("open it: %w", err)
	}
	defer f.Close()
	return io.ReadAll(io.LimitReader(f, most))
}

// replace puts data in place of a file in dir, whatever that is, in one
// step. Only plain names below the open directory are used.
func replace(dir int, name string, data []byte) (err error) {
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
	return unix.Renameat(dir, tmp, dir, name)
}
