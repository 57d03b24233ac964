// SPDX-License-Identifier: Apache-2.0

package page

import (
	"math"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/wire"
)

// A client can only read its page, and sees what the scheduler writes there.
func TestClientOnlyReads(t *testing.T) {
	p, file, err := New(7)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Unmap()
	defer file.Close()
	fd := int(file.Fd())
	if mem, err := unix.Mmap(fd, 0, wire.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
		unix.Munmap(mem)
		t.Error("a client can map its page for writing")
	}
	for _, size := range []int64{0, wire.PageSize - 1, 2 * wire.PageSize} {
		if err := unix.Ftruncate(fd, size); err == nil {
			t.Errorf("a client can make its page %d bytes large", size)
		}
	}
	if _, err := unix.Pwrite(fd, []byte{1}, 64); err == nil {
		t.Error("a client can write to its page")
	}
	mem, err := unix.Mmap(fd, 0, wire.PageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	theirs, err := wire.OpenPage(mem)
	if err != nil {
		t.Fatal(err)
	}
	const channel = 3
	for _, step := range []struct {
		what string
		do   func()
		word uint32
	}{
		{"open", func() { p.Open(channel, 9, 0, 1, 2) }, 9},
		{"shut", func() { p.Shut(channel) }, wire.WordClosed},
		{"reopen", func() { p.Reopen(channel, 9) }, 9},
		{"close", func() { p.Close(channel) }, wire.WordClosed},
		{"announce", func() { p.Announce(channel) }, wire.WordClosed},
	} {
		if step.do(); theirs.Word(channel) != step.word {
			t.Errorf("%s: the client sees %d, want %d", step.what, theirs.Word(channel), step.word)
		}
	}
	if theirs.Flags(channel)&wire.GrantNext == 0 {
		t.Error("the client does not see what was announced")
	}
	p.Unmap()
	p.Unmap() // does nothing
}

// A thread that waits on the word, with a mapping of its own as another process
// has, is woken by each change.
func TestChangesWake(t *testing.T) {
	p, file, err := New(7)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Unmap()
	defer file.Close()
	mem, err := unix.Mmap(int(file.Fd()), 0, wire.PageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	theirs, err := wire.OpenPage(mem)
	if err != nil {
		t.Fatal(err)
	}
	const channel, futexWait = 3, 0
	for name, change := range map[string]func(){
		"open":     func() { p.Open(channel, 9, 0, 1, 2) },
		"reopen":   func() { p.Reopen(channel, 9) },
		"shut":     func() { p.Shut(channel) },
		"announce": func() { p.Announce(channel) },
		"room":     func() { p.SetRoom(channel, math.MaxUint32, 1) },
	} {
		woken := make(chan unix.Errno, 1)
		go func() {
			limit := unix.NsecToTimespec(int64(time.Minute)) // longer than any machine takes
			for {
				_, _, e := unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(theirs.WordAddr(channel))), futexWait,
					uintptr(wire.WordClosed), uintptr(unsafe.Pointer(&limit)), 0, 0)
				if e != unix.EAGAIN { // else the word had changed before the thread waited
					woken <- e
					return
				}
			}
		}()
		for done := false; !done; {
			p.Close(channel)
			runtime.Gosched() // the thread may begin to wait
			change()
			select {
			case e := <-woken:
				if done = true; e != 0 {
					t.Errorf("%s: %v", name, e)
				}
			default:
			}
		}
	}
}
