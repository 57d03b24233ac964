// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// For launch-cost: batches of each call in a run, and calls in a batch.
const (
	batches  = 150
	perBatch = 1000
)

// Bounds of how long a process takes to get ready, and a run to end. They are reached
// only if something is broken.
const (
	startTimeout = 30 * time.Second
	runTimeout   = 2 * time.Minute
)

// A library is preloaded; nil means none.
type library struct {
	name, path string
	ours       bool // registers with the scheduler
}

func (l *library) key() string {
	if l == nil {
		return native
	}
	return l.name
}

// peer tells whether l is not ours; a peer may fail without failing the run.
func (l *library) peer() bool { return l != nil && !l.ours }

// sample is what a run of launch-cost printed: nanoseconds by name.
type sample map[string]float64

// parseSample reads a line that launch-cost printed; nil if it is not a sample.
func parseSample(line []byte) sample {
	var all map[string]any
	if json.Unmarshal(line, &all) != nil {
		return nil
	}
	s := sample{}
	for name, value := range all {
		if ns, ok := value.(float64); ok {
			s[name] = ns
		}
	}
	return s
}

type bench struct {
	build, dir string // dir: of this run only
	libraries  []library
	scheduler  *exec.Cmd
}

func newBench(build, shim string, peers []string) (*bench, error) {
	build, err := filepath.Abs(build)
	if err != nil {
		return nil, err
	}
	b := &bench{build: build}
	for i, path := range append([]string{shim}, peers...) {
		if path, err = filepath.Abs(path); err != nil {
			return nil, err
		}
		if _, err := os.Stat(path); err != nil {
			return nil, err
		}
		l := library{name: "shim", path: path, ours: i == 0}
		if i > 0 {
			l.name = fmt.Sprintf("%d:%s", i, strings.TrimSuffix(filepath.Base(path), ".so"))
		}
		b.libraries = append(b.libraries, l)
	}
	if b.dir, err = os.MkdirTemp("", "nvshare-bench-"); err != nil {
		return nil, err
	}
	if err := b.prepare(); err != nil {
		b.close()
		return nil, err
	}
	return b, nil
}

// prepare makes the simulated GPUs that the scheduler finds; the driver is a stub.
func (b *bench) prepare() error {
	for _, d := range []string{"run", "sim/run", "sim/lib"} {
		if err := os.MkdirAll(filepath.Join(b.dir, d), 0o755); err != nil {
			return err
		}
	}
	nvml := filepath.Join(b.build, "simgpu", "libnvidia-ml.so.1")
	if err := os.Symlink(nvml, filepath.Join(b.dir, "sim/lib/libnvidia-ml.so.1")); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.dir, "sim/run/config"), []byte("gpus=2\n"), 0o644)
}

func (b *bench) close() {
	if b.scheduler != nil {
		_ = b.scheduler.Process.Kill()
		_ = b.scheduler.Wait()
	}
	_ = os.RemoveAll(b.dir)
}

func (b *bench) runDir() string { return filepath.Join(b.dir, "run") }

func (b *bench) startScheduler(ctx context.Context) error {
	var log bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(b.build, "bin", "nvshare-scheduler"),
		"--run-dir", b.runDir(), "--simgpu", filepath.Join(b.dir, "sim"), "--anti-thrash", "on",
		"--swap-memory", "0") // the stub has no virtual memory management
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		return err
	}
	b.scheduler = cmd
	deadline := time.Now().Add(startTimeout)
	for {
		_, err := b.status(ctx)
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // then the log is complete
			b.scheduler = nil
			return fmt.Errorf("nvshare-scheduler does not answer: %w\n%s", err, log.String())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (b *bench) status(ctx context.Context) (*api.StatusResponse, error) {
	conn, err := api.Dial(ctx, b.runDir())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.Status(ctx, &api.StatusRequest{})
}

// program is a launch-cost that has submitted work and waits.
type program struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	err   bytes.Buffer
	ended bool
}

