// SPDX-License-Identifier: Apache-2.0

package arena

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
	// not shrink again at once; see HostReserve.
	stockReserve = 2 * HostReserve
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
	segment Segment       // once it is ready
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

// held is what it has taken from the host.
func (s *stock) held() (sum uint64) {
	for _, list := range [][]*piece{s.making, s.ready, s.leaving} {
		for _, p := range list {
			sum += p.filled.Load()
		}
	}
	return sum
}

// remove removes an element of a list.
func remove[T comparable](list []T, one T) []T {
	return slices.DeleteFunc(list, func(other T) bool { return other == one })
}

// pick returns the piece that a client with so much is to have: near its GPU, from least
// to most bytes. The first ones are small, so that it has soon pinned one; nil: none.
func (s *stock) pick(node int, has, least, most uint64) (best *piece) {
	ideal := max(has, least, MinSegment)
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
	for size := uint64(MinSegment); size < MaxSegment; size *= 2 {
		if size <= room && number[size] < smallReady {
			return size
		}
	}
	for size := uint64(MaxSegment); size >= MinSegment; size /= 2 {
		if size <= room {
			return size
		}
	}
	return 0
}

// nodes are those of GPUs.
func (a *Pool) nodes() (all []int) {
	for _, g := range a.gpus {
		if !slices.Contains(all, g.node) {
			all = append(all, g.node)
		}
	}
	return all
}

// giveReady gives a piece to the client of a GPU that needs one most, of those for whom
// there is one; false: there is none.
func (g *GPU) giveReady(limit uint64, soon bool) bool {
	a := g.pool
	s := &a.stock
	if len(s.ready) == 0 {
		return false
	}
	pick := func(c *Client, lacks uint64) *piece {
		least := c.leastSegment(lacks)
		p := s.pick(g.node, c.Bytes(), least, max(least, lacks))
		if p == nil || a.used+p.size > limit {
			return nil
		}
		return p
	}
	c, lacks := g.neediest(soon, func(c *Client, lacks uint64) bool { return pick(c, lacks) == nil })
	if c == nil {
		return false
	}
	p := pick(c, lacks)
	s.ready = remove(s.ready, p)
	a.used += p.size
	c.give(p.segment)
	return true
}

// restockAgain is for when there is more host memory than there was.
func (a *Pool) restockAgain() {
	a.stock.paused = false
	a.restock()
}

// restock brings the stock to what it may be, and has it made as far as it lacks.
func (a *Pool) restock() {
	s := &a.stock
	if a.Config.Ready == 0 {
		return
	}
	a.giveBack(less(a.used+s.bytes(), a.Limit), false)
	nodes, target := a.nodes(), min(a.Config.Ready, less(a.Limit, a.used))
	for len(nodes) > 0 && !s.paused && a.jobs == 0 && !a.retry.Planned() && len(s.making) < fillers() && len(s.making)+len(s.ready) < a.MaxReady {
		are := [2]uint64{target, s.bytes()}
		if are == s.full {
			break
		}
		node, size := s.next(nodes, target)
		if size == 0 {
			s.full = are
			break
		}
		if !a.hostHas(size) {
			s.paused = true
			break
		}
		a.stockUp(node, size)
	}
	if !s.look.Planned() && (s.paused || len(s.making)+len(s.ready) > 0) {
		s.look.Set(a.Loop.Now().Add(stockPause))
	}
}

// hostHas says whether the stock may grow so much.
func (a *Pool) hostHas(size uint64) bool {
	pages, huge, ok := a.Host.Free()
	for _, p := range a.stock.making {
		size += less(p.size, p.filled.Load())
	}
	return !ok || huge >= size || pages >= size+stockReserve
}

// stockUp has a piece made.
func (a *Pool) stockUp(node int, size uint64) {
	p := &piece{node: node, size: size, stop: make(chan struct{}), gone: make(chan struct{})}
	a.stock.making = append(a.stock.making, p)
	a.Loop.Go(func() {
		var seg Segment
		var err error
		a.placed(nicely(node, func() {
			seg, err = a.Host.Make(size, func(filled uint64) error {
				p.filled.Store(filled)
				select {
				case <-p.stop:
					return errors.New("it is not wanted any more")
				default:
					return a.goOn(filled)
				}
			})
		}))
		if !a.Loop.Do(func() { a.finishStock(p, seg, err) }) && seg.File != nil {
			seg.File.Close()
		}
	})
}

