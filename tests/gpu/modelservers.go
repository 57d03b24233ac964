// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/quantile"
)

const (
	// serverPrompt and serverOutput are the tokens of a request and of its answer, and
	// serverSpan what a slot of the cache holds.
	serverPrompt, serverOutput, serverSpan = 512, 32, 2304
	// fillerGrows and modelGrows are what a server may take beside its MiB for answers, and
	// contextMiB what a context takes of the GPU, and of the host while it is suspended.
	fillerGrows, modelGrows, contextMiB = 512, 192, 500
	// contexts is for how many of these at a time the GPU keeps memory, where there are more servers
	// than it holds: by default the scheduler leaves them a thirty-second of the GPU.
	contexts = 16
	// zipf is the exponent by which requests go to servers.
	zipf = 1.0
)

// serverOptions choose the model servers.
type serverOptions struct {
	n, mib, gpuMiB int
	model          string
	eager          bool
	rate           float64
	suspendAfter   time.Duration
}

func (o *serverOptions) flags() {
	flag.IntVar(&o.n, "servers", 0, "suspend: model servers, fewer if the host has no memory for them; default 20, with --quick 8")
	flag.IntVar(&o.mib, "server-mib", 0, "suspend: GPU memory of each, without its context, `MiB`; default 4608")
	flag.IntVar(&o.gpuMiB, "server-gpu-mib", -1, "suspend: what the GPU looks like to them, `MiB`, 0: as it is, and then servers are started natively until one fails; default 24576")
	flag.StringVar(&o.model, "model", "", "suspend: what they serve: llama-1b or another of loads/decoder.py, or filler (default), memory that each answer reads")
	flag.BoolVar(&o.eager, "eager", false, "suspend: models without CUDA graphs")
	flag.Float64Var(&o.rate, "rate", 0, "suspend: requests a `second` to all, as a Poisson process; 0: each follows the answer before, after 0 to 0.4 s. With --window for so long, otherwise 200, with --quick 60")
	flag.DurationVar(&o.suspendAfter, "suspend-after", 0, "suspend: `time` without a request after which a server is suspended; default 3s")
}

// servers are model servers of which few fit the GPU.
type servers struct {
	N        int                  `json:"servers"`
	MiB      int                  `json:"mib_each"`
	Model    string               `json:"model"`
	GPUMiB   int                  `json:"gpu_mib,omitempty"` // that the GPU is made to look like; 0: as it is
	Fit      int                  `json:"fit_without_nvshare"`
	Natives  int                  `json:"started_natively,omitempty"` // until the next one failed, which said
	Refused  string               `json:"natively_refused,omitempty"`
	Started  float64              `json:"started_s"` // until all are suspended
	Rate     float64              `json:"requests_per_second"`
	Requests int                  `json:"requests"`
	Errors   []string             `json:"errors,omitempty"`
	Wrong    int                  `json:"wrong_answers"` // tokens that are not those of the first answer
	First    map[string][]float64 `json:"first_token_s"` // by where the server was: resident, swapped, suspended, filed (suspended, in a file)
	Answers  []float64            `json:"answers_s"`
	UsedIdle int64                `json:"used_when_all_are_suspended"`
	Arena    uint64               `json:"host_arena_bytes"`                       // that the scheduler has given out for memory of servers
	Host     float64              `json:"host_used_bytes"`                        // less of it available than before the first server
	OwnMiB   float64              `json:"host_mib_of_a_native_process,omitempty"` // beside what it shares with the others
	EachMiB  float64              `json:"gpu_mib_of_a_native_process,omitempty"`  // context included
	Dropped  string               `json:"fewer_servers_than_asked_because,omitempty"`
	mu       sync.Mutex
	first    string // answer
}

