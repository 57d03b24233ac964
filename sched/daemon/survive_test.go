// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// killSeedsEnv is how many times TestKilledAnywhere kills the scheduler.
const killSeedsEnv = "NVSHARE_TEST_KILL_SEEDS"

// abandon ends a daemon as SIGKILL would, from its loop: descriptors are closed,
// nothing is said, unlinked or put in order. The caller cleans up later what the
// kernel would, see remains.
func (d *Daemon) abandon() {
	d.Failpoint = nil // for deferred ones
	d.End()
	for c := range d.conns {
		c.Sock.Close()
		if c.Client == nil {
			c.Peer.Close()
		}
	}
	for _, cl := range d.Clients {
		cl.Close()
	}
	d.dir.Abandon()
	runtime.Goexit()
}

// remains waits for the goroutines of an abandoned daemon and unmaps its pages.
func (d *Daemon) remains() {
	d.Wg.Wait()
	d.memory.Pool.Close()
	for c := range d.conns {
		if c.Page != nil {
			c.Page.Unmap()
		}
	}
	for _, cl := range d.Clients {
		if cl.Page != nil {
			cl.Page.Unmap()
		}
	}
}

// gpuJudge knows who could really submit work to a GPU.
type gpuJudge struct {
	mu      sync.Mutex
	holders map[*honest]uint64 // gate open, or not drained yet, by epoch
	newest  uint64
	opened  uint64        // how often a gate was opened under a new epoch
	news    chan struct{} // of that; capacity 1
	err     error
}

func (j *gpuJudge) fail(format string, args ...any) {
	if j.err == nil {
		j.err = fmt.Errorf(format, args...)
	}
}

// open notes that the client may submit from now on.
func (j *gpuJudge) open(c *honest, epoch uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	// A latency tenant is let in beside others, and in between: who is next has
	// its epoch already.
	if !c.latency {
		for other, e := range j.holders {
			if !other.latency {
				j.fail("%s opens its gate under epoch %d while %s has epoch %d", c.name, epoch, other.name, e)
			}
		}
		if epoch <= j.newest {
			j.fail("%s is granted epoch %d, after %d", c.name, epoch, j.newest)
		}
		j.newest = epoch
	}
	j.holders[c] = epoch
	j.opened++
	select {
	case j.news <- struct{}{}:
	default:
	}
}

// drained notes that the client has nothing on the GPU any more.
func (j *gpuJudge) drained(c *honest) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.holders, c)
}

// count returns how many grants there were.
func (j *gpuJudge) count() uint64 {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.opened
}

func (j *gpuJudge) verdict() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.err
}

// honest behaves as the shim does: hook/core/lease.c is what it follows.
type honest struct {
	name    string
	proc    *proc
	judge   *gpuJudge
	rnd     *rand.Rand
	latency bool
	stop    chan struct{} // to be closed
	ended   chan struct{}

	registered bool
	conn       *net.UnixConn
	page       wire.Page // of the connection that was attached last
	mem        []byte
	epoch      uint64 // its gate is open, or to be drained; 0: shut
	last       uint64 // the newest seen
	closed     uint32 // word of the epoch given back last
	requested  bool
}

// run lives until stop.
func (c *honest) run() {
	defer close(c.ended)
	for {
		select {
		case <-c.stop:
			c.hangUp()
			return
		default:
		}
		if c.conn == nil {
			if err := c.attach(); err != nil {
				c.hangUp()
				time.Sleep(500 * time.Microsecond)
			}
			continue
		}
		if err := c.turn(); err != nil {
			c.hangUp()
		}
	}
}

// hangUp changes nothing about what it holds.
func (c *honest) hangUp() {
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
}

func (c *honest) send(f wire.Frame) error {
	f.Version = wire.Version
	b := f.Encode()
	_, err := c.conn.Write(b[:])
	return err
}

