// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/node"
	"github.com/nvshare/nvshare/tests/quantile"
)

// matrixOptions say how much of the matrix is run, and how long it may take.
type matrixOptions struct {
	quick   bool
	minutes float64        // cells that would end later are not begun; 0: no limit
	only    *regexp.Regexp // of framework/allocator/load
	peer    string         // a library to preload in place of ours
}

// A loadGroup is the loads that one set of workers runs, one after the other.
type loadGroup struct {
	framework, allocator string
	backend              string
	env                  []string
	optional             []string // env that old or new versions may not know
	loads                []string
	pair                 bool // also two native tenants beside each other
}

// solo loads do not fill the GPU, so a second tenant says nothing.
var solo = map[string]bool{"small-step": true, "small-graph": true, "small": true}

var torchLoads = []string{"gemm", "add", "conv", "attention", "graph", "compile"}

var matrixGroups = []loadGroup{
	{framework: "torch", allocator: "default", backend: "torch", pair: true,
		loads: append(slices.Clone(torchLoads), "small-step", "small-graph")},
	{framework: "jax", allocator: "default", backend: "jax", loads: []string{"mlp", "small"},
		env:      []string{"XLA_PYTHON_CLIENT_PREALLOCATE=false", "TF_CPP_MIN_LOG_LEVEL=2"},
		optional: []string{"XLA_FLAGS=--xla_gpu_deterministic_ops=true"}},
	{framework: "cupy", allocator: "default", backend: "cupy", loads: []string{"mixed"}},
	{framework: "torch", allocator: "expandable", backend: "torch", loads: torchLoads,
		env: []string{"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"}},
	{framework: "torch", allocator: "async", backend: "torch", loads: torchLoads,
		env: []string{"PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync"}},
}

// Names of a group's workers. shim1 is compared with native; shim2 is there to
// share the GPU with it.
const (
	native, native2 = "native", "native2"
	shim1, shim2    = "shim", "shim2"
	peer            = "peer"
)

type matrixResult struct {
	Options struct {
		Quick  bool    `json:"quick"`
		Alone  float64 `json:"alone_s"`
		Beside float64 `json:"beside_s"`
		Pairs  int     `json:"pairs"`
		Peer   string  `json:"peer,omitempty"`
	} `json:"options"`
	Groups []*groupResult `json:"groups"`
	Cells  []*cell        `json:"cells"`
	Phases []phase        `json:"phases"`
}

type phase struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
}

type groupResult struct {
	Framework string                    `json:"framework"`
	Allocator string                    `json:"allocator"`
	Env       []string                  `json:"env,omitempty"`
	Versions  map[string]string         `json:"versions,omitempty"`
	Init      map[string]any            `json:"init,omitempty"`
	Allocates map[string]map[string]any `json:"allocates,omitempty"` // what PyTorch says of its allocator
	Problems  []string                  `json:"problems,omitempty"`
}

// A cell is one load of one group.
type cell struct {
	Framework string   `json:"framework"`
	Allocator string   `json:"allocator"`
	Load      string   `json:"load"`
	Skipped   string   `json:"skipped,omitempty"`
	Problems  []string `json:"problems,omitempty"`
	Notes     []string `json:"notes,omitempty"`

	Built map[string]built `json:"built,omitempty"`
	// Alone lists the windows in which nobody else worked, in order.
	Alone []aloneWindow `json:"alone,omitempty"`
	// Of native's rate in the same pair of windows.
	Shim *spread `json:"shim_of_native,omitempty"`
	Peer *spread `json:"peer_of_native,omitempty"`
	// Two tenants at the same time; each with the windows around it as reference.
	Beside     []*besideWindow `json:"beside,omitempty"`
	NativePair *besideWindow   `json:"native_pair,omitempty"`

	Results *results          `json:"results,omitempty"`
	Proof   map[string]*proof `json:"proof,omitempty"`
	Revokes uint64            `json:"revokes"` // in this cell
	Fences  uint64            `json:"fences"`
	Seconds float64           `json:"seconds"`
}

type aloneWindow struct {
	Who  string  `json:"who"`
	Pair int     `json:"pair"`
	Rate float64 `json:"rate"`
	Gap  float64 `json:"longest_gap_s"`
}

type besideWindow struct {
	Quantum  string             `json:"quantum,omitempty"`
	Tenants  map[string]counted `json:"tenants"`
	Sum      float64            `json:"rate"`
	Native   float64            `json:"native_rate"` // reference
	Shim     float64            `json:"shim_rate,omitempty"`
	OfNative float64            `json:"of_native"`
	OfShim   float64            `json:"of_shim,omitempty"`
	// Of both tenants, in the window and the time before it.
	Revokes     uint64 `json:"revokes,omitempty"`
	Preemptions uint64 `json:"preemptions,omitempty"` // drains that were cut
}

