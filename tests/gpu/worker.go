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
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// How long workers may take. A time-out is a failure of its cell, so these
// are far above what is normal.
const (
	loadWithin   = 3 * time.Minute // imports from a cold disk
	initWithin   = 90 * time.Second
	buildWithin  = 2 * time.Minute // compiles
	checkWithin  = time.Minute
	windowBeyond = 45 * time.Second // past the end of a window
	dropWithin   = 30 * time.Second
	quitWithin   = 20 * time.Second
)

// A worker is a worker.py: a tenant that does as it is told.
type worker struct {
	name   string
	stderr string        // file
	user   uint32        // whose process it is, where the step wants to know
	client int           // the process that the scheduler knows, if cmd only relays to it
	more   func() string // what else it has printed

	cmd     *exec.Cmd
	orders  io.WriteCloser
	replies chan reply
	ended   chan struct{}
	mu      sync.Mutex
	next    int
	dead    error
}

type reply struct {
	ID     int    `json:"id"`
	Error  string `json:"error"`
	Skip   string `json:"skip"`
	Usable *bool  `json:"usable"`
	raw    []byte
}

// skipped is the error for what a worker cannot do here, and says why.
type skipped string

func (s skipped) Error() string { return string(s) }

// startWorker runs worker.py with env on top of this program's.
func startWorker(python, script, name, stderr string, env []string, backend ...string) (*worker, error) {
	return startWorkerAs(nil, python, script, name, stderr, env, backend...)
}

// startWorkerAs runs it as another user, or with nil as this program's.
func startWorkerAs(who *syscall.Credential, python, script, name, stderr string, env []string, backend ...string) (*worker, error) {
	cmd := exec.Command(python, append([]string{"-B", script}, backend...)...)
	cmd.Env = append(os.Environ(), env...)
	log, err := os.OpenFile(stderr, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: who}
	orders, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	w := &worker{name: name, stderr: stderr, cmd: cmd, orders: orders, replies: make(chan reply, 16), ended: make(chan struct{})}
	go func() {
		lines := bufio.NewReader(out)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				break
			}
			r := reply{raw: line}
			if json.Unmarshal(line, &r) == nil {
				w.replies <- r
			}
		}
		_ = cmd.Wait()
		close(w.ended)
	}()
	return w, nil
}

func (w *worker) pid() int { return w.cmd.Process.Pid }

// clientPID is the process that uses the GPU.
func (w *worker) clientPID() uint32 {
	if w.client != 0 {
		return uint32(w.client)
	}
	return uint32(w.pid())
}

// tail is the end of what the worker wrote to standard error.
func (w *worker) tail() string {
	data, _ := os.ReadFile(w.stderr)
	if w.more != nil {
		data = append(data, w.more()...)
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-4):], " | ")
}

// call gives an order and decodes the reply into out. A worker that does not
// answer in time, or says that it can't go on, is killed.
func (w *worker) call(ctx context.Context, within time.Duration, order map[string]any, out any) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead != nil {
		return fmt.Errorf("%s: %w", w.name, w.dead)
	}
	w.next++
	order["id"] = w.next
	line, err := json.Marshal(order)
	if err != nil {
		return err
	}
	if _, err := w.orders.Write(append(line, '\n')); err != nil {
		return w.kill(fmt.Errorf("%v: it has ended: %s", order["op"], w.tail()))
	}
	timeout := time.NewTimer(within)
	defer timeout.Stop()
	for {
		select {
		case r := <-w.replies:
			switch {
			case r.ID != w.next:
				continue
			case r.Skip != "":
				return skipped(r.Skip)
			case r.Error != "":
				err := fmt.Errorf("%s: %v: %s", w.name, order["op"], r.Error)
				if r.Usable != nil && !*r.Usable {
					return w.kill(err)
				}
				return err
			case out == nil:
				return nil
			}
			return json.Unmarshal(r.raw, out)
		case <-w.ended:
			return w.kill(fmt.Errorf("%s: %v: it ended (%v): %s", w.name, order["op"], w.cmd.ProcessState, w.tail()))
		case <-ctx.Done():
			return w.kill(fmt.Errorf("%s: %v: %w", w.name, order["op"], ctx.Err()))
		case <-timeout.C:
			_ = w.cmd.Process.Signal(unix.SIGUSR1) // prints its Python stacks
			time.Sleep(500 * time.Millisecond)
			return w.kill(fmt.Errorf("%s: %v: no answer within %v; %s", w.name, order["op"], within, w.kernelStacks()))
		}
	}
}

// kernelStacks tells what each thread waits for in the kernel.
func (w *worker) kernelStacks() string {
	count := map[string]int{}
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/wchan", w.pid()))
	for _, t := range tasks {
		text, _ := os.ReadFile(t)
		count[string(text)]++
	}
	return fmt.Sprintf("threads in the kernel: %v", count)
}

// kill ends the worker's process group at once; why is what later calls get.
func (w *worker) kill(why error) error {
	w.dead = why
	_ = unix.Kill(-w.pid(), unix.SIGKILL)
	select {
	case <-w.ended:
	case <-time.After(quitWithin):
	}
	return why
}

