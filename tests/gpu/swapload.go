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
	"strconv"
	"strings"
	"syscall"
	"time"
)

// A swapLoad is a process of tests/workload/swap-load.
type swapLoad struct {
	name   string
	record string
	cmd    *exec.Cmd
	in     io.WriteCloser
	said   chan loadEvent
	errs   bytes.Buffer
	end    chan struct{}
	Told   []loadEvent
}

// loadEvent is a line that it prints.
type loadEvent struct {
	Event  string  `json:"event"`
	PID    int     `json:"pid,omitempty"`
	MiB    uint64  `json:"mib,omitempty"`
	Checks string  `json:"checks,omitempty"`
	Alloc  float64 `json:"alloc_s,omitempty"`
	Fill   float64 `json:"fill_s,omitempty"`
	// The GPU's clock and the time of day, at one moment.
	GPUClock  int64  `json:"gpu_clock_ns,omitempty"`
	TimeOfDay int64  `json:"time_of_day_ns,omitempty"`
	Bursts    uint64 `json:"bursts,omitempty"`
	Kernels   uint64 `json:"kernels,omitempty"`
	Began     int64  `json:"began_ns,omitempty"`
	Ended     int64  `json:"ended_ns,omitempty"`
	Wrong     uint64 `json:"wrong"`
	OnTheWay  uint64 `json:"wrong_on_the_way"`
	Words     uint64 `json:"words,omitempty"`
}

// startSwapLoad runs it as user i, a tenant of s or natively, for at most limit,
// whatever happens. What it records is in the file record.
func (b *bench) startSwapLoad(i int, s *scheduler, limit time.Duration, args ...string) (*swapLoad, error) {
	env, home, who, err := b.asUser(i, s)
	if err != nil {
		return nil, err
	}
	l := &swapLoad{name: fmt.Sprintf("tenant %d", i+1), record: filepath.Join(home, "record"), said: make(chan loadEvent, 16), end: make(chan struct{})}
	args = append(args, "--tenant", fmt.Sprintf("t%d", i+1), "--seed", strconv.Itoa(i+1), "--record", l.record, "--limit", strconv.Itoa(int(limit.Seconds())+1))
	l.cmd = exec.Command(filepath.Join(swapDir, "swap-load"), args...)
	// Its memory is filled once, and would leave once: what is measured is the link.
	l.cmd.Env = append(append(os.Environ(), env...), "NVSHARE_MOVE_ALL=1")
	l.cmd.Stderr = &l.errs
	l.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: who}
	if l.in, err = l.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := l.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := l.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var e loadEvent
			if json.Unmarshal(lines.Bytes(), &e) == nil {
				l.said <- e
			}
		}
		_ = l.cmd.Wait()
		close(l.end)
	}()
	return l, nil
}

// await is its next line, which is to be of that kind.
func (l *swapLoad) await(ctx context.Context, event string, within time.Duration) (loadEvent, error) {
	fail := func(why string) (loadEvent, error) {
		l.kill()
		return loadEvent{}, fmt.Errorf("%s: %s instead of %q: %s", l.name, why, event, strings.TrimSpace(l.errs.String()))
	}
	timeout := time.NewTimer(within)
	defer timeout.Stop()
	take := func(e loadEvent) (loadEvent, error) {
		l.Told = append(l.Told, e)
		if e.Event != event {
			return fail(fmt.Sprintf("it said %q", e.Event))
		}
		return e, nil
	}
	select {
	case e := <-l.said:
		return take(e)
	default:
	}
	select {
	case e := <-l.said:
		return take(e)
	case <-l.end:
		select {
		case e := <-l.said:
			return take(e)
		default:
			return fail(fmt.Sprintf("it ended (%v)", l.cmd.ProcessState))
		}
	case <-ctx.Done():
		return fail(ctx.Err().Error())
	case <-timeout.C:
		return fail(fmt.Sprintf("nothing within %v", within))
	}
}

func (l *swapLoad) begin() error {
	_, err := io.WriteString(l.in, "\n")
	return err
}

// finish has it end its bursts, if it has not, and waits for the last check.
func (l *swapLoad) finish(ctx context.Context, within time.Duration) (done, checked loadEvent, err error) {
	if err := l.in.Close(); err != nil {
		return done, checked, err
	}
	return l.results(ctx, within)
}

// results waits for them.
func (l *swapLoad) results(ctx context.Context, within time.Duration) (done, checked loadEvent, err error) {
	if done, err = l.await(ctx, "done", within); err != nil {
		return
	}
	if checked, err = l.await(ctx, "checked", within); err != nil {
		return
	}
	if checked.Wrong+checked.OnTheWay > 0 {
		err = fmt.Errorf("%s: %d words of %d are WRONG, and %d were on the way", l.name, checked.Wrong, checked.Words, checked.OnTheWay)
	}
	return
}

func (l *swapLoad) kill() {
	_ = l.cmd.Process.Kill()
	select {
	case <-l.end:
	case <-time.After(quitWithin):
	}
}

func killAll(loads []*swapLoad) {
	for _, l := range loads {
		l.kill()
	}
}

// each calls f for all at the same time.
func each(loads []*swapLoad, f func(int, *swapLoad) error) error {
	errs := make(chan error, len(loads))
	for i, l := range loads {
		go func() { errs <- f(i, l) }()
	}
	var all []error
	for range loads {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}