// results compares what the load computes from fixed seeds.
type results struct {
	Native  string `json:"native"`
	Again   string `json:"native_again"`
	Other   string `json:"native_other_process,omitempty"`
	Shim    string `json:"shim,omitempty"`
	Beside  string `json:"shim_beside_another,omitempty"`
	Peer    string `json:"peer,omitempty"`
	Verdict string `json:"verdict"`
	// Largest differences of some numbers, by the largest number.
	NativeDifference float64 `json:"native_difference"`
	ShimDifference   float64 `json:"shim_difference"`
}

// proof is what the scheduler knows of a worker: the shim's self-proof, and
// what it counted in this cell.
type proof struct {
	Interposed  uint32  `json:"interposed"`
	Bypassed    uint32  `json:"bypassed"`
	ShimVersion string  `json:"shim_version"`
	Calls       uint64  `json:"calls"`
	GateWaits   uint64  `json:"gate_waits"`
	Grants      uint64  `json:"grants"`
	MemoryPeak  uint64  `json:"memory_peak_bytes"`
	Held        float64 `json:"held_s"`
}

// spread is a median with its quartiles.
type spread struct {
	Median float64 `json:"median"`
	Q1     float64 `json:"q1"`
	Q3     float64 `json:"q3"`
	N      int     `json:"n"`
}

func newSpread(v []float64) *spread {
	if len(v) == 0 {
		return nil
	}
	return &spread{quantile.Of(v, 0.5), quantile.Of(v, 0.25), quantile.Of(v, 0.75), len(v)}
}

// arbiter is what the matrix needs of the scheduler.
type arbiter interface {
	setQuantum(ctx context.Context, quantum string) error
	Status(ctx context.Context) (*api.StatusResponse, error)
}

// matrix runs it.
type matrix struct {
	o         matrixOptions
	arbiter   arbiter
	tenantEnv func(who, peerLibrary string) []string // native, the shim's or a peer's
	python    string
	script    string
	dir       string // caches and standard errors
	results   string
	begin     func(g loadGroup, who string) (*worker, error) // starts who uses the shim in another way than as a process

	alone    time.Duration
	beside   time.Duration
	test     time.Duration // how long another works while a result is computed
	before   int           // pairs before the first shared window; two more follow
	deadline time.Time
	took     map[string]time.Duration // by load, in the group before
	r        matrixResult
	phaseAt  time.Time
	all      []*running
}

// running is a group with its workers.
type running struct {
	loadGroup
	m        *matrix
	r        *groupResult
	workers  map[string]*worker
	names    []string // of the workers, native first
	restarts int
	stopped  bool
	skip     string // why no cell of it can run
}

func newMatrix(o matrixOptions, dir string) (*matrix, error) {
	m := &matrix{o: o, dir: dir, took: map[string]time.Duration{}, alone: 500 * time.Millisecond, beside: 2500 * time.Millisecond, test: 1500 * time.Millisecond, before: 3,
		phaseAt: time.Now()}
	if o.quick {
		m.alone, m.beside, m.test, m.before = 300*time.Millisecond, 800*time.Millisecond, 500*time.Millisecond, 1
	}
	if o.minutes > 0 {
		m.deadline = time.Now().Add(time.Duration(o.minutes * float64(time.Minute)))
	}
	m.r.Options.Quick, m.r.Options.Peer = o.quick, o.peer
	return m, os.MkdirAll(dir, 0o755)
}

// phase closes a phase and says how long it took.
func (m *matrix) phase(name string) {
	took := time.Since(m.phaseAt)
	m.phaseAt = time.Now()
	m.r.Phases = append(m.r.Phases, phase{name, took.Seconds()})
	fmt.Printf("  [%5.1f s] %s\n", took.Seconds(), name)
}

func (m *matrix) run(ctx context.Context, groups []loadGroup) error {
	m.r.Options.Alone, m.r.Options.Beside, m.r.Options.Pairs = m.alone.Seconds(), m.beside.Seconds(), m.before+2
	if !m.deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, m.deadline.Add(30*time.Second))
		defer cancel()
	}
	for _, g := range groups {
		if g.loads = m.chosen(g); len(g.loads) == 0 {
			continue
		}
		r, err := m.start(g)
		if err != nil {
			return err
		}
		defer r.stop()
		m.all = append(m.all, r)
		m.r.Groups = append(m.r.Groups, r.r)
	}
	// Imports use all cores: before anything is measured.
	var imports sync.WaitGroup
	for _, r := range m.all {
		imports.Go(func() { r.load(ctx) })
	}
	imports.Wait()
	m.phase(fmt.Sprintf("imports, %d groups of processes", len(m.all)))
	for _, r := range m.all {
		r.run(ctx)
	}
	m.phase("end of the last processes")
	if err := m.save(); err != nil {
		return err
	}
	for _, line := range m.table() {
		fmt.Println(line)
	}
	return m.failed()
}

