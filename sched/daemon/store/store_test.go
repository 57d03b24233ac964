// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/segments"
)

const mib = 1 << 20

func goOn() error { return nil }

// segment makes one with random content, and some zeros.
func segment(t *testing.T, size int) segments.Segment {
	t.Helper()
	fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "test")
	t.Cleanup(func() { f.Close() })
	content := make([]byte, size)
	rnd := rand.NewChaCha8([32]byte{byte(size >> 20)})
	rnd.Read(content[size/4:])
	if _, err := f.WriteAt(content, 0); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	return segments.Segment{File: f, Inode: st.Ino, Size: uint64(size), Present: uint64(st.Blocks) * 512}
}

func content(t *testing.T, s segments.Segment) []byte {
	t.Helper()
	b, err := io.ReadAll(io.NewSectionReader(s.File, 0, int64(s.Size)))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func present(t *testing.T, s segments.Segment) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(int(s.Fd()), &st); err != nil {
		t.Fatal(err)
	}
	return uint64(st.Blocks) * 512
}

// saved is two segments in a file.
func saved(t *testing.T) (path string, parts []Part, all []segments.Segment, want [][]byte) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "x")
	all = []segments.Segment{segment(t, 6*mib), segment(t, 4*mib)}
	want = [][]byte{content(t, all[0]), content(t, all[1])}
	parts, err := Save(path, all, goOn)
	if err != nil {
		t.Fatal(err)
	}
	return path, parts, all, want
}

func TestRoundTrip(t *testing.T) {
	path, parts, all, want := saved(t)
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 || info.Size() != 10*mib || Bytes(parts) != 10*mib {
		t.Fatalf("%v %v %v", info, err, parts)
	}
	if present(t, all[0]) != 6*mib {
		t.Error("saving has changed the segment")
	}
	if err := Empty(parts, all); err != nil || present(t, all[0])+present(t, all[1]) != 0 {
		t.Fatalf("%v: %d bytes are left", err, present(t, all[0])+present(t, all[1]))
	}
	slices.Reverse(all) // the order of mappings may change
	if err := Load(path, parts, all, goOn); err != nil {
		t.Fatal(err)
	}
	slices.Reverse(all)
	for i := range all {
		if !bytes.Equal(content(t, all[i]), want[i]) || present(t, all[i]) != all[i].Size {
			t.Errorf("segment %d came back changed", i)
		}
	}
	if _, err := Save(path, all, goOn); !errors.Is(err, os.ErrExist) {
		t.Errorf("over a file that is there: %v", err)
	}
}

// Nothing that is not as it was is taken for the memory of a process.
func TestDamagedFile(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"a changed byte": func(path string) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err == nil {
				_, err = f.WriteAt([]byte{1}, 9*mib)
			}
			return err
		},
		"a changed zero": func(path string) error {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err == nil {
				_, err = f.WriteAt([]byte{1}, 1)
			}
			return err
		},
		"cut off": func(path string) error { return os.Truncate(path, 9*mib) },
		"gone":    os.Remove,
		"a link":  func(path string) error { return errors.Join(os.Rename(path, path+".x"), os.Symlink(path+".x", path)) },
	} {
		t.Run(name, func(t *testing.T) {
			path, parts, all, _ := saved(t)
			if err := damage(path); err != nil {
				t.Fatal(err)
			}
			err := Load(path, parts, all, goOn)
			if err == nil || !strings.Contains(err.Error(), path) {
				t.Errorf("%v", err)
			}
		})
	}
	path, parts, all, _ := saved(t)
	if err := Load(path, parts, all[:1], goOn); err == nil || !strings.Contains(err.Error(), "unmapped a segment of 4 MiB") {
		t.Errorf("a segment is gone: %v", err)
	}
}

// What is given up or fails leaves no file.
func TestSaveFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	s := segment(t, 4*mib)
	n := 0
	_, err := Save(path, []segments.Segment{s}, func() error {
		if n++; n == 3 {
			return errors.New("not wanted")
		}
		return nil
	})
	if err == nil || err.Error() != "not wanted" {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// fullDisk mounts a file system of 4 MiB.
func fullDisk(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounts a file system, which takes root")
	}
	dir := t.TempDir()
	if err := unix.Mount("test", dir, "tmpfs", 0, "size=4m,mode=0700"); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

func TestFullDisk(t *testing.T) {
	dir := fullDisk(t)
	s := segment(t, 6*mib)
	_, err := Save(filepath.Join(dir, "x"), []segments.Segment{s}, goOn)
	if !errors.Is(err, ErrFull) {
		t.Error(err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
	if present(t, s) != 6*mib {
		t.Error("memory is lost")
	}
	d := &Dir{path: dir, Statfs: unix.Statfs}
	if err := d.Room(3 * mib); err != nil {
		t.Error(err)
	}
	if err := d.Room(4 * mib); !errors.Is(err, ErrFull) {
		t.Errorf("a sixteenth is not left: %v", err)
	}
}

func TestOpen(t *testing.T) {
	if err := segments.CanOpen(); err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, "boot"); err != nil {
		t.Skip(err) // the temporary directory may be in memory
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("%v is left", left)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	open := filepath.Join(dir, "open")
	if err := errors.Join(os.Mkdir(open, 0), os.Chmod(open, 0o777)); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		filepath.Join(dir, "none"): "make it", file: "not a directory", open: "chmod 0700", fullDisk(t): "in memory",
	} {
		if _, err := Open(path, "boot"); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", path, err, want)
		}
	}
}

// Only files of nobody are told to be removed.
func TestOthers(t *testing.T) {
	dir := t.TempDir()
	d := &Dir{path: dir, bootID: "now"}
	lives := peer.Process{PID: 7, Start: 70}
	known := d.PathOf(peer.Process{PID: 9, Start: 90}, 1)
	for _, path := range []string{d.PathOf(lives, 2), d.PathOf(peer.Process{PID: 8, Start: 80}, 3), known} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"nvshare-before-7-70-1.arena", "nvshare-x.arena", "nvshare-now-x.arena", "notes"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	nobodys, somebodys, err := d.Others(map[string]bool{known: true}, func(p peer.Process) bool { return p == lives })
	if err != nil || !slices.Equal(somebodys, []string{d.PathOf(lives, 2)}) ||
		!slices.Equal(nobodys, []string{filepath.Join(dir, "nvshare-before-7-70-1.arena"), d.PathOf(peer.Process{PID: 8, Start: 80}, 3)}) {
		t.Errorf("%v, %v, %v", nobodys, somebodys, err)
	}
}