// serverDefaults completes what the flags say.
func (x *suspendBench) serverDefaults() serverOptions {
	o, d := x.servers, serverOptions{n: 20, mib: 4608, gpuMiB: 24 << 10, model: "filler", suspendAfter: 3 * time.Second}
	switch {
	case x.simulated:
		d = serverOptions{n: 4, mib: 64, gpuMiB: 160, model: "spin", suspendAfter: time.Second}
	case x.cells.quick:
		d.n = 8
	}
	if o.gpuMiB < 0 {
		o.gpuMiB = d.gpuMiB
	}
	o.n, o.mib, o.model, o.suspendAfter = cmp.Or(o.n, d.n), cmp.Or(o.mib, d.mib), cmp.Or(o.model, d.model), cmp.Or(o.suspendAfter, d.suspendAfter)
	return o
}

// words are the flags of a server.
func (o serverOptions) words() []string {
	words := []string{"--model", o.model, "--device", "cuda", "--slots", "1", "--spans", fmt.Sprint(serverSpan), "--mib", fmt.Sprint(o.mib)}
	if o.eager {
		words = append(words, "--eager")
	}
	return words
}

// many is the second part.
func (x *suspendBench) many(ctx context.Context) error {
	o := x.serverDefaults()
	m := &servers{N: o.n, MiB: o.mib, Model: o.model, GPUMiB: o.gpuMiB, Rate: o.rate, Requests: 200, First: map[string][]float64{}}
	if x.simulated {
		m.Requests = 24
	}
	if x.cells.quick {
		m.Requests = min(m.Requests, 60)
	}
	x.r.Servers = m
	m.Fit = m.GPUMiB / (m.MiB + contextMiB)
	if m.GPUMiB == 0 {
		if err := x.natives(ctx, o, m); err != nil {
			return err
		}
	}
	room, err := hostRoom()
	if err != nil {
		return err
	}
	host, err := x.startFor(ctx, o, m, room)
	if err != nil {
		return err
	}
	defer x.s.stop()
	all, z, err := x.startServers(ctx, o, m, host)
	if z != nil {
		defer z.end()
	}
	if err != nil {
		return err
	}
	if idle, err := x.look(ctx); err == nil {
		m.UsedIdle = idle.Used
	}
	err = x.requests(ctx, m, all)
	if now, err := hostRoom(); err == nil {
		m.Host = room - now
	}
	if r, err := x.s.status(ctx); err == nil && len(r.Gpus) > 0 && r.Gpus[0].Swap != nil {
		m.Arena = r.Gpus[0].Swap.ArenaUsedBytes
	}
	m.print()
	if len(m.Errors) > 0 || m.Wrong > 0 {
		x.r.Problems = append(x.r.Problems, fmt.Sprintf("%d wrong answers and %d errors of model servers: %s", m.Wrong, len(m.Errors), strings.Join(m.Errors[:min(1, len(m.Errors))], "")))
	}
	return err
}

// startFor starts the scheduler of as many servers as the host has room for, bytes, and returns
// what it may use of that for each.
func (x *suspendBench) startFor(ctx context.Context, o serverOptions, m *servers, room float64) (uint64, error) {
	args := []string{"--suspend-after", o.suspendAfter.String()}
	if m.GPUMiB > 0 {
		args = append(args, "--gpu-memory", fmt.Sprintf("%dMi", m.GPUMiB))
	}
	if m.GPUMiB == 0 && !x.simulated && !slices.Contains(x.schedulerArgs, "--swap-headroom") {
		args = append(args, "--swap-headroom", fmt.Sprintf("%dMi", contexts*contextMiB))
	}
	host := m.MiB + modelGrows
	if m.Model == "filler" {
		host = m.MiB + fillerGrows
	}
	if x.simulated {
		host = m.MiB + 16
		args = append(args, "--swap-headroom", "0")
	}
	if x.suspendDir != "" { // files keep the other half
		if err := os.MkdirAll(x.suspendDir, 0o700); err != nil {
			return 0, err
		}
		m.N = max(m.N, 16) // a quarter of the first half has room for two, see awaitHost
		host /= 2
		args = append(args, "--suspend-dir", x.suspendDir)
	}
	// The process, and its context while that is away, take memory of the host as well.
	if most := int(room*15/16/mib20) / (host + contextMiB + int(cmp.Or(m.OwnMiB, 600))); most < m.N && !x.simulated {
		m.Dropped = fmt.Sprintf("the host has %.0f MiB for %d servers", room/mib20, m.N)
		m.N = most
	}
	return uint64(host) << 20, x.start(ctx, "suspend-servers", m.N*host, args...)
}

