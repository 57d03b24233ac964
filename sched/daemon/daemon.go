// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/away"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/moves"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/overlap"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/rundir"
	"github.com/nvshare/nvshare/sched/daemon/settings"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/daemon/watch"
)

// Lister finds the GPUs of this node.
type Lister func(ctx context.Context) ([]node.Found, error)

// Options configure a Daemon. Zero durations mean package sched's defaults.
type Options struct {
	node.Config
	// Sockets says what is not as by default in the run directory.
	Sockets rundir.Options
	Grace   time.Duration
	Tuning  account.Tuning // how time is accounted
	// FenceKill has processes killed that do not release a GPU in the grace period; else
	// nvshare-warden keeps them off it, where it runs.
	FenceKill bool
	// Spin is how long the scheduler and the next client may spin for the
	// release of a grant that was revoked; 0: they sleep.
	Spin    time.Duration
	List    Lister
	Version string // for display
	// CheckpointCheck says why Checkpoint cannot work, or not for all processes; nil: it is
	// not looked at.
	CheckpointCheck func(context.Context) error
	// MPSControl finds nvidia-cuda-mps-control. nil: there are no overlap groups.
	MPSControl func() (string, error)
	// OverlapStarter is a command that ends in overlap.Start.
	OverlapStarter []string
	// Rules bound what pods may ask for.
	Rules tenants.Rules
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
}

// Daemon is a scheduler with open sockets. Make one with New, then call Run.
type Daemon struct {
	*node.Node
	tenants  *tenants.Book
	memory   *memory.Memory
	away     *away.Away
	moves    *moves.Moves
	watch    *watch.Watch
	own      Options
	settings *settings.Store
	started  time.Time
	// These are the constants, except in tests.
	registerTimeout, slowLately time.Duration
	overviewPart                time.Duration

	dir   *rundir.Dir
	ports []*port

	// Below: the loop's own.

	search      *timer.Timer // for GPUs
	runDirWatch *timer.Timer // that the run directory is there

	fatal    error // ends the loop
	state    *state.File
	cautious bool // the state file was damaged: holders may be about
	conns    map[*node.Conn]struct{}
	toStep   []string // GPUs where a gang goes on because of another GPU; see stepGangs

	discovering   bool
	discovered    base.Time // when the latest search ended; 0: never
	discoverErr   error
	pending       []*node.PendingAttach
	persistErr    error
	checkpointErr error // of CheckpointCheck
	invariantErr  error
	identifyErr   error     // clients are refused that no client can do anything about
	plugin        []string  // problems that the plugin has reported
	pluginAt      base.Time // when
	nextCheck     base.Time
	overlap       *overlap.Manager // nil: none
	latest        *overview
	checkAlways   bool   // tests
	refused       uint64 // beside those that the desk refused
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
	none := api.SwapMemoryZero
	if opts.SwapAuto {
		opts.SwapMemory, none = memory.AutoSwapMemory(arena.Kernel{}, arena.Total())
		opts.SwapReady = min(opts.SwapReady, opts.SwapMemory)
	}
	d := assemble(opts, bootID, peers)
	d.memory.NoHost = none
	d.memory.OpenArena(arena.Kernel{}, maxReady, maxHeld)
	if err := d.away.OpenFiles(); err != nil {
		return nil, err
	}
	d.openOverlap()
	d.NoteChange(nil, &history.Event{Kind: api.EventType_EVENT_TYPE_START, Text: "version " + opts.Version})
	return d, nil
}

// assemble puts the parts together. They have nothing open.
func assemble(opts Options, bootID string, peers *peer.Finder) *Daemon {
	d := &Daemon{
		Node:            node.New(opts.Config, bootID, peers),
		own:             opts,
		started:         time.Now(),
		registerTimeout: registerTimeout,
		slowLately:      slowLately,
		overviewPart:    overviewPart,
		conns:           map[*node.Conn]struct{}{},
	}
	d.Node.Step, d.Node.Bury = d.step, d.bury
	d.settings = settings.New(filepath.Join(d.Opts.RunDir, "settings.json"), d.Log, &d.Timers)
	d.tenants = tenants.New(d.Node)
	d.memory = memory.New(d.tenants)
	d.tenants.MemoryChanged, d.tenants.OverlapChanged = d.memory.SetTenantMemory, d.reviewOverlap
	d.away = away.New(d.memory)
	d.moves = moves.New(d.away, d.loseClient)
	d.watch = watch.New(d.tenants, d.managed, func(samples []metrics.GPUSample) {
		d.noteSamples(samples)
	})
	d.watch.HoldsFenced = !opts.FenceKill
	d.search = d.Timers.New(d.startDiscovery)
	d.runDirWatch = d.Timers.New(d.watchRunDir)
	d.History = history.New(d.started.UnixNano())
	return d
}

