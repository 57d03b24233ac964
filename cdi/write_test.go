// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func someSpec(t *testing.T, kind string) *specs.Spec {
	t.Helper()
	gpus := []GPU{{Index: 0, UUID: uuidA}}
	spec, err := Build(kind, gpus, SimulatedBase("/sim", gpus, "/hook"), DefaultPaths)
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func TestWriteAndRemove(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077)) // must not matter
	dir := filepath.Join(t.TempDir(), "run", "cdi")
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	all := []*specs.Spec{someSpec(t, Kind), someSpec(t, KindNRI)}
	for i, want := range []bool{true, false} {
		if changed, err := Write(dir, all...); err != nil || changed != want {
			t.Fatalf("write %d: changed %v, %v", i, changed, err)
		}
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the directory: %v, %v: rootless engines can't look into it", info, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 || entries[0].Name() != "nvshare.com-gpu-nri.yaml" || entries[1].Name() != "nvshare.com-gpu.yaml" {
		t.Fatalf("directory holds %v, %v", entries, err)
	}
	for _, e := range entries {
		if info, _ := e.Info(); info.Mode() != 0o644 {
			t.Errorf("%s has mode %v: rootless engines can't read it", e.Name(), info.Mode())
		}
	}

	// A changed mode or content is put right.
	file := filepath.Join(dir, FileName(Kind))
	if err := os.Chmod(file, 0o600); err != nil {
		t.Fatal(err)
	}
	if changed, err := Write(dir, all...); err != nil || !changed {
		t.Errorf("after chmod: changed %v, %v", changed, err)
	}
	if info, _ := os.Stat(file); info.Mode() != 0o644 {
		t.Errorf("mode is still %v", info.Mode())
	}

	for i, want := range []bool{true, false} {
		if removed, err := Remove(dir, Kind, KindNRI); err != nil || removed != want {
			t.Errorf("remove %d: %v, %v", i, removed, err)
		}
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("left behind: %v", entries)
	}
}

func TestWriteRefusesAnInvalidSpec(t *testing.T) {
	dir := t.TempDir()
	good := someSpec(t, Kind)
	if _, err := Write(dir, good); err != nil {
		t.Fatal(err)
	}
	before, _ := os.ReadFile(filepath.Join(dir, FileName(Kind)))
	bad := someSpec(t, Kind)
	bad.Devices[0].Name = "not a name"
	if _, err := Write(dir, bad); err == nil || !strings.Contains(err.Error(), "not a name") {
		t.Errorf("got %v", err)
	}
	entries, _ := os.ReadDir(dir)
	if after, _ := os.ReadFile(filepath.Join(dir, FileName(Kind))); string(after) != string(before) || len(entries) != 1 {
		t.Errorf("the good file changed, or something was left: %v", entries)
	}
}

func TestForeignFilesAreNotTouched(t *testing.T) {
	const foreign = "cdiVersion: 0.5.0\nkind: vendor.com/net\ndevices: []\n"
	const twice = "cdiVersion: 0.5.0\nkind: nvshare.com/gpu\ndevices: [{name: '0', containerEdits: {env: [A=b]}}]\n"
	const beside = "cdiVersion: 0.5.0\nkind: nvshare.com/gpu\ndevices: [{name: mine, containerEdits: {env: [A=b]}}]\n"
	for name, c := range map[string]struct {
		file    string // in the CDI directory
		prepare func(file string) error
		refuses bool // Write
		keeps   bool // Remove reports it, too
	}{
		"another kind under our name": {FileName(Kind), func(f string) error { return os.WriteFile(f, []byte(foreign), 0o644) }, true, true},
		"directory under our name":    {FileName(Kind), func(f string) error { return os.Mkdir(f, 0o755) }, true, true},
		"link under our name":         {FileName(Kind), func(f string) error { return os.Symlink("/dev/zero", f) }, true, true},
		"our device in another file":  {"old.json", func(f string) error { return os.WriteFile(f, []byte(twice), 0o644) }, true, false},
		"another device of our kind":  {"mine.yaml", func(f string) error { return os.WriteFile(f, []byte(beside), 0o644) }, false, false},
		"another kind elsewhere":      {"net.yaml", func(f string) error { return os.WriteFile(f, []byte(foreign), 0o644) }, false, false},
		"garbage elsewhere":           {"x.yaml", func(f string) error { return os.WriteFile(f, []byte("{"), 0o644) }, false, false},
	} {
		dir := t.TempDir()
		file := filepath.Join(dir, c.file)
		if err := c.prepare(file); err != nil {
			t.Fatal(err)
		}
		before, err := os.Lstat(file)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Write(dir, someSpec(t, KindNRI), someSpec(t, Kind))
		if errors.Is(err, ErrForeign) != c.refuses || (err != nil && !strings.Contains(err.Error(), file)) {
			t.Errorf("%s: write: %v", name, err)
		}
		if entries, _ := os.ReadDir(dir); c.refuses && len(entries) != 1 {
			t.Errorf("%s: written all the same: %v", name, entries)
		}
		_, err = Remove(dir, Kind)
		if errors.Is(err, ErrForeign) != c.keeps {
			t.Errorf("%s: remove: %v", name, err)
		}
		if after, err := os.Lstat(file); err != nil || !os.SameFile(before, after) || after.ModTime() != before.ModTime() {
			t.Errorf("%s: the file changed: %v", name, err)
		}
	}
}

