// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/quantile"
)

const (
	migrateTimes  = 20 // there and back ten times
	migrateWithin = 8 * time.Minute

	migrateSmall = 8 << 10  // MiB
	migrateLarge = 45 << 10 // 60 GiB with what a training has besides; a GPU of 80 GB holds that
)

// A migrateCase is a program that changes its GPU again and again, against the same
// program that never does.
type migrateCase struct {
	Program string        `json:"program"`
	MiB     int           `json:"mib"`
	Steps   int           `json:"steps"` // that both have done
	Same    int           `json:"same_results"`
	StepMs  float64       `json:"step_ms"` // median, while it stays
	Moves   []migrateMove `json:"moves"`
	Told    pauses        `json:"told_s"`  // as the scheduler says
	Pause   pauses        `json:"pause_s"` // the longest step of each move, beyond the median
	Problem string        `json:"problem,omitempty"`
}

// pauses are how long half of the moves took at most, and 99 of 100.
type pauses struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
}

type migrateMove struct {
	To    int     `json:"to_gpu"`
	Told  float64 `json:"told_s"`
	Pause float64 `json:"pause_s"`
	Bytes uint64  `json:"bytes"`
}

// programStep is what one step of migrate.py says.
type programStep struct {
	Step   int     `json:"step"`
	At     float64 `json:"at"`
	Took   float64 `json:"took"`
	Result string  `json:"result"`
}

// migrateStep moves a program between two GPUs while it works.
func (b *bench) migrateStep(ctx context.Context, _ string) error {
	ctx, cancel := context.WithTimeout(ctx, migrateWithin)
	defer cancel()
	status, err := b.node.Status(ctx)
	if err != nil {
		return err
	}
	if len(status.Gpus) > 0 && len(status.Gpus) < 2 {
		return errors.New("this machine has only one GPU")
	}
	all := []*migrateCase{{Program: "torch", MiB: migrateSmall}}
	switch {
	case b.tenantMiB > 0:
		all[0].MiB = b.tenantMiB
	case !b.cells.quick:
		all = append(all, &migrateCase{Program: "torch", MiB: migrateLarge})
	}
	if b.simulated {
		all = []*migrateCase{{Program: "driver", MiB: 64}}
	}
	var errs []error
	for _, c := range all {
		if err := b.migrateOne(ctx, c); err != nil {
			c.Problem = err.Error()
			errs = append(errs, fmt.Errorf("%s of %d MiB: %w", c.Program, c.MiB, err))
		}
		fmt.Println("  " + c.line())
		errs = append(errs, b.saveJSON("migrate.json", all))
	}
	return errors.Join(errs...)
}

func (c *migrateCase) line() string {
	text := fmt.Sprintf("%s of %d MiB, a step takes %.1f ms: ", c.Program, c.MiB, c.StepMs)
	if len(c.Moves) > 0 {
		text += fmt.Sprintf("%d moves, pause p50 %.2f s, p99 %.2f s (the scheduler says %.2f and %.2f); ", len(c.Moves), c.Pause.P50, c.Pause.P99, c.Told.P50, c.Told.P99)
	}
	text += fmt.Sprintf("%d of %d steps have the results of one that never moved: %s", c.Same, c.Steps, holds(c.Steps > 0 && c.Same == c.Steps && len(c.Moves) == migrateTimes))
	if c.Problem != "" {
		text += "; PROBLEM: " + c.Problem
	}
	return text
}

func (b *bench) migrateOne(ctx context.Context, c *migrateCase) error {
	swap := c.MiB*3/2 + 1024 // what a training has besides its parameters is a third
	s, err := b.scheduler(ctx, fmt.Sprintf("migrate-%s-%d", c.Program, c.MiB), "--swap-memory", fmt.Sprintf("%dMi", swap), "--swap-ready", "100%")
	if err != nil {
		return err
	}
	defer s.stop()
	s.awaitReady(ctx, uint64(swap)<<20)
	moving, err := b.startProgram(0, s, c, 50)
	if err != nil {
		return err
	}
	defer moving.kill()
	for range 10 { // the allocator has what it needs
		if _, err := moving.next(ctx); err != nil {
			return err
		}
	}
	quiet, err := moving.gather(ctx, 20)
	if err != nil {
		return err
	}
	c.StepMs = round(1000*quantile.Of(quiet, 0.5), 3)
	var told, pause []float64
	for i := range migrateTimes {
		m, err := b.moveOnce(ctx, s, moving, 1-i%2)
		if err != nil {
			return fmt.Errorf("move %d: %w", i+1, err)
		}
		m.Pause = round(m.Pause-c.StepMs/1000, 4)
		c.Moves = append(c.Moves, m)
		told, pause = append(told, m.Told), append(pause, m.Pause)
		c.Told, c.Pause = pauses{quantile.Of(told, 0.5), quantile.Of(told, 0.99)}, pauses{quantile.Of(pause, 0.5), quantile.Of(pause, 0.99)}
	}
	moving.in.Close()
	if err := moving.rest(ctx); err != nil {
		return err
	}

	// The same without the shim, and without a move.
	still, err := b.startProgram(0, nil, c, len(moving.steps))
	if err != nil {
		return err
	}
	defer still.kill()
	still.in.Close()
	cut := still.rest(ctx)
	if cut != nil && ctx.Err() == nil {
		return cut
	}
	c.Steps = min(len(moving.steps), len(still.steps))
	for i := range c.Steps {
		if moving.steps[i].Result == still.steps[i].Result {
			c.Same++
		}
	}
	if c.Same != c.Steps {
		return fmt.Errorf("%d of %d results differ", c.Steps-c.Same, c.Steps)
	}
	if cut != nil { // what was compared counts all the same
		return fmt.Errorf("only %d of %d steps were compared: %w", c.Steps, len(moving.steps), cut)
	}
	return nil
}