// restoreFiles reads what earlier schedulers have written.
func (d *Daemon) restoreFiles() error {
	var err error
	d.state, err = state.Load(d.statePath(), d.BootID)
	if errors.Is(err, state.ErrNotRegular) {
		return fmt.Errorf("no grant could be recorded: %w", err)
	}
	if err != nil {
		d.cautious = true
		d.Log.WithError(err).Warn("the state file cannot be used: epochs go on from the wall clock, and the first grants wait for one quantum and grace period, in case an unknown client still holds a GPU")
	}
	if d.Opts.SwapMemory != 0 {
		if d.memory.Before, err = memory.ReadMembers(&d.Opts, d.BootID); err != nil {
			return err
		}
	}
	for _, restore := range []func() error{d.restoreSettings, d.tenants.RestoreShares, d.moves.RestoreCarried, d.away.RestoreFiled} {
		if err := restore(); err != nil {
			return err
		}
	}
	return nil
}

func (d *Daemon) restoreSettings() error {
	o := &d.Opts
	return d.settings.Restore(settings.Setting{Quantum: o.Quantum, Mode: o.Mode.String(), SwapShare: settings.Percent(o.SwapShare)}, d.HasEnded)
}

func (d *Daemon) statePath() string { return filepath.Join(d.Opts.RunDir, "state.json") }

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
	admit := [rundir.Sockets]func(context.Context, *net.UnixConn){d.admit, d.admitViewer, d.admitCaller(server)}
	for s := range rundir.Sockets {
		d.Go(func() { d.accept(ctx, d.dir.Listener(s), admit[s]) })
	}
	for _, p := range d.ports {
		d.Go(func() { d.servePort(ctx, p) })
	}
	d.startDiscovery()
	d.checkCheckpoint(ctx)
	d.runDirWatch.Set(loop.Now().Add(watchPause))
	d.watch.Begin()
	d.Loop.Run(ctx, d.afterEvent)
	for _, k := range []*state.Keeper{d.memory.Members, d.tenants.Record, d.settings.Record} {
		if k.Planned() {
			k.Keep()
		}
	}
	d.End() // before anything is closed that others wait for
	d.watch.Close()
	d.dir.CloseSockets()
	server.Close()
	d.closeAll(cancel)
	return d.fatal
}

// closeAll closes what clients and goroutines have, which end by cancel.
func (d *Daemon) closeAll(cancel func()) {
	for c := range d.conns {
		c.Sock.Close()
		if c.Client == nil {
			c.Peer.Close()
		}
	}
	for _, cl := range d.Clients {
		cl.Close()
	}
	for _, p := range d.tenants.Firsts {
		p.Close()
	}
	cancel()
	if d.overlap != nil {
		d.overlap.Close()
	}
	d.Wg.Wait()
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
	d.dir.Close()
	d.memory.Pool.Close() // takes a while, and nobody waits for it
}

// afterEvent does what may be due after each event of the loop.
func (d *Daemon) afterEvent() (goOn bool) {
	d.dropBroken()
	d.watch.Advance()
	d.moves.AdvanceMigrations()
	d.away.WatchRefusals()
	d.planTurns()
	return d.fatal == nil
}

// planTurns sets the timers of all GPUs: what one GPU's core waits for can
// change by a step of another GPU in the same gang.
func (d *Daemon) planTurns() {
	for _, g := range d.Order {
		if at, ok := g.Core.Deadline(); ok && !g.IsStuck() {
			g.Turn.Set(at)
		} else {
			g.Turn.Stop()
		}
	}
}

// watchRunDir ends the scheduler when the run directory, or a socket in it, is lost. Whoever
// supervises the scheduler starts one that makes them anew.
func (d *Daemon) watchRunDir() {
	if d.fatal = d.dir.Check(); d.fatal != nil {
		d.Log.WithError(d.fatal).Error("the run directory is lost")
		return
	}
	d.runDirWatch.Set(loop.Now().Add(watchPause))
}
