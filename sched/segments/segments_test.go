// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// mapped makes a memfd and maps it.
func mapped(t *testing.T, name string, seals, size int) (fd int, mem []byte) {
	t.Helper()
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err == nil {
		err = unix.Ftruncate(fd, int64(size))
	}
	if err == nil {
		mem, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	return fd, mem
}

// What a process has mapped is found without a descriptor, once, and what the kernel does
// not have of it is known. Other files are left alone.
func TestOpen(t *testing.T) {
	if err := CanOpen(); err != nil {
		t.Skip(err)
	}
	const size = 1 << 20
	fd, mem := mapped(t, Name, Seals, size)
	for i := range mem {
		mem[i] = 7
	}
	again, err := unix.Mmap(fd, 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(again)
	unix.Close(fd)
	for _, other := range []struct {
		name  string
		seals int
	}{{"another", Seals}, {Name, unix.F_SEAL_GROW}} {
		fd, _ := mapped(t, other.name, other.seals, size)
		unix.Close(fd)
	}
	all, err := Open(os.Getpid())
	if err != nil || len(all) != 1 || all[0].Size != size || Missing(all) != 0 || all[0].Huge {
		t.Fatalf("%+v, %v", all, err)
	}
	if err := unix.Fallocate(int(all[0].Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size/2); err != nil {
		t.Fatal(err)
	}
	Close(all)
	if all, err = Open(os.Getpid()); err != nil || Missing(all) != size/2 {
		t.Errorf("%+v, %v", all, err)
	}
	Close(all)
}

// readOnly maps a file for reading. It returns the descriptor and the link to the mapping.
func readOnly(t *testing.T, path string) (fd int, link string) {
	t.Helper()
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	size := uintptr(os.Getpagesize())
	mem, err := unix.MmapPtr(fd, 0, nil, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.MunmapPtr(mem, size) })
	return fd, fmt.Sprintf("/proc/self/map_files/%x-%x", uintptr(mem), uintptr(mem)+size)
}

// lease takes a lease on a file that nobody has open for writing: whoever opens it for that waits for its end.
func lease(t *testing.T, fd int) {
	t.Helper()
	signal.Ignore(unix.SIGIO) // says that somebody opens it
	t.Cleanup(func() { signal.Reset(unix.SIGIO) })
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, unix.F_RDLCK); err != nil {
		t.Fatal(err)
	}
}

// A file of another file system is not opened, as its open may never end: it would break the lease.
func TestOtherFilesAreNotOpened(t *testing.T) {
	if err := CanOpen(); err != nil {
		t.Skip(err)
	}
	path := filepath.Join(t.TempDir(), "memfd:"+Name)
	if err := os.WriteFile(path, make([]byte, os.Getpagesize()), 0o600); err != nil {
		t.Fatal(err)
	}
	fd, link := readOnly(t, path)
	lease(t, fd)
	memfds, err := memfdSystems()
	if err != nil {
		t.Fatal(err)
	}
	if f, err := openMemfd(link, memfds); !errors.Is(err, errOther) {
		t.Errorf("%v, %v", f, err)
	}
	if kind, err := unix.FcntlInt(uintptr(fd), unix.F_GETLEASE, 0); err != nil || kind != unix.F_RDLCK {
		t.Errorf("the lease is %d, %v", kind, err)
	}
}

// A process's own memfd, with the name and the seals, on which it has a lease is passed over.
func TestLeaseIsNotWaitedFor(t *testing.T) {
	if err := CanOpen(); err != nil {
		t.Skip(err)
	}
	own, mem := mapped(t, Name, Seals, os.Getpagesize())
	fd, _ := readOnly(t, fmt.Sprintf("/proc/self/fd/%d", own))
	if err := errors.Join(unix.Munmap(mem), unix.Close(own)); err != nil {
		t.Fatal(err)
	}
	lease(t, fd)
	if all, err := Open(os.Getpid()); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
}
