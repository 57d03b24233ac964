// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"time"
)

const (
	rlJobs = 2
	// rlAlone is how many iterations a job does alone, and rlTogether by default together.
	rlAlone, rlTogether = 2, 6
	rlWithin            = 8 * time.Minute
	rlLast              = time.Minute // before that, for the last iteration
	rlBar               = 1.6         // times one after the other
)

// rlOptions choose the jobs.
type rlOptions struct {
	part   float64
	reward time.Duration
	tokens int
	shape  string
}

func (o *rlOptions) flags() {
	flag.Float64Var(&o.part, "rl-part", 0.7, "rl: what each job takes of the GPU's memory")
	flag.DurationVar(&o.reward, "rl-reward", 0, "rl: how long a reward takes; for what is left of that after scoring the job waits; default: as long as the first job generates and trains")
	flag.IntVar(&o.tokens, "rl-tokens", 0, "rl: length of a rollout; default 224")
	flag.StringVar(&o.shape, "rl-model", "llama-1b", "rl: one of the shapes of loads/decoder.py")
}

// An rlStep is an iteration, by loads/rl.py. Times are seconds.
type rlStep struct {
	Generate float64 `json:"generate_s"`
	Reward   float64 `json:"reward_s"`
	Scored   float64 `json:"scored_s"` // of that, what scoring in Python took
	Train    float64 `json:"train_s"`  // the checksum too
	Score    float64 `json:"score"`
	Weights  string  `json:"weights"` // a checksum
}

// gpu is what it needs the GPU for.
func (s rlStep) gpu() float64 { return s.Generate + s.Train }

// An rlJob is what a job did one way.
type rlJob struct {
	Build float64  `json:"build_s"`
	Steps []rlStep `json:"steps"`
	Ended float64  `json:"ended_s"` // from the start of both
}

// rlResult is rl.json.
type rlResult struct {
	Part     float64 `json:"part_of_gpu"`
	Rollouts int     `json:"rollouts"`
	Tokens   int     `json:"tokens"`
	Reward   float64 `json:"reward_s"`

	Alone    []rlJob `json:"native_alone"`
	Natively string  `json:"native_together"` // why that is not possible, or how it went
	Together []rlJob `json:"together"`

	Seconds  float64 `json:"together_s"`
	After    float64 `json:"one_after_the_other_s"` // as many iterations, natively
	Most     float64 `json:"at_most"`               // times faster, if nothing had to move
	Faster   float64 `json:"faster"`
	Rate     float64 `json:"steps_per_second"`
	Same     bool    `json:"same_weights"` // as alone, after each iteration that was done alone
	Out      uint64  `json:"out_bytes"`
	In       uint64  `json:"in_bytes"`
	OutNs    int64   `json:"out_ns"`
	InNs     int64   `json:"in_ns"`
	Promised float64 `json:"promised_of_gpu"`
}

// rlStep measures two jobs that generate, reward and train, whose memory does not fit together:
// together, natively together, and one after the other.
func (b *bench) rlStep(ctx context.Context, _ string) error {
	ctx, cancel := context.WithTimeout(ctx, rlWithin)
	defer cancel()
	o, times := b.rl, cmp.Or(b.rounds, rlTogether)
	o.tokens = cmp.Or(o.tokens, 224)
	if b.simulated {
		o.shape, o.tokens = "spin", 16
	}
	old := b.shared
	defer func() { b.shared, b.backendName = old, nil }()
	b.backendName = []string{"rl", o.shape}
	r := &rlResult{Part: o.part, Tokens: o.tokens, Reward: o.reward.Seconds()}
	deadline, _ := ctx.Deadline()
	x := &rlBench{bench: b, o: o, r: r, latest: float64(monotonic())/1e9 + (time.Until(deadline) - rlLast).Seconds()}
	err := x.natively(ctx)
	if err == nil {
		err = errors.Join(b.saveJSON("rl.json", r), x.together(ctx, times))
	}
	if err == nil {
		r.sumUp()
		fmt.Println("  " + r.line())
		if !r.Same {
			err = errors.New("the weights are not those of the jobs alone")
		}
	}
	return errors.Join(err, b.saveJSON("rl.json", r))
}

