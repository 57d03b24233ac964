// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/wire"
)

// The arena is host memory for what clients have away from GPUs: memfds that the
// scheduler makes, of huge pages if the node has them, fills with zeros beside the
// loop as soon as reservations make them necessary, or soon may, and hands to one client
// each.
// A client keeps what it got until its end; then it is emptied and goes back to the
// kernel, also if the client has passed it on. Nothing of one tenant is ever seen by
// another, for no segment is used twice.
//
// Reservations are refused where the arena could not hold what they may send away
// (arenaFits), so that a swap finds its segments made. Some are made before anybody
// reserves: arena_stock.go.

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
	used   uint64 // bytes that clients were given, or that are being made for them
	making uint64 // of these, what is being made
	held   int    // segments of clients of which a descriptor is here as well
	jobs   int    // segments that are being made for clients
	err    error  // the latest segment could not be made
	retry  *timer.Timer
	stock  stock
	// make is newSegment, and memory is hostMemory, but for tests.
	make     func(size uint64, step func(filled uint64) error) (segment, error)
	memory   func() (pages, huge uint64, ok bool)
	unplaced sync.Once // it was said that memory is not taken of a GPU's node
}

// clientArena is a client's part of it, for one GPU.
type clientArena struct {
	given, making uint64 // bytes
	next          uint64 // number of the next segment
	segments      int    // that it has
	unsent, sent  []segment
	dropped       bool
}

// bytes is what the client has, or is soon to have.
func (a *clientArena) bytes() uint64 { return a.given + a.making }

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
	more, stock := total-d.arena.used, d.arena.stock.held() // which is there for clients
	if d.arena.err != nil && more > stock {
		return fmt.Errorf("host memory for what is away cannot be had: %w", d.arena.err)
	}
	if pages, huge, ok := d.arena.memory(); ok && more > less(pages+huge+stock, hostReserve) {
		return fmt.Errorf("what is away then may take %d MiB more of host memory, and %d MiB are left", more>>20, (pages+huge+stock)>>20)
	}
	return nil
}

// less is a-b, or 0.
func less(a, b uint64) uint64 { return a - min(a, b) }

// prepareArenas has segments made for those clients that need more; and where all that
// is reserved just fits, for what they will need if it goes on to grow, as far as the
// half of the arena lasts.
func (d *Daemon) prepareArenas(g *gpu) {
	d.prepareArena(g)
	d.restock()
}

// prepareAll is prepareArenas for all GPUs.
func (d *Daemon) prepareAll() {
	for _, g := range d.order {
		d.prepareArena(g)
	}
	d.restock()
}

func (d *Daemon) prepareArena(g *gpu) {
	if g.swap == nil {
		return
	}
	d.prepareUpTo(g, d.opts.SwapMemory, 0)
	n, capacity := g.swap.residency.Promised(), g.swap.residency.Capacity()
	if len(g.swap.members) > 1 && n > capacity/5*4 && n <= capacity {
		d.prepareUpTo(g, d.opts.SwapMemory/2, n/4)
	}
}

// prepareUpTo gives what is ready and has as many made as there are fillers, if clients
// are promised so much more. All that is given stays below limit.
func (d *Daemon) prepareUpTo(g *gpu, limit, more uint64) {
	for d.giveReady(g, limit, more) {
	}
	for d.arena.jobs < fillers() && !d.arena.retry.Planned() {
		m, lacks := d.neediest(g, more, nil)
		if m == nil || d.arena.used >= limit {
			return
		}
		size := max(nextSegment(m.arena.bytes(), lacks), d.leastSegment(m, lacks))
		size = min(size, limit-d.arena.used) / arenaUnit * arenaUnit
		if size == 0 {
			return
		}
		d.makeSegment(g, m, size, lacks)
	}
}

