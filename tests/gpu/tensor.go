// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	tensorWithin   = 9 * time.Minute
	tensorUser     = 950
	tensorGPUs     = 2
	tensorAlone    = 20 * time.Second  // about, of each job
	tensorSwitches = 200               // with --quick a tenth
	tensorTurn     = "200ms"           // while switches are counted
	tensorLongest  = 4 * time.Minute   // of that
	tensorStuck    = 100 * time.Second // longer than a turn of the other job may keep an answer waiting
)

// A tensorCase is two language models, each split over the same two GPUs, that promise 1.5 times the memory of each.
type tensorCase struct {
	Kind     string  `json:"kind"` // of loads/tensor.py
	GPUMiB   int     `json:"gpu_mib"`
	RankMiB  int     `json:"rank_mib"`
	Promised float64 `json:"promised_of_gpu"` // the GPU with less

	Answers  int       `json:"answers"`       // of each job
	Alone    []float64 `json:"alone_seconds"` // of each job, the other idle
	Together float64   `json:"together_seconds"`
	Tokens   int       `json:"tokens"` // of both jobs, each way
	Ratio    float64   `json:"of_one_after_the_other"`
	Turns    []uint64  `json:"moves_in"`      // together, by GPU
	Least    float64   `json:"least_on_gpu"`  // the least part of its memory that a rank had on its GPU
	Fixed    float64   `json:"fixed_at_most"` // the largest part of its memory that a rank could not move
	Why      string    `json:"why_fixed,omitempty"`
	Unequal  int       `json:"answers_unequal"` // to those of the same job alone
	Wrong    int       `json:"weights_wrong"`   // at the end

	Wanted       uint64   `json:"switches_wanted,omitempty"`
	Switches     []uint64 `json:"switches,omitempty"` // in turns of tensorTurn, by GPU
	SwitchingFor float64  `json:"switching_seconds,omitempty"`
	Problem      string   `json:"problem,omitempty"`
}

// A tensorJob is a rank on each GPU, and the hashes of its answers alone.
type tensorJob struct {
	ranks  []*worker
	hashes []string
}

// tensorRun is a case at work.
type tensorRun struct {
	*tensorCase
	b    *bench
	s    *scheduler
	jobs []*tensorJob
	mu   sync.Mutex // of Unequal and Wrong
}

// tensorStep compares two such jobs together with one after the other.
func (b *bench) tensorStep(ctx context.Context, _ string) error {
	ctx, cancel := context.WithTimeout(ctx, tensorWithin)
	defer cancel()
	cases := []*tensorCase{{Kind: "nccl", GPUMiB: 16 << 10, RankMiB: 23 << 9}, {Kind: "graphs", GPUMiB: 16 << 10, RankMiB: 23 << 9}}
	if b.simulated {
		cases = []*tensorCase{{Kind: "driver", GPUMiB: 256, RankMiB: 184}}
	}
	var errs []error
	for i, c := range cases {
		if b.cells.only != nil && !b.cells.only.MatchString(c.Kind) {
			continue
		}
		if err := b.tensor(ctx, c, i == 0); err != nil {
			c.Problem = err.Error()
			errs = append(errs, fmt.Errorf("%s: %w", c.Kind, err))
		}
		fmt.Println("  " + c.line())
		errs = append(errs, b.saveJSON("tensor.json", cases))
	}
	return errors.Join(errs...)
}

// tensor runs a case; switches: also until memory has moved often enough.
func (b *bench) tensor(ctx context.Context, c *tensorCase, switches bool) (err error) {
	host := 2*tensorGPUs*c.RankMiB + 1024
	args := []string{"--gpu-memory", fmt.Sprintf("%dMi", c.GPUMiB), "--swap-memory", fmt.Sprintf("%dMi", host), "--swap-ready", "100%"}
	if b.simulated {
		args = append(args, "--swap-headroom", "0")
	}
	r := &tensorRun{tensorCase: c, b: b}
	if r.s, err = b.scheduler(ctx, "tensor-"+c.Kind, args...); err != nil {
		return err
	}
	defer r.s.stop()
	defer func() {
		for _, j := range r.jobs {
			err = errors.Join(append(together(j.ranks, (*worker).quit), err)...)
		}
	}()
	if err := r.start(ctx); err != nil {
		return err
	}
	if err := r.alone(ctx); err != nil {
		return err
	}
	if err := r.together(ctx); err != nil {
		return err
	}
	if switches {
		if err := r.switching(ctx); err != nil {
			return err
		}
	}
	err = r.check(ctx)
	if c.Unequal > 0 || c.Wrong > 0 {
		err = errors.Join(err, fmt.Errorf("%d answers are not those alone, %d weights are wrong", c.Unequal, c.Wrong))
	}
	return err
}

// check counts weights that are not as they were made, of one job after the other: each check waits for a turn.
func (r *tensorRun) check(ctx context.Context) (err error) {
	for _, j := range r.jobs {
		err = errors.Join(append(together(j.ranks, func(w *worker) error {
			var found struct{ Wrong int }
			err := w.call(ctx, tensorStuck, map[string]any{"op": "call", "function": "check"}, &found)
			r.mu.Lock()
			defer r.mu.Unlock()
			r.Wrong += found.Wrong
			return err
		}), err)...)
	}
	return err
}

