// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nvshare/nvshare/sched/daemon/timer"
)

// The stock is part of the arena that is made while nobody needs it, so that a client
// which begins to need host memory has it at once. A segment leaves it for one client and
// never comes back: the client may have passed it on. What clients need goes first:
// then nothing is made for the stock, and it is given back where they could not have
// theirs beside it, under --swap-memory or of the host's memory.

const (
	// stockPause is how long nothing is tried after the host was short of memory, and
	// how often it is looked whether it is.
	stockPause = 5 * time.Second
	// stockReserve is left of the host's memory when the stock grows, so that it does
	// not shrink again at once; see hostReserve.
	stockReserve = 2 * hostReserve
	// smallReady of each size but the largest are kept, for what is no multiple of that.
	smallReady = 8
)

// stock is the loop's own. Its segments are made, then ready, then given to a client or,
// leaving, to the kernel; so do those of clients that are no more.
type stock struct {
	making, ready, leaving []*piece
	paused                 bool         // until look
	look                   *timer.Timer // for lookAtStock, if there is anything to look at
	full                   [2]uint64    // target and bytes with which nothing was to be made
}

// piece is a segment of it.
type piece struct {
	node    int
	size    uint64
	segment segment       // once it is ready
	filled  atomic.Uint64 // bytes of it that are taken from the host
	stop    chan struct{} // closed: it is not wanted any more
	gone    chan struct{} // closed: it is with the kernel
}

func sizes(pieces []*piece) (sum uint64) {
	for _, p := range pieces {
		sum += p.size
	}
	return sum
}

// bytes is what clients cannot have beside it.
func (s *stock) bytes() uint64 { return sizes(s.making) + sizes(s.ready) }

func (s *stock) readyBytes() uint64 { return sizes(s.ready) }

// held is what it has taken from the host.
func (s *stock) held() (sum uint64) {
	for _, list := range [][]*piece{s.making, s.ready, s.leaving} {
		for _, p := range list {
			sum += p.filled.Load()
		}
	}
	return sum
}

func without(list []*piece, p *piece) []*piece {
	return slices.DeleteFunc(list, func(other *piece) bool { return other == p })
}

// pick returns the piece that a client with so much is to have: near its GPU, from least
// to most bytes. The first ones are small, so that it has soon pinned one; nil: none.
func (s *stock) pick(node int, has, least, most uint64) (best *piece) {
	ideal := max(has, least, minSegment)
	for _, p := range s.ready {
		if p.node != node || p.size < least || p.size > most {
			continue
		}
		fits := p.size <= ideal
		switch {
		case best == nil:
			best = p
		case fits != (best.size <= ideal):
			if fits {
				best = p
			}
		case fits == (p.size > best.size): // the largest that fits, or the smallest
			best = p
		}
	}
	return best
}

// next returns what is to be made next, if so much is to be there for the GPUs of these
// nodes, at least one; size 0: nothing.
func (s *stock) next(nodes []int, target uint64) (node int, size uint64) {
	has := map[int]uint64{}
	number := map[int]map[uint64]int{}
	for _, p := range slices.Concat(s.making, s.ready) {
		has[p.node] += p.size
		if number[p.node] == nil {
			number[p.node] = map[uint64]int{}
		}
		number[p.node][p.size]++
	}
	node = slices.MinFunc(nodes, func(a, b int) int { return cmp.Compare(has[a], has[b]) })
	return node, readySize(number[node], min(less(target/uint64(len(nodes)), has[node]), less(target, s.bytes())))
}

// readySize returns the size of the next one, where there are so many of each size and
// there is to be so much more: a few of each, the small ones first; then the largest, for
// a shim keeps 256. 0: none.
func readySize(number map[uint64]int, room uint64) uint64 {
	for size := uint64(minSegment); size < maxSegment; size *= 2 {
		if size <= room && number[size] < smallReady {
			return size
		}
	}
	for size := uint64(maxSegment); size >= minSegment; size /= 2 {
		if size <= room {
			return size
		}
	}
	return 0
}

