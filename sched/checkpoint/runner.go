// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"
)

// DefaultLimit is how long an operation may take: the driver moves 2 GB of what is left on
// the GPU in a second.
const DefaultLimit = 60 * time.Second

const (
	// maxReady bounds how many programs wait for an operation; each has the driver loaded.
	maxReady = 2
	// linger is how long a program waits that is not wanted any more.
	linger = time.Minute
)

// Runner has the program do operations, each program one at a time. The zero Runner has no
// program.
type Runner struct {
	Program string
	Env     []string      // beside the environment of this process
	Limit   time.Duration // of an operation; 0: DefaultLimit
	// Lock is a file by which operations on a process exclude each other, also those that an earlier
	// Runner's programs are still doing. "": they do not.
	Lock string

	mu       sync.Mutex
	wanted   int // so many programs are to be ready
	starting int
	ready    []*helper
	ending   *time.Timer // ends those that are not wanted; nil: never set
}

// Off has a process leave all GPUs.
func (r *Runner) Off(ctx context.Context, pid int) (Times, error) {
	res, err := r.run(ctx, Request{Op: "off", PID: pid})
	return res.Took, err
}

// On has a process come back.
func (r *Runner) On(ctx context.Context, pid int, pairs []Pair) (Times, error) {
	res, err := r.run(ctx, Request{Op: "on", PID: pid, Pairs: pairs})
	return res.Took, err
}

// State asks the driver for the state of a process.
func (r *Runner) State(ctx context.Context, pid int) (State, error) {
	res, err := r.run(ctx, Request{Op: "state", PID: pid})
	return res.State, err
}

// Check says why no operation can work, whatever the process; nil: it may.
func (r *Runner) Check(ctx context.Context) error {
	_, err := r.State(ctx, os.Getpid())
	var e *Error
	if errors.As(err, &e) && e.Step == "state" {
		return nil // the driver was asked, and this process uses no GPU
	}
	return err
}

// Expect says that so many operations may come at any time. Programs are started for them,
// up to a small number, and make the driver ready: that takes some tenths of a second.
// Those that nobody expects any more end after a minute. It does not wait.
func (r *Runner) Expect(operations int) {
	if r.Program == "" {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wanted = min(operations, maxReady)
	r.ready = slices.DeleteFunc(r.ready, (*helper).dead)
	for ; len(r.ready)+r.starting < r.wanted; r.starting++ {
		go func() {
			h, err := r.start()
			r.mu.Lock()
			defer r.mu.Unlock()
			r.starting--
			if err == nil { // else an operation will say why
				r.keep(h)
			}
		}()
	}
	r.endLater()
}

// keep has a program wait for an operation. The lock is held.
func (r *Runner) keep(h *helper) {
	if len(r.ready) >= maxReady || r.wanted == 0 && r.ending == nil {
		h.end()
		return
	}
	r.ready = append(r.ready, h)
	r.endLater()
}

// endLater has programs end that are not wanted then. The lock is held.
func (r *Runner) endLater() {
	if len(r.ready) <= r.wanted {
		return
	}
	if r.ending != nil {
		r.ending.Reset(linger)
		return
	}
	r.ending = time.AfterFunc(linger, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for len(r.ready) > r.wanted {
			r.ready[0].end()
			r.ready = r.ready[1:]
		}
	})
}

// take gives the operation to a program that has nothing to do, and returns the program.
func (r *Runner) take(q Request) (*helper, error) {
	for h := r.takeReady(); h != nil; h = r.takeReady() {
		if h.send(q) == nil {
			return h, nil
		}
		h.end() // it has ended already
	}
	h, err := r.start()
	if err == nil {
		_ = h.send(q) // answer() says what became of it
	}
	return h, err
}

func (r *Runner) takeReady() *helper {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ready) == 0 {
		return nil
	}
	h := r.ready[0]
	r.ready = r.ready[1:]
	return h
}

