// SPDX-License-Identifier: Apache-2.0

// Command gpu measures nvshare on a real GPU, in steps: what the shim adds to
// a call, how long the GPU stands still at a hand-over, how fast two
// containers are that share the GPU, and the same for many kinds of work, each
// next to the driver alone in the same run.
//
// It is started by run.sh from the bundle that bundle.sh makes, as root, and
// uses the node of the end-to-end tests: its own scheduler, and for containers
// its own containerd, NRI, CDI from our own discovery. The containers see the
// host's /usr and /opt, so its PyTorch, and no other part of the host.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/node"
)

// A step is a part of the measurements that can be run alone.
type step struct {
	name string
	what string
	run  func(*bench, context.Context, string) error
}

var steps = []step{
	{"launch", "what the shim adds to a launch and to other calls", (*bench).launchCost},
	{"handover", "how long the GPU stands still at a hand-over", (*bench).handovers},
	{"gemm", "two containers with PyTorch, next to the driver's time slicing", (*bench).gemm},
	{"matrix", "many kinds of work with and without the shim, alone and beside another", (*bench).matrix},
	{"memory", "what a process with a memory limit is told and given", (*bench).memoryLimit},
	{"shares", "how exact compute limits and requests are, by the tenants' own work", (*bench).sharesStep},
	{"programs", "real programs that share the GPU, natively and in each mode", (*bench).programsStep},
	{"alone", "real programs without company, natively and with the shim", (*bench).aloneStep},
	{"oversub", "real programs whose memory does not fit together", (*bench).oversubStep},
	{"tenants", "what 2 to 16 tenants that saturate the GPU get done together", (*bench).tenantsStep},
	{"priority", "short requests beside 1, 3 and 8 tenants that saturate the GPU", (*bench).priorityStep},
	{"preempt", "hand-over, short requests and a core limit beside kernels of 50 ms and 1 s", (*bench).preemptStep},
	{"swap", "how long it takes to move memory out and in when the GPU passes on, by the link's limit", (*bench).swapStep},
	{"content", "what moves of memory that is zero, unchanged, or written", (*bench).contentStep},
	{"suspend", "a process off the GPU with its context, and back; many model servers on a small GPU", (*bench).suspendStep},
	{"rl", "two jobs that generate, reward and train, whose memory does not fit together, against one after the other", (*bench).rlStep},
	{"alloc", "what allocations cost, and swapping while all fits", (*bench).allocStep},
	{"makespan", "tenants whose memory does not fit together, against one after the other", (*bench).makespanStep},
	{"containers", "rows of the matrix in two containers; CDI without NRI", (*bench).containersStep},
	{"overlap", "small kernels at the same time: time slices, plain MPS and overlap groups", (*bench).overlapStep},
	{"starts", "tenants that start at the same time", (*bench).startsStep},
	{"gang", "a job on two GPUs beside tenants of one, and beside another; not by default", (*bench).gangStep},
	{"tensor", "two tensor-parallel models on two GPUs that do not hold both; not by default", (*bench).tensorStep},
	{"two-gpu", "processes that use two GPUs each; not by default", (*bench).twoGPUs},
	{"migrate", "a training that changes its GPU twenty times, against one that stays; two GPUs, not by default", (*bench).migrateStep},
}

// ordinary are the steps without any named.
var ordinary = []string{"launch", "handover", "gemm", "matrix", "memory"}