// neediest returns the client with the smallest part of what it needs, and what it
// lacks; nil: nobody lacks anything. Those are passed over that skip says; it may be nil.
func (d *Daemon) neediest(g *gpu, more uint64, skip func(m *clientMemory, lacks uint64) bool) (least *clientMemory, lacks uint64) {
	part := 1.0
	for id, m := range g.swap.members {
		need, have := g.swap.residency.Arena(id, minSegment, more), m.arena.bytes()
		if need < have+arenaUnit || skip != nil && skip(m, need-have) {
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

// fewSegments and someSegments: a shim keeps 256 for a GPU, so that a client which grows
// for long, by little at a time, gets no small ones in the end.
const (
	fewSegments  = 32
	someSegments = 64
)

// leastSegment returns how large a client's next one has to be. That may be more than it
// lacks, where it takes nothing from what others have reserved.
func (d *Daemon) leastSegment(m *clientMemory, lacks uint64) uint64 {
	least := uint64(maxSegment)
	switch {
	case m.arena.segments < fewSegments:
		return 0
	case m.arena.segments < someSegments:
		least = tailSegment
	}
	if least > lacks && d.arenaFits(d.arenaNeeded(nil)+least-lacks) != nil {
		return lacks
	}
	return least
}

func (d *Daemon) makeSegment(g *gpu, m *clientMemory, size, lacks uint64) {
	wait := d.makeWay(g.node, size, lacks)
	m.arena.making += size
	d.arena.making += size
	d.arena.used += size
	d.arena.jobs++
	newSegment := d.arena.make
	d.wg.Add(1)
	go func() {
		defer d.wg.Done()
		for _, p := range wait {
			select {
			case <-p.gone:
			case <-d.ended:
			}
		}
		var seg segment
		var err error
		d.placed(nicely(g.node, func() { seg, err = newSegment(size, d.goOn) }))
		if !d.do(func() { d.finishSegment(g, m, size, seg, err) }) && seg.fd != nil {
			seg.fd.Close()
		}
	}()
}

// goOn says whether memory is still to be filled.
func (d *Daemon) goOn(uint64) error {
	select {
	case <-d.ended:
		return errors.New("the scheduler ends")
	default:
		return nil
	}
}

// placed takes note of whether memory is taken of the GPU's node.
func (d *Daemon) placed(err error) {
	if err != nil {
		d.arena.unplaced.Do(func() {
			d.log.WithError(err).Debug("host memory is not taken from the GPU's NUMA node first: CAP_SYS_NICE may be missing")
		})
	}
}

func (d *Daemon) finishSegment(g *gpu, m *clientMemory, size uint64, seg segment, err error) {
	m.arena.making -= size
	d.arena.making -= size
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
			d.arena.err = err
			d.arena.retry.Set(now().Add(arenaRetry))
			d.giveBack(size, true)
			return
		}
	default:
		if d.arena.err != nil {
			d.log.Info("host memory for what is swapped out can be had again")
			d.arena.err = nil
		}
		d.give(g, m, seg)
	}
	d.prepareAll() // each may have waited for a filler
}

// give makes a segment a client's.
func (d *Daemon) give(g *gpu, m *clientMemory, seg segment) {
	m.arena.given += seg.size
	m.arena.segments++
	d.noteMembers()
	m.arena.unsent = append(m.arena.unsent, seg)
	d.reach(beforeArena)
	d.sendArenas(g, m)
	d.reach(afterArena)
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
		if d.arena.held < d.maxHeld {
			d.arena.held++
			m.arena.sent = append(m.arena.sent, seg)
		} else {
			seg.fd.Close() // for want of descriptors
		}
	}
}

// dropArenas is for a client that is no more. What it had goes as the stock's does: others
// may count on it, and wait for it where the host is short of memory.
func (d *Daemon) dropArenas(m *clientMemory) {
	m.arena.dropped = true
	d.arena.used -= m.arena.given // what is being made follows
	m.arena.given = 0
	d.arena.held -= len(m.arena.sent)
	d.takeBack(append(m.arena.sent, m.arena.unsent...))
	m.arena.sent, m.arena.unsent = nil, nil
}

// countOldArena takes what a client got from an earlier scheduler, by its word, into
// account: as far as it can have needed that.
func (d *Daemon) countOldArena(g *gpu, m *clientMemory) {
	o, _ := g.swap.residency.Occupancy(m.client.id)
	n := min(m.moved.Arena, o.Promised+maxSegment)
	if n > m.arena.given {
		d.hadArena(m, n)
	}
}

// hadArena makes n bytes what a client got from an earlier scheduler.
func (d *Daemon) hadArena(m *clientMemory, n uint64) {
	d.arena.used += n - m.arena.given
	m.arena.given = n
	m.arena.next = 1 << 32 // above those of before
	m.arena.segments = int(n / minSegment)
}

func freeHugePages() uint64 {
	text, err := os.ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n
}

// hostMemory returns how much memory the scheduler can get, bytes, of the host and
// within its cgroup: of common pages, and in addition of huge ones.
func hostMemory() (pages, huge uint64, ok bool) {
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, false
	}
	for line := range strings.Lines(string(text)) {
		if rest, found := strings.CutPrefix(line, "MemAvailable:"); found {
			n, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			pages, ok = n<<10, err == nil
		}
	}
	huge = freeHugePages() * hugePage
	if text, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		if path, found := strings.CutPrefix(strings.TrimSpace(string(text)), "0::"); found {
			dir := filepath.Join("/sys/fs/cgroup", path)
			limit, has := readNumber(filepath.Join(dir, "memory.max"))
			used, knows := readNumber(filepath.Join(dir, "memory.current"))
			if has && knows {
				pages = min(pages, less(limit, used))
				huge = min(huge, less(limit, used)-pages)
			}
		}
	}
	return pages, huge, ok
}

func readNumber(path string) (uint64, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}