// nodes are those of GPUs whose memory is swapped.
func (d *Daemon) nodes() (all []int) {
	for _, g := range d.order {
		if g.swap != nil && !slices.Contains(all, g.node) {
			all = append(all, g.node)
		}
	}
	return all
}

// giveReady gives a piece to the client of a GPU that needs one most, of those for whom
// there is one; false: there is none.
func (d *Daemon) giveReady(g *gpu, limit, more uint64) bool {
	s := &d.arena.stock
	if len(s.ready) == 0 {
		return false
	}
	pick := func(m *clientMemory, lacks uint64) *piece {
		least := d.leastSegment(m, lacks)
		p := s.pick(g.node, m.arena.bytes(), least, max(least, lacks))
		if p == nil || d.arena.used+p.size > limit {
			return nil
		}
		return p
	}
	m, lacks := d.neediest(g, more, func(m *clientMemory, lacks uint64) bool { return pick(m, lacks) == nil })
	if m == nil {
		return false
	}
	p := pick(m, lacks)
	s.ready = without(s.ready, p)
	d.arena.used += p.size
	d.give(g, m, p.segment)
	return true
}

// restockAgain is for when there is more host memory than there was.
func (d *Daemon) restockAgain() {
	d.arena.stock.paused = false
	d.restock()
}

// restock brings the stock to what it may be, and has it made as far as it lacks.
func (d *Daemon) restock() {
	s := &d.arena.stock
	if d.opts.SwapReady == 0 {
		return
	}
	d.giveBack(less(d.arena.used+s.bytes(), d.opts.SwapMemory), false)
	nodes, target := d.nodes(), min(d.opts.SwapReady, less(d.opts.SwapMemory, d.arena.used))
	for len(nodes) > 0 && !s.paused && d.arena.jobs == 0 && !d.arena.retry.Planned() && len(s.making) < fillers() && len(s.making)+len(s.ready) < d.maxReady {
		are := [2]uint64{target, s.bytes()}
		if are == s.full {
			break
		}
		node, size := s.next(nodes, target)
		if size == 0 {
			s.full = are
			break
		}
		if !d.hostHas(size) {
			s.paused = true
			break
		}
		d.stockUp(node, size)
	}
	if !s.look.Planned() && (s.paused || len(s.making)+len(s.ready) > 0) {
		s.look.Set(now().Add(stockPause))
	}
}

// hostHas says whether the stock may grow so much.
func (d *Daemon) hostHas(size uint64) bool {
	pages, huge, ok := d.arena.memory()
	for _, p := range d.arena.stock.making {
		size += less(p.size, p.filled.Load())
	}
	return !ok || huge >= size || pages >= size+stockReserve
}

// stockUp has a piece made.
func (d *Daemon) stockUp(node int, size uint64) {
	p := &piece{node: node, size: size, stop: make(chan struct{}), gone: make(chan struct{})}
	d.arena.stock.making = append(d.arena.stock.making, p)
	newSegment := d.arena.make
	d.wg.Add(1)
	go func() {
		defer d.wg.Done()
		var seg segment
		var err error
		d.placed(nicely(node, func() {
			seg, err = newSegment(size, func(filled uint64) error {
				p.filled.Store(filled)
				select {
				case <-p.stop:
					return errors.New("it is not wanted any more")
				default:
					return d.goOn(filled)
				}
			})
		}))
		if !d.do(func() { d.finishStock(p, seg, err) }) && seg.fd != nil {
			seg.fd.Close()
		}
	}()
}

func (d *Daemon) finishStock(p *piece, seg segment, err error) {
	s := &d.arena.stock
	p.segment = seg
	if slices.Contains(s.leaving, p) {
		d.letGo([]*piece{p}, func() {})
		return
	}
	s.making = without(s.making, p)
	if err != nil {
		d.log.WithError(err).Debugf("no host memory that is kept ready: trying again in %v", stockPause)
		s.paused = true
	} else {
		p.filled.Store(p.size)
		s.ready = append(s.ready, p)
	}
	d.prepareAll()
}

