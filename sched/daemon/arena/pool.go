// SPDX-License-Identifier: Apache-2.0

package arena

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/timer"
)

const (
	// unit is what segments are a multiple of, of whatever pages, bytes.
	unit = 2 << 20
	// MinSegment and MaxSegment bound the size of a segment, bytes: few descriptors
	// and registrations, and no long pause before the first of them is ready. That
	// one is small, and each next one as large as all before it. What a client needs
	// is a multiple of MinSegment.
	MinSegment = 64 << 20
	MaxSegment = 1 << 30
	// tailSegment: the last ones are that small, so that all fillers end together.
	tailSegment = 256 << 20
	// retryPause is the pause after a segment could not be made.
	retryPause = 5 * time.Second
)

// Loop is the goroutine that uses a Pool.
type Loop interface {
	// Do has the loop run f later; false: the loop has ended.
	Do(f func()) bool
	// Go runs f beside the loop. Whoever ends the loop waits for f.
	Go(f func())
	// Ended is closed when the loop has ended.
	Ended() <-chan struct{}
	Now() base.Time
}

// Config says what a Pool may do.
type Config struct {
	Limit uint64 // bytes for clients and stock together
	Ready uint64 // bytes of the stock
	// Leave is what the stock leaves to everybody else on the host, bytes: nobody needs the
	// stock yet. What clients need leaves Floor.
	Leave, Floor uint64
	// MaxReady and MaxHeld are how many descriptors the stock and the segments of
	// clients may take here.
	MaxReady, MaxHeld int
	// Spare reports whether clients could have so much more than they need now:
	// nobody is refused anything for it.
	Spare  func(more uint64) bool
	Loop   Loop
	Timers *timer.List
	Host   Host
	Log    *logrus.Entry
}

// Owner is a client of one GPU, as far as the Pool needs it.
type Owner interface {
	// Needs says how much the client needs, bytes in all.
	Needs() uint64
	// Changed is called when Bytes of the Client has changed.
	Changed()
	// Send hands a segment to the client; false: that is not possible now. number
	// tells the client's segments apart. The descriptor stays the Pool's.
	Send(number uint64, s Segment) bool
}

// Pool is the host memory of a node.
type Pool struct {
	Config
	gpus      []*GPU
	used      uint64        // bytes that clients were given and that are not in files, or that are being made for them
	filed     uint64        // bytes that clients were given and that are in files
	untaken   atomic.Uint64 // of these, what is being made and is not taken from the host yet
	held      int           // segments of clients of which a descriptor is here as well
	fillers   int           // how many segments are made at a time
	jobs      int           // segments that are being made for clients
	short     bool          // the host has not what a client needs
	err       error         // why a client does not get what it needs
	retry     *timer.Timer
	stock     stock
	preparing bool
	unplaced  sync.Once // it was said that memory is not taken of a GPU's node
}

// GPU is where clients are near to a NUMA node.
type GPU struct {
	pool    *Pool
	node    int
	clients []*Client
	due     bool // for Prepare
}

// Client is a client's part of the Pool, for one GPU.
type Client struct {
	gpu           *GPU
	owner         Owner
	given, making uint64 // bytes
	filed         uint64 // of given, what is in a file and takes no host memory
	next          uint64 // number of the next segment
	segments      int    // that it has
	unsent, sent  []Segment
	dropped       bool
}

// Segment is a part of host memory.
type Segment struct {
	File *os.File
	Size uint64 // bytes
	Huge bool   // of huge pages
}

// New returns a Pool that has nothing yet.
func New(c Config) *Pool {
	a := &Pool{Config: c, fillers: fillers()}
	a.retry = c.Timers.New(a.tryAgain)
	a.stock.look = c.Timers.New(a.lookAtStock)
	return a
}

// AddGPU adds a GPU that is near to a NUMA node, or to NoNode.
func (a *Pool) AddGPU(node int) *GPU {
	g := &GPU{pool: a, node: node}
	a.gpus = append(a.gpus, g)
	return g
}

// AddClient adds a client that has nothing yet.
func (g *GPU) AddClient(o Owner) *Client {
	c := &Client{gpu: g, owner: o}
	g.clients = append(g.clients, c)
	return c
}

// Bytes is what the client has, or is soon to have.
func (c *Client) Bytes() uint64 { return c.given + c.making }

// Given is what the client has, bytes.
func (c *Client) Given() uint64 { return c.given }

// Filed is what of that is in a file, and takes no host memory.
func (c *Client) Filed() uint64 { return c.filed }

// Settled reports whether the client has all that was made for it, and nothing is being
// made.
func (c *Client) Settled() bool { return c.making == 0 && len(c.unsent) == 0 }

// SetFiled says whether what the client has now is in a file, and takes no host memory. It
// makes way for what comes back.
func (c *Client) SetFiled(on bool) {
	a := c.gpu.pool
	was := c.filed
	a.filed, a.used, c.filed = a.filed-was, a.used+was, 0
	if on {
		c.filed = c.given
		a.filed, a.used = a.filed+c.filed, a.used-c.filed
		a.restockAgain()
		return
	}
	a.giveBack(less(a.used+a.stock.bytes(), a.Limit), false)
	if pages, _, ok := a.Host.Free(); ok {
		a.giveBack(less(was+a.left(), pages), true)
	}
}