type rlBench struct {
	*bench
	o      rlOptions
	r      *rlResult
	latest float64 // no iteration begins later, seconds of CLOCK_MONOTONIC
}

// make makes job i in a process.
func (x *rlBench) make(ctx context.Context, w *worker, i int) (float64, error) {
	var said struct {
		Batch   int
		Seconds float64
	}
	err := w.call(ctx, buildWithin, map[string]any{"op": "call", "function": "make", "args": []any{i, x.o.part, x.r.Rollouts, x.o.tokens}}, &said)
	if err == nil {
		x.r.Rollouts = said.Batch // the first job decides for all: their weights depend on it
	}
	return said.Seconds, err
}

// iterate has the jobs of processes work at the same time.
func (x *rlBench) iterate(ctx context.Context, workers []*worker, times int) ([]rlJob, error) {
	jobs := make([]rlJob, len(workers))
	start := float64(monotonic())/1e9 + 0.1
	err := errors.Join(together(workers, func(w *worker) error {
		var said struct {
			Steps []rlStep
			Ended float64
		}
		err := w.call(ctx, rlWithin, map[string]any{"op": "call", "function": "iterate", "args": []any{times, start, x.latest, x.r.Reward}}, &said)
		jobs[slices.Index(workers, w)] = rlJob{Steps: said.Steps, Ended: round(said.Ended-start, 3)}
		return err
	})...)
	return jobs, err
}

// natively has each job run alone, and tries both at once.
func (x *rlBench) natively(ctx context.Context) (err error) {
	x.shared = nil
	p, err := x.poolOf(ctx, 0, rlJobs, "")
	if p != nil {
		defer func() { err = errors.Join(err, p.stop()) }()
	}
	if err != nil {
		return err
	}
	for i, w := range p.natives {
		took, err := x.make(ctx, w, i)
		if err != nil {
			return err
		}
		job, err := x.alone(ctx, w)
		if err != nil {
			return err
		}
		job.Build = round(took, 2)
		x.r.Alone = append(x.r.Alone, job)
		fmt.Printf("  job %d alone natively: %s\n", i, job)
		if i == 0 { // which keeps its memory
			x.r.Natively = x.both(ctx, p.natives)
			fmt.Printf("  both natively at once: %s\n", x.r.Natively)
			if err := w.quit(); err != nil {
				return err
			}
		}
	}
	return nil
}

// alone has a process work alone. Where nobody said how long a reward takes, the first iteration
// waits for none, and decides that.
func (x *rlBench) alone(ctx context.Context, w *worker) (rlJob, error) {
	var steps []rlStep
	for len(steps) < rlAlone {
		job, err := x.iterate(ctx, []*worker{w}, 1)
		if err != nil {
			return rlJob{}, err
		}
		steps = append(steps, job[0].Steps...)
		if x.r.Reward == 0 {
			x.r.Reward = round(steps[0].gpu(), 3)
		}
	}
	return rlJob{Steps: steps}, nil
}

// both says what comes of the second job beside the first one.
func (x *rlBench) both(ctx context.Context, natives []*worker) string {
	if _, err := x.make(ctx, natives[1], 1); err != nil {
		return "failed: " + err.Error()
	}
	jobs, err := x.iterate(ctx, natives, rlAlone)
	if err != nil {
		return "failed: " + err.Error()
	}
	return fmt.Sprintf("%d iterations of each in %.2f s", rlAlone, max(jobs[0].Ended, jobs[1].Ended))
}

