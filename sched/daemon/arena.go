// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/wire"
)

// The arena is host memory for what clients have away from GPUs: memfds that the
// scheduler makes, of huge pages if the node has them, fills with zeros beside the
// loop as soon as a reservation makes them necessary, and hands to one client each.
// A client keeps what it got until its end; then the kernel takes it back. Nothing
// of one tenant is ever seen by another, for no segment is used twice.
//
// Reservations are refused where the arena could not hold what they may send away
// (arenaFits), so that a swap finds its segments made.

const (
	// arenaUnit is what segments are a multiple of, of whatever pages.
	arenaUnit = 2 << 20
	// minSegment and maxSegment: few descriptors and registrations, and no long
	// pause before the first of them is ready. A client gets multiples of minSegment.
	minSegment = 64 << 20
	maxSegment = 1 << 30
	// arenaRetry is the pause after a segment could not be made.
	arenaRetry = 5 * time.Second
	// hostReserve is what is left of the host's memory to others.
	hostReserve = 256 << 20
)

// arena is that of the node.
type arena struct {
	used  uint64     // bytes that clients were given, or that are being made for them
	err   error      // the latest segment could not be made
	retry sched.Time // 0: not planned
	work  sync.Mutex // one segment is made at a time
}

// clientArena is a client's part of it, for one GPU.
type clientArena struct {
	given, making uint64 // bytes
	next          uint64 // number of the next segment
	unsent        []segment
	dropped       bool
}

// segment is one that the client was not sent yet.
type segment struct {
	fd   *os.File
	size uint64
	huge bool
}

// arenaFits says why so much in all cannot be had.
func (d *Daemon) arenaFits(total uint64) error {
	if total <= d.arena.used {
		return nil // it is there
	}
	if total > d.opts.SwapMemory {
		return fmt.Errorf("what is away then may take %d MiB of host memory, and there are %d MiB (--swap-memory), of which clients have %d", total>>20, d.opts.SwapMemory>>20, d.arena.used>>20)
	}
	if d.arena.err != nil {
		return fmt.Errorf("host memory for what is away cannot be had: %w", d.arena.err)
	}
	if free, ok := hostMemory(); ok && total-d.arena.used > free-min(free, hostReserve) {
		return fmt.Errorf("what is away then may take %d MiB more of host memory, and %d MiB are left", (total-d.arena.used)>>20, free>>20)
	}
	return nil
}

// prepareArenas has segments made for those clients that need more.
func (d *Daemon) prepareArenas(g *gpu) {
	if g.swap == nil || d.arena.retry != 0 {
		return
	}
	for id, m := range g.swap.members {
		need, have := g.swap.residency.Arena(id, minSegment), m.arena.given+m.arena.making
		if m.arena.making != 0 || need <= have || d.arena.used >= d.opts.SwapMemory {
			continue
		}
		size := min(max(need-have, minSegment), maxSegment, d.opts.SwapMemory-d.arena.used) / arenaUnit * arenaUnit
		if size == 0 {
			continue
		}
		m.arena.making = size
		d.arena.used += size
		d.wg.Add(1)
		go func() {
			defer d.wg.Done()
			d.arena.work.Lock()
			seg, err := newSegment(size, d.ended)
			d.arena.work.Unlock()
			if !d.do(func() { d.finishSegment(g, m, seg, err) }) && seg.fd != nil {
				seg.fd.Close()
			}
		}()
	}
}

func (d *Daemon) finishSegment(g *gpu, m *clientMemory, seg segment, err error) {
	size := m.arena.making
	m.arena.making = 0
	if m.arena.dropped || err != nil {
		if seg.fd != nil {
			seg.fd.Close()
		}
		d.arena.used -= size
		if err != nil {
			if d.arena.err == nil {
				d.log.WithError(err).Errorf("no host memory for what is swapped out: trying again every %v", arenaRetry)
			}
			d.arena.err, d.arena.retry = err, now().Add(arenaRetry)
		}
		return
	}
	if d.arena.err != nil {
		d.log.Info("host memory for what is swapped out can be had again")
		d.arena.err = nil
	}
	m.arena.given += size
	m.arena.unsent = append(m.arena.unsent, seg)
	d.reach(beforeArena)
	d.sendArenas(g, m)
	d.reach(afterArena)
	d.prepareArenas(g)
}

