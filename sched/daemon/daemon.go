// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/overlap"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/rundir"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/web"
	"github.com/nvshare/nvshare/sched/wire"
)

// GPU is what the daemon wants to know of one.
type GPU struct {
	Index       int    // for display
	UUID        string // GPU-…
	Name        string
	MIG         string // see api.GPU
	MemoryBytes uint64
	PCIBusID    string        // 0000:17:00.0, or "": not known
	Model       *api.GPUModel // nil: not known
	Unopened    bool          // the driver knows it, and did not open it: only what is recorded of it counts
}

// Lister finds the GPUs of this node.
type Lister func(ctx context.Context) ([]GPU, error)

// Options configure a Daemon. Zero durations mean package sched's defaults.
type Options struct {
	RunDir string
	// Sockets says what is not as by default in the run directory.
	Sockets rundir.Options
	Quantum time.Duration
	Grace   time.Duration
	Mode    sched.Mode
	// Flags are the names of the settings (api.TurnLengthSetting and so on) that the command
	// line says; the others are the program's defaults. It is for display.
	Flags  []string
	Tuning sched.Tuning // how time is accounted
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
	// SwapAuto has SwapMemory be half of what the host can spare when the Daemon is made.
	SwapAuto bool
	// SwapReady is how much of that is made before clients need it, bytes.
	SwapReady uint64
	// SwapHeadroom is what is left free of each GPU's memory for what the driver
	// needs for processes, bytes, or DefaultHeadroom.
	SwapHeadroom int64
	// SwapShare is the percentage of the time that moving memory may take; 0: turns are
	// as long as Quantum.
	SwapShare int
	// SuspendAfter is after which idle time a process is suspended, from
	// sched.MinSuspendAfter to sched.MaxSuspendAfter; 0: never.
	SuspendAfter time.Duration
	// GPUMemory makes GPUs look as if they had no more memory, bytes; 0: they have
	// what they have.
	GPUMemory uint64
	// DefaultMemoryLimit is the memory limit, on each GPU, of tenants that have none of
	// their own, bytes; 0: none.
	DefaultMemoryLimit uint64
	// SuspendDir is a directory for files with the memory of processes that are suspended with
	// their contexts, where host memory is short; "": there are none. SuspendDirSize is what
	// they may take, bytes; 0: as much as leaves a part of the file system free.
	SuspendDir     string
	SuspendDirSize uint64
	// Checkpoint takes processes off their GPUs that are suspended, and puts them back,
	// or on others. nil: their contexts stay, and none moves.
	Checkpoint Checkpointer
	// CheckpointCheck says why Checkpoint cannot work, or not for all processes; nil: it is
	// not looked at.
	CheckpointCheck func(context.Context) error
	// MPSControl finds nvidia-cuda-mps-control. nil: there are no overlap groups.
	MPSControl func() (string, error)
	// OverlapStarter is a command that ends in overlap.Start.
	OverlapStarter []string
	// Rules bound what pods may ask for.
	Rules Rules
	// MetricsAddr is where /metrics and /healthz are served over HTTP, to
	// whoever reaches it; "": nowhere.
	MetricsAddr string
	// MetricsProcesses is how many clients have metrics of their own, beside those
	// of their tenants.
	MetricsProcesses int
	// MetricsDCGM adds what pods have under the names of NVIDIA's dcgm-exporter.
	MetricsDCGM bool
	// WebAddr is where the page of package web is served; "": nowhere. WebTokenFile has
	// the token that its readers need.
	WebAddr, WebTokenFile string
	// Warden is the socket of nvshare-warden, by which processes without a shim keep the core
	// limit of their tenant; "": they are only reported.
	Warden string
	// Sample asks the driver who uses GPUs, for metrics and to find processes that
	// are no clients. nil: nobody is asked.
	Sample metrics.Sampler
}

