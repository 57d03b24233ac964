// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func TestPlace(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077)) // must not matter
	dir := t.TempDir()
	from, to := filepath.Join(dir, "built.so"), filepath.Join(dir, "host", "lib", "libnvshare.so")
	if err := os.WriteFile(from, []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{true, false} {
		if changed, err := Place(from, to); err != nil || changed != want {
			t.Fatalf("place %d: %v, %v", i, changed, err)
		}
	}
	check := func(want string) {
		t.Helper()
		data, err := os.ReadFile(to)
		info, _ := os.Stat(to)
		if err != nil || string(data) != want || info.Mode() != 0o755 {
			t.Errorf("placed file is %q, %v, %v", data, info.Mode(), err)
		}
		if entries, _ := os.ReadDir(filepath.Dir(to)); len(entries) != 1 {
			t.Errorf("beside it: %v", entries)
		}
	}
	check("one")
	if info, _ := os.Stat(filepath.Dir(to)); info.Mode().Perm() != 0o755 {
		t.Errorf("directory has mode %v", info.Mode())
	}

	// Who has the old file open keeps it.
	old, err := os.Open(to)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	if err := os.WriteFile(from, []byte("two"), 0o600); err != nil {
		t.Fatal(err)
	}
	if changed, err := Place(from, to); err != nil || !changed {
		t.Fatalf("new version: %v, %v", changed, err)
	}
	check("two")
	var b [8]byte
	if n, _ := old.Read(b[:]); string(b[:n]) != "one" {
		t.Errorf("the old file now holds %q", b[:n])
	}

	if err := os.Chmod(to, 0o600); err != nil {
		t.Fatal(err)
	}
	if changed, err := Place(from, to); err != nil || !changed {
		t.Errorf("wrong mode: %v, %v", changed, err)
	}
	check("two")
}

