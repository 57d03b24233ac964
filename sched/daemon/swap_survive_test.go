// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// memory is that of a GPU, as its driver keeps it.
type testMemory struct {
	mu      sync.Mutex
	free    uint64
	refused int // requests for which there was none
	rounds  int // times that a client had all of its own there
}

func (m *testMemory) take(n uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > m.free {
		m.refused++
		return false
	}
	m.free -= n
	return true
}

func (m *testMemory) give(n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.free += n
}

func (m *testMemory) ready() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rounds++
}

func (m *testMemory) counts() (refused, rounds int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.refused, m.rounds
}

// mover is a client that moves memory as the shim does, and lives through the
// scheduler's ends. It takes turns for ever.
type mover struct {
	honest
	memory *testMemory
	has    wire.Moved
	total  uint64
	told   bool // that its gate is open
}

const movedAtOnce = 4 * mib

func newMover(t *testing.T, dir string, i int, m *testMemory, total uint64) *mover {
	c := &mover{memory: m, total: total, honest: honest{name: fmt.Sprintf("mover %d", i), proc: newProc(t, dir, 0), rnd: rand.New(rand.NewPCG(uint64(i), 2)),
		stop: make(chan struct{}), ended: make(chan struct{})}}
	c.has.Away = total
	go c.run()
	return c
}

func (c *mover) run() {
	defer close(c.ended)
	for {
		select {
		case <-c.stop:
			c.hangUp()
			return
		default:
		}
		var err error
		if c.conn == nil {
			if err = c.attach(); err != nil {
				time.Sleep(500 * time.Microsecond)
			}
		} else {
			err = c.turn()
		}
		if err != nil {
			c.hangUp()
		}
	}
}

func (c *mover) attach() (err error) {
	if c.conn, err = c.proc.tryConnect(); err != nil {
		return err
	}
	reg := registerFrame()
	reg.Code = wire.RegisterSwap
	if c.registered {
		reg.Code |= wire.RegisterReconnect
	}
	if err := c.send(reg); err != nil {
		return err
	}
	_, fd, err := c.await(wire.TypeWelcome)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if c.mem != nil {
		unix.Munmap(c.mem)
	}
	if c.mem, err = unix.Mmap(fd, 0, wire.PageSize, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		return err
	}
	if c.page, err = wire.OpenPage(c.mem); err != nil {
		return err
	}
	if err := c.send(wire.Frame{Type: wire.TypeAttach, Epoch: c.epoch, Attach: wire.Attach{UUID: uuidOf(gpuA)}}); err != nil {
		return err
	}
	if _, _, err = c.await(wire.TypeAttached); err != nil {
		return err
	}
	c.requested = false
	code := uint32(0)
	if c.registered {
		code = wire.ReserveForce
	}
	if err := c.send(wire.Frame{Type: wire.TypeReserve, Code: code, Reserve: wire.Reserve{Total: c.total, Least: c.total, Serial: 1}}); err != nil {
		return err
	}
	answer, _, err := c.await(wire.TypeReserved)
	if err == nil && answer.Code != wire.OK {
		err = fmt.Errorf("refused: code %d", answer.Code)
	}
	if err != nil {
		return err
	}
	c.registered = true
	if err := c.report(0); err != nil {
		return err
	}
	if c.epoch != 0 && c.page.Word(0) != uint32(c.epoch) {
		return c.release()
	}
	return nil
}

func (c *mover) report(code uint32) error {
	return c.send(wire.Frame{Type: wire.TypeMoved, Code: code, Epoch: c.epoch, Moved: c.has})
}

func (c *mover) release() error {
	err := c.send(wire.Frame{Type: wire.TypeRelease, Epoch: c.epoch, Code: wire.ReleaseRevoked})
	c.epoch, c.told, c.requested = 0, false, false
	return err
}

// turn does the next thing.
func (c *mover) turn() error {
	if c.epoch == 0 && !c.requested {
		c.requested = true
		if err := c.send(wire.Frame{Type: wire.TypeRequest}); err != nil {
			return err
		}
	}
	f, fd, ok, err := c.receive(time.Millisecond)
	if fd >= 0 {
		unix.Close(fd)
	}
	if err != nil {
		return err
	}
	if ok {
		switch f.Type {
		case wire.TypeArena:
			c.has.Arena += f.Arena.Size
		case wire.TypeGrant:
			c.epoch = f.Epoch
		case wire.TypeRevoke:
			if f.Epoch == c.epoch {
				return c.release()
			}
			return c.send(wire.Frame{Type: wire.TypeRelease, Epoch: f.Epoch, Code: wire.ReleaseRevoked})
		case wire.TypeRoom:
			if c.epoch == 0 {
				return c.out()
			}
		}
	}
	switch {
	case c.epoch == 0:
		return nil
	case c.has.Away > 0:
		return c.in()
	case !c.told:
		c.told = true
		c.memory.ready()
		return c.report(wire.MovedReady)
	}
	return nil
}