// Daemon is a scheduler with open sockets. Make one with New, then call Run.
type Daemon struct {
	opts    Options
	log     *logrus.Entry
	bootID  string
	started time.Time
	desk    *admission.Desk
	// sysfs is where that is; not /sys in tests.
	sysfs string
	peers *peer.Finder
	find  func(peer.Process) (*peer.Peer, error) // of peers, except in tests
	// These are the constants, except in tests.
	registerTimeout, lookPause                    time.Duration
	prepareLimit, busyPause, restPause, leaveWait time.Duration
	departLimit, slowLately                       time.Duration
	overviewPart                                  time.Duration

	dir     *rundir.Dir
	metrics *metrics.Exporter // nil: none, or not open at the start
	page    *web.Page         // the same

	metricsErr, pageErr error // why that is not served yet

	events chan func()    // run by the loop
	wg     sync.WaitGroup // every goroutine but the loop
	life   context.Context
	end    context.CancelFunc
	ended  <-chan struct{} // of life: closed when the loop has ended

	// Below: the loop's own.

	timers  timer.List
	search  *timer.Timer // for GPUs
	members *timer.Timer // write the file of who has memory
	reshare *timer.Timer // write the file of shares, which could not be written
	reset   *timer.Timer // the same of settings
	again   *timer.Timer // restore what is unsure
	watch   *timer.Timer // that the run directory is there
	look    *timer.Timer // which processes use GPUs
	// These serve the listeners of dir, which are new ones after a socket was lost.
	serveTenants, serveView, serveControl func()

	fatal       error // ends the loop
	state       *state.File
	cautious    bool // the state file was damaged: holders may be about
	nextID      sched.ClientID
	clients     map[sched.ClientID]*client
	byProc      map[peer.Process]*client
	conns       map[*conn]struct{}
	byAccount   map[string]map[*client]struct{} // by peer.Peer.Account
	outOfMemory map[string]map[*gpu]uint64      // the same, of those with a client: what its limit refused
	told        map[string]time.Time            // see mayTell
	gpus        map[wire.UUID]*gpu
	order       []*gpu                    // by index
	node        *sched.Node               // of all GPUs
	toStep      []string                  // GPUs where a gang goes on because of another GPU; see stepGangs
	names       map[string]*api.Container // by id; what the plugin told us; never changed, only replaced
	described   chan struct{}             // closed when a container is described, and made anew
	firsts      map[string]*peer.Peer     // first processes of containers that OCI hooks described, by container id
	shares      shares                    // that were set, or asked for by pods
	settings    settings                  // time quanta and modes that were set
	broken      []*conn                   // to be treated as lost after the current event
	migrations  map[string]*migration     // by account
	copiers     map[int]bool              // PIDs of copiers that run
	strayed     map[*client]string        // UUIDs of the GPUs that clients may have left, of GPUs not found yet
	unsure      []unsure

	discovering   bool
	discovered    sched.Time // when the latest search ended; 0: never
	discoverErr   error
	pending       []*pendingAttach
	persistErr    error
	checkpointErr error // of CheckpointCheck
	invariantErr  error
	identifyErr   error      // clients are refused that no client can do anything about
	sharesErr     error      // shares were lost, or would be at a restart
	settingsErr   error      // settings were lost
	plugin        []string   // problems that the plugin has reported
	pluginAt      sched.Time // when
	nextCheck     sched.Time
	tenantLog     *rate.Limiter
	unloggedTold  uint64
	arena         *arena.Pool
	files         files
	overlap       *overlap.Manager         // nil: none
	holder        *holder                  // nil: no warden is wanted
	before        map[string][]memberState // of GPUs not found yet, by UUID; see swap_record.go
	unrecorded    bool                     // who has memory could not be recorded
	unsettled     bool                     // the same of settings
	history       *history.Log
	latest        *overview
	traffic       metrics.Traffic
	checkAlways   bool            // tests
	failpoint     func(failpoint) // tests
	fencesChanged bool
	refused       uint64 // beside those that the desk refused
	extraWork     uint64 // see work
	malformed     uint64
}

// New takes the run directory, reads the state file and opens the sockets, so
// that clients can connect; they are answered once Run runs. It fails if
// another scheduler has the directory.
func New(opts Options) (*Daemon, error) {
	d, err := newDaemon(opts)
	if err != nil {
		return nil, err
	}
	if d.dir, err = rundir.Open(opts.RunDir, opts.Sockets); err != nil {
		return nil, err
	}
	if err = d.restoreFiles(); err == nil {
		err = d.openPorts()
	}
	if err != nil {
		d.closePorts()
		d.dir.Close()
		return nil, err
	}
	return d, nil
}