// makeWay has the stock give way to a segment that is to be made for a client which lacks
// so much. That begins once those are gone that it returns.
func (d *Daemon) makeWay(node int, size, lacks uint64) (wait []*piece) {
	s := &d.arena.stock
	for _, p := range slices.Clone(s.making) {
		if p.node != node || p.size > lacks { // else it is soon given to the client
			d.discard(p)
		}
	}
	d.giveBack(less(d.arena.used+size+s.bytes(), d.opts.SwapMemory), false)
	if len(s.making)+len(s.ready)+len(s.leaving) == 0 {
		return nil
	}
	// All that is being made may be yet to be taken.
	if pages, huge, ok := d.arena.memory(); ok && huge < d.arena.making+size && pages < d.arena.making+size+hostReserve {
		d.giveBack(d.arena.making+size+hostReserve-pages, true)
		return slices.Clone(s.leaving)
	}
	return nil
}

// giveBack gives up so much of the stock, as far as there is any: what is being made
// first. For the host it is about what was taken, and not about huge pages.
func (d *Daemon) giveBack(n uint64, host bool) {
	s := &d.arena.stock
	for n > 0 {
		p := s.leastUse(n, host)
		if p == nil {
			return
		}
		if host {
			n = less(n, p.filled.Load())
		} else {
			n = less(n, p.size)
		}
		d.discard(p)
	}
}

func (s *stock) leastUse(n uint64, host bool) (best *piece) {
	if len(s.making) > 0 {
		return s.making[len(s.making)-1]
	}
	for _, p := range s.ready {
		switch {
		case host && p.segment.huge:
		case best == nil, p.size >= n && (best.size < n || p.size < best.size), best.size < n && p.size > best.size:
			best = p
		}
	}
	return best
}

// discard gives a piece up.
func (d *Daemon) discard(p *piece) {
	s := &d.arena.stock
	close(p.stop)
	if slices.Contains(s.making, p) {
		s.making, s.leaving = without(s.making, p), append(s.leaving, p) // its maker goes on to finishStock
		return
	}
	s.ready, s.leaving = without(s.ready, p), append(s.leaving, p)
	d.letGo([]*piece{p}, func() {})
}

// letGo is beside the loop, because the kernel takes a tenth of a second for 1 GiB.
func (d *Daemon) letGo(pieces []*piece, then func()) {
	d.wg.Add(1)
	go func() {
		defer d.wg.Done()
		for _, p := range pieces {
			if p.segment.fd != nil {
				p.segment.free()
			}
			p.filled.Store(0)
			close(p.gone)
		}
		d.do(func() {
			s := &d.arena.stock
			s.leaving = slices.DeleteFunc(s.leaving, func(p *piece) bool { return slices.Contains(pieces, p) })
			then()
		})
	}()
}

// takeBack is for what a client had that is no more. The stock grows when that is gone.
func (d *Daemon) takeBack(segments []segment) {
	var pieces []*piece
	for _, seg := range segments {
		p := &piece{node: noNode, size: seg.size, segment: seg, gone: make(chan struct{})}
		p.filled.Store(seg.size)
		pieces = append(pieces, p)
	}
	d.arena.stock.leaving = append(d.arena.stock.leaving, pieces...)
	d.letGo(pieces, d.restockAgain)
}

// lookAtStock sees whether the host needs the memory, or has some again.
func (d *Daemon) lookAtStock() {
	s := &d.arena.stock
	s.look.Stop()
	s.paused = false
	if pages, _, ok := d.arena.memory(); ok && pages < hostReserve {
		d.giveBack(hostReserve-pages, true)
		s.paused = true
	}
	d.restock()
}

// close gives all of it back; the loop has ended.
func (s *stock) close() {
	var wg sync.WaitGroup
	for part := range slices.Chunk(s.ready, max(1, (len(s.ready)+maxFillers-1)/maxFillers)) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for _, p := range part {
				p.segment.fd.Close()
			}
		}()
	}
	wg.Wait()
	s.ready = nil
}