func (c *mover) out() error {
	for room := c.page.Room(0); c.has.Resident > room; room = c.page.Room(0) {
		n := min(movedAtOnce, c.has.Resident)
		c.has.Resident -= n
		c.has.Away += n
		c.has.Out += n
		c.memory.give(n)
		if err := c.report(0); err != nil {
			return err
		}
	}
	return c.report(0)
}

func (c *mover) in() error {
	n := min(movedAtOnce, c.has.Away)
	if c.has.Resident+n > c.page.Room(0) {
		return nil
	}
	if !c.memory.take(n) {
		return c.report(wire.MovedStuck | wire.MovedNoMemory)
	}
	c.has.Resident += n
	c.has.Away -= n
	c.has.In += n
	return c.report(0)
}

var swapKillPoints = []node.Failpoint{
	node.AtMoved, node.BeforeRoom, node.InRoom, node.AfterRoom, node.BeforeArena, node.AfterArena, node.AtDecided, node.Before("grant"), node.InGrant, node.After("grant"),
	node.After("revoke"), node.After("released"), node.BeforeReserved, node.AfterReserved, node.AfterAttached, node.AfterWelcome, node.Before("adopt"),
}

// A scheduler that is killed at any place of a swap, with another one to follow:
// everybody gets all of his memory onto the GPU again and again.
func TestSwapKilledAnywhere(t *testing.T) {
	const capacity, each = 64 * mib, 40 * mib
	dir := t.TempDir()
	m := &testMemory{free: capacity}
	gpu := gpuA
	gpu.MemoryBytes = capacity
	o := &ordeal{t: t, dir: dir, reached: map[node.Failpoint]int{}}
	run := func(failpoint func(*Daemon)) (*Daemon, chan struct{}) {
		d := o.newDaemon(func(opts *Options) {
			opts.Quantum, opts.Grace = sched.MinQuantum, 10*time.Second
			opts.SwapMemory, opts.SwapReady, opts.SwapShare = gib, 64*mib, 0
			opts.List = func(context.Context) ([]node.Found, error) { return []node.Found{gpu}, nil }
		})
		failpoint(d)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = d.Run(context.Background())
		}()
		return d, done
	}
	d, done := run(func(*Daemon) {})
	var movers []*mover
	for i := range 3 {
		movers = append(movers, newMover(t, dir, i, m, each))
	}
	defer func() {
		for _, c := range movers {
			close(c.stop)
			<-c.ended
		}
	}()
	goOn := func(d *Daemon, what any, n int) {
		t.Helper()
		_, before := m.counts()
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			if _, now := m.counts(); now >= before+n {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%v: turns do not go on: %v", what, statusOf(d))
			}
		}
	}
	goOn(d, "at first", 6)
	if refused, _ := m.counts(); refused != 0 {
		t.Errorf("room was promised %d times that there was not", refused)
	}
	d.Do(d.abandon)
	<-done
	for seed := range 4 * len(swapKillPoints) {
		point := swapKillPoints[seed%len(swapKillPoints)]
		skip := rand.New(rand.NewPCG(uint64(seed), 3)).IntN(6)
		began := time.Now()
		d, done := run(func(d *Daemon) {
			d.Failpoint = func(p node.Failpoint) {
				if p == point {
					skip--
				}
				if p == point && skip < 0 {
					o.reached[p]++
					d.abandon()
				}
				if time.Since(began) > 50*time.Millisecond { // in vain
					d.abandon()
				}
			}
		})
		select {
		case <-done:
		case <-time.After(patience):
			t.Fatalf("seed %d: never at: %s: %v", seed, point, statusOf(d))
		}
		if d.invariantErr != nil {
			t.Fatalf("seed %d: killed %s: %v", seed, point, d.invariantErr)
		}
	}
	d, done = run(func(*Daemon) {})
	goOn(d, "in the end", 12)
	_ = d.Ask(context.Background(), func() {
		if d.invariantErr != nil {
			t.Error(d.invariantErr)
		}
	})
	t.Logf("killed at %d of %d places", len(o.reached), len(swapKillPoints))
	d.Do(d.abandon)
	<-done
	o.last.remains()
}
