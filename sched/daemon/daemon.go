// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// GPU is what the daemon wants to know of one.
type GPU struct {
	Index       int    // for display
	UUID        string // GPU-…
	Name        string
	MemoryBytes uint64
	PCIBusID    string // 0000:17:00.0, or "": not known
}

// Lister finds the GPUs of this node.
type Lister func(ctx context.Context) ([]GPU, error)

// Options configure a Daemon. Zero durations mean package sched's defaults.
type Options struct {
	RunDir  string
	Quantum time.Duration
	Grace   time.Duration
	Mode    sched.Mode
	Tuning  sched.Tuning // how time is accounted
	// FenceAction is FenceReport if it is "".
	FenceAction FenceAction
	// Spin is how long the scheduler and the next client may spin for the
	// release of a grant that was revoked; 0: they sleep.
	Spin    time.Duration
	List    Lister
	Version string // for display
	Log     *logrus.Entry
	// SwapMemory is how much host memory, on this node, may hold what clients
	// have away from GPUs, bytes; 0: nothing is swapped.
	SwapMemory uint64
	// SwapReady is how much of that is made before clients need it, bytes.
	SwapReady uint64
	// SwapHeadroom is what is left free of each GPU's memory for what the driver
	// needs for processes, bytes, or DefaultHeadroom.
	SwapHeadroom int64
	// SwapShare is the percentage of the time that moving memory may take, where
	// the time quantum is not fixed.
	SwapShare    int
	QuantumFixed bool
	// GPUMemory makes GPUs look as if they had no more memory, bytes; 0: they have
	// what they have.
	GPUMemory uint64
	// MetricsAddr is where /metrics and /healthz are served over HTTP, to
	// whoever reaches it; "": nowhere. Sample may be nil.
	MetricsAddr string
	Sample      Sampler
}

// Daemon is a scheduler with open sockets. Make one with New, then call Run.
type Daemon struct {
	opts     Options
	log      *logrus.Entry
	bootID   string
	started  time.Time
	maxConns int
	// maxReady and maxHeld: segments that may be kept ready, and held of clients.
	maxReady, maxHeld int
	// sysfs is where that is; not /sys in tests.
	sysfs string
	peers *peer.Finder
	// registerTimeout is the constant, but for tests.
	registerTimeout time.Duration

	lock    *os.File
	tenants *net.UnixListener
	control net.Listener
	metrics *exporter // nil: none

	events chan func()    // run by the loop
	ended  chan struct{}  // closed when the loop has ended
	wg     sync.WaitGroup // every goroutine but the loop

	// Below: the loop's own.

	state    *state
	cautious bool // the state file was damaged: holders may be about
	nextID   sched.ClientID
	clients  map[sched.ClientID]*client
	byProc   map[peer.Process]*client
	conns    map[*conn]struct{}
	counts   map[string]*account // by peer.Peer.Account
	gpus     map[wire.UUID]*gpu
	order    []*gpu                    // by index
	node     *sched.Node               // of all GPUs
	toStep   []string                  // GPUs where a gang goes on because of another GPU; see stepGangs
	names    map[string]*api.Container // by id; what the plugin told us; never changed, only replaced
	shares   shares                    // that were set, or asked for by pods
	settings settings                  // time quanta and modes that were set
	broken   []*conn                   // to be treated as lost after the current event

	discovering     bool
	discoverDue     sched.Time // 0: not planned
	discovered      sched.Time // when the latest search ended; 0: never
	discoverErr     error
	pending         []*pendingAttach
	persistErr      error
	invariantErr    error
	identifyErr     error // clients are refused that no client can do anything about
	sharesErr       error // shares were lost, or would be at a restart
	settingsErr     error // settings were lost
	nextCheck       sched.Time
	nextLedgerCheck sched.Time
	tenantLog       bucket
	unloggedTold    uint64
	arena           arena
	before          map[string][]memberState // of GPUs not found yet, by UUID; see swap_record.go
	membersDue      sched.Time               // their file is to be written; 0: it is right
	unlogged        uint64                   // lines that tenants caused and tenantLog held back
	history         history
	traffic         traffic
	checkAlways     bool            // tests
	failpoint       func(failpoint) // tests
	fencesChanged   bool
	refused         uint64
	malformed       uint64
}

