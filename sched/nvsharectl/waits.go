// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	// waitsTime is how long a wait counts.
	waitsTime = time.Minute
	// maxWaits is how many waits of a tenant on one GPU count, the newest.
	maxWaits = 8192
	// maxLooks bounds the answers with events that one question takes.
	maxLooks = 64
)

// waits has how long each tenant waited for its grants in the latest minute, by the
// scheduler's events.
type waits struct {
	next  api.EventsRequest
	since map[waitKey][]grantWait
}

type waitKey struct{ gpu, tenant string }

// grantWait is how long one grant was waited for.
type grantWait struct{ at, took int64 } // ns

func newWaits() *waits {
	w := &waits{since: map[waitKey][]grantWait{}}
	w.next.Types = []api.EventType{api.EventType_EVENT_TYPE_GRANT}
	return w
}

// look asks for the grants since the last time. Users who may not ask get none.
func (w *waits) look(ctx context.Context, runDir string, now time.Time) {
	_ = call(ctx, runDir, func(ctx context.Context, c *api.Conn) error {
		for range maxLooks {
			resp, err := c.Events(ctx, &w.next)
			if err != nil {
				return err
			}
			w.add(resp.Events)
			if resp.Next == w.next.Since && resp.Run == w.next.Run {
				break
			}
			w.next.Since, w.next.Run = resp.Next, resp.Run
		}
		return nil
	})
	w.forget(now)
}

func (w *waits) add(events []*api.Event) {
	for _, e := range events {
		if e.Type != api.EventType_EVENT_TYPE_GRANT {
			continue
		}
		key := waitKey{e.Uuid, cmp.Or(e.Container.GetId(), "user "+strconv.FormatUint(uint64(e.Uid), 10))}
		all := append(w.since[key], grantWait{e.TimeNs, e.WaitedNs})
		w.since[key] = all[max(len(all)-maxWaits, 0):]
	}
}

// forget drops what is older than waitsTime.
func (w *waits) forget(now time.Time) {
	from := now.Add(-waitsTime).UnixNano()
	for key, all := range w.since {
		i := slices.IndexFunc(all, func(one grantWait) bool { return one.at >= from })
		if i < 0 {
			delete(w.since, key)
			continue
		}
		w.since[key] = slices.Clone(all[i:])
	}
}

// spread is how long half of the waits, and 99 of 100, lasted at most.
type spread struct {
	p50, p99 int64 // ns
	known    bool  // there was a wait
}

func (s spread) String() string {
	if !s.known {
		return "-"
	}
	return brief(s.p50) + "/" + brief(s.p99)
}

// spreads returns the spread of each tenant on each GPU.
func (w *waits) spreads() map[waitKey]spread {
	out := map[waitKey]spread{}
	for key, all := range w.since {
		took := make([]int64, len(all))
		for i, one := range all {
			took[i] = one.took
		}
		slices.Sort(took)
		at := func(percent int) int64 { return took[(len(took)*percent+99)/100-1] }
		out[key] = spread{at(50), at(99), true}
	}
	return out
}

// brief prints nanoseconds in at most five characters.
func brief(ns int64) string {
	units := []struct {
		of   int64
		name string
	}{{int64(time.Hour), "h"}, {int64(time.Minute), "m"}, {int64(time.Second), "s"}, {int64(time.Millisecond), "ms"}, {int64(time.Microsecond), "µs"}}
	for _, u := range units {
		switch {
		case ns >= 10*u.of:
			return strconv.FormatInt(ns/u.of, 10) + u.name
		case ns >= u.of:
			tenths := ns * 10 / u.of
			return strconv.FormatInt(tenths/10, 10) + "." + strconv.FormatInt(tenths%10, 10) + u.name
		}
	}
	return "0"
}
