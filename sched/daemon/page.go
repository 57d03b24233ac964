// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"math"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/wire"
)

// grantPage is the scheduler's writable mapping of one client's page.
type grantPage struct {
	wire.Page
	mem []byte
}

// newGrantPage makes a page and the descriptor to send. After sealing, nobody
// can map it writable or change its size; our mapping stays as it is. The
// caller closes the descriptor.
func newGrantPage(id sched.ClientID) (*grantPage, *os.File, error) {
	fd, err := unix.MemfdCreate("nvshare-grant", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, nil, fmt.Errorf("grant page: memfd_create: %w", err)
	}
	file := os.NewFile(uintptr(fd), "nvshare-grant")
	fail := func(what string, err error) (*grantPage, *os.File, error) {
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
	seals := unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals|unix.F_SEAL_FUTURE_WRITE)
	if errors.Is(err, unix.EINVAL) {
		// Before Linux 5.1. The client could then write to its own page, and
		// open its own gate, as it can by not loading the shim.
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
	}
	if err != nil {
		unix.Munmap(mem)
		return fail("seal", err)
	}
	page, err := wire.NewPage(mem, uint64(id))
	if err != nil {
		unix.Munmap(mem)
		return fail("layout", err)
	}
	return &grantPage{page, mem}, file, nil
}

// wake wakes every thread of the client that waits on the channel's word. The
// futex is a shared one: the waiters are in another process.
func (p *grantPage) wake(channel uint16) {
	const futexWake = 1
	// It fails only for a bad address.
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(p.WordAddr(channel))), futexWake, math.MaxInt32, 0, 0, 0)
}

func (p *grantPage) open(channel uint16, epoch sched.Epoch, flags uint32, quantumNs, nowNs uint64) {
	p.Open(channel, uint64(epoch), flags, quantumNs, nowNs)
	p.wake(channel)
}

func (p *grantPage) reopen(channel uint16, epoch sched.Epoch) {
	p.Reopen(channel, uint64(epoch))
	p.wake(channel)
}

func (p *grantPage) shut(channel uint16) {
	p.Close(channel)
	p.wake(channel)
}

// announce has the client's waiting threads look out for a grant.
func (p *grantPage) announce(channel uint16) {
	p.Next(channel)
	p.wake(channel)
}

// unmap gives the memory back; p must not be used after it, but for another
// unmap.
func (p *grantPage) unmap() {
	if p.mem != nil {
		unix.Munmap(p.mem)
	}
	*p = grantPage{}
}