func main() {
	b := &bench{}
	bundle := flag.String("bundle", ".", "unpacked bundle, or a build directory")
	results := flag.String("results", "results", "directory for the results")
	only := flag.String("only", "", "a regular expression: cells of the matrix (framework/allocator/load), mixes of programs (of oversub with the GPU's MiB: a+b/5120), cases of gang and tensor, or parts of overlap and suspend")
	flag.Float64Var(&b.seconds, "seconds", 8, "length of gemm's windows")
	flag.BoolVar(&b.cells.quick, "quick", false, "shorter windows and fewer tenants, to try it")
	flag.Float64Var(&b.cells.minutes, "minutes", -1, "matrix: begin no cell that would end later; 0: no limit; default 8.5, 3.2 with --quick")
	flag.StringVar(&b.cells.peer, "peer", "", "matrix: a `library` to preload in place of ours, for comparison")
	loads := flag.String("loads", "", "shares: some of "+strings.Join(sharesByDefault, ", ")+" and hot-gemm, hot-graph, separated by commas")
	flag.Float64Var(&b.cellSeconds, "cell", 0, "shares: length of a cell, `seconds`; default 6.6")
	flag.IntVar(&b.rounds, "rounds", 0, "programs, alone: windows of each mix each way, default 4, programs with --quick 1; oversub: rounds, default 3, with --quick 2; rl: iterations, default 6, of which two are done alone too")
	flag.DurationVar(&b.window, "window", 0, "programs: length of a window, default 5s, with --quick 3s; oversub: of a round, default 24s; suspend: of the requests to servers")
	ways := flag.String("ways", "", "programs, alone: only these ways to share, of native, on, off and auto, separated by commas; default of alone: auto")
	flag.BoolVar(&b.swapping, "swapping", false, "alone: in turns, with memory that may be swapped")
	schedulerArgs := flag.String("scheduler-args", "", "options of every scheduler of the run, like \"--swap-memory auto\"; those of a step come after them")
	flag.BoolVar(&b.simulated, "simulated", false, "two simulated GPUs and no framework, to try the program")
	flag.IntVar(&b.simulatedMiB, "simulated-mib", 16384, "memory of each simulated GPU, `MiB`")
	flag.IntVar(&b.tenantMiB, "tenant-mib", 0, "swap: memory of each tenant, `MiB`, in place of 16 GiB and up to 60")
	b.servers.flags()
	b.rl.flags()
	flag.StringVar(&b.suspendDir, "suspend-dir", "", "suspend: a `directory` on a disk, to which memory of the servers goes on from half as much host memory")
	plot := flag.String("plot", "", "only draw pictures of the results in a `file`: swap.json or makespan.json")
	flag.Usage = usage
	var chosen []string
	for rest := os.Args[1:]; ; rest = flag.Args()[1:] { // flags may also follow steps
		if err := flag.CommandLine.Parse(rest); err != nil || flag.NArg() == 0 {
			break
		}
		chosen = append(chosen, flag.Arg(0))
	}
	if *plot != "" {
		if err := plotFile(*plot); err != nil {
			fatal(err)
		}
		return
	}
	var err error
	if b.bundle, err = filepath.Abs(*bundle); err != nil {
		fatal(err)
	}
	if b.results, err = filepath.Abs(*results); err != nil {
		fatal(err)
	}
	if err := os.MkdirAll(b.results, 0o755); err != nil {
		fatal(err)
	}
	if *only != "" {
		if b.cells.only, err = regexp.Compile(*only); err != nil {
			fatal(err)
		}
	}
	if *loads != "" {
		b.loads = strings.Split(*loads, ",")
	}
	b.schedulerArgs = strings.Fields(*schedulerArgs)
	if *ways != "" {
		b.ways = strings.Split(*ways, ",")
	}
	if b.cells.minutes < 0 {
		b.cells.minutes = 8.5
		if b.cells.quick {
			b.cells.minutes = 3.2
		}
	}
	b.python = pythonPath()
	if len(chosen) == 0 {
		chosen = ordinary
	}
	for _, name := range chosen {
		if !slices.ContainsFunc(steps, func(s step) bool { return s.name == name }) {
			fatal(fmt.Errorf("no step %q; there are %s", name, stepNames()))
		}
	}
	os.Exit(node.Isolated(b.bundle, "gpu-", func(work string) int {
		ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
		defer stop()
		return b.run(ctx, work, chosen)
	}))
}

func usage() {
	out := flag.CommandLine.Output()
	fmt.Fprintln(out, "usage: gpu [flags] [STEP...]\n\nsteps:")
	for _, s := range steps {
		fmt.Fprintf(out, "  %-10s %s\n", s.name, s.what)
	}
	fmt.Fprintln(out, "\nflags:")
	flag.PrintDefaults()
}

func stepNames() string {
	var names []string
	for _, s := range steps {
		names = append(names, s.name)
	}
	return strings.Join(names, ", ")
}

func fatal(err error) {
	fmt.Fprintln(os.Stderr, "gpu:", err)
	os.Exit(1)
}

// pythonPath is the interpreter that has PyTorch: $PYTHON, or python3.
func pythonPath() string {
	if p := os.Getenv("PYTHON"); p != "" {
		return p
	}
	p, err := exec.LookPath("python3")
	if err != nil {
		return "/usr/bin/python3"
	}
	return p
}