// quit ends the worker as a user's program ends, and returns how it ended.
func (w *worker) quit() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.dead != nil {
		return nil // reported where it happened
	}
	_, _ = io.WriteString(w.orders, `{"op":"quit"}`+"\n")
	_ = w.orders.Close()
	select {
	case <-w.ended:
		w.dead = errors.New("it was told to quit")
		if !w.cmd.ProcessState.Success() {
			return fmt.Errorf("%s ended with %v: %s", w.name, w.cmd.ProcessState, w.tail())
		}
		return nil
	case <-time.After(quitWithin):
		return w.kill(fmt.Errorf("%s did not end within %v of being told to; %s", w.name, quitWithin, w.kernelStacks()))
	}
}

// together runs f for each worker at the same time and returns their errors
// in the same order.
func together(workers []*worker, f func(*worker) error) []error {
	errs := make([]error, len(workers))
	var all sync.WaitGroup
	for i, w := range workers {
		all.Go(func() { errs[i] = f(w) })
	}
	all.Wait()
	return errs
}

// built is what a worker says of a load that it has built.
type built struct {
	StepMS    float64 `json:"step_ms"`
	Steps     int     `json:"steps"` // between two marks
	Marks     int     `json:"marks"` // ahead of the GPU
	FirstStep float64 `json:"first_step_s"`
	Note      string  `json:"note,omitempty"`
}

// counted is what a worker completed in a window.
type counted struct {
	Steps      float64 `json:"steps"`
	Seconds    float64 `json:"seconds"`
	Rate       float64 `json:"rate"` // steps per second
	Marks      int     `json:"marks"`
	LongestGap float64 `json:"longest_gap_s"`
	Turns      int     `json:"turns"`
	FirstMark  float64 `json:"first_mark"`
	LastMark   float64 `json:"last_mark"`
	Late       float64 `json:"late_s"`
	Ran        float64 `json:"ran"` // part of the time that its thread ran on a CPU, or looked for the GPU there
	Note       string  `json:"note,omitempty"`

	StepMS float64   `json:"step_ms"`        // of a step while it has the GPU
	Done   []float64 `json:"done,omitempty"` // steps by the end of each slice
}

// digested is a result: a hash of all of it, and some of its numbers.
type digested struct {
	Digest  string    `json:"digest"`
	Samples []float64 `json:"samples"`
}

// span is a window's time in seconds of CLOCK_MONOTONIC: work goes on from
// lead on and is counted from start to end.
type span struct{ lead, start, end float64 }

// all is how long work goes on.
func (s span) all() time.Duration { return time.Duration((s.end - s.lead) * float64(time.Second)) }

// soon makes a span that leaves time to give the orders.
func soon(lead, length time.Duration) span {
	at := float64(monotonic())/1e9 + 0.03
	return span{at, at + lead.Seconds(), at + (lead + length).Seconds()}
}

// load imports the framework and returns its versions.
func (w *worker) load(ctx context.Context) (map[string]string, error) {
	var r struct {
		Versions map[string]string `json:"versions"`
	}
	err := w.call(ctx, loadWithin, map[string]any{"op": "load"}, &r)
	return r.Versions, err
}

// init makes the context and returns what the framework says of the GPU.
func (w *worker) init(ctx context.Context) (map[string]any, error) {
	var r map[string]any
	err := w.call(ctx, initWithin, map[string]any{"op": "init"}, &r)
	delete(r, "id")
	return r, err
}

func (w *worker) build(ctx context.Context, load string, like built) (built, error) {
	var b built
	err := w.call(ctx, buildWithin, map[string]any{"op": "build", "load": load, "steps": like.Steps, "marks": like.Marks}, &b)
	return b, err
}

func (w *worker) check(ctx context.Context, load string, seed int) (digested, error) {
	var d digested
	err := w.call(ctx, checkWithin, map[string]any{"op": "check", "load": load, "seed": seed}, &d)
	return d, err
}

// window works on the loads, a thread each.
func (w *worker) window(ctx context.Context, s span, loads ...string) (map[string]counted, error) {
	return w.slices(ctx, s, 0, windowBeyond, loads...)
}

// slices works on the loads and counts also the steps that were completed at
// the beginning of the window and after each slice of it; beyond is how much
// longer than the window it may take.
func (w *worker) slices(ctx context.Context, s span, every, beyond time.Duration, loads ...string) (map[string]counted, error) {
	var r struct {
		Loads map[string]counted `json:"loads"`
	}
	length := time.Duration((s.end - s.lead) * float64(time.Second))
	err := w.call(ctx, length+beyond, map[string]any{
		"op": "window", "loads": loads, "lead": s.lead, "start": s.start, "end": s.end, "every": every.Seconds()}, &r)
	return r.Loads, err
}

func (w *worker) drop(ctx context.Context, load string) error {
	return w.call(ctx, dropWithin, map[string]any{"op": "drop", "load": load}, nil)
}