// New takes the run directory, reads the state file and opens the sockets, so
// that clients can connect; they are answered once Run runs. It fails if
// another scheduler has the directory.
func New(opts Options) (*Daemon, error) {
	d, err := newDaemon(opts)
	if err != nil {
		return nil, err
	}
	if err := d.openRunDir(); err != nil {
		return nil, err
	}
	d.restoreFiles()
	if err := d.openMetrics(); err != nil {
		d.closeRunDir()
		return nil, err
	}
	return d, nil
}

// newDaemon has nothing open, and knows nothing of before.
func newDaemon(opts Options) (*Daemon, error) {
	bootID, err := readBootID()
	if err != nil {
		return nil, fmt.Errorf("read the boot id: %w", err)
	}
	peers, err := peer.NewFinder()
	if err != nil {
		return nil, err
	}
	opts.Quantum = cmp.Or(opts.Quantum, sched.DefaultQuantum)
	opts.Grace = cmp.Or(opts.Grace, sched.DefaultGrace)
	maxReady, maxHeld := maxSegments()
	d := &Daemon{
		opts:            opts,
		log:             opts.Log,
		bootID:          bootID,
		started:         time.Now(),
		maxConns:        maxConnections(),
		maxReady:        maxReady,
		maxHeld:         maxHeld,
		sysfs:           "/sys",
		arena:           arena{make: newSegment, memory: hostMemory},
		peers:           peers,
		registerTimeout: registerTimeout,
		events:          make(chan func(), 256),
		ended:           make(chan struct{}),
		clients:         map[sched.ClientID]*client{},
		byProc:          map[peer.Process]*client{},
		conns:           map[*conn]struct{}{},
		counts:          map[string]*account{},
		gpus:            map[wire.UUID]*gpu{},
		node:            sched.NewNode(),
		names:           map[string]*api.Container{},
		tenantLog:       bucket{rate: tenantLogRate, burst: tenantLogBurst},
	}
	d.history = newHistory(d.started.UnixNano())
	d.noteChange(nil, &event{kind: api.EventType_EVENT_TYPE_START, text: "version " + opts.Version})
	return d, nil
}

// restoreFiles reads what earlier schedulers have written.
func (d *Daemon) restoreFiles() {
	var err error
	if d.state, err = loadState(d.statePath(), d.bootID); err != nil {
		d.cautious = true
		d.log.WithError(err).Warn("the state file cannot be used: epochs go on from the wall clock, and the first grants wait for one quantum and grace period, in case an unknown client still holds a GPU")
	}
	d.restoreSettings()
	d.restoreShares()
	d.restoreMembers()
}

func (d *Daemon) statePath() string { return filepath.Join(d.opts.RunDir, "state.json") }

// Run serves until ctx is done, then closes the sockets and returns nil. Open
// gates stay open. It may be called once.
func (d *Daemon) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server, err := d.newControlServer()
	if err != nil {
		return err
	}
	d.wg.Add(2)
	go func() {
		defer d.wg.Done()
		d.accept(ctx, d.tenants)
	}()
	go func() {
		defer d.wg.Done()
		if err := server.Serve(ctx, d.control); err != nil && ctx.Err() == nil {
			d.log.WithError(err).Error("control socket: no longer served")
		}
	}()
	if d.metrics != nil {
		d.wg.Add(1)
		go func() {
			defer d.wg.Done()
			d.metrics.serve(ctx)
		}()
	}
	d.startDiscovery(ctx)
	d.loop(ctx)
	if d.membersDue != 0 {
		d.recordMembers()
	}
	close(d.ended) // before anything is closed that others wait for

	d.tenants.Close()
	server.Close()
	for c := range d.conns {
		c.sock.Close()
		if c.client == nil {
			c.peer.Close()
		}
	}
	for _, cl := range d.clients {
		cl.Close()
	}
	cancel()
	d.wg.Wait()
	for c := range d.conns {
		if c.page != nil {
			c.page.Unmap()
		}
	}
	for _, cl := range d.clients {
		if cl.page != nil {
			cl.page.Unmap()
		}
	}
	d.closeRunDir()
	d.arena.stock.close() // takes a while, and nobody waits for it
	return nil
}

