// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/timer"
)

// errEnding is for those who ask a loop that ends.
var errEnding = errors.New("the scheduler is ending")

// loop runs what it is given, and timers, in one goroutine.
type loop struct {
	timers timer.List
	events chan func()
	wg     sync.WaitGroup // every goroutine but the loop
	life   context.Context
	end    context.CancelFunc
}

func newLoop() *loop {
	life, end := context.WithCancel(context.Background())
	return &loop{events: make(chan func(), 256), life: life, end: end}
}

// run goes on until ctx is done, or after says so: it is called after each event.
func (l *loop) run(ctx context.Context, after func() (goOn bool)) {
	wake := time.NewTimer(0)
	defer wake.Stop()
	for goOn := true; goOn; goOn = after() {
		if at, ok := l.timers.Next(); ok {
			wake.Reset(max(at.Sub(now()), 0))
		} else {
			wake.Stop()
		}
		select {
		case <-ctx.Done():
			return
		case f := <-l.events:
			f()
		case <-wake.C:
			l.timers.Run(now())
		}
	}
}

// Go starts a goroutine that end waits for.
func (l *loop) Go(f func()) { l.wg.Go(f) }

// Ended is closed when the loop has ended, or is about to.
func (l *loop) Ended() <-chan struct{} { return l.life.Done() }

// Now is the time of the loop.
func (l *loop) Now() sched.Time { return now() }

// Do has the loop run f, after what came before; false: the loop has ended.
func (l *loop) Do(f func()) bool {
	select {
	case l.events <- f:
		return true
	case <-l.Ended():
		return false
	}
}

// try is Do where the loop has little to do.
func (l *loop) try(f func()) {
	select {
	case l.events <- f:
	default:
	}
}

// ask is Do for callers that need the answer. f has run when it returns nil, and never runs once
// it has returned an error: what f writes is the caller's again.
func (l *loop) ask(ctx context.Context, f func()) error {
	done := make(chan struct{})
	var begun atomic.Bool // or given up
	g := func() {
		if begun.CompareAndSwap(false, true) {
			f()
			close(done)
		}
	}
	select {
	case l.events <- g:
	case <-ctx.Done():
		return ctx.Err()
	case <-l.Ended():
		return errEnding
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		if begun.CompareAndSwap(false, true) {
			return ctx.Err()
		}
	case <-l.Ended():
	}
	select { // f runs, or the loop has ended
	case <-done:
		return nil
	case <-l.Ended():
		return errEnding
	}
}

// Answers returns nil when the loop has dealt with all that came before: an
// error, when ctx is done first or the loop has ended.
func (l *loop) Answers(ctx context.Context) error { return l.ask(ctx, func() {}) }

// now reads CLOCK_MONOTONIC, which is what the grant page promises.
func now() sched.Time {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic("CLOCK_MONOTONIC: " + err.Error())
	}
	return sched.Time(ts.Nano())
}
