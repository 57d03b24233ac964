// SPDX-License-Identifier: Apache-2.0

package arena

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Every page of a segment is there, holds zeros, and is a huge one where the kernel lets
// memfds have those by MADV_COLLAPSE.
func TestSegmentIsThere(t *testing.T) {
	const size = fillStep + 6*mib
	seg, err := newSegment(size, func(uint64) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	defer seg.File.Close()
	var stat unix.Stat_t
	if err := unix.Fstat(int(seg.File.Fd()), &stat); err != nil || stat.Size != size || stat.Blocks*512 != size {
		t.Errorf("%d bytes, %d there, %v; want %d", stat.Size, stat.Blocks*512, err, size)
	}
	content := make([]byte, size)
	if _, err := seg.File.ReadAt(content, 0); err != nil || bytes.Count(content, []byte{0}) != size {
		t.Errorf("not all zeros: %v", err)
	}
	if seg.Huge {
		t.Skip("of reserved huge pages")
	}
	if err := tryCollapse(t); err != nil {
		t.Skipf("no huge pages for memfds here: %v", err)
	}
	if hugeBytes(t, seg.File, size) == 0 { // a page that is busy just then stays small
		t.Error("no page is a huge one")
	}
}

func tryCollapse(t *testing.T) error {
	fd, err := unix.MemfdCreate("try", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, hugePage); err != nil {
		t.Fatal(err)
	}
	if err := write(fd, 0, 1); err != nil {
		t.Fatal(err)
	}
	return collapsed(fd, 0, hugePage)
}

// hugeBytes returns how much of the file the kernel maps as huge pages.
func hugeBytes(t *testing.T, f *os.File, size int) int {
	mem, unmap, err := mapAligned(int(f.Fd()), 0, size)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	bytes.Count(mem, []byte{1}) // touches all
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(smaps), fmt.Sprintf("\n%x-", uintptr(unsafe.Pointer(&mem[0]))))
	if !found {
		t.Fatal("the mapping is not in smaps")
	}
	for line := range strings.Lines(rest) {
		var kib int
		if n, _ := fmt.Sscanf(line, "ShmemPmdMapped: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	t.Fatal("no ShmemPmdMapped in smaps")
	return 0
}