// start runs launch-cost with a library preloaded, or none; with wrap, under a command
// like valgrind.
func (b *bench) start(ctx context.Context, l *library, s scenario, wrap []string, args ...string) (*program, error) {
	argv := append(slices.Clone(wrap), filepath.Join(b.build, "bench", "launch-cost"), "--wait",
		"--threads", strconv.Itoa(s.Threads), "--streams", strconv.Itoa(s.Streams),
		"--only", strings.Join(s.Calls, ","), "--runtime", filepath.Join(b.build, "bench", "libcudart.so"))
	argv = append(argv, args...)
	p := &program{cmd: exec.CommandContext(ctx, argv[0], argv[1:]...)}
	p.cmd.Stderr = &p.err
	p.cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Join(b.build, "bench"),
		"NVSHARE_BENCH_GPUS="+strconv.Itoa(s.GPUs), "NVSHARE_RUN_DIR="+b.runDir(),
		"NVSHARE_SIMGPU_DIR="+filepath.Join(b.dir, "sim/run"))
	if l != nil {
		p.cmd.Env = append(p.cmd.Env, "LD_PRELOAD="+l.path)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	// A peer may hang; killing it ends the read.
	timer := time.AfterFunc(startTimeout, func() { _ = p.cmd.Process.Kill() })
	defer timer.Stop()
	for line := ""; line != "ready\n"; { // a peer may print more
		if line, err = p.out.ReadString('\n'); err != nil {
			return nil, p.end(fmt.Errorf("not ready: %w", err))
		}
	}
	return p, nil
}

// end waits for the program and adds its output to err.
func (p *program) end(err error) error {
	if p.ended {
		return err
	}
	p.ended = true
	_ = p.in.Close()
	_, _ = io.Copy(io.Discard, p.out)
	if e := p.cmd.Wait(); e != nil || err != nil {
		return fmt.Errorf("%w: %s", errors.Join(err, e), strings.TrimSpace(p.err.String()))
	}
	return nil
}

// finish lets the program measure, and returns its sample.
func (p *program) finish() (sample, error) {
	if _, err := io.WriteString(p.in, "\n"); err != nil {
		return nil, p.end(err)
	}
	timer := time.AfterFunc(runTimeout, func() { _ = p.cmd.Process.Kill() })
	defer timer.Stop()
	for {
		line, err := p.out.ReadBytes('\n')
		if s := parseSample(line); s != nil {
			return s, p.end(nil)
		}
		if err != nil {
			return nil, p.end(fmt.Errorf("no figures: %w", err))
		}
	}
}

// arbitrated waits until the program has a grant, all its entry points lead to the shim,
// and no other client is attached except the scenario's tenant.
func (b *bench) arbitrated(ctx context.Context, p, tenant *program) error {
	deadline := time.Now().Add(startTimeout)
	for {
		wrong, err := b.unlike(ctx, p, tenant)
		if err != nil || wrong == "" {
			return err
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return errors.New(wrong)
		}
		time.Sleep(time.Millisecond) // the scheduler learns later that a process has ended
	}
}

// unlike says which condition of arbitrated does not hold.
func (b *bench) unlike(ctx context.Context, p, tenant *program) (string, error) {
	status, err := b.status(ctx)
	if err != nil {
		return "", err
	}
	want := map[uint32]api.ClientState{uint32(p.cmd.Process.Pid): api.ClientState_CLIENT_STATE_HOLDING}
	if tenant != nil {
		want[uint32(tenant.cmd.Process.Pid)] = api.ClientState_CLIENT_STATE_IDLE
	}
	for _, gpu := range status.Gpus {
		if gpu.Index != 0 {
			continue
		}
		for _, c := range gpu.Clients {
			if want[c.Pid] != c.State || c.Interposed == 0 || c.Bypassed != 0 {
				return fmt.Sprintf("client is not as it should be: %v", c), nil
			}
			delete(want, c.Pid)
		}
	}
	if len(want) != 0 {
		return fmt.Sprintf("no client with process and state %v", want), nil
	}
	return "", nil
}

