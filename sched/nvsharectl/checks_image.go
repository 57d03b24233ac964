// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/version"
)

// oldestGlibc is the oldest one that loads the shim.
var oldestGlibc = version.MustParseGeneric("2.17")

var (
	glibcFiles = []string{"lib/x86_64-linux-gnu/libc.so.6", "lib64/libc.so.6", "lib/aarch64-linux-gnu/libc.so.6", "usr/lib/libc.so.6", "lib/libc.so.6"}
	muslFiles  = []string{"lib/ld-musl-x86_64.so.1", "lib/ld-musl-aarch64.so.1"}
)

// checkImage looks whether programs of an image can load the shim.
func checkImage(p *patient) []finding {
	if p.image == "" {
		return nil
	}
	root := p.image
	if info, err := os.Stat(root); err != nil || !info.IsDir() {
		dir, leave, err := p.mount(p.image)
		if err != nil {
			return found(fail, "podman pull "+p.image+", or give a directory that holds the image's files", "%s is no directory, and podman does not mount it as an image: %v", p.image, err)
		}
		defer leave()
		root = dir
	}
	return judgeLibc(p.image, root)
}

func judgeLibc(image, root string) []finding {
	for _, path := range glibcFiles {
		f, err := openInside(root, path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return found(fail, "give the top directory of the image's files", "%s of %s: %v", path, image, err)
		}
		newest, err := glibcVersion(f)
		f.Close()
		switch {
		case err != nil:
			return found(fail, "FROM debian:stable-slim, or another base with glibc", "%s of %s is no C library: %v", path, image, err)
		case newest.LessThan(oldestGlibc):
			return found(fail, "FROM debian:stable-slim, or another base with glibc 2.17 or later", "%s has glibc %v, which cannot load the shim", image, newest)
		}
		return found(pass, "", "%s has glibc %v", image, newest)
	}
	for _, path := range muslFiles {
		if f, err := openInside(root, path); err == nil {
			f.Close()
			return found(fail, "FROM debian:stable-slim, or another base with glibc", "%s has musl libc, which loads neither the shim nor NVIDIA's libraries", image)
		}
	}
	return found(warn, "FROM debian:stable-slim, for programs that are linked with the C library", "%s has no C library: a static program reaches the GPU past the shim", image)
}

// openInside opens a file of an image. Its links are followed inside the image.
func openInside(root, path string) (*os.File, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, path, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// glibcVersion returns the newest version of symbols that a C library defines.
func glibcVersion(f *os.File) (newest *version.Version, err error) {
	e, err := elf.NewFile(f)
	if err != nil {
		return nil, err
	}
	defined, err := e.DynamicVersions()
	if err != nil {
		return nil, err
	}
	for _, d := range defined {
		text, is := strings.CutPrefix(d.Name, "GLIBC_")
		if !is {
			continue
		}
		if v, err := version.ParseGeneric(text); err == nil && (newest == nil || newest.LessThan(v)) {
			newest = v
		}
	}
	if newest == nil {
		return nil, errors.New("it defines no version of glibc")
	}
	return newest, nil
}

// mountImage has podman mount an image.
func mountImage(image string) (dir string, leave func(), err error) {
	run := func(args ...string) (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "podman", args...)
		var stderr strings.Builder
		cmd.Stderr = &stderr
		text, err := cmd.Output()
		if err != nil {
			err = fmt.Errorf("%w %s", err, strings.TrimSpace(stderr.String()))
		}
		return strings.TrimSpace(string(text)), err
	}
	if dir, err = run("image", "mount", image); err != nil {
		return "", nil, err
	}
	return dir, func() { _, _ = run("image", "unmount", image) }, nil
}