func (r *Runner) start() (*helper, error) {
	cmd := exec.Command(r.Program, "serve", "--lock", r.Lock)
	cmd.Env = r.environment()
	return startHelper(cmd)
}

func (r *Runner) environment() []string {
	return slices.DeleteFunc(append(os.Environ(), r.Env...), func(e string) bool { return strings.HasPrefix(e, "LD_PRELOAD=") })
}

func (r *Runner) run(ctx context.Context, q Request) (Result, error) {
	began := time.Now()
	if r.Program == "" {
		return Result{PID: q.PID, State: Unknown}, ErrNone
	}
	limit := cmp.Or(r.Limit, DefaultLimit)
	q.Limit = limit + time.Second // only where this Runner does not end it
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	fail := func(why string, timeout bool) (Result, error) {
		res := Result{PID: q.PID, State: Unknown, Error: fmt.Sprintf("%s %s of process %d %s", Name, q.Op, q.PID, why)}
		return res, &Error{Result: res, Timeout: timeout}
	}
	h, err := r.take(q)
	if err != nil {
		return fail(err.Error(), false)
	}
	res, err := h.answer(ctx)
	switch {
	case ctx.Err() != nil && err != nil:
		h.kill()
		return fail(fmt.Sprintf("did not end within %s", limit), true)
	case err != nil:
		h.end()
		return fail(err.Error(), false)
	}
	res.Took = append(Times{{"start", time.Since(began) - res.Took.Sum()}}, res.Took...)
	if res.Error != "" {
		h.end() // a new one may do better
		return res, &Error{Result: res}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keep(h)
	return res, nil
}

// helper is a running program. One goroutine at a time asks it.
type helper struct {
	cmd       *exec.Cmd
	in        io.WriteCloser
	answers   chan Result
	ended     chan struct{} // closed at its end; then err and diagnosis may be read
	err       error
	diagnosis beginning // what it printed on standard error
}

// beginning keeps the first part of what is written.
type beginning struct{ text []byte }

const maxDiagnosis = 4096

func (b *beginning) Write(p []byte) (int, error) {
	b.text = append(b.text, p[:min(len(p), maxDiagnosis-len(b.text))]...)
	return len(p), nil
}

func startHelper(cmd *exec.Cmd) (*helper, error) {
	h := &helper{cmd: cmd, answers: make(chan Result, 1), ended: make(chan struct{})}
	h.cmd.Stderr = &h.diagnosis
	var err error
	if h.in, err = h.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := h.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		decoder := json.NewDecoder(out)
		for {
			res := Result{State: Unknown}
			if decoder.Decode(&res) != nil {
				break
			}
			h.answers <- res
		}
		h.err = h.cmd.Wait()
		close(h.ended)
	}()
	return h, nil
}

func (h *helper) dead() bool {
	select {
	case <-h.ended:
		return true
	default:
		return false
	}
}

// end has the program end, once it has done what it does.
func (h *helper) end() { h.in.Close() }

// kill ends the program now. One that hangs in the kernel is not waited for.
func (h *helper) kill() {
	_ = h.cmd.Process.Kill()
	h.end()
}

// send gives the program an operation to do. A request fits into the pipe, so that nobody waits.
func (h *helper) send(q Request) error {
	if h.dead() {
		return os.ErrClosed
	}
	return json.NewEncoder(h.in).Encode(q)
}

func (h *helper) answer(ctx context.Context) (Result, error) {
	select {
	case res := <-h.answers:
		return res, nil
	case <-ctx.Done():
		return Result{}, ctx.Err()
	case <-h.ended:
	}
	select {
	case res := <-h.answers: // its last words
		return res, nil
	default:
	}
	why := cmp.Or(h.err, errors.New("it printed no result"))
	if text := strings.TrimSpace(string(h.diagnosis.text)); text != "" {
		return Result{}, fmt.Errorf("failed: %w: %s", why, text)
	}
	return Result{}, fmt.Errorf("failed: %w", why)
}
