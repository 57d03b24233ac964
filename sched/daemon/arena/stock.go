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

// The stock is memory that is made while nobody needs it, so that a client which begins
// to need host memory has it at once. A segment leaves the stock for one client and never
// comes back: the client may have passed a descriptor on. What clients need comes first.
// While they lack anything, nothing is made for the stock. The stock is given back where
// they could not have theirs beside it, by the limit or by the host's memory.

const (
	// stockPause is how long nothing is made after the host was short of memory, and the
	// time between two looks at whether the host is.
	stockPause = 5 * time.Second
	// stockReserve is the least that is left of the host's memory when the stock grows,
	// bytes. See Config.Leave.
	stockReserve = 2 * HostReserve
	// smallReady is how many segments of each size but the largest are kept.
	smallReady = 8
)

// stock has segments that are made, then ready, and then given to a client or, leaving,
// to the kernel. Segments of clients that have ended leave in the same way.
type stock struct {
	making, ready, leaving []*piece
	paused                 bool         // until look
	look                   *timer.Timer // for lookAtStock, if there is anything to look at
	full                   [2]uint64    // target and bytes for which next returned nothing
}

// piece is a segment of the stock.
type piece struct {
	node    int
	size    uint64
	segment Segment       // once it is ready
	filled  atomic.Uint64 // bytes that are taken from the host
	stop    chan struct{} // closed: the piece is not wanted any more
	gone    chan struct{} // closed: the memory is with the kernel
}

func sizes(pieces []*piece) (sum uint64) {
	for _, p := range pieces {
		sum += p.size
	}
	return sum
}

// bytes is what clients cannot have beside the stock.
func (s *stock) bytes() uint64 { return sizes(s.making) + sizes(s.ready) }

// held is what the stock has taken from the host, bytes.
func (s *stock) held() (sum uint64) {
	for _, list := range [][]*piece{s.making, s.ready, s.leaving} {
		for _, p := range list {
			sum += p.filled.Load()
		}
	}
	return sum
}

// pages is what the host has more of common pages without the stock, bytes.
func (s *stock) pages() (sum uint64) {
	for _, p := range slices.Concat(s.making, s.ready, s.leaving) {
		if !p.segment.Huge {
			sum += p.filled.Load()
		}
	}
	return sum
}

// remove removes an element of a list.
func remove[T comparable](list []T, one T) []T {
	return slices.DeleteFunc(list, func(other T) bool { return other == one })
}

// pick returns the piece that is next for a client which has so many bytes: near the
// client's GPU, of least to most bytes; nil: none. The first ones are small, so that the
// client has soon pinned one.
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

// next returns what to make next for a stock of target bytes in all, for the GPUs of
// these nodes (at least one); size 0: nothing.
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

// readySize returns the size of the next segment, where there are so many of each size
// and room for so many bytes: a few of each size, the small ones first; then the largest,
// because a shim keeps 256. 0: none.
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

// nodes are the NUMA nodes of all GPUs, each once.
func (a *Pool) nodes() (all []int) {
	for _, g := range a.gpus {
		if !slices.Contains(all, g.node) {
			all = append(all, g.node)
		}
	}
	return all
}

// giveReady gives a piece to the client that needs memory most, of those for whom there
// is a piece; false: there is none.
func (g *GPU) giveReady() bool {
	a := g.pool
	s := &a.stock
	if len(s.ready) == 0 {
		return false
	}
	pick := func(c *Client, lacks uint64) *piece {
		least := c.leastSegment(lacks)
		p := s.pick(g.node, c.Bytes(), least, max(least, lacks))
		if p == nil || a.used+p.size > a.Limit {
			return nil
		}
		return p
	}
	c, lacks := g.neediest(func(c *Client, lacks uint64) bool { return pick(c, lacks) == nil })
	if c == nil {
		return false
	}
	p := pick(c, lacks)
	s.ready = remove(s.ready, p)
	a.used += p.size
	c.give(p.segment)
	return true
}

// restockAgain is restock when there is more host memory than before.
func (a *Pool) restockAgain() {
	a.stock.paused = false
	a.restock()
}

// restock gives back what the stock may not have, and has made what it lacks.
func (a *Pool) restock() {
	s := &a.stock
	if a.Config.Ready == 0 {
		return
	}
	a.giveBack(less(a.used+s.bytes(), a.Limit), false)
	nodes, target := a.nodes(), min(a.Config.Ready, less(a.Limit, a.used))
	for len(nodes) > 0 && !s.paused && a.jobs == 0 && !a.retry.Planned() && len(s.making) < a.fillers && len(s.making)+len(s.ready) < a.MaxReady {
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

// leave is what the stock leaves to the host when it grows, bytes. It shrinks when the host
// has less than half of that.
func (a *Pool) leave() uint64 { return max(a.Leave, stockReserve) }

// hostHas reports whether the stock may grow by so many bytes.
func (a *Pool) hostHas(size uint64) bool {
	pages, huge, ok := a.Host.Free()
	for _, p := range a.stock.making {
		size += less(p.size, p.filled.Load())
	}
	return !ok || huge >= size || pages >= size+a.leave()
}

// stockUp has a piece made, beside the loop.
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
					return errors.New("the segment is not wanted any more")
				default:
					return a.goOn()
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

// left is what is to be left of the host's memory where the stock has some that clients need.
func (a *Pool) left() uint64 { return max(a.Floor, HostReserve) }

// makeWay gives back what keeps a segment from being made for a client that lacks so
// much. The maker waits for the pieces that makeWay returns to be gone.
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
	takes := a.untaken.Load() + size
	leaves := takes + a.left()
	if pages, huge, ok := a.Host.Free(); ok && huge < takes && pages < leaves {
		a.giveBack(leaves-pages, true)
		return slices.Clone(s.leaving)
	}
	return nil
}

// giveBack gives up n bytes of the stock, or all of it: what is being made first. For the
// host only what was taken from the host counts, and huge pages are kept.
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

// leastUse returns the piece to give up next, if n bytes are to be given up; nil: none.
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

// discard gives a piece to the kernel.
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

// letGo gives pieces to the kernel beside the loop, because the kernel takes a tenth of a
// second for 1 GiB. Then the loop runs then.
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

// takeBack gives the segments of a client that has ended to the kernel. The stock grows
// when that has the memory.
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

// lookAtStock gives memory back if the host needs it, and makes some if the host has it
// again.
func (a *Pool) lookAtStock() {
	s := &a.stock
	s.look.Stop()
	s.paused = false
	if pages, _, ok := a.Host.Free(); ok && pages < a.leave()/2 {
		a.giveBack(a.leave()/2-pages, true)
		s.paused = true
	}
	a.restock()
}

// Close gives the stock back; the loop has ended.
func (a *Pool) Close() {
	s := &a.stock
	var wg sync.WaitGroup
	for part := range slices.Chunk(s.ready, max(1, (len(s.ready)+maxFillers-1)/maxFillers)) {
		wg.Go(func() {
			for _, p := range part {
				p.segment.File.Close()
			}
		})
	}
	wg.Wait()
	s.ready = nil
}