// start makes the jobs, one after the other: each begins with collectives.
func (r *tensorRun) start(ctx context.Context) error {
	if now, err := r.s.status(ctx); err != nil || len(now.Gpus) < tensorGPUs {
		return errors.Join(err, errors.New("this machine has only one GPU, or it is not known why not"))
	}
	r.s.awaitReady(ctx, uint64(2*tensorGPUs*r.RankMiB)<<20)
	for i := range 2 {
		user := tensorUser + i
		if err := r.s.set(ctx, user, "--gang", "true"); err != nil {
			return err
		}
		j := &tensorJob{}
		r.jobs = append(r.jobs, j)
		for rank := range tensorGPUs {
			w, err := r.rank(user, i, rank)
			if err != nil {
				return err
			}
			j.ranks = append(j.ranks, w)
		}
	}
	began, answer := time.Now(), 0.0
	for _, op := range []string{"load", "init"} {
		for _, j := range r.jobs {
			if err := errors.Join(together(j.ranks, func(w *worker) error {
				var said struct {
					Answer float64 `json:"answer_s"`
				}
				err := w.call(ctx, loadWithin, map[string]any{"op": op}, &said)
				if w == j.ranks[0] {
					answer = max(answer, said.Answer)
				}
				return err
			})...); err != nil {
				return err
			}
		}
	}
	r.Answers = max(2, min(int(tensorAlone.Seconds()/answer), 200))
	if r.b.simulated || r.b.cells.quick {
		r.Answers = max(2, r.Answers/5)
	}
	fmt.Printf("  started in %.1f s, an answer takes %.2f s, %d of each job\n", time.Since(began).Seconds(), answer, r.Answers)
	return nil
}

// rank starts a process. NVLink's multicast stays off, as on the machines that are lent.
func (r *tensorRun) rank(user, job, rank int) (*worker, error) {
	env, home, who, err := r.b.asUser(user, r.s)
	if err != nil {
		return nil, err
	}
	env = append(env, "NVSHARE_DEBUG=1", "NCCL_NVLS_ENABLE=0", "OMP_NUM_THREADS=1", "PYTHONWARNINGS=ignore")
	file := filepath.Join(home, fmt.Sprintf("tensor-%s-%d", r.Kind, job))
	if rank == 0 {
		for _, old := range []string{file, file + ".group"} {
			if err := os.RemoveAll(old); err != nil {
				return nil, err
			}
		}
	}
	log := filepath.Join(r.b.results, fmt.Sprintf("tensor-%s-stderr.txt", r.Kind))
	return startWorkerAs(who, r.b.python, filepath.Join(swapDir, "worker.py"), fmt.Sprintf("job %d, rank %d", job, rank), log, env,
		"tensor", r.Kind, file, strconv.Itoa(rank), strconv.Itoa(tensorGPUs), strconv.Itoa(r.RankMiB), strconv.Itoa(job+1))
}

// answered is what a rank says of requests.
type answered struct {
	Seconds float64
	Tokens  int
	Hashes  []string
}

// answer has all ranks of a job answer n requests from one on. All ranks have the same tokens.
func (j *tensorJob) answer(ctx context.Context, first, n int, within time.Duration) (answered, error) {
	said := make([]answered, len(j.ranks))
	at := map[*worker]int{}
	for i, w := range j.ranks {
		at[w] = i
	}
	err := errors.Join(together(j.ranks, func(w *worker) error {
		return w.call(ctx, within, map[string]any{"op": "call", "function": "answers", "args": []int{first, n}}, &said[at[w]])
	})...)
	for _, s := range said[1:] {
		if err == nil && !slices.Equal(s.Hashes, said[0].Hashes) {
			err = errors.New("the ranks of a job have other tokens than each other")
		}
	}
	return said[0], err
}

// alone has each job answer while the other is idle.
func (r *tensorRun) alone(ctx context.Context) error {
	for _, j := range r.jobs {
		if _, err := j.answer(ctx, 1, 1, tensorStuck); err != nil { // its memory comes in
			return err
		}
		said, err := j.answer(ctx, 1, r.Answers, 10*tensorAlone)
		if err != nil {
			return err
		}
		j.hashes = said.Hashes
		r.Alone = append(r.Alone, round(said.Seconds, 3))
		r.Tokens += said.Tokens
	}
	return nil
}

// together has both jobs answer the same at the same time.
func (r *tensorRun) together(ctx context.Context) error {
	w := r.watch(ctx)
	began := time.Now()
	err := r.both(func(j *tensorJob) error {
		said, err := j.answer(ctx, 1, r.Answers, 20*tensorAlone)
		r.compare(j, 1, said.Hashes)
		return err
	})
	r.Together = round(time.Since(began).Seconds(), 3)
	r.Turns = w.stop()
	r.Promised, r.Least, r.Fixed, r.Why = round(w.promised, 3), round(w.least, 4), round(w.fixed, 4), w.why
	r.Ratio = round(sumOf(r.Alone)/r.Together, 4)
	return errors.Join(err, w.err)
}

