// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
)

const (
	// maxEventsWait is how long a call for events may wait for one.
	maxEventsWait = 30 * time.Second
	// eventsPace is how long a call that waits lets events gather, so that
	// followers cost the loop next to nothing however fast turns change.
	eventsPace = 50 * time.Millisecond
)

// observe notes an action that was carried out, for events and metrics.
func (d *Daemon) observe(g *node.GPU, a base.Action) {
	t := time.Now()
	switch a := a.(type) {
	case sched.Grant:
		g.Turns.Granted(t, &a)
		d.Turn(t, g, a.Client, &history.Event{Kind: api.EventType_EVENT_TYPE_GRANT, Epoch: a.Epoch,
			Waited: a.Waited, Limited: a.Limited, Concurrent: a.Concurrent, Latency: a.Latency || a.Beside})
	case sched.Revoke:
		d.Turn(t, g, a.Client, &history.Event{Kind: api.EventType_EVENT_TYPE_REVOKE, Epoch: a.Epoch,
			Reason: uint8(a.Why), N: uint32(a.Waiters)})
	case sched.Released:
		g.Turns.Released(t, &a)
		kind, reason := api.EventType_EVENT_TYPE_RELEASE, a.Reason
		switch {
		case reason == sched.EndDeath && a.Fenced:
			kind = api.EventType_EVENT_TYPE_RECLAIM
		case reason == sched.EndDeath: // most programs end so: the GPU was free, and they kept it
			reason = sched.EndExit
		}
		d.Turn(t, g, a.Client, &history.Event{Kind: kind, Epoch: a.Epoch,
			Reason: uint8(reason), Held: a.Held, Drained: a.Drained, Fenced: a.Fenced})
		if a.Fenced { // one that outlives the turns, as the fence does
			d.fenceEvent(d.EventOf(t, g, a.Client, &history.Event{Kind: api.EventType_EVENT_TYPE_UNFENCE, Epoch: a.Epoch, Held: a.Held, Text: a.Reason.String()}), a.Claimed)
		}
	case sched.Adopt:
		d.Turn(t, g, a.Client, &history.Event{Kind: api.EventType_EVENT_TYPE_ADOPT, Epoch: a.Epoch})
	case sched.Fence:
		d.fenceEvent(d.EventOf(t, g, a.Client, &history.Event{Kind: api.EventType_EVENT_TYPE_FENCE, Epoch: a.Epoch, Text: d.fenceAction(g, a)}), a.Claimed)
	case sched.ModeChosen:
		// Tenants that come and go cause it.
		d.TellOf(d.Log.WithFields(logrus.Fields{"gpu": g.UUID, "reason": a.Cause.String()}), logrus.InfoLevel, fmt.Sprintf("GPU %d: %v", g.Index, a.Mode))
		d.History.AddCaused(d.EventOf(t, g, 0, &history.Event{Kind: api.EventType_EVENT_TYPE_MODE, Concurrent: a.Mode == sched.Concurrent, Text: a.Cause.String()}))
	}
}

// fenceEvent notes the begin or the end of a fence. Whoever claims a grant causes one as often as
// he connects.
func (d *Daemon) fenceEvent(e *history.Event, claimed bool) {
	if claimed {
		d.History.AddTurn(e)
	} else {
		d.History.AddCaused(e)
	}
}

// noteWarnings notes what a container asks for in vain, in the log and the events.
func (d *Daemon) noteWarnings(c *api.Container, warnings []string) {
	for _, text := range warnings {
		d.Log.Warnf("%s: %s", api.Tenant(c, 0), text)
		d.History.AddCaused(d.EventOf(time.Now(), nil, 0, &history.Event{Kind: api.EventType_EVENT_TYPE_WARNING, Names: c, Text: text}))
	}
}

// Events answers the control call. It is the only one that waits.
func (s controlService) Events(ctx context.Context, req *api.EventsRequest) (*api.EventsResponse, error) {
	timer := time.After(min(time.Duration(req.WaitNs), maxEventsWait))
	since, last := req.Since, req.WaitNs <= 0
	for {
		var found []history.Event
		var resp *api.EventsResponse
		var more <-chan struct{}
		var err error
		if askErr := s.d.Ask(ctx, func() { found, resp, more, err = s.d.eventsSince(req, since) }); askErr != nil {
			return nil, askErr
		}
		if err != nil {
			return nil, err
		}
		var gather <-chan time.Time
		if len(found) > 0 {
			more = nil
			wait := eventsPace - time.Since(time.Unix(0, found[0].At))
			if last || len(found) == history.MaxAnswer || wait <= 0 || wait > eventsPace { // the latter: the clock was set
				resp.Events = history.API(found)
				return resp, nil
			}
			gather = time.After(wait)
		} else if since = resp.Next; last || resp.Lost > 0 {
			return resp, nil
		}
		select {
		case <-more:
		case <-gather:
		case <-timer:
			last = true
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.d.Ended():
			return nil, loop.ErrEnding
		}
	}
}

// eventsSince is the loop's part of Events: more is closed at the next event.
func (d *Daemon) eventsSince(req *api.EventsRequest, since uint64) (found []history.Event, resp *api.EventsResponse, more <-chan struct{}, err error) {
	uuid := ""
	if req.Gpu != "" {
		g := d.FindGPU(req.Gpu)
		if g == nil {
			return nil, nil, nil, node.NoSuchGPU(req.Gpu)
		}
		uuid = g.UUID
	}
	if req.Run != 0 && req.Run != d.History.Run() {
		since = 0
	}
	resp = &api.EventsResponse{Run: d.History.Run()}
	found, resp.Next, resp.Lost = d.History.Since(since, uuid, req.Types...)
	return found, resp, d.History.More(), nil
}