// Used is what clients have, or are soon to have, of host memory, bytes.
func (a *Pool) Used() uint64 { return a.used }

// Filed is what clients have in files instead, bytes.
func (a *Pool) Filed() uint64 { return a.filed }

// Err says why the host does not give what clients need; nil: it does.
func (a *Pool) Err() error { return a.err }

// Ready is what the stock has ready, bytes.
func (a *Pool) Ready() uint64 { return sizes(a.stock.ready) }

// Held is what the stock has taken from the host, bytes. Clients can have it.
func (a *Pool) Held() uint64 { return a.stock.held() }

// less is a-b, or 0.
func less(a, b uint64) uint64 { return a - min(a, b) }

// Prepare has segments made for those clients of the GPU that need more, then for
// the stock. An Owner may call it.
func (g *GPU) Prepare() {
	g.due = true
	g.pool.prepare()
}

// Prepare is GPU.Prepare for all GPUs.
func (a *Pool) Prepare() {
	a.short = false
	for _, g := range a.gpus {
		g.due = true
	}
	a.prepare()
}

func (a *Pool) prepare() {
	if a.preparing {
		return // who prepares sees what is due
	}
	a.preparing = true
	defer func() { a.preparing = false }()
	for due := true; due; {
		due = false
		for _, g := range a.gpus {
			if g.due {
				g.due, due = false, true
				g.give()
			}
		}
	}
	if a.short && a.jobs == 0 && !a.retry.Planned() {
		pages, _, _ := a.Host.Free()
		a.fail(hostLeft(pages))
	}
	a.restock()
}

// give gives what is ready and has as many made as there are fillers, for
// what clients need. All that is given stays below the limit, and leaves the Floor to the host:
// where that has less than a client needs, what there is is made.
func (g *GPU) give() {
	a := g.pool
	for g.giveReady() {
	}
	for a.jobs < a.fillers && !a.retry.Planned() && a.used < a.Limit {
		hostRoom := sync.OnceValue(a.hostRoom) // only if somebody lacks anything: the kernel is asked
		c, lacks := g.neediest(func(c *Client, lacks uint64) bool {
			tooMuch := max(c.leastSegment(lacks), min(lacks, MinSegment)) > hostRoom()
			a.short = a.short || tooMuch
			return tooMuch
		})
		if c == nil {
			return
		}
		size := max(nextSegment(c.Bytes(), lacks, a.fillers), c.leastSegment(lacks))
		if room := hostRoom(); size > room {
			size = room / MinSegment * MinSegment
		}
		size = min(size, a.Limit-a.used) / unit * unit
		if size == 0 {
			return
		}
		c.makeSegment(size, lacks)
	}
}

// hostRoom is how large a segment the host has memory for, bytes, where the stock makes way. What a client was promised
// did leave the Floor to the host; since then somebody else may have taken it.
func (a *Pool) hostRoom() uint64 {
	pages, huge, ok := a.Host.Free()
	if !ok {
		return a.Limit
	}
	taking := a.untaken.Load()
	return max(less(pages+a.stock.pages(), a.Floor+taking), less(huge, taking))
}

// neediest returns the client with the smallest part of what it needs, and what it
// lacks; nil: nobody lacks anything. skip names clients to pass over; it may be nil.
func (g *GPU) neediest(skip func(c *Client, lacks uint64) bool) (least *Client, lacks uint64) {
	part := 1.0
	for _, c := range g.clients {
		need, have := c.owner.Needs(), c.Bytes()
		if need < have+unit || skip != nil && skip(c, need-have) {
			continue
		}
		if got := float64(have) / float64(need); least == nil || got < part {
			least, lacks, part = c, need-have, got
		}
	}
	return least, lacks
}

// nextSegment returns the size of the next segment of a client that has so much, and
// lacks so much.
func nextSegment(has, lacks uint64, fillers int) uint64 {
	size := min(max(has, MinSegment), MaxSegment, max(lacks/uint64(fillers), tailSegment))
	return min(size/MinSegment*MinSegment, lacks)
}

// A shim keeps 256 segments for a GPU. From fewSegments and someSegments on the next
// ones are larger, so that a client which grows for long, by little at a time, does
// not reach that number.
const (
	fewSegments  = 32
	someSegments = 64
)

// leastSegment returns how large a client's next one has to be. That may be more
// than it lacks, where nobody is refused anything for it.
func (c *Client) leastSegment(lacks uint64) uint64 {
	least := uint64(MaxSegment)
	switch {
	case c.segments < fewSegments:
		return 0
	case c.segments < someSegments:
		least = tailSegment
	}
	if least > lacks && !c.gpu.pool.Spare(least-lacks) {
		return lacks
	}
	return least
}

