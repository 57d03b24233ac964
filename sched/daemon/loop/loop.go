// SPDX-License-Identifier: Apache-2.0

// Package loop runs what the daemon does in one goroutine, and its timers.
//
// What it guarantees:
//
//   - Functions run one at a time, in the order in which they came. So they need no locks.
//   - Who asks and gives up gets back what it lent: its question never runs later.
//   - Nothing is lost silently: Do and Ask say that the loop has ended.
//   - A goroutine that Go has started is waited for at the end.
package loop

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/timer"
)

// ErrEnding is for those who ask a loop that ends.
var ErrEnding = errors.New("the scheduler is ending")

// Loop runs what it is given, and timers, in one goroutine.
type Loop struct {
	Timers timer.List
	Events chan func()
	Wg     sync.WaitGroup // every goroutine but the loop
	Life   context.Context
	End    context.CancelFunc
}

// New returns a loop that does not run yet.
func New() *Loop {
	life, end := context.WithCancel(context.Background())
	return &Loop{Events: make(chan func(), 256), Life: life, End: end}
}

// Run goes on until ctx is done, or after says so: it is called after each event.
func (l *Loop) Run(ctx context.Context, after func() (goOn bool)) {
	wake := time.NewTimer(0)
	defer wake.Stop()
	for goOn := true; goOn; goOn = after() {
		if at, ok := l.Timers.Next(); ok {
			wake.Reset(max(at.Sub(Now()), 0))
		} else {
			wake.Stop()
		}
		select {
		case <-ctx.Done():
			return
		case f := <-l.Events:
			f()
		case <-wake.C:
			l.Timers.Run(Now())
		}
	}
}

// Go starts a goroutine that end waits for.
func (l *Loop) Go(f func()) { l.Wg.Go(f) }

// Ended is closed when the loop has ended, or is about to.
func (l *Loop) Ended() <-chan struct{} { return l.Life.Done() }

// Now is the time of the loop.
func (l *Loop) Now() base.Time { return Now() }

// Do has the loop run f, after what came before; false: the loop has ended.
func (l *Loop) Do(f func()) bool {
	if l.Life.Err() != nil { // where there is room too, select may choose that
		return false
	}
	select {
	case l.Events <- f:
		return true
	case <-l.Ended():
		return false
	}
}

// Try is Do where the loop has little to do.
func (l *Loop) Try(f func()) {
	select {
	case l.Events <- f:
	default:
	}
}

// Ask is Do for callers that need the answer. f has run when it returns nil, and never runs once
// it has returned an error: what f writes is the caller's again.
func (l *Loop) Ask(ctx context.Context, f func()) error {
	done := make(chan struct{})
	var begun atomic.Bool // or given up
	g := func() {
		if begun.CompareAndSwap(false, true) {
			f()
			close(done)
		}
	}
	select {
	case l.Events <- g:
	case <-ctx.Done():
		return ctx.Err()
	case <-l.Ended():
		return ErrEnding
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
		return ErrEnding
	}
}

// Answers returns nil when the loop has dealt with all that came before: an
// error, when ctx is done first or the loop has ended.
func (l *Loop) Answers(ctx context.Context) error { return l.Ask(ctx, func() {}) }

// Now reads CLOCK_MONOTONIC, which is what the grant page promises.
func Now() base.Time {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic("CLOCK_MONOTONIC: " + err.Error())
	}
	return base.Time(ts.Nano())
}