// newDaemon has nothing open, and knows nothing of earlier schedulers.
func newDaemon(opts Options) (*Daemon, error) {
	bootID, err := state.BootID()
	if err != nil {
		return nil, err
	}
	peers, err := peer.NewFinder()
	if err != nil {
		return nil, err
	}
	opts.Quantum = cmp.Or(opts.Quantum, sched.DefaultQuantum)
	opts.Grace = cmp.Or(opts.Grace, sched.DefaultGrace)
	moreFiles, err := spareFiles()
	if err != nil {
		return nil, err
	}
	maxReady, maxHeld := maxSegments(moreFiles)
	if opts.SwapAuto {
		before, err := readMembers(&opts, bootID)
		if err != nil {
			return nil, err
		}
		opts.SwapMemory = autoSwapMemory(&opts, before, peers)
		opts.SwapReady = min(opts.SwapReady, opts.SwapMemory)
	}
	life, end := context.WithCancel(context.Background())
	d := &Daemon{
		opts:            opts,
		log:             opts.Log,
		bootID:          bootID,
		started:         time.Now(),
		desk:            admission.New(maxConnections, opts.SwapMemory),
		sysfs:           "/sys",
		peers:           peers,
		find:            peers.Find,
		registerTimeout: registerTimeout,
		lookPause:       lookPause,
		prepareLimit:    prepareLimit,
		busyPause:       busyPause,
		restPause:       restPause,
		leaveWait:       leaveWait,
		departLimit:     departLimit,
		slowLately:      slowLately,
		overviewPart:    overviewPart,
		events:          make(chan func(), 256),
		life:            life,
		end:             end,
		ended:           life.Done(),
		clients:         map[sched.ClientID]*client{},
		byProc:          map[peer.Process]*client{},
		conns:           map[*conn]struct{}{},
		byAccount:       map[string]map[*client]struct{}{},
		outOfMemory:     map[string]map[*gpu]uint64{},
		told:            map[string]time.Time{},
		gpus:            map[wire.UUID]*gpu{},
		node:            sched.NewNode(),
		names:           map[string]*api.Container{},
		described:       make(chan struct{}),
		firsts:          map[string]*peer.Peer{},
		migrations:      map[string]*migration{},
		copiers:         map[int]bool{},
		strayed:         map[*client]string{},
		tenantLog:       rate.NewLimiter(tenantLogRate, tenantLogBurst),
	}
	d.node.Arenas.Bound(opts.SwapMemory, arena.HostReserve)
	d.search = d.timers.New(d.startDiscovery)
	d.members = d.timers.New(d.recordMembers)
	d.reshare = d.timers.New(d.recordShares)
	d.reset = d.timers.New(d.keepSettings)
	d.again = d.timers.New(d.restoreAgain)
	d.watch = d.timers.New(d.watchRunDir)
	d.look = d.timers.New(d.lookForStrangers)
	d.openArena(arena.Kernel{}, maxReady, maxHeld)
	if err := d.openFiles(); err != nil {
		return nil, err
	}
	d.openOverlap()
	d.openHolder()
	d.history = history.New(d.started.UnixNano())
	d.noteChange(nil, &history.Event{Kind: api.EventType_EVENT_TYPE_START, Text: "version " + opts.Version})
	return d, nil
}

// restoreFiles reads what earlier schedulers have written.
func (d *Daemon) restoreFiles() error {
	var err error
	d.state, err = state.Load(d.statePath(), d.bootID)
	if errors.Is(err, state.ErrNotRegular) {
		return fmt.Errorf("no grant could be recorded: %w", err)
	}
	if err != nil {
		d.cautious = true
		d.log.WithError(err).Warn("the state file cannot be used: epochs go on from the wall clock, and the first grants wait for one quantum and grace period, in case an unknown client still holds a GPU")
	}
	if d.opts.SwapMemory != 0 {
		if d.before, err = readMembers(&d.opts, d.bootID); err != nil {
			return err
		}
	}
	for _, restore := range []func() error{d.restoreSettings, d.restoreShares, d.restoreCarried, d.restoreFiled} {
		if err := restore(); err != nil {
			return err
		}
	}
	return nil
}