// loop is the only goroutine that touches the tables and the cores.
func (d *Daemon) loop(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case f := <-d.events:
			f()
		case <-timer.C:
			d.tick(ctx)
		}
		d.dropBroken()
		d.applyFences()
		if at, ok := d.deadline(); ok {
			timer.Reset(max(at.Sub(now()), 0))
		} else {
			timer.Stop()
		}
	}
}

// do has the loop run f, after what came before; false: the daemon has ended.
func (d *Daemon) do(f func()) bool {
	select {
	case d.events <- f:
		return true
	case <-d.ended:
		return false
	}
}

// ask is do for callers that need the answer; f has run when it returns nil.
func (d *Daemon) ask(ctx context.Context, f func()) error {
	done := make(chan struct{})
	g := func() { f(); close(done) }
	select {
	case d.events <- g:
	case <-ctx.Done():
		return ctx.Err()
	case <-d.ended:
		return errors.New("the scheduler is ending")
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-d.ended:
		return errors.New("the scheduler is ending")
	}
}

// Answers returns nil when the loop has dealt with all that came before: an
// error, when ctx is done first or the daemon has ended.
func (d *Daemon) Answers(ctx context.Context) error { return d.ask(ctx, func() {}) }

// now reads CLOCK_MONOTONIC, which is what the grant page promises.
func now() sched.Time {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic("CLOCK_MONOTONIC: " + err.Error())
	}
	return sched.Time(ts.Nano())
}

// deadline is when tick must run next.
func (d *Daemon) deadline() (at sched.Time, ok bool) {
	earliest := func(t sched.Time) {
		if !ok || t < at {
			at, ok = t, true
		}
	}
	for _, g := range d.order {
		if t, has := g.core.Deadline(); has {
			earliest(t)
		}
		if len(g.outbox) > 0 {
			earliest(g.retry)
		}
		if g.swap != nil && g.swap.due != 0 {
			earliest(g.swap.due)
		}
	}
	if d.arena.retry != 0 {
		earliest(d.arena.retry)
	}
	if d.arena.stock.due != 0 {
		earliest(d.arena.stock.due)
	}
	if d.membersDue != 0 {
		earliest(d.membersDue)
	}
	if d.discoverDue != 0 {
		earliest(d.discoverDue)
	}
	return at, ok
}

func (d *Daemon) tick(ctx context.Context) {
	t := now()
	for _, g := range d.order {
		if at, ok := g.core.Deadline(); ok && at <= t {
			d.step(g, sched.Tick{})
		}
		if len(g.outbox) > 0 && g.retry <= t {
			d.flush(g)
		}
		if g.swap != nil && g.swap.due != 0 && g.swap.due <= t {
			d.lookAtVictims(g)
		}
	}
	if d.arena.retry != 0 && d.arena.retry <= t {
		d.arena.retry = 0
		d.prepareAll()
	}
	if d.arena.stock.due != 0 && d.arena.stock.due <= t {
		d.lookAtStock()
	}
	if d.membersDue != 0 && d.membersDue <= t {
		d.recordMembers()
	}
	if d.discoverDue != 0 && d.discoverDue <= t {
		d.discoverDue = 0
		d.startDiscovery(ctx)
	}
}
