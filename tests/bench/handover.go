// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	handOverTurn    = 5 * time.Millisecond
	handOverSeconds = 8
)

// wait is a launch that had to wait at its gate, from its call to its return, ns.
type wait struct{ from, to int64 }

// handOver is how long a hand-over takes on a driver that does nothing: from the first
// call of one tenant that finds its gate shut, to the return of the other's first launch.
// Between are the drain, which has nothing to wait for, the release, the scheduler, and
// the other's wake-up.
type handOver struct {
	TurnMS  float64 `json:"turn_ms"`
	Tenants int     `json:"tenants"`
	All     times   `json:"shut_to_launch"`
	Second  times   `json:"release_to_launch"` // the part after the scheduler has received the release
}

// times are durations, sorted, ns.
type times struct {
	AllNS []int64 `json:"all_ns"`
	P50   int64   `json:"p50_ns"`
	P99   int64   `json:"p99_ns"`
}

func newTimes(ns []int64) (times, error) {
	if len(ns) == 0 {
		return times{}, errors.New("hand-over: the two processes did not take turns")
	}
	slices.Sort(ns)
	return times{ns, ns[len(ns)/2], ns[len(ns)*99/100]}, nil
}

// handOvers finds the hand-overs in the waits of two tenants, each in order of time: one
// tenant's wait begins while the other waits, and lasts longer.
func handOvers(a, b []wait) []int64 {
	var all []int64
	for len(a) > 0 && len(b) > 0 {
		if a[0].from > b[0].from {
			a, b = b, a
		}
		// a waited first. Either b's gate was shut during a's wait, or this is no hand-over.
		switch {
		case b[0].from >= a[0].to:
			a = a[1:]
		case b[0].to < a[0].to: // b's wait is within a's: the machine paused b
			b = b[1:]
		default:
			all = append(all, a[0].to-b[0].from)
			a = a[1:]
		}
	}
	return all
}

// firstLaunches returns the time from each release to the end of the first wait after
// the release. All are ns of one clock.
func firstLaunches(releases []int64, a, b []wait) []int64 {
	var opened []int64
	for _, w := range slices.Concat(a, b) {
		opened = append(opened, w.to)
	}
	slices.Sort(opened)
	var all []int64
	for _, t := range releases { // earlier releases belong to other hand-overs
		if i, _ := slices.BinarySearch(opened, t); i > 0 && i < len(opened) {
			all = append(all, opened[i]-t)
		}
	}
	return all
}

// releases returns when the scheduler received releases, as far as it still knows them,
// in ns of CLOCK_MONOTONIC.
func releases(ctx context.Context, conn *api.Conn) ([]int64, error) {
	var real, mono unix.Timespec
	if err := errors.Join(unix.ClockGettime(unix.CLOCK_REALTIME, &real), unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono)); err != nil {
		return nil, err
	}
	var all []int64
	for req := (&api.EventsRequest{}); ; {
		r, err := conn.Events(ctx, req)
		if err != nil {
			return nil, err
		}
		for _, e := range r.Events {
			if e.Type == api.EventType_EVENT_TYPE_RELEASE {
				all = append(all, e.TimeNs-real.Nano()+mono.Nano())
			}
		}
		if len(r.Events) == 0 {
			return all, nil
		}
		req = &api.EventsRequest{Since: r.Next, Run: r.Run}
	}
}

func (b *bench) handOver(ctx context.Context) (*handOver, error) {
	conn, err := api.Dial(ctx, b.runDir())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if _, err := conn.Set(ctx, &api.SetRequest{QuantumNs: int64(handOverTurn)}); err != nil {
		return nil, fmt.Errorf("set the time quantum: %w", err)
	}
	var (
		programs [2]*exec.Cmd
		outs     [2]bytes.Buffer
		said     [2]bytes.Buffer
		failed   error
	)
	for i := range programs {
		p := exec.CommandContext(ctx, filepath.Join(b.build, "bench", "turns"), fmt.Sprint(handOverSeconds))
		p.Env = append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Join(b.build, "bench"), "NVSHARE_BENCH_GPUS=1",
			"NVSHARE_RUN_DIR="+b.runDir(), "LD_PRELOAD="+b.libraries[0].path)
		p.Stdout, p.Stderr = &outs[i], &said[i]
		if err := p.Start(); err != nil {
			failed = errors.Join(failed, err)
			break
		}
		programs[i] = p
	}
	var waits [2][]wait
	for i, p := range programs {
		if p == nil {
			continue
		}
		if err := p.Wait(); err != nil {
			failed = errors.Join(failed, fmt.Errorf("turns: %w: %s", err, strings.TrimSpace(said[i].String())))
			continue
		}
		if waits[i], err = parseWaits(&outs[i]); err != nil {
			failed = errors.Join(failed, err)
		}
	}
	if failed != nil {
		return nil, failed
	}
	released, err := releases(ctx, conn)
	if err != nil {
		return nil, err
	}
	h := &handOver{TurnMS: float64(handOverTurn) / float64(time.Millisecond), Tenants: len(programs)}
	h.All, err = newTimes(handOvers(waits[0], waits[1]))
	if err != nil {
		return nil, err
	}
	h.Second, err = newTimes(firstLaunches(released, waits[0], waits[1]))
	return h, err
}

// parseWaits reads the output of the program turns.
func parseWaits(r io.Reader) ([]wait, error) {
	var word string
	if _, err := fmt.Fscanln(r, &word); err != nil || word != "ready" {
		return nil, fmt.Errorf("turns said %q (%w)", word, err)
	}
	var waits []wait
	for {
		var w wait
		switch _, err := fmt.Fscanln(r, &w.from, &w.to); {
		case errors.Is(err, io.EOF):
			return waits, nil
		case err != nil:
			return nil, fmt.Errorf("turns: %w", err)
		}
		waits = append(waits, w)
	}
}

func (h *handOver) print(w io.Writer) {
	us := func(ns int64) float64 { return float64(ns) / 1e3 }
	fmt.Fprintf(w, "\nHand-over between %d tenants that launch without a pause, turns of %v ms: from the shut gate of one\n"+
		"to the first launch of the other p50 %.0f us, p99 %.0f us; from the release p50 %.0f us, p99 %.0f us (%d hand-overs).\n",
		h.Tenants, h.TurnMS, us(h.All.P50), us(h.All.P99), us(h.Second.P50), us(h.Second.P99), len(h.All.AllNS))
}
