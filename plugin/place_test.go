// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
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