// together has both run as tenants.
func (x *rlBench) together(ctx context.Context, times int) (err error) {
	var args []string // memory is swapped by default
	if x.simulated {
		args = []string{"--swap-headroom", "0"}
	}
	s, err := x.scheduler(ctx, "rl", args...)
	if err != nil {
		return err
	}
	defer s.stop()
	s.awaitReady(ctx, 1<<50) // as much as there will be, if somebody chose an amount of host memory
	x.shared = nil
	p, err := x.poolOf(ctx, rlJobs, 0, s.dir)
	if p != nil {
		defer func() { err = errors.Join(err, p.stop()) }()
	}
	if err != nil {
		return err
	}
	var built []float64
	for i, w := range p.tenants {
		took, err := x.make(ctx, w, i)
		if err != nil {
			return fmt.Errorf("%w; the scheduler: %s", err, s.tail())
		}
		built = append(built, took)
	}
	before, err := contentMoved(ctx, s)
	if err != nil {
		return err
	}
	if x.r.Together, err = x.iterate(ctx, p.tenants, times); err != nil {
		return fmt.Errorf("%w; the scheduler: %s", err, s.tail())
	}
	after, err := contentMoved(ctx, s)
	if err != nil {
		return err
	}
	x.r.Out, x.r.In, x.r.OutNs, x.r.InNs = after.out-before.out, after.in-before.in, after.outNs-before.outNs, after.inNs-before.inNs
	if now, err := s.status(ctx); err == nil && len(now.Gpus) > 0 && now.Gpus[0].MemoryBytes > 0 {
		x.r.Promised = round(float64(now.Gpus[0].Swap.PromisedBytes)/float64(now.Gpus[0].MemoryBytes), 2)
	}
	for i, job := range x.r.Together {
		x.r.Together[i].Build = round(built[i], 2)
		fmt.Printf("  job %d together: %s\n", i, job)
	}
	return nil
}

// sumUp compares as many iterations one after the other. A first iteration loads kernels, so
// that it takes longer than the others.
func (r *rlResult) sumUp() {
	gpu, longest, steps := 0.0, 0.0, 0
	r.Same = len(r.Alone) == len(r.Together)
	for i, job := range r.Alone {
		n := len(r.Together[i].Steps)
		last := job.Steps[len(job.Steps)-1]
		reward := max(last.Reward, r.Reward)
		r.After += job.Steps[0].gpu() + float64(n-1)*last.gpu() + float64(n)*reward
		gpu, longest, steps = gpu+float64(n)*last.gpu(), max(longest, float64(n)*(last.gpu()+reward)), steps+n
		for k, s := range job.Steps {
			r.Same = r.Same && (k >= n || r.Together[i].Steps[k].Weights == s.Weights)
		}
		r.Seconds = max(r.Seconds, r.Together[i].Ended)
	}
	r.Most = round(r.After/max(gpu, longest), 3)
	r.After, r.Faster = round(r.After, 2), round(r.After/r.Seconds, 3)
	r.Rate = round(float64(steps)/r.Seconds, 4)
}

func (j rlJob) String() string {
	var phases [4]float64
	for _, s := range j.Steps {
		for i, v := range []float64{s.Generate, s.Reward, s.Scored, s.Train} {
			phases[i] += v / float64(len(j.Steps))
		}
	}
	weights := ""
	for _, s := range j.Steps {
		weights += " " + s.Weights
	}
	return fmt.Sprintf("%d iterations: generate %.2f, reward %.2f (scoring %.2f), train %.2f s; weights%s", len(j.Steps), phases[0], phases[1], phases[2], phases[3], weights)
}

func (r *rlResult) line() string {
	return fmt.Sprintf("two jobs of %d rollouts of %d tokens, %.2f times the GPU's memory: %.2f s (%.3f steps/s), one after the other natively %.2f s: %.3f times faster, at most %.2f if nothing moved; %.1f GiB out in %.2f s, %.1f in in %.2f; weights as alone: %t: %s",
		r.Rollouts, r.Tokens, r.Promised, r.Seconds, r.Rate, r.After, r.Faster, r.Most, float64(r.Out)/(1<<30), float64(r.OutNs)/1e9, float64(r.In)/(1<<30), float64(r.InNs)/1e9, r.Same, holds(r.Same && r.Faster >= rlBar))
}
