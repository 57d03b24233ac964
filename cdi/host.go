// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// host is the root of the host's file system as this program sees it; empty
// means "/". Paths given to its methods, and returned, are the host's own.
type host string

func (h host) isSelf() bool { return h == "" || filepath.Clean(string(h)) == "/" }

// at returns where a path of the host is seen from here. Symbolic links in it
// are not followed: use real first where that matters.
func (h host) at(path string) string {
	if h.isSelf() {
		return path
	}
	return filepath.Join(string(h), path)
}

// unresolved says why openat2 did not resolve a path.
func (h host) unresolved(path string, err error) error {
	if errors.Is(err, unix.ENOSYS) {
		return fmt.Errorf("resolve %s in the host's root %s: %w: openat2 needs Linux 5.6, so nvshare needs a later kernel here", path, string(h), err)
	}
	return &os.PathError{Op: "resolve", Path: path, Err: err}
}

// real follows all symbolic links of path inside the host's root.
func (h host) real(path string) (string, error) {
	if h.isSelf() {
		return filepath.EvalSymlinks(path)
	}
	root, err := unix.Open(string(h), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("open the host's root %s: %w", string(h), err)
	}
	defer unix.Close(root)
	fd, err := unix.Openat2(root, path, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return "", h.unresolved(path, err)
	}
	defer unix.Close(fd)
	seen, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", err
	}
	rootSeen, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", root))
	if err != nil {
		return "", err
	}
	rel, err := filepath.Rel(rootSeen, seen)
	if err != nil {
		return "", err
	}
	return filepath.Join("/", rel), nil
}

// readable returns where the host's path, symbolic links followed, is seen
// from here.
func (h host) readable(path string) (string, error) {
	real, err := h.real(path)
	if err != nil {
		return "", err
	}
	return h.at(real), nil
}

// OnHost returns where a path of the host is seen from here, when the host's
// root is at root ("" is "/"). Symbolic links are followed inside that root, as
// far as the path exists: /var/run of a host usually is a link to /run.
func OnHost(root, path string) string {
	h := host(root)
	if h.isSelf() {
		return path
	}
	if real, err := h.real(path); err == nil {
		return h.at(real)
	}
	parent := filepath.Dir(path)
	if parent == path {
		return h.at(path)
	}
	return filepath.Join(OnHost(root, parent), filepath.Base(path))
}

func (h host) exists(path string) bool {
	_, err := h.real(path)
	return err == nil
}