// once is one run.
func (b *bench) once(ctx context.Context, l *library, s scenario, tenant *program, wrap []string, args ...string) (sample, error) {
	p, err := b.start(ctx, l, s, wrap, args...)
	if err != nil {
		return nil, err
	}
	if l != nil && l.ours {
		if err := b.arbitrated(ctx, p, tenant); err != nil {
			return nil, p.end(err)
		}
	}
	return p.finish()
}

// tenant starts the other client, if the scenario has one.
func (b *bench) tenant(ctx context.Context, s scenario) (*program, error) {
	if !s.Tenant {
		return nil, nil
	}
	return b.start(ctx, &b.libraries[0], scenario{Calls: submits[:1], Threads: 1, Streams: 1, GPUs: s.GPUs}, nil, "1", "1")
}

func (b *bench) measure(ctx context.Context, s scenario, pairs int) (result, error) {
	r := result{scenario: s, Samples: map[string][]sample{}, Failed: map[string]string{}}
	other, err := b.tenant(ctx, s)
	if err != nil {
		return r, err
	}
	if other != nil {
		defer func() { _ = other.end(nil) }()
	}
	runs := []*library{nil}
	for i := range b.libraries {
		runs = append(runs, &b.libraries[i])
	}
	args := []string{strconv.Itoa(batches), strconv.Itoa(perBatch)}
	for range pairs {
		// Forwards and backwards, so that drift affects all libraries alike.
		for _, l := range runs {
			name := l.key()
			if r.Failed[name] != "" {
				continue
			}
			one, err := b.once(ctx, l, s, other, nil, args...)
			switch {
			case err == nil:
				r.Samples[name] = append(r.Samples[name], one)
			case l.peer() && ctx.Err() == nil:
				r.Failed[name] = err.Error()
				delete(r.Samples, name)
			default:
				return r, fmt.Errorf("%s: %w", name, err)
			}
		}
		slices.Reverse(runs)
	}
	counts := map[string]map[string]float64{}
	for _, l := range runs {
		if s.Threads > 1 || r.Failed[l.key()] != "" {
			continue
		}
		counts[l.key()], err = b.instructions(ctx, l, s, other)
		if err != nil && !errors.Is(err, errNoValgrind) && !l.peer() {
			return r, fmt.Errorf("%s: %w", l.key(), err)
		}
	}
	r.Figures = b.figures(r, counts)
	return r, nil
}

func (b *bench) figures(r result, counts map[string]map[string]float64) map[string]map[string]figures {
	all := map[string]map[string]figures{}
	unit := "_ns"
	if r.Threads > 1 {
		unit = "_cpu_ns"
	}
	for _, l := range b.libraries {
		samples := r.Samples[l.name]
		if samples == nil {
			continue
		}
		all[l.name] = map[string]figures{}
		for _, call := range r.Calls {
			var base, added []float64
			for i, with := range samples {
				without := r.Samples[native][i][call+unit]
				base = append(base, without)
				added = append(added, with[call+unit]-without)
			}
			f := figures{Native: quartile(base, 2), Added: spread{quartile(added, 1), quartile(added, 2), quartile(added, 3)}}
			before, ok := counts[native][call]
			if after, ok2 := counts[l.name][call]; ok && ok2 {
				more := after - before
				f.Instructions, f.AddedInstr = &before, &more
			}
			all[l.name][call] = f
		}
	}
	return all
}

// quartile n of the values: 2 is the median.
func quartile(values []float64, n int) float64 {
	v := slices.Sorted(slices.Values(values))
	at := float64(n) / 4 * float64(len(v)-1)
	low := int(at)
	if low+1 == len(v) {
		return v[low]
	}
	return v[low] + (at-float64(low))*(v[low+1]-v[low])
}