// natives starts servers without nvshare until one fails.
func (x *suspendBench) natives(ctx context.Context, o serverOptions, m *servers) error {
	if err := x.installSwap(); err != nil {
		return err
	}
	z, err := x.zygote(ctx, "natives", nil)
	if err != nil {
		return err
	}
	defer z.end()
	empty, err := x.look(ctx)
	if err != nil {
		return err
	}
	room, err := hostRoom()
	if err != nil {
		return err
	}
	expected := int((empty.Total - empty.Used) >> 20 / int64(m.MiB+contextMiB))
	all, errs := z.startAll(ctx, 0, expected*3/4, x.parallel(), o.words(), nil) // far from the limit
	for len(errs) == 0 && len(all) < 2*expected+8 {                             // near it one at a time
		var more []*modelServer
		more, errs = z.startAll(ctx, len(all), 1, 1, o.words(), nil)
		all = append(all, more...)
	}
	m.Natives = len(all)
	if len(errs) == 0 {
		return fmt.Errorf("%d servers started natively, and none failed", len(all))
	}
	m.Refused = errs[0].Error()
	used, err := x.look(ctx)
	if err != nil {
		return err
	}
	now, err := hostRoom()
	if err != nil {
		return err
	}
	if n := len(all); n > 0 {
		m.EachMiB = round(float64(used.Used-empty.Used)/float64(n)/mib20, 1)
		m.OwnMiB = round(max(0, room-now)/float64(n)/mib20, 1)
		m.Fit = int(float64(empty.Total-empty.Used) / mib20 / max(1, m.EachMiB))
	}
	fmt.Printf("  natively %d servers of %d MiB start, by their memory (%.0f MiB each) %d fit; the next one: %s\n", m.Natives, m.MiB, m.EachMiB, m.Fit, m.Refused)
	z.end()
	within, cancel := context.WithTimeout(ctx, suspendCall)
	defer cancel()
	for { // the driver takes a while to free what they had
		now, err := x.look(within)
		if err != nil {
			return err
		}
		if now.Used <= empty.Used+(64<<20) {
			return nil
		}
		select {
		case <-within.Done():
			return fmt.Errorf("the native servers have ended, and %d MiB of the GPU are used, %d before them", now.Used>>20, empty.Used>>20)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// parallel is how many servers start at the same time: it takes a processor to make a model.
func (x *suspendBench) parallel() int { return max(1, min(8, len(x.processors)/2)) }

// startServers starts all. Each is suspended once it is ready, so that few contexts are on the
// GPU at the same time; with files one after the other.
func (x *suspendBench) startServers(ctx context.Context, o serverOptions, m *servers, half uint64) (all []*modelServer, z *zygote, err error) {
	began := time.Now()
	if z, err = x.zygote(ctx, "servers", x.s); err != nil {
		return nil, nil, err
	}
	parallel := x.parallel()
	leave := func(v *modelServer) error {
		return errors.Join(x.order(ctx, v.user, (*api.Conn).Suspend), x.awaitOff(ctx, v.pid))
	}
	if x.suspendDir != "" {
		parallel = 1
		// What is resident could have to leave to host memory, which holds half of the servers.
		suspend := leave
		leave = func(v *modelServer) error { return errors.Join(suspend(v), x.awaitHost(ctx, 2*half)) }
	}
	all, errs := z.startAll(ctx, 0, m.N, parallel, o.words(), leave)
	for _, err := range errs {
		m.Errors = append(m.Errors, err.Error())
	}
	if m.N = len(all); m.N == 0 {
		return nil, z, fmt.Errorf("no server has started: %w", errors.Join(errs...))
	}
	m.Started = round(time.Since(began).Seconds(), 1)
	fmt.Printf("  %d servers started and suspended in %.0f s\n", m.N, m.Started)
	return all, z, nil
}

// requests asks servers, the first ones most often.
func (x *suspendBench) requests(ctx context.Context, m *servers, all []*modelServer) error {
	var wg sync.WaitGroup
	random := rand.New(rand.NewPCG(1, 2))
	began := time.Now()
	due := began
	most := m.Requests
	for m.Requests = 0; x.window > 0 && time.Since(began) < x.window || x.window == 0 && m.Requests < most; m.Requests++ {
		if m.Rate == 0 {
			due = time.Now().Add(time.Duration(random.IntN(400)) * time.Millisecond)
		} else {
			due = due.Add(time.Duration(random.ExpFloat64() / m.Rate * float64(time.Second)))
		}
		select {
		case <-time.After(time.Until(due)):
		case <-ctx.Done():
			return ctx.Err()
		}
		v, at := all[byZipf(random, len(all))], due
		wg.Go(func() { m.add(v.ask(ctx, at, x.where(ctx, v))) })
		if m.Rate == 0 {
			wg.Wait()
		}
	}
	wg.Wait()
	return nil
}

// where a server is.
func (x *suspendBench) where(ctx context.Context, v *modelServer) string {
	c, err := x.client(ctx, v.pid)
	switch {
	case err == nil && c.Context == api.ContextState_CONTEXT_STATE_PRESENT && c.AwayBytes > 0:
		return "swapped"
	case err == nil && c.Context == api.ContextState_CONTEXT_STATE_PRESENT:
		return "resident"
	case err == nil && c.FileBytes > 0:
		return "filed"
	}
	return "suspended"
}

// An answer is what came of a request.
type answer struct {
	where        string
	first, total float64 // seconds since it was due
	tokens       string
	err          error
}

func (m *servers) add(a answer) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if a.err != nil {
		m.Errors = append(m.Errors, a.err.Error())
		return
	}
	if m.first == "" {
		m.first = a.tokens
	}
	if a.tokens != m.first { // all have the same weights and the same prompt
		m.Wrong++
	}
	m.First[a.where], m.Answers = append(m.First[a.where], round(a.first, 4)), append(m.Answers, round(a.total, 4))
}

func (m *servers) print() {
	looks := "the GPU"
	if m.GPUMiB > 0 {
		looks = fmt.Sprintf("a GPU that looks like %d MiB", m.GPUMiB)
	}
	fmt.Printf("  %d servers of %d MiB (%s) on %s (%d fit without nvshare) %s; all suspended: %d MiB used on the GPU; of the host %.0f MiB are used, %d of these for servers' memory; %d requests, %d errors, %d wrong answers: %s\n",
		m.N, m.MiB, m.Model, looks, m.Fit, m.Dropped, m.UsedIdle>>20, m.Host/mib20, m.Arena>>20, m.Requests, len(m.Errors), m.Wrong, holds(len(m.Errors)+m.Wrong == 0))
	for _, where := range []string{"resident", "swapped", "suspended", "filed"} {
		if first := m.First[where]; len(first) > 0 {
			fmt.Printf("  first token, %s: p50 %.3f, p99 %.3f s of %d\n", where, quantile.Of(first, 0.5), quantile.Of(first, 0.99), len(first))
		}
	}
	if len(m.Answers) > 0 {
		fmt.Printf("  answers of %d tokens: p50 %.3f, p99 %.3f s\n", serverOutput, quantile.Of(m.Answers, 0.5), quantile.Of(m.Answers, 0.99))
	}
}

// byZipf draws one of n, the first most often.
func byZipf(r *rand.Rand, n int) int {
	sum := 0.0
	for i := range n {
		sum += 1 / math.Pow(float64(i+1), zipf)
	}
	at := r.Float64() * sum
	for i := range n {
		if at -= 1 / math.Pow(float64(i+1), zipf); at < 0 {
			return i
		}
	}
	return n - 1
}