type bench struct {
	bundle, results string
	seconds         float64
	python          string
	simulated       bool
	simulatedMiB    int // memory of each simulated GPU
	swapping        bool
	schedulerArgs   []string
	cells           matrixOptions
	loads           []string // of the step shares
	cellSeconds     float64
	tenantMiB       int           // of the step swap
	suspendDir      string        // of the step suspend
	servers         serverOptions // of the step suspend
	rl              rlOptions
	rounds          int // of the steps programs and alone; 0: by default
	window          time.Duration
	ways            []string // of the step programs; none: all
	node            *node.Node
	processors      processors
	backendName     []string // of the pool's processes, in place of PyTorch's loads
	shared          *pool    // of the steps shares, tenants and priority; nil until one needs it
}

// run does the steps one after the other. A step that fails does not keep the
// next from running.
func (b *bench) run(ctx context.Context, work string, chosen []string) int {
	options := node.Options{Build: b.bundle, Simulated: b.simulated}
	if b.simulated {
		options.SimConfig = fmt.Sprintf("gpus=2\nmemory_mib=%d\n", b.simulatedMiB)
		if _, err := os.Stat(filepath.Join(b.bundle, "simgpu")); err != nil {
			fmt.Fprintf(os.Stderr, "gpu: a bundle has no simulated GPU (%v): in the clone run cp -a .build/simgpu %s\n", err, b.bundle)
			return 1
		}
	}
	var err error
	if b.processors, err = ownProcessors(); err != nil {
		fmt.Fprintln(os.Stderr, "gpu:", err)
		return 1
	}
	n, err := node.New(work, options)
	if err == nil {
		b.node = n
		err = n.StartScheduler(ctx, b.schedulerArgs...)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "gpu:", err)
		return 1
	}
	status := 0
	for _, s := range steps {
		if !slices.Contains(chosen, s.name) {
			continue
		}
		began := time.Now()
		fmt.Printf("--- %s: %s\n", s.name, s.what)
		if err := s.run(b, ctx, work); err != nil {
			fmt.Fprintf(os.Stderr, "gpu: %s: %v\n%s\n", s.name, err, n.Logs(20))
			status = 1
		}
		fmt.Printf("--- %s took %.1f s\n", s.name, time.Since(began).Seconds())
	}
	if b.shared != nil {
		if err := b.shared.stop(); err != nil {
			fmt.Fprintln(os.Stderr, "gpu: end of the tenants:", err)
			status = 1
		}
	}
	return status
}

// containers makes the node one that runs containers with GPUs.
func (b *bench) containers(ctx context.Context) error {
	if b.node.Containerd != nil {
		return nil
	}
	for _, start := range []func(context.Context) error{b.node.StartContainerd, b.node.BuildImages,
		func(ctx context.Context) error { return b.node.StartPlugin(ctx) }} {
		if err := start(ctx); err != nil {
			return err
		}
	}
	return b.save("cdi.yaml", b.cdiSpec())
}

// matrix is the step.
func (b *bench) matrix(ctx context.Context, work string) error {
	if b.cells.peer != "" {
		if _, err := os.Stat(b.cells.peer); err != nil {
			return err
		}
	}
	m, err := newMatrix(b.cells, filepath.Join(work, "private", "matrix"))
	if err != nil {
		return err
	}
	m.python, m.script, m.results, m.arbiter, m.tenantEnv = b.python, b.script("worker.py"), b.results, nodeArbiter{b.node}, b.tenantEnv
	groups := matrixGroups
	if b.simulated {
		groups = []loadGroup{{framework: "driver", allocator: "default", backend: "driver", loads: []string{"spin"}, pair: true}}
	}
	return m.run(ctx, groups)
}

// nodeArbiter is the node's scheduler, as the matrix needs it.
type nodeArbiter struct{ *node.Node }

func (a nodeArbiter) setQuantum(ctx context.Context, quantum string) error {
	_, err := a.Ctl(ctx, "-T", quantum)
	return err
}

// script is the path of one of our Python programs: in the bundle, or in the
// tree that the build directory belongs to.
func (b *bench) script(name string) string {
	path := filepath.Join(b.bundle, name)
	if _, err := os.Stat(path); err != nil {
		return filepath.Join(b.bundle, "..", "tests", "gpu", name)
	}
	return path
}

// cdiSpec is what the plugin wrote for this host.
func (b *bench) cdiSpec() string {
	files, _ := filepath.Glob("/var/run/cdi/nvshare.com-gpu.*")
	var text strings.Builder
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err == nil {
			text.Write(data)
		}
	}
	return text.String()
}

func (b *bench) save(name, text string) error { return save(b.results, name, text) }

func (b *bench) saveJSON(name string, v any) error { return saveJSON(b.results, name, v) }

func save(dir, name, text string) error {
	return os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644)
}

func saveJSON(dir, name string, v any) error {
	data, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return save(dir, name, string(data)+"\n")
}