func (d *Daemon) statePath() string { return filepath.Join(d.opts.RunDir, "state.json") }

// Run serves until ctx is done, then closes the sockets and returns nil. It
// returns an error when the run directory is lost. Open gates stay open. It may
// be called once.
func (d *Daemon) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	server, err := d.newControlServer()
	if err != nil {
		return err
	}
	d.serveTenants = func() {
		l := d.dir.Tenants
		d.wg.Go(func() { d.accept(ctx, l, d.admit) })
	}
	d.serveView = func() {
		l := d.dir.View
		d.wg.Go(func() { d.accept(ctx, l, d.admitViewer) })
	}
	d.serveControl = func() {
		l := d.dir.Control
		d.wg.Go(func() { d.accept(ctx, l, d.admitCaller(server)) })
	}
	d.serveTenants()
	d.serveView()
	d.serveControl()
	d.servePorts(ctx)
	d.startDiscovery()
	d.checkCheckpoint(ctx)
	d.watch.Set(now().Add(watchPause))
	if d.opts.Sample != nil {
		d.look.Set(now().Add(d.lookPause))
	}
	if d.holder != nil {
		d.holder.next.Set(now())
	}
	d.loop(ctx)
	if d.members.Planned() {
		d.recordMembers()
	}
	if d.reshare.Planned() {
		d.recordShares()
	}
	if d.reset.Planned() {
		d.keepSettings()
	}
	d.end() // before anything is closed that others wait for
	d.closeHolder()

	d.dir.Tenants.Close()
	d.dir.View.Close()
	d.dir.Control.Close()
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
	for _, p := range d.firsts {
		p.Close()
	}
	cancel()
	if d.overlap != nil {
		d.overlap.Close()
	}
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
	d.dir.Close()
	d.arena.Close() // takes a while, and nobody waits for it
	return d.fatal
}

// loop is the only goroutine that touches the tables and the cores.
func (d *Daemon) loop(ctx context.Context) {
	wake := time.NewTimer(0)
	defer wake.Stop()
	for d.fatal == nil {
		select {
		case <-ctx.Done():
			return
		case f := <-d.events:
			f()
		case <-wake.C:
			d.timers.Run(now())
		}
		d.dropBroken()
		d.applyFences()
		d.advanceMigrations()
		d.watchRefusals()
		d.planTurns()
		if at, ok := d.timers.Next(); ok {
			wake.Reset(max(at.Sub(now()), 0))
		} else {
			wake.Stop()
		}
	}
}

// planTurns sets the timers of all GPUs: what one GPU's core waits for can
// change by a step of another GPU in the same gang.
func (d *Daemon) planTurns() {
	for _, g := range d.order {
		if at, ok := g.core.Deadline(); ok {
			g.turn.Set(at)
		} else {
			g.turn.Stop()
		}
	}
}

// watchRunDir listens anew where a socket was deleted or replaced. It ends the
// scheduler when the run directory is lost: no grant could be recorded. Whoever
// supervises the scheduler starts one that makes the directory anew.
func (d *Daemon) watchRunDir() {
	mended, err := d.dir.Mend()
	if d.fatal = err; err != nil {
		d.log.WithError(err).Error("the run directory is lost")
		return
	}
	if mended != (rundir.Mended{}) {
		d.log.Warnf("somebody deleted or replaced a socket in the run directory: listening anew %+v", mended)
	}
	if mended.Tenants {
		d.serveTenants()
	}
	if mended.View {
		d.serveView()
	}
	if mended.Control {
		d.serveControl()
	}
	d.watch.Set(now().Add(watchPause))
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

// ask is do for callers that need the answer. f has run when it returns nil, and never runs once
// it has returned an error: what f writes is the caller's again.
func (d *Daemon) ask(ctx context.Context, f func()) error {
	done := make(chan struct{})
	var begun atomic.Bool // or given up
	g := func() {
		if begun.CompareAndSwap(false, true) {
			f()
			close(done)
		}
	}
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
		if begun.CompareAndSwap(false, true) {
			return ctx.Err()
		}
	case <-d.ended:
	}
	select { // f runs, or the loop has ended
	case <-done:
		return nil
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