// receive waits for a frame until the deadline; then ok is false.
func (c *honest) receive(wait time.Duration) (f wire.Frame, fd int, ok bool, err error) {
	var buf [wire.FrameSize]byte
	var oob [64]byte
	c.conn.SetReadDeadline(time.Now().Add(wait))
	n, oobn, _, _, err := c.conn.ReadMsgUnix(buf[:], oob[:])
	if os.IsTimeout(err) {
		return f, -1, false, nil
	}
	if err != nil || n == 0 {
		return f, -1, false, fmt.Errorf("connection ended: %v", err)
	}
	fd = -1
	if oobn > 0 {
		fd = rights(c.proc.t, oob[:oobn])
	}
	f, err = wire.Decode(buf[:n])
	return f, fd, err == nil, err
}

// await is receive for an answer that has to come.
func (c *honest) await(want wire.Type) (wire.Frame, int, error) {
	for {
		f, fd, ok, err := c.receive(patience)
		switch {
		case err != nil:
			return f, fd, err
		case !ok:
			return f, fd, fmt.Errorf("no %v", want)
		case f.Type == want:
			return f, fd, nil
		}
	}
}

// attach connects, registers and attaches, with what it holds.
func (c *honest) attach() (err error) {
	if c.conn, err = c.proc.tryConnect(); err != nil {
		return err
	}
	reg := registerFrame()
	if c.registered {
		reg.Code = wire.RegisterReconnect
	}
	if err := c.send(reg); err != nil {
		return err
	}
	_, fd, err := c.await(wire.TypeWelcome)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	c.registered = true
	mem, err := unix.Mmap(fd, 0, wire.PageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	page, err := wire.OpenPage(mem)
	if err == nil {
		err = c.send(wire.Frame{Type: wire.TypeAttach, Epoch: c.epoch, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
	}
	if err == nil {
		_, _, err = c.await(wire.TypeAttached)
	}
	if err != nil {
		unix.Munmap(mem)
		return err
	}
	if c.mem != nil {
		unix.Munmap(c.mem)
	}
	c.mem, c.page, c.requested = mem, page, false
	if c.epoch == 0 {
		c.closed = 0
		return nil
	}
	if word := page.Word(0); word != uint32(c.epoch) {
		return c.giveBack(wire.ReleaseRevoked) // not adopted, or revoked since
	}
	return nil
}

// giveBack drains and releases.
func (c *honest) giveBack(reason uint32) error {
	if c.rnd.IntN(4) == 0 {
		time.Sleep(time.Duration(c.rnd.IntN(300)) * time.Microsecond)
	}
	epoch := c.epoch
	c.judge.drained(c)
	c.epoch, c.closed, c.requested = 0, uint32(epoch), false
	return c.send(wire.Frame{Type: wire.TypeRelease, Epoch: epoch, Code: reason})
}

// look opens the gate if the page says so, as a thread that waits on it does.
func (c *honest) look() {
	word := c.page.Word(0)
	if c.epoch == 0 && word != wire.WordClosed && word != c.closed {
		epoch := c.last&^0xffffffff | uint64(word)
		if epoch < c.last {
			epoch += 1 << 32
		}
		c.last, c.epoch, c.requested = epoch, epoch, false
		c.judge.open(c, epoch)
	}
}

// turn does one thing.
func (c *honest) turn() error {
	if c.epoch == 0 && !c.requested {
		c.requested = true
		if err := c.send(wire.Frame{Type: wire.TypeRequest}); err != nil {
			return err
		}
	}
	f, _, ok, err := c.receive(2 * time.Millisecond)
	if err != nil {
		if c.rnd.IntN(2) == 0 {
			c.look() // a thread may see the word before the end of the connection
		}
		return err
	}
	if ok {
		switch f.Type {
		case wire.TypeGrant:
			if uint32(f.Epoch) != c.closed && c.page.Word(0) == uint32(f.Epoch) {
				c.last = max(c.last, f.Epoch)
			}
		case wire.TypeRevoke:
			c.last = max(c.last, f.Epoch)
			switch {
			case c.epoch != 0:
				return c.giveBack(wire.ReleaseRevoked)
			case uint32(f.Epoch) != c.closed: // it had not opened yet
				c.epoch = f.Epoch
				return c.giveBack(wire.ReleaseRevoked)
			}
		}
	}
	c.look()
	switch n := c.rnd.IntN(100); {
	case n < 10 && c.epoch != 0:
		if waiters, _ := c.page.Hints(0); waiters > 0 && c.page.Word(0) == uint32(c.epoch) {
			return c.giveBack(wire.ReleaseIdle)
		}
	case n < 20:
		return c.send(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: 1 << 20, Least: 1 << 20}})
	case n == 20:
		return fmt.Errorf("the connection is cut")
	}
	if c.latency && c.epoch != 0 { // it has nothing to do already
		return c.giveBack(wire.ReleaseIdle)
	}
	return nil
}

// killPoints are all failpoints but those that need a fence: no honest client
// is fenced here.
var killPoints = []node.Failpoint{
	node.AtFrame, node.AtDecided, node.Before("persist"), node.InPersist, node.After("persist"), node.Before("grant"), node.InGrant, node.After("grant"),
	node.Before("revoke"), node.InRevoke, node.After("revoke"), node.Before("close"), node.After("close"), node.Before("adopt"), node.After("adopt"),
	node.BeforeAttached, node.AfterAttached, node.After("released"), node.Before("notice"), node.After("notice"), node.BeforeWelcome, node.AfterWelcome,
	node.BeforeReserved, node.AfterReserved, node.BeforeBury, node.AfterBury, node.BeforeRestore, node.AfterRestore, node.AfterLost,
}

var latencyKillPoints = []node.Failpoint{node.Before("pause"), node.After("pause"), node.Before("resume"), node.After("resume")}

// atStart are those reached before turns go on; the others count from then.
var atStart = []node.Failpoint{node.BeforeRestore, node.AfterRestore, node.Before("adopt"), node.After("adopt"), node.BeforeWelcome, node.AfterWelcome, node.BeforeAttached, node.AfterAttached}

// ordeal is what clients live through.
type ordeal struct {
	t       *testing.T
	dir     string
	judge   *gpuJudge
	clients []*honest // all but the latency tenant
	reached map[node.Failpoint]int
	last    *Daemon // abandoned
}

// spawn starts a client. As another user it is a latency tenant.
func (o *ordeal) spawn(i int, uid uint32) *honest {
	c := &honest{name: fmt.Sprintf("client %d", i), proc: newProc(o.t, o.dir, uid), judge: o.judge,
		rnd: rand.New(rand.NewPCG(uint64(i), 0)), latency: uid != 0, stop: make(chan struct{}), ended: make(chan struct{})}
	go c.run()
	return c
}

// end kills a client's process.
func (o *ordeal) end(c *honest) {
	close(c.stop)
	<-c.ended
	o.judge.drained(c) // it does nothing more, and now dies
	c.proc.kill()
}

// newDaemon waits for the last one's end to be complete.
func (o *ordeal) newDaemon(change func(*Options)) *Daemon {
	o.t.Helper()
	opts := testOptions(o.dir)
	opts.List = func(context.Context) ([]node.Found, error) { return []node.Found{gpuA}, nil }
	change(&opts)
	began := time.Now()
	d, err := New(opts)
	for err != nil && time.Since(began) < patience && strings.Contains(err.Error(), "another nvshare-scheduler runs") {
		// A process that we started has not closed its copies yet: the kernel
		// does that a moment after its exec is said to be done.
		time.Sleep(time.Millisecond)
		d, err = New(opts)
	}
	if err != nil {
		o.t.Fatal(err)
	}
	if o.last != nil {
		o.last.remains()
	}
	o.last = d
	d.unhurried()
	return d
}

// kill runs a scheduler until a failpoint, which it passes a few times, and
// returns how long it took from its start to the first grant; 0: none came.
func (o *ordeal) kill(seed int, point node.Failpoint) (regrant time.Duration) {
	o.t.Helper()
	rnd := rand.New(rand.NewPCG(uint64(seed), 1))
	skip := rnd.IntN(4)
	switch point {
	case node.BeforeRestore, node.AfterRestore, node.BeforeBury, node.AfterBury:
		skip = 0 // it happens once
	}
	before := o.judge.count()
	began := time.Now()
	d := o.newDaemon(func(opts *Options) { opts.Quantum = time.Duration(1+rnd.IntN(3)) * time.Millisecond })
	goesOn := false
	var since time.Time // when all has begun that leads to the point; a start may take longer than that
	d.Failpoint = func(p node.Failpoint) {
		switch {
		case !goesOn && !slices.Contains(atStart, p):
		case p == point:
			if skip--; skip < 0 {
				o.reached[p]++
				d.abandon()
			}
		case !since.IsZero() && time.Since(since) > 100*time.Millisecond: // in vain
			d.abandon()
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = d.Run(context.Background())
	}()
	for regrant == 0 {
		select {
		case <-o.judge.news:
			if o.judge.count() == before {
				continue
			}
			regrant = time.Since(began)
			d.Do(func() { goesOn = true })
		case <-done:
			return 0
		case <-time.After(patience):
			o.t.Fatalf("seed %d (%s): no grant: %v", seed, point, statusOf(d))
		}
	}
	if point == node.BeforeBury || point == node.AfterBury {
		i := rnd.IntN(len(o.clients))
		o.end(o.clients[i])
		o.clients[i] = o.spawn(1000*(seed+1)+i, 0)
	}
	d.Do(func() { since = time.Now() })
	select {
	case <-done:
	case <-time.After(patience):
		o.t.Fatalf("seed %d: never at: %s", seed, point)
	}
	if err := cmp.Or(d.invariantErr, o.judge.verdict()); err != nil {
		o.t.Fatalf("seed %d: killed %s: %v", seed, point, err)
	}
	return regrant
}

// A scheduler that is killed at any place, again and again, each time with
// another one to follow: nobody holds twice, no epoch comes again, and turns go
// on. All clients go through it with what they had.
func TestKilledAnywhere(t *testing.T) {
	kills := 160 // five at each point; make stress: 1000
	if s := os.Getenv(killSeedsEnv); s != "" {
		var err error
		if kills, err = strconv.Atoi(s); err != nil {
			t.Fatalf("%s: %v", killSeedsEnv, err)
		}
	}
	o := &ordeal{t: t, dir: t.TempDir(), reached: map[node.Failpoint]int{},
		judge: &gpuJudge{holders: map[*honest]uint64{}, news: make(chan struct{}, 1)}}
	points := killPoints
	if own := ownContainer(t); os.Getuid() == 0 && own == "" {
		// Two users are two tenants. What one of them is outlives all that comes.
		points = append(slices.Clone(points), latencyKillPoints...)
		openToAll(t, o.dir)
		d := o.newDaemon(func(*Options) {})
		go func() {
			_ = d.Run(context.Background())
		}()
		d.setLatency(t, o.dir)
		defer o.end(o.spawn(4, nobody))
		d.Do(d.abandon)
		<-d.Ended()
	}
	for i := range 4 {
		o.clients = append(o.clients, o.spawn(i, 0))
	}
	defer func() {
		for _, c := range o.clients {
			o.end(c)
		}
	}()
	var regrants []time.Duration
	for seed := range kills {
		if took := o.kill(seed, points[seed%len(points)]); took != 0 {
			regrants = append(regrants, took)
		}
	}
	o.last.remains()
	for _, p := range points {
		if o.reached[p] == 0 && kills >= 10*len(points) {
			t.Errorf("never killed: %s", p)
		}
	}
	slices.Sort(regrants)
	t.Logf("%d kills, %d grants; from a scheduler's start to the next grant: median %v, p99 %v, longest %v",
		kills, o.judge.count(), regrants[len(regrants)/2], regrants[len(regrants)*99/100], regrants[len(regrants)-1])
}

func statusOf(d *Daemon) (r *api.StatusResponse) {
	_ = d.Ask(context.Background(), func() { r, _ = d.status() })
	return r
}

// setLatency makes the user nobody a latency tenant.
func (d *Daemon) setLatency(t *testing.T, dir string) {
	t.Helper()
	ctl, err := api.Dial(context.Background(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer ctl.Close()
	uid, priority := uint32(nobody), api.Priority_PRIORITY_LATENCY
	if _, err := ctl.SetShare(context.Background(), &api.SetShareRequest{Uid: &uid, Priority: &priority}); err != nil {
		t.Fatal(err)
	}
}
