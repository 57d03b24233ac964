// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/wire"
)

// The arena is host memory for what clients have away from GPUs: memfds that the
// scheduler makes, of huge pages if the node has them, fills with zeros beside the
// loop as soon as reservations make them necessary, or soon may, and hands to one client
// each.
// A client keeps what it got until its end; then the kernel takes it back. Nothing
// of one tenant is ever seen by another, for no segment is used twice.
//
// Reservations are refused where the arena could not hold what they may send away
// (arenaFits), so that a swap finds its segments made.

const (
	// arenaUnit is what segments are a multiple of, of whatever pages.
	arenaUnit = 2 << 20
	// minSegment and maxSegment: few descriptors and registrations, and no long
	// pause before the first of them is ready: that is small, each next one as large
	// as all before it. A client gets multiples of minSegment.
	minSegment = 64 << 20
	maxSegment = 1 << 30
	// tailSegment: the last ones are that small, so that all fillers end together.
	tailSegment = 256 << 20
	// arenaRetry is the pause after a segment could not be made.
	arenaRetry = 5 * time.Second
	// hostReserve is what is left of the host's memory to others.
	hostReserve = 256 << 20
)

// arena is that of the node.
type arena struct {
	used  uint64     // bytes that clients were given, or that are being made for them
	jobs  int        // segments that are being made
	err   error      // the latest segment could not be made
	retry sched.Time // 0: not planned
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

// prepareArenas has segments made for those clients that need more; and where all that
// is reserved just fits, for what they will need if it goes on to grow, as far as the
// half of the arena lasts.
func (d *Daemon) prepareArenas(g *gpu) {
	if g.swap == nil {
		return
	}
	d.prepareUpTo(g, d.opts.SwapMemory, 0)
	n, capacity := g.swap.residency.Promised(), g.swap.residency.Capacity()
	if len(g.swap.members) > 1 && n > capacity/5*4 && n <= capacity {
		d.prepareUpTo(g, d.opts.SwapMemory/2, n/4)
	}
}

// prepareUpTo has as many made as there are fillers, if clients are promised so much
// more. All that is given stays below limit.
func (d *Daemon) prepareUpTo(g *gpu, limit, more uint64) {
	for d.arena.jobs < fillers() && d.arena.retry == 0 {
		m, need := d.neediest(g, more)
		if m == nil || d.arena.used >= limit {
			return
		}
		size := nextSegment(m.arena.given+m.arena.making, need)
		size = min(size, limit-d.arena.used) / arenaUnit * arenaUnit
		if size == 0 {
			return
		}
		d.makeSegment(g, m, size)
	}
}

// neediest returns the client with the smallest part of what it needs, and what it
// lacks; nil: nobody lacks anything.
func (d *Daemon) neediest(g *gpu, more uint64) (least *clientMemory, lacks uint64) {
	part := 1.0
	for id, m := range g.swap.members {
		need, have := g.swap.residency.Arena(id, minSegment, more), m.arena.given+m.arena.making
		if need < have+arenaUnit {
			continue
		}
		if p := float64(have) / float64(need); least == nil || p < part {
			least, lacks, part = m, need-have, p
		}
	}
	return least, lacks
}

// nextSegment returns the size of the next segment of a client that has so much, and
// lacks so much.
func nextSegment(has, lacks uint64) uint64 {
	size := min(max(has, minSegment), maxSegment, max(lacks/uint64(fillers()), tailSegment))
	return min(size/minSegment*minSegment, lacks)
}

func (d *Daemon) makeSegment(g *gpu, m *clientMemory, size uint64) {
	m.arena.making += size
	d.arena.used += size
	d.arena.jobs++
	d.wg.Add(1)
	go func() {
		defer d.wg.Done()
		var seg segment
		var err error
		nicely(func() { seg, err = newSegment(size, d.ended) })
		if !d.do(func() { d.finishSegment(g, m, size, seg, err) }) && seg.fd != nil {
			seg.fd.Close()
		}
	}()
}

func (d *Daemon) finishSegment(g *gpu, m *clientMemory, size uint64, seg segment, err error) {
	m.arena.making -= size
	d.arena.jobs--
	switch {
	case m.arena.dropped || err != nil:
		if seg.fd != nil {
			seg.fd.Close()
		}
		d.arena.used -= size
		if err != nil {
			if d.arena.err == nil {
				d.log.WithError(err).Errorf("no host memory for what is swapped out: trying again every %v", arenaRetry)
			}
			d.arena.err, d.arena.retry = err, now().Add(arenaRetry)
			return
		}
	default:
		if d.arena.err != nil {
			d.log.Info("host memory for what is swapped out can be had again")
			d.arena.err = nil
		}
		m.arena.given += size
		d.noteMembers()
		m.arena.unsent = append(m.arena.unsent, seg)
		d.reach(beforeArena)
		d.sendArenas(g, m)
		d.reach(afterArena)
	}
	for _, other := range d.order { // each may have waited for a filler
		d.prepareArenas(other)
	}
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