// quickLoads are enough to try an allocator.
var quickLoads = []string{"conv", "graph"}

func (m *matrix) chosen(g loadGroup) []string {
	if m.o.only == nil && m.o.quick && g.allocator != "default" {
		return quickLoads
	}
	if m.o.only == nil {
		return g.loads
	}
	return slices.DeleteFunc(slices.Clone(g.loads), func(l string) bool {
		return !m.o.only.MatchString(g.framework + "/" + g.allocator + "/" + l)
	})
}

// save writes what there is.
func (m *matrix) save() error {
	if err := saveJSON(m.results, "matrix.json", &m.r); err != nil {
		return err
	}
	if err := save(m.results, "matrix.md", strings.Join(m.markdown(), "\n")+"\n"); err != nil {
		return err
	}
	var text strings.Builder
	files, _ := filepath.Glob(filepath.Join(m.dir, "*.stderr"))
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil || len(data) == 0 {
			continue
		}
		fmt.Fprintf(&text, "--- %s\n%s\n", filepath.Base(f), data[max(0, len(data)-20000):])
	}
	if text.Len() == 0 {
		return nil
	}
	return save(m.results, "matrix-stderr.txt", text.String())
}

func (m *matrix) failed() error {
	var n int
	for _, c := range m.r.Cells {
		n += min(1, len(c.Problems))
	}
	for _, g := range m.r.Groups {
		n += min(1, len(g.Problems))
	}
	if n > 0 {
		return fmt.Errorf("%d cells or groups with problems", n)
	}
	return nil
}

// environ is a worker's environment on top of this program's.
func (m *matrix) environ(g loadGroup, who string) []string {
	cache := filepath.Join(m.dir, "cache")
	env := append([]string{
		"PYTHONWARNINGS=ignore", "CUBLAS_WORKSPACE_CONFIG=:4096:8",
		"TORCHINDUCTOR_COMPILE_THREADS=1", "TORCHINDUCTOR_CACHE_DIR=" + cache + "/inductor",
		"TRITON_CACHE_DIR=" + cache + "/triton", "CUPY_CACHE_DIR=" + cache + "/cupy",
		"JAX_COMPILATION_CACHE_DIR=" + cache + "/jax", "CUDA_CACHE_PATH=" + cache + "/cuda",
	}, g.env...)
	env = append(env, g.optional...)
	return append(env, m.tenantEnv(who, m.o.peer)...)
}

// tenantEnv is what makes a process native, ours or a peer's.
func (b *bench) tenantEnv(who, peerLibrary string) []string {
	var env []string
	if b.simulated {
		env = append(env, "NVSHARE_SIMGPU_DIR="+node.SimGPU+"/run", "LD_LIBRARY_PATH="+node.SimGPU+"/lib", node.TenantEnv+"="+who)
	}
	switch who {
	case native, native2:
	case peer:
		env = append(env, "LD_PRELOAD="+peerLibrary)
	default:
		env = append(env, "LD_PRELOAD="+b.node.Shim(), "NVSHARE_RUN_DIR="+node.RunDir)
	}
	return env
}

func (m *matrix) startOne(g loadGroup, who string) (*worker, error) {
	if m.begin != nil && who != native && who != native2 {
		return m.begin(g, who)
	}
	log := filepath.Join(m.dir, fmt.Sprintf("%s-%s-%s.stderr", g.framework, g.allocator, who))
	return startWorker(m.python, m.script, who, log, m.environ(g, who), g.backend)
}

func (m *matrix) start(g loadGroup) (*running, error) {
	r := &running{loadGroup: g, m: m, workers: map[string]*worker{}, names: []string{native, shim1, shim2}}
	r.r = &groupResult{Framework: g.framework, Allocator: g.allocator, Env: append(slices.Clone(g.env), g.optional...)}
	if g.pair && !m.o.quick {
		r.names = append(r.names, native2)
	}
	if m.o.peer != "" && g.allocator == "default" {
		r.names = append(r.names, peer)
	}
	for _, who := range r.names {
		w, err := m.startOne(g, who)
		if err != nil {
			return nil, err
		}
		r.workers[who] = w
	}
	return r, nil
}

func (r *running) all() []*worker {
	var all []*worker
	for _, who := range r.names {
		if w := r.workers[who]; w != nil {
			all = append(all, w)
		}
	}
	return all
}

