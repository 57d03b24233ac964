// SPDX-License-Identifier: Apache-2.0

package segments

import (
	"os"
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