// switching has both answer in short turns until memory has come in often enough on both GPUs.
func (r *tensorRun) switching(ctx context.Context) error {
	if r.Wanted = tensorSwitches; r.b.simulated || r.b.cells.quick {
		r.Wanted /= 10
	}
	if err := r.s.ctl(ctx, "config", "set", "swap-share", "none"); err != nil {
		return err
	}
	if err := r.s.ctl(ctx, "-T", tensorTurn); err != nil {
		return err
	}
	w := r.watch(ctx)
	began := time.Now()
	err := r.both(func(j *tensorJob) error {
		for k := 0; slices.Min(w.moves()) < r.Wanted && time.Since(began) < tensorLongest; k++ {
			first := 1 + k%r.Answers
			said, err := j.answer(ctx, first, 1, tensorStuck)
			if err != nil {
				return err
			}
			r.compare(j, first, said.Hashes)
		}
		return nil
	})
	r.SwitchingFor = round(time.Since(began).Seconds(), 1)
	r.Switches = w.stop()
	return errors.Join(err, w.err)
}

// both runs f for each job at the same time.
func (r *tensorRun) both(f func(*tensorJob) error) error {
	errs := make(chan error)
	for _, j := range r.jobs {
		go func() { errs <- f(j) }()
	}
	return errors.Join(<-errs, <-errs)
}

func (c *tensorCase) line() string {
	text := fmt.Sprintf("two tensor-parallel models (%s) of %d MiB a rank on two GPUs of %d MiB, %.2f times promised: ", c.Kind, c.RankMiB, c.GPUMiB, c.Promised)
	if c.Together > 0 {
		text += fmt.Sprintf("alone %.1f s, together %.1f s: %.1f tokens/s, %.1f one after the other, ratio %.3f; %v moves in; least on a GPU %.1f %%, unmovable at most %.1f %% %s: %s; %d answers unequal, %d weights wrong",
			c.Alone, c.Together, float64(c.Tokens)/c.Together, float64(c.Tokens)/sumOf(c.Alone), c.Ratio, c.Turns, 100*c.Least, 100*c.Fixed, c.Why, holds(c.Fixed <= 0.1), c.Unequal, c.Wrong)
	}
	if len(c.Switches) > 0 {
		text += fmt.Sprintf("; %v switches in %.0f s: %s", c.Switches, c.SwitchingFor, holds(slices.Min(c.Switches) >= c.Wanted))
	}
	if c.Problem != "" {
		text += "\n      PROBLEM " + strings.ReplaceAll(c.Problem[:min(900, len(c.Problem))], "\n", "; ")
	}
	return text
}

// A tensorWatch follows where the memory of the ranks is.
type tensorWatch struct {
	mu                     sync.Mutex
	least, fixed, promised float64
	why                    string
	began, now             []uint64 // moves in, by GPU
	err                    error
	end                    func()
}

// watch begins to look, until stop is called.
func (r *tensorRun) watch(ctx context.Context) *tensorWatch {
	ctx, cancel := context.WithCancel(ctx)
	w, done := &tensorWatch{least: 1}, make(chan struct{})
	w.end = func() { cancel(); <-done }
	w.look(r.s.status(ctx))
	go func() {
		defer close(done)
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
			if st, err := r.s.status(ctx); ctx.Err() == nil {
				w.look(st, err)
			}
		}
	}()
	return w
}

func (w *tensorWatch) look(st *api.StatusResponse, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil && slices.ContainsFunc(st.Gpus, func(g *api.GPU) bool { return g.Swap == nil }) {
		err = errors.New("the scheduler swaps nothing")
	}
	if err != nil {
		w.err = err
		return
	}
	w.now = nil
	promised := math.Inf(1)
	for _, g := range st.Gpus[:min(tensorGPUs, len(st.Gpus))] {
		w.now = append(w.now, g.Swap.Ins)
		promised = min(promised, float64(g.Swap.PromisedBytes)/float64(g.Swap.CapacityBytes))
		for _, c := range g.Clients {
			if c.MemoryBytes > 0 {
				w.least = min(w.least, float64(c.ResidentBytes)/float64(c.MemoryBytes))
				w.fixed = max(w.fixed, float64(c.FixedBytes)/float64(c.MemoryBytes))
			}
			if c.FixedReason != "" {
				w.why = c.FixedReason
			}
		}
	}
	w.promised = max(w.promised, promised)
	if w.began == nil {
		w.began = w.now
	}
}

// moves is how often memory has been moved in since, by GPU.
func (w *tensorWatch) moves() []uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	moves := make([]uint64, tensorGPUs)
	for i := range min(len(w.now), len(w.began)) {
		moves[i] = w.now[i] - w.began[i]
	}
	return moves
}

// stop ends it, and returns the moves.
func (w *tensorWatch) stop() []uint64 {
	w.end()
	return w.moves()
}

// compare counts answers that are not those of the job alone.
func (r *tensorRun) compare(j *tensorJob, first int, hashes []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, h := range hashes {
		if h != j.hashes[first-1+i] {
			r.Unequal++
		}
	}
}
