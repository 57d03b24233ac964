// SPDX-License-Identifier: Apache-2.0

// Package page makes grant pages: the memory in which the scheduler opens and
// shuts a client's gates. The layout is package wire's.
//
// What it guarantees:
//
//   - Whoever gets the descriptor can map the page for reading only, and cannot
//     change its size.
//   - A change that a thread of the client may wait for wakes that thread.
//   - No call waits for a client.
package page

import (
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/wire"
)

// Page is the scheduler's writable mapping of one client's page.
type Page struct {
	wire.Page
	mem []byte
}

// New makes the page of a client, and the descriptor to send. The caller closes
// the descriptor, and unmaps the page at the client's end.
func New(client uint64) (*Page, *os.File, error) {
	fd, err := unix.MemfdCreate("nvshare-grant", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, nil, fmt.Errorf("grant page: memfd_create: %w", err)
	}
	file := os.NewFile(uintptr(fd), "nvshare-grant")
	fail := func(what string, err error) (*Page, *os.File, error) {
		file.Close()
		return nil, nil, fmt.Errorf("grant page: %s: %w", what, err)
	}
	if err := unix.Ftruncate(fd, wire.PageSize); err != nil {
		return fail("ftruncate", err)
	}
	mem, err := unix.Mmap(fd, 0, wire.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fail("mmap", err)
	}
	// Our own mapping stays writable.
	seals := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals|unix.F_SEAL_FUTURE_WRITE); err != nil {
		unix.Munmap(mem)
		return fail("seal", err)
	}
	page, err := wire.NewPage(mem, client)
	if err != nil {
		unix.Munmap(mem)
		return fail("layout", err)
	}
	page.SetFeatures(wire.FeatureUtil | wire.FeatureControls | wire.FeaturePreempt)
	return &Page{page, mem}, file, nil
}

// wake wakes every thread of the client that waits on the channel's word. The
// futex is a shared one: the waiters are in another process.
func (p *Page) wake(channel uint16) {
	const futexWake = 1
	// It fails only for a bad address.
	_, _, _ = unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(p.WordAddr(channel))), futexWake, math.MaxInt32, 0, 0, 0)
}

// Open opens the gate under a grant, and wakes who waits for one.
func (p *Page) Open(channel uint16, epoch uint64, flags uint32, quantumNs, nowNs uint64) {
	p.Page.Open(channel, epoch, flags, quantumNs, nowNs)
	p.wake(channel)
}

// Reopen opens the gate again under the grant for which it was open before.
func (p *Page) Reopen(channel uint16, epoch uint64) {
	p.Page.Reopen(channel, epoch)
	p.wake(channel)
}

// Shut shuts the gate. Close does so too, where nobody can be waiting yet.
func (p *Page) Shut(channel uint16) {
	p.Close(channel)
	p.wake(channel)
}

// Announce has the client's waiting threads look out for a grant.
func (p *Page) Announce(channel uint16) {
	p.Next(channel)
	p.wake(channel)
}

// SetRoom says how many bytes of the GPU's memory the client may have there, and
// wakes who waits for a change.
func (p *Page) SetRoom(channel uint16, bytes uint64, seq uint32) {
	p.Page.SetRoom(channel, bytes, seq)
	p.wake(channel)
}

// Unmap gives the memory back. After that the Page may only be unmapped again.
func (p *Page) Unmap() {
	if p.mem != nil {
		unix.Munmap(p.mem)
	}
	*p = Page{}
}