func (r *running) problem(format string, args ...any) {
	p := fmt.Sprintf(format, args...)
	fmt.Printf("  %s %s: %s\n", r.framework, r.allocator, p)
	r.r.Problems = append(r.r.Problems, p)
}

// load imports the frameworks. No cell of the group can run if that fails.
func (r *running) load(ctx context.Context) {
	for i, err := range together(r.all(), func(w *worker) error {
		versions, err := w.load(ctx)
		if w.name == native {
			r.r.Versions = versions
		}
		return err
	}) {
		r.failed(r.names[i], "import", err)
	}
}

// failed notes why a worker, or the whole group, cannot be used.
func (r *running) failed(who, what string, err error) {
	var why skipped
	switch {
	case err == nil:
	case errors.As(err, &why):
		r.skip = why.Error()
	default:
		r.problem("%s: %s: %v", who, what, err)
		if who == native {
			r.skip = what + " failed in the native process"
		}
	}
}

// init makes the contexts, native first: what optional environment it does
// not bear is left out.
func (r *running) init(ctx context.Context) {
	first := func(w *worker) (err error) {
		r.r.Init, err = w.init(ctx)
		return err
	}
	err := first(r.workers[native])
	if err != nil && len(r.optional) > 0 && r.workers[native].dead != nil {
		r.problem("without %v: %v", r.optional, err)
		r.optional, r.r.Env = nil, r.env
		for _, w := range r.all() {
			_ = w.kill(errors.New("started again"))
		}
		for _, who := range r.names {
			if r.workers[who], err = r.m.startOne(r.loadGroup, who); err != nil {
				r.failed(native, "start", err)
				return
			}
		}
		r.load(ctx)
		if r.skip == "" {
			err = first(r.workers[native])
		}
	}
	if r.failed(native, "init", err); r.skip != "" {
		return
	}
	for i, err := range together(r.all()[1:], func(w *worker) error {
		_, err := w.init(ctx)
		return err
	}) {
		r.failed(r.names[i+1], "init", err)
	}
}

// maxRestarts is how often a group starts a worker again that failed.
const maxRestarts = 4

// revive starts workers again that have died.
func (r *running) revive(ctx context.Context) {
	if w := r.workers[peer]; w != nil && w.dead != nil {
		r.problem("goes on without the peer: %v", w.dead)
		delete(r.workers, peer)
		r.names = slices.DeleteFunc(r.names, func(who string) bool { return who == peer })
	}
	for _, who := range r.names {
		if r.workers[who].dead == nil {
			continue
		}
		if r.restarts++; r.restarts > maxRestarts {
			r.skip = "its processes failed too often"
			return
		}
		w, err := r.m.startOne(r.loadGroup, who)
		if err == nil {
			r.workers[who] = w
			if _, err = w.load(ctx); err == nil {
				_, err = w.init(ctx)
			}
		}
		r.failed(who, "start again", err)
	}
}

// run does all cells of the group and ends its processes.
func (r *running) run(ctx context.Context) {
	name := r.framework + " " + r.allocator
	if r.skip == "" {
		r.init(ctx)
		r.m.phase("contexts of " + name)
	}
	for _, load := range r.loads {
		c := &cell{Framework: r.framework, Allocator: r.allocator, Load: load}
		r.m.r.Cells = append(r.m.r.Cells, c)
		needs := r.m.needs(load)
		switch left := time.Until(r.m.deadline); {
		case r.skip != "":
			c.Skipped = r.skip
		case ctx.Err() != nil:
			c.Skipped = ctx.Err().Error()
		case !r.m.deadline.IsZero() && left < needs:
			c.Skipped = fmt.Sprintf("no time: %.0f s left, it may take %.0f s", left.Seconds(), needs.Seconds())
		default:
			began := time.Now()
			r.measure(ctx, c)
			took := time.Since(began)
			c.Seconds = took.Seconds()
			r.m.took[load] = took
			r.revive(ctx)
		}
		r.m.phase(c.line())
		if err := r.m.save(); err != nil { // whatever happens next, this is kept
			r.problem("save: %v", err)
		}
	}
	r.stop()
}

// needs is how long a cell may take.
func (m *matrix) needs(load string) time.Duration {
	if t := m.took[load]; t > 0 {
		return t + t/10
	}
	return 5*time.Second + 4*m.beside + 8*m.alone
}

// stop ends the processes as users' programs end.
func (r *running) stop() {
	if r.stopped {
		return
	}
	r.stopped = true
	for i, err := range together(r.all(), (*worker).quit) {
		if err != nil {
			r.problem("%s: %v", r.names[i], err)
		}
	}
}
