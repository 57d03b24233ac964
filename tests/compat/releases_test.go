//go:build compat

// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// oldest is the release with the oldest C library that can still be downloaded.
const oldest = "bullseye"

var fetching sync.Map // directory to its mutex

// image returns a root file system made of a release's packages. It stays in the build
// directory.
func image(t *testing.T, name, suite, arch string, packages ...string) string {
	t.Helper()
	root := program("images/" + name)
	lock, _ := fetching.LoadOrStore(root, &sync.Mutex{})
	lock.(*sync.Mutex).Lock()
	defer lock.(*sync.Mutex).Unlock()
	if _, err := os.Stat(root); err == nil {
		return root
	}
	need(t, "apt-get", "dpkg-deb")
	if err := os.MkdirAll(filepath.Dir(root), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", append([]string{"images.sh", root, suite, arch}, packages...)...)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Skipf("the packages of this release could not be downloaded: %v\n%s", err, text)
	}
	return root
}

func release(t *testing.T, suite, arch string) string {
	t.Helper()
	return image(t, suite+"-"+arch, suite, arch, "bash", "coreutils", "perl-base", "python3", "libc6-dev")
}

// old builds the programs and the simulated driver with the C library of the oldest
// release, so that they run with each later one, and returns their directory.
func old(t *testing.T, arch string) string {
	t.Helper()
	out := program("oldest-" + arch)
	triplet, cross := "x86_64-linux-gnu", ""
	if arch == "arm64" {
		triplet, cross = "aarch64-linux-gnu", "aarch64-linux-gnu-"
	}
	need(t, cross+"gcc")
	sysroot := release(t, oldest, arch)
	lock, _ := fetching.LoadOrStore(out, &sync.Mutex{})
	lock.(*sync.Mutex).Lock()
	defer lock.(*sync.Mutex).Unlock()
	cmd := exec.Command("make", "--no-print-directory", "image-programs", "OUT="+out, "SYSROOT="+sysroot, "TRIPLET="+triplet, "CROSS="+cross)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, text)
	}
	return out
}

// fetch makes the images before the cases run, because that is much work. A case whose
// image cannot be made says so.
func fetch(t *testing.T) {
	t.Run("fetch", func(t *testing.T) {
		for _, arch := range []string{"amd64", "arm64"} {
			t.Run("old "+arch, func(t *testing.T) { old(t, arch) })
		}
		for _, suite := range suites {
			t.Run(suite, func(t *testing.T) { release(t, suite, "amd64") })
		}
		t.Run("sid arm64", func(t *testing.T) { release(t, "sid", "arm64") })
	})
}

var suites = []string{oldest, "bookworm", "trixie", "forky", "sid"}

// releases runs the shim, as built on this machine, in older and newer images.
func releases(t *testing.T) {
	const lib, preload = "LD_LIBRARY_PATH=/usr/lib/nvshare", "LD_PRELOAD=/usr/lib/nvshare/libnvshare.so"
	for _, suite := range suites {
		check(t, "image of "+suite, func(t *testing.T) {
			t.Parallel()
			needRoot(t)
			root, out := release(t, suite, "amd64"), old(t, "amd64")
			for from, to := range map[string]string{
				shim: "usr/lib/nvshare/libnvshare.so", filepath.Join(out, "simgpu/libcuda.so.1"): "usr/lib/nvshare/libcuda.so.1",
				filepath.Join(out, "compat/probe"): "usr/bin/probe", filepath.Join(out, "compat/probe-linked"): "usr/bin/probe-linked",
				filepath.Join(out, "compat/plain"): "usr/bin/plain", "programs/two.py": "usr/bin/two.py",
			} {
				install(t, from, filepath.Join(root, to))
			}
			mountPoints(t, root)
			t.Log(glibcOf(t, root))
			for _, argv := range [][]string{
				{"/usr/bin/probe", "dlsym"}, {"/usr/bin/probe", "thread"}, {"/usr/bin/probe", "fork", "legacy"},
				{"/usr/bin/probe", "threads", "resolver"}, {"/usr/bin/probe-linked", "linked"}, {"/usr/bin/probe-linked", "next"},
				{"/usr/bin/python3", "/usr/bin/two.py"},
			} {
				managed(t, enter(root, []string{lib, preload}, argv...))
			}
			for _, argv := range [][]string{
				{"/usr/bin/plain"}, {"/bin/bash", "-c", "echo $((6 * 7)); true | cat; exit 3"}, {"/bin/ls", "/"},
				{"/usr/bin/perl", "-e", "print 6 * 7, qq(\n); system('true'); exit 4"},
				{"/usr/bin/python3", "-c", "import ctypes, threading; print(ctypes.CDLL(None).strlen(b'four'))"},
			} {
				without, endedWithout := output(t, enter(root, nil, argv...))
				with, endedWith := output(t, enter(root, []string{preload}, argv...))
				if with != without || (endedWith == nil) != (endedWithout == nil) {
					t.Errorf("%v: without the shim %v, printed %q; with it %v, printed %q", argv, endedWithout, without, endedWith, with)
				}
			}
		})
	}
	for _, suite := range []string{oldest, "sid"} {
		check(t, "arm64 image of "+suite, func(t *testing.T) {
			t.Parallel()
			needArm64(t)
			root, out := release(t, suite, "arm64"), old(t, "arm64")
			t.Log(glibcOf(t, root))
			lib, preload := filepath.Join(out, "simgpu"), program("arm64/lib/libnvshare.so")
			managed(t, emulated(root, preload, lib, filepath.Join(out, "compat/probe"), "dlsym"))
			managed(t, emulated(root, preload, lib, filepath.Join(out, "compat/probe"), "threads", "thread"))
			managed(t, emulated(root, preload, lib, filepath.Join(out, "compat/probe-linked"), "next"))
		})
	}
	// A 32-bit program cannot load the shim: the loader prints a line and goes on.
	check(t, "32-bit image", func(t *testing.T) {
		t.Parallel()
		needRoot(t)
		root := image(t, "bookworm-i386", "bookworm", "i386", "bash", "coreutils")
		install(t, shim, filepath.Join(root, "usr/lib/nvshare/libnvshare.so"))
		mountPoints(t, root)
		text, err := output(t, enter(root, []string{preload}, "/bin/bash", "-c", "echo 42"))
		if err != nil {
			if plain, e := output(t, enter(root, nil, "/bin/bash", "-c", "echo 42")); e != nil {
				t.Skipf("32-bit programs do not run here: %v %s", e, plain)
			}
		}
		if err != nil || !strings.HasSuffix(text, "\n42\n") || !strings.Contains(text, "ignored") {
			t.Errorf("%v, printed %q", err, text)
		}
	})
}

// glibcOf tells the version of an image's C library, by the names it defines.
func glibcOf(t *testing.T, root string) string {
	t.Helper()
	found, _ := filepath.Glob(root + "/usr/lib/*/libc.so.6")
	if len(found) == 0 {
		return "no glibc"
	}
	text := string(must(os.ReadFile(found[0]))(t))
	if _, rest, ok := strings.Cut(text, "GNU C Library ("); ok {
		line, _, _ := strings.Cut(rest, "\n")
		return "GNU C Library (" + line
	}
	return found[0]
}