func (c *Client) makeSegment(size, lacks uint64) {
	a, node := c.gpu.pool, c.gpu.node
	wait := a.makeWay(node, size, lacks)
	c.making += size
	a.untaken.Add(size)
	a.used += size
	a.jobs++
	c.owner.Changed()
	a.Loop.Go(func() {
		for _, w := range wait {
			select {
			case <-w.gone:
			case <-a.Loop.Ended():
			}
		}
		var seg Segment
		var err error
		taken := uint64(0)
		take := func(filled uint64) {
			a.untaken.Add(taken - filled)
			taken = filled
		}
		a.placed(nicely(node, func() {
			seg, err = a.Host.Make(size, func(filled uint64) error {
				take(filled)
				return a.above(size - filled)
			})
		}))
		take(size)
		if !a.Loop.Do(func() { c.finishSegment(size, seg, err) }) && seg.File != nil {
			seg.File.Close()
		}
	})
}

// tryAgain is for a while after the host did not have what clients need. If nobody needs it any more,
// whether it can be had is not known: who needs the next segment finds out.
func (a *Pool) tryAgain() {
	a.Prepare()
	if a.jobs == 0 && !a.short {
		a.err = nil
	}
}

// fail is for when the host does not give what clients need. It is tried again after a while.
func (a *Pool) fail(err error) {
	if a.err == nil {
		a.Log.WithError(err).Errorf("no host memory for what is swapped out: trying again every %v", retryPause)
	}
	a.err = err
	a.retry.Set(a.Loop.Now().Add(retryPause))
}

// above says whether so much more can be filled, and leaves the Floor to the host: somebody else may have taken
// what there was when the segment was begun.
func (a *Pool) above(more uint64) error {
	if pages, huge, ok := a.Host.Free(); ok && pages < a.Floor+more && huge < more {
		return hostLeft(pages)
	}
	return a.goOn()
}

func hostLeft(pages uint64) error { return fmt.Errorf("the host has %d MiB left", pages>>20) }

// goOn says whether memory is still to be filled.
func (a *Pool) goOn() error {
	select {
	case <-a.Loop.Ended():
		return errors.New("the scheduler ends")
	default:
		return nil
	}
}

// placed takes note of whether memory is taken of the GPU's node.
func (a *Pool) placed(err error) {
	if err != nil {
		a.unplaced.Do(func() {
			a.Log.WithError(err).Debug("host memory is not taken from the GPU's NUMA node first: CAP_SYS_NICE may be missing")
		})
	}
}

func (c *Client) finishSegment(size uint64, seg Segment, err error) {
	a := c.gpu.pool
	c.making -= size
	a.jobs--
	if c.dropped || err != nil {
		if seg.File != nil {
			seg.File.Close()
		}
		a.used -= size
		if !c.dropped {
			c.owner.Changed()
		}
	}
	if err != nil {
		a.fail(err)
		a.giveBack(size, true)
		return
	}
	if !c.dropped {
		c.give(seg)
	}
	a.Prepare() // clients of all GPUs may have waited for a filler
	if a.err != nil && !a.short && !a.retry.Planned() {
		a.Log.Info("host memory for what is swapped out can be had again")
		a.err = nil
	}
}

// give makes a segment a client's.
func (c *Client) give(seg Segment) {
	c.given += seg.Size
	c.segments++
	c.unsent = append(c.unsent, seg)
	c.owner.Changed()
	c.Flush()
}

// Flush sends the segments that could not be sent before.
func (c *Client) Flush() {
	a := c.gpu.pool
	for len(c.unsent) > 0 {
		seg := c.unsent[0]
		if !c.owner.Send(c.next+1, seg) {
			return
		}
		c.unsent = c.unsent[1:]
		c.next++
		if a.held < a.MaxHeld {
			a.held++
			c.sent = append(c.sent, seg)
		} else {
			seg.File.Close() // descriptors are short; the client has its own
		}
	}
}

// Drop takes all from a client that has ended. That goes as the stock's does: other
// clients may count on it, and wait for it where the host is short of memory.
func (c *Client) Drop() {
	a := c.gpu.pool
	c.dropped = true
	a.used -= c.given - c.filed // what is being made follows
	a.filed -= c.filed
	c.given, c.filed = 0, 0
	a.held -= len(c.sent)
	a.takeBack(append(c.sent, c.unsent...))
	c.sent, c.unsent = nil, nil
	c.gpu.clients = remove(c.gpu.clients, c)
}

// Move has a client, with all that it has, be one of another GPU of the Pool.
func (c *Client) Move(to *GPU, o Owner) {
	c.gpu.clients = remove(c.gpu.clients, c)
	c.gpu, c.owner = to, o
	to.clients = append(to.clients, c)
}

// Had makes n bytes what a client got from an earlier scheduler.
func (c *Client) Had(n uint64) {
	c.gpu.pool.used += n - c.given
	c.given = n
	c.next = 1 << 32 // above those of the earlier scheduler
	c.segments = int(n / MinSegment)
	c.owner.Changed()
}