// sendArenas hands over the segments that are made, if the client is connected.
func (d *Daemon) sendArenas(g *gpu, m *clientMemory) {
	att := m.client.attached[g]
	for len(m.arena.unsent) > 0 {
		c := m.client.conn
		if att == nil || c == nil || c.dead || c.channels[att.channel] != att || !att.answered {
			return
		}
		seg := m.arena.unsent[0]
		m.arena.unsent = m.arena.unsent[1:]
		m.arena.next++
		f := wire.Frame{Type: wire.TypeArena, Channel: att.channel, Arena: wire.Arena{Segment: m.arena.next, Size: seg.size}}
		if seg.huge {
			f.Arena.Flags = wire.ArenaHuge
		}
		d.send(c, &f, unix.UnixRights(int(seg.fd.Fd())))
		seg.fd.Close()
	}
}

// dropArenas is for a client that is no more.
func (d *Daemon) dropArenas(m *clientMemory) {
	m.arena.dropped = true
	d.arena.used -= m.arena.given // what is being made follows
	m.arena.given = 0
	for _, seg := range m.arena.unsent {
		seg.fd.Close()
	}
	m.arena.unsent = nil
}

// countOldArena takes what a client got from an earlier scheduler, by its word, into
// account: as far as it can have needed that.
func (d *Daemon) countOldArena(g *gpu, m *clientMemory) {
	o, _ := g.swap.residency.Occupancy(m.client.id)
	n := min(m.moved.Arena, o.Promised+maxSegment)
	if n > m.arena.given {
		d.arena.used += n - m.arena.given
		m.arena.given = n
		m.arena.next = 1 << 32 // above those of before
	}
}

// newSegment makes and fills one; it gives up when ended is closed.
func newSegment(size uint64, ended <-chan struct{}) (segment, error) {
	if freeHugePages()*hugePage >= size {
		if fd, err := newMemfd(size, unix.MFD_HUGETLB|unix.MFD_HUGE_2MB, ended); err == nil {
			return segment{fd, size, true}, nil
		}
	}
	fd, err := newMemfd(size, 0, ended)
	if err != nil {
		return segment{}, fmt.Errorf("a segment of %d MiB: %w", size>>20, err)
	}
	return segment{fd, size, false}, nil
}

const hugePage = 2 << 20

// newMemfd makes a memfd of which every page is there, and which nobody can make
// larger or smaller.
func newMemfd(size uint64, flags int, ended <-chan struct{}) (*os.File, error) {
	fd, err := unix.MemfdCreate("nvshare-arena", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	f := os.NewFile(uintptr(fd), "nvshare-arena")
	if err := fill(fd, size, ended); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// fillStep is what is filled between two looks at whether it is still wanted.
const fillStep = 64 << 20

func fill(fd int, size uint64, ended <-chan struct{}) error {
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		return fmt.Errorf("ftruncate: %w", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	defer unix.Munmap(mem)
	_ = unix.Madvise(mem, unix.MADV_HUGEPAGE) // where shmem may have any
	for from := 0; from < len(mem); from += fillStep {
		select {
		case <-ended:
			return errors.New("the scheduler ends")
		default:
		}
		if err := populate(fd, mem, from, min(from+fillStep, len(mem))); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	return nil
}

// populate makes the pages of a part be there, on several cores where there are.
func populate(fd int, mem []byte, from, to int) error {
	threads := min(max(runtime.NumCPU()/4, 1), 4)
	part := ((to-from)/threads + arenaUnit - 1) / arenaUnit * arenaUnit
	errs := make(chan error, threads)
	n := 0
	for at := from; at < to; at += part {
		n++
		go func() {
			end := min(at+part, to)
			err := unix.Madvise(mem[at:end], unix.MADV_POPULATE_WRITE)
			if errors.Is(err, unix.EINVAL) { // before Linux 5.14
				err = unix.Fallocate(fd, 0, int64(at), int64(end-at))
			}
			errs <- err
		}()
	}
	var all error
	for range n {
		all = errors.Join(all, <-errs)
	}
	return all
}

func freeHugePages() uint64 {
	text, err := os.ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n
}

// hostMemory returns how much memory the scheduler can get, bytes: of the host, huge
// pages included, and within its cgroup.
func hostMemory() (free uint64, ok bool) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(string(text)) {
		if rest, found := strings.CutPrefix(line, "MemAvailable:"); found {
			n, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			free, ok = n<<10, err == nil
		}
	}
	free += freeHugePages() * hugePage
	if text, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		if path, found := strings.CutPrefix(strings.TrimSpace(string(text)), "0::"); found {
			dir := filepath.Join("/sys/fs/cgroup", path)
			limit, has := readNumber(filepath.Join(dir, "memory.max"))
			used, knows := readNumber(filepath.Join(dir, "memory.current"))
			if has && knows {
				free = min(free, limit-min(used, limit))
			}
		}
	}
	return free, ok
}

func readNumber(path string) (uint64, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}