// A file under our name that is no spec at all, after a full disk perhaps, is
// written anew, and can be removed.
// A program that is killed while it replaces a file leaves a part of it, which is not kept for ever.
func TestUnfinishedFilesAreRemoved(t *testing.T) {
	dir := t.TempDir()
	stale, fresh, other := dir+"/.file.1.tmp", dir+"/.file.2.tmp", dir+"/.other.1.tmp"
	for _, f := range []string{stale, fresh, other} {
		write(t, f, "")
	}
	for _, f := range []string{stale, other} {
		if err := os.Chtimes(f, time.Time{}, time.Now().Add(-2*staleAfter)); err != nil {
			t.Fatal(err)
		}
	}
	if err := ReplaceFile(dir+"/file", nil, 0o644, nil); err != nil {
		t.Fatal(err)
	}
	for f, want := range map[string]bool{stale: false, fresh: true, other: true} {
		if _, err := os.Stat(f); (err == nil) != want {
			t.Errorf("%s: %v", f, err)
		}
	}
}

func TestDamagedSpecHeals(t *testing.T) {
	for name, text := range map[string]string{"truncated": mark + "---\ncdiVersion: 0.5.0\nkind", "empty": "", "no YAML": "{hello", "no kind": "devices: []\n", "huge": strings.Repeat("#\n", maxSpecSize)} {
		dir := t.TempDir()
		file := filepath.Join(dir, FileName(Kind))
		damage := func() {
			t.Helper()
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		damage()
		if changed, err := Write(dir, someSpec(t, KindNRI), someSpec(t, Kind)); err != nil || !changed {
			t.Errorf("%s: write: %v, %v", name, changed, err)
		}
		if err := validate(file); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		damage()
		if removed, err := Remove(dir, Kind); err != nil || !removed {
			t.Errorf("%s: remove: %v, %v", name, removed, err)
		}
	}
}

// An engine ignores a device that two files of a directory declare: of two that
// nvshare wrote, the new one must be the only one, or neither works.
func TestOlderSpecOfOursGivesWay(t *testing.T) {
	dir := t.TempDir()
	data, err := Marshal(someSpec(t, Kind))
	if err != nil {
		t.Fatal(err)
	}
	old, other := filepath.Join(dir, "nvshare.yaml"), filepath.Join(dir, "net.yaml")
	if err := errors.Join(os.WriteFile(old, data, 0o644), os.WriteFile(other, []byte("kind: vendor.com/net\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if changed, err := Write(dir, someSpec(t, Kind), someSpec(t, KindNRI)); err != nil || !changed {
		t.Fatalf("changed %v, %v", changed, err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil || cache.GetDevice("nvshare.com/gpu=0") == nil {
		t.Errorf("an engine does not find nvshare.com/gpu=0: %v, %v", err, cache.GetErrors())
	}
	ours, err := Ours(dir)
	if want := []string{filepath.Join(dir, FileName(KindNRI)), filepath.Join(dir, FileName(Kind))}; err != nil || !slices.Equal(ours, want) {
		t.Errorf("ours are %v, %v, want %v", ours, err, want)
	}
	if _, err := os.Stat(other); err != nil {
		t.Errorf("somebody else's file: %v", err)
	}
}

func TestUnusableDirectory(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cdi")
	if err := os.WriteFile(dir, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Write(dir, someSpec(t, Kind)); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("a file as directory: %v", err)
	}
	if os.Getuid() == 0 {
		t.Skip("root may read everything")
	}
	dir = t.TempDir()
	if err := os.Chmod(dir, 0); err != nil {
		t.Fatal(err)
	}
	defer os.Chmod(dir, 0o755)
	if _, err := Write(dir, someSpec(t, Kind)); !errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), dir) {
		t.Errorf("unreadable: %v", err)
	}
}

// A spec of our name that we may not read is made anew, as a damaged one is. The plugin
// of the DaemonSet has no right to read what its mode forbids to the owner.
func TestWriteReplacesAnUnreadableSpec(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	const user = 3000
	root := t.TempDir()
	dir := filepath.Join(root, "cdi")
	file := filepath.Join(dir, FileName(Kind))
	write(t, file, "kind: nvshare.com/gpu\n")
	for _, path := range []string{dir, file} {
		if err := os.Chown(path, user, user); err != nil {
			t.Fatal(err)
		}
	}
	for path := dir; path != "/" && path != os.TempDir(); path = filepath.Dir(path) {
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(file, 0); err != nil {
		t.Fatal(err)
	}
	spec := someSpec(t, Kind)
	// The rights to files of this thread are those of an ordinary user.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Setfsuid(user); err != nil {
		t.Fatal(err)
	}
	defer unix.Setfsuid(0)
	if _, err := os.ReadFile(file); !errors.Is(err, os.ErrPermission) {
		t.Skipf("the file can be read: %v", err)
	}
	if changed, err := Write(dir, spec); err != nil || !changed {
		t.Errorf("written: %v, %v", changed, err)
	}
	if err := validate(file); err != nil {
		t.Error(err)
	}
}