func TestPlaceErrors(t *testing.T) {
	dir := t.TempDir()
	from := filepath.Join(dir, "built.so")
	if _, err := Place(from, filepath.Join(dir, "x")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("nothing to place: %v", err)
	}
	if err := os.WriteFile(from, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Place(from, filepath.Join(from, "lib", "libnvshare.so")); err == nil || !strings.Contains(err.Error(), "place libnvshare.so") {
		t.Errorf("a file in the way: %v", err)
	}
	// A file system where nothing can be made: its answer is "no such file".
	if _, err := Place(from, "/proc/nvshare/lib/libnvshare.so"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("below /proc: %v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "libnvshare.so"), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := Place(from, filepath.Join(dir, "libnvshare.so")); err == nil {
		t.Error("a directory was replaced")
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 2 {
		t.Errorf("left behind: %v", entries)
	}
}

// As /var on Container-Optimized OS: all could be written, and each container with a GPU would fail.
func TestPlaceOnNoexecHost(t *testing.T) {
	dir := t.TempDir()
	from, host := filepath.Join(dir, "built.so"), filepath.Join(dir, "host")
	if err := errors.Join(os.WriteFile(from, nil, 0o644), os.Mkdir(host, 0o755)); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", host, "tmpfs", unix.MS_NOEXEC, ""); err != nil {
		t.Skipf("can't mount here: %v", err)
	}
	defer func() {
		if err := unix.Unmount(host, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	if _, err := Place(from, host+"/bin/hook"); err == nil || !strings.Contains(err.Error(), "noexec, so") {
		t.Errorf("the hook: %v", err)
	}
	if _, err := PlaceShim(from, host+"/lib"); err == nil || !strings.Contains(err.Error(), "noexec, so") {
		t.Errorf("the shim: %v", err)
	}
}

func TestPlaceOnReadOnlyHost(t *testing.T) {
	dir := t.TempDir()
	from, host := filepath.Join(dir, "built.so"), filepath.Join(dir, "host")
	if err := os.WriteFile(from, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(host, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(host, host, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("can't mount here: %v", err)
	}
	defer func() {
		if err := unix.Unmount(host, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	if err := unix.Mount("", host, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Skipf("can't remount here: %v", err)
	}
	for _, to := range []string{host + "/libnvshare.so", host + "/lib/libnvshare.so"} {
		if _, err := Place(from, to); !errors.Is(err, unix.EROFS) || !strings.Contains(err.Error(), "writable") {
			t.Errorf("%s: %v", to, err)
		}
	}
}

// A shim that containers use is never written again, whatever is done in its place, and
// stays when another one comes. Only the oldest are removed.
func TestPlaceShim(t *testing.T) {
	dir := t.TempDir()
	from, lib := filepath.Join(dir, "built.so"), filepath.Join(dir, "lib")
	shim := filepath.Join(lib, ShimLink, ShimFile)
	put := func(text string) (container string) {
		t.Helper()
		if err := os.WriteFile(from, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := PlaceShim(from, lib); err != nil {
			t.Fatal(err)
		}
		if changed, err := PlaceShim(from, lib); err != nil || changed {
			t.Errorf("again: %v, %v", changed, err)
		}
		if got, err := os.ReadFile(shim); err != nil || string(got) != text {
			t.Fatalf("placed %q, %v", got, err)
		}
		container, err := filepath.EvalSymlinks(shim) // what a mount shows from now on
		if err != nil {
			t.Fatal(err)
		}
		return container
	}
	first := put("first")
	mapped, err := os.Open(first)
	if err != nil {
		t.Fatal(err)
	}
	defer mapped.Close()
	if second := put("second"); second == first {
		t.Errorf("%s is written again", first)
	}
	if got, err := os.ReadFile(first); err != nil || string(got) != "first" {
		t.Errorf("a running container has %q, %v", got, err)
	}
	// Somebody cuts the file in use short: it is replaced, not written.
	put("first")
	if err := os.Truncate(first, 0); err != nil {
		t.Fatal(err)
	}
	put("first")
	if info, err := mapped.Stat(); err != nil || info.Size() != 0 {
		t.Errorf("the file that was in use was written: %v, %v", info.Size(), err)
	}

	for i := range keptShims + 3 {
		version := filepath.Dir(put(fmt.Sprint("version ", i)))
		at := time.Unix(int64(1000+i), 0)
		if err := os.Chtimes(version, at, at); err != nil {
			t.Fatal(err)
		}
	}
	all, err := Shims(lib)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range all {
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}
	if left, _ := os.ReadDir(lib); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	// A file and a directory for each, the link, and the empty directory.
	if want := 2*keptShims + 2; len(all) != want {
		t.Errorf("%d paths to remove, want %d: %v", len(all), want, all)
	}
	if err := os.MkdirAll(filepath.Dir(shim), 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := PlaceShim(from, lib); err == nil || !strings.Contains(err.Error(), filepath.Dir(shim)) {
		t.Errorf("a directory in the way: %v", err)
	}
}

// What pods see of the shim has no writable side, even for CAP_SYS_ADMIN.
func TestPodsSeeTheShimThroughAnOverlay(t *testing.T) {
	if err := unix.Mount("none", t.TempDir(), "overlay", 0, ""); errors.Is(err, unix.EPERM) {
		t.Skip("needs root")
	}
	from, lib, at := filepath.Join(t.TempDir(), "built.so"), filepath.Join(t.TempDir(), "lib"), t.TempDir()
	if err := os.WriteFile(from, []byte("shim"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := PlaceShim(from, lib); err != nil {
		t.Fatal(err)
	}
	p := DefaultPaths
	p.ShimDir = filepath.Join(lib, ShimLink)
	var why string
	if p.EmptyDir, why = EmptyDirFor("", lib); why != "" {
		t.Skip(why)
	}
	gpus := []GPU{{UUID: uuidA}}
	for _, kind := range []string{Kind, KindNRI} {
		spec, err := Build(kind, gpus, Base{PerGPU: []specs.ContainerEdits{{Env: []string{"A=B"}}}}, p)
		if err != nil {
			t.Fatal(err)
		}
		m := spec.ContainerEdits.Mounts[0]
		if (m.Type == "overlay") != (kind == KindNRI) {
			t.Errorf("%s mounts %+v", kind, m)
		}
		if kind == Kind {
			continue // rootless engines of old kernels have no overlay
		}
		var data string
		for _, o := range m.Options {
			if strings.HasPrefix(o, "lowerdir=") {
				data = o
			}
		}
		if err := unix.Mount(m.HostPath, at, m.Type, unix.MS_RDONLY, data); err != nil {
			t.Fatal(err)
		}
		defer unix.Unmount(at, unix.MNT_DETACH)
	}
	shim := filepath.Join(at, ShimFile)
	if got, err := os.ReadFile(shim); err != nil || string(got) != "shim" {
		t.Errorf("it shows %q, %v", got, err)
	}
	_ = unix.Mount("", at, "", unix.MS_REMOUNT|unix.MS_BIND, "")
	if err := unix.Mount("", at, "", unix.MS_REMOUNT, ""); err == nil {
		t.Error("it was made writable")
	}
	if err := os.WriteFile(shim, nil, 0o755); !errors.Is(err, unix.EROFS) {
		t.Errorf("written: %v", err)
	}
	if err := os.Remove(shim); !errors.Is(err, unix.EROFS) {
		t.Errorf("removed: %v", err)
	}
}