func (a *Pool) finishStock(p *piece, seg Segment, err error) {
	s := &a.stock
	p.segment = seg
	if slices.Contains(s.leaving, p) {
		a.letGo([]*piece{p}, func() {})
		return
	}
	s.making = remove(s.making, p)
	if err != nil {
		a.Log.WithError(err).Debugf("no host memory that is kept ready: trying again in %v", stockPause)
		s.paused = true
	} else {
		p.filled.Store(p.size)
		s.ready = append(s.ready, p)
	}
	a.Prepare()
}

// makeWay has the stock give way to a segment that is to be made for a client which lacks
// so much. That begins once those are gone that it returns.
func (a *Pool) makeWay(node int, size, lacks uint64) (wait []*piece) {
	s := &a.stock
	for _, p := range slices.Clone(s.making) {
		if p.node != node || p.size > lacks { // else it is soon given to the client
			a.discard(p)
		}
	}
	a.giveBack(less(a.used+size+s.bytes(), a.Limit), false)
	if len(s.making)+len(s.ready)+len(s.leaving) == 0 {
		return nil
	}
	// All that is being made may be yet to be taken.
	if pages, huge, ok := a.Host.Free(); ok && huge < a.making+size && pages < a.making+size+HostReserve {
		a.giveBack(a.making+size+HostReserve-pages, true)
		return slices.Clone(s.leaving)
	}
	return nil
}

// giveBack gives up so much of the stock, as far as there is any: what is being made
// first. For the host it is about what was taken, and not about huge pages.
func (a *Pool) giveBack(n uint64, host bool) {
	s := &a.stock
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
		a.discard(p)
	}
}

func (s *stock) leastUse(n uint64, host bool) (best *piece) {
	if len(s.making) > 0 {
		return s.making[len(s.making)-1]
	}
	for _, p := range s.ready {
		switch {
		case host && p.segment.Huge:
		case best == nil, p.size >= n && (best.size < n || p.size < best.size), best.size < n && p.size > best.size:
			best = p
		}
	}
	return best
}

// discard gives a piece up.
func (a *Pool) discard(p *piece) {
	s := &a.stock
	close(p.stop)
	if slices.Contains(s.making, p) {
		s.making, s.leaving = remove(s.making, p), append(s.leaving, p) // its maker goes on to finishStock
		return
	}
	s.ready, s.leaving = remove(s.ready, p), append(s.leaving, p)
	a.letGo([]*piece{p}, func() {})
}

// letGo is beside the loop, because the kernel takes a tenth of a second for 1 GiB.
func (a *Pool) letGo(pieces []*piece, then func()) {
	a.Loop.Go(func() {
		for _, p := range pieces {
			if p.segment.File != nil {
				p.segment.free()
			}
			p.filled.Store(0)
			close(p.gone)
		}
		a.Loop.Do(func() {
			s := &a.stock
			s.leaving = slices.DeleteFunc(s.leaving, func(p *piece) bool { return slices.Contains(pieces, p) })
			then()
		})
	})
}

// takeBack is for what a client had that is no more. The stock grows when that is gone.
func (a *Pool) takeBack(segments []Segment) {
	var pieces []*piece
	for _, seg := range segments {
		p := &piece{node: NoNode, size: seg.Size, segment: seg, gone: make(chan struct{})}
		p.filled.Store(seg.Size)
		pieces = append(pieces, p)
	}
	a.stock.leaving = append(a.stock.leaving, pieces...)
	a.letGo(pieces, a.restockAgain)
}

// lookAtStock sees whether the host needs the memory, or has some again.
func (a *Pool) lookAtStock() {
	s := &a.stock
	s.look.Stop()
	s.paused = false
	if pages, _, ok := a.Host.Free(); ok && pages < HostReserve {
		a.giveBack(HostReserve-pages, true)
		s.paused = true
	}
	a.restock()
}

// Close gives the stock back; the loop has ended.
func (a *Pool) Close() {
	s := &a.stock
	var wg sync.WaitGroup
	for part := range slices.Chunk(s.ready, max(1, (len(s.ready)+maxFillers-1)/maxFillers)) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for _, p := range part {
				p.segment.File.Close()
			}
		}()
	}
	wg.Wait()
	s.ready = nil
}