// moveOnce moves the program, and finds the longest step meanwhile.
func (b *bench) moveOnce(ctx context.Context, s *scheduler, p *program, to int) (m migrateMove, err error) {
	conn, err := api.Dial(ctx, s.dir)
	if err != nil {
		return m, err
	}
	defer conn.Close()
	type answer struct {
		*api.MigrateResponse
		error
	}
	done := make(chan answer, 1)
	go func() {
		uid := p.uid
		r, err := conn.Migrate(ctx, &api.MigrateRequest{Uid: &uid, Gpu: strconv.Itoa(to)})
		done <- answer{r, err}
	}()
	m.To = to
	for after := -1; after != 0; { // and a few steps after it
		step, err := p.next(ctx)
		if err != nil {
			return m, err
		}
		m.Pause = max(m.Pause, step.Took)
		if after > 0 {
			after--
			continue
		}
		select {
		case a := <-done:
			if a.error != nil {
				return m, a.error
			}
			m.Told, m.Bytes, after = round(float64(a.TookNs)/1e9, 4), a.Bytes, 5
		default:
		}
	}
	return m, nil
}

// program is a process of migrate.py.
type program struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines chan programStep
	steps []programStep
	uid   uint32
}

// startProgram starts one as a tenant of s, or natively. It works until it has done so many
// steps and its standard input is closed.
func (b *bench) startProgram(user int, s *scheduler, c *migrateCase, steps int) (*program, error) {
	env, home, who, err := b.asUser(user, s)
	if err != nil {
		return nil, err
	}
	for _, file := range []string{"migrate.py", "loads/__init__.py", "loads/common.py", "loads/driver.py"} {
		data, err := os.ReadFile(filepath.Join(filepath.Dir(b.script("worker.py")), file))
		if err != nil {
			return nil, err
		}
		to := filepath.Join(home, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, data, 0o644)); err != nil {
			return nil, err
		}
	}
	env = append(env, "CUBLAS_WORKSPACE_CONFIG=:4096:8", "PYTHONWARNINGS=ignore", "PYTHONDONTWRITEBYTECODE=1", "USER=nobody", "LOGNAME=nobody")
	p := &program{lines: make(chan programStep, 1<<16), uid: who.Uid}
	p.cmd = exec.Command(b.python, filepath.Join(home, "migrate.py"), c.Program, strconv.Itoa(c.MiB), strconv.Itoa(steps))
	p.cmd.Env, p.cmd.Dir, p.cmd.Stderr = env, home, os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: who}
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(p.lines)
		for scan := bufio.NewScanner(out); scan.Scan(); {
			var step programStep
			if json.Unmarshal(scan.Bytes(), &step) == nil {
				p.lines <- step
			}
		}
	}()
	return p, nil
}

func (p *program) next(ctx context.Context) (programStep, error) {
	select {
	case step, ok := <-p.lines:
		if !ok {
			return step, errors.New("the program has ended")
		}
		p.steps = append(p.steps, step)
		return step, nil
	case <-ctx.Done():
		return programStep{}, ctx.Err()
	}
}

// gather returns how long steps take.
func (p *program) gather(ctx context.Context, n int) (took []float64, err error) {
	for range n {
		step, err := p.next(ctx)
		if err != nil {
			return nil, err
		}
		took = append(took, step.Took)
	}
	return took, nil
}

// rest reads what the program says until it ends.
func (p *program) rest(ctx context.Context) error {
	for {
		select {
		case step, ok := <-p.lines:
			if !ok {
				return p.cmd.Wait()
			}
			p.steps = append(p.steps, step)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// kill ends the program and what it has forked.
func (p *program) kill() { _ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) }
