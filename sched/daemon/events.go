// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"sort"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

const (
	// keptTurns is how many events are kept that tenants cause, by taking
	// turns, coming and going; keptChanges how many of the others, which are
	// rare and so outlive them.
	keptTurns   = 16384
	keptChanges = 1024
	// maxEventsAnswer keeps an answer under the 4 MiB of a ttrpc message, with
	// the longest names.
	maxEventsAnswer = 1000
	// maxEventsWait is how long a call for events may wait for one.
	maxEventsWait = 30 * time.Second
	// eventsPace is how long a call that waits lets events gather, so that
	// followers cost the loop next to nothing however fast turns change.
	eventsPace = 50 * time.Millisecond
)

// event is something that has happened. It is made for each turn of a GPU, so
// it is small, and nothing is looked up or formatted before somebody asks. What
// it points to is never changed.
type event struct {
	seq        uint64
	at         int64 // since 1970, ns
	kind       api.EventType
	reason     uint8  // sched.RevokeReason or sched.EndReason
	fenced     bool   //
	concurrent bool   //
	latency    bool   //
	n          uint32 // waiters, or bypassed entry points
	index      int    // of the GPU
	uuid       string // of the GPU; "": none
	client     sched.ClientID
	peer       *peer.Peer     // of the client; nil: no client, or unknown
	names      *api.Container // of its container, if we were told
	epoch      sched.Epoch
	waited     time.Duration
	held       time.Duration
	drained    time.Duration
	text       string
	bytes      uint64
	took       time.Duration
	change     *change
}

// change is a setting that was changed.
type change struct {
	setting, old, new string
	tenant            *api.Container // nil: not of a tenant
	uid               uint32
}

// ring keeps the latest events that were put into it.
type ring struct {
	buf []event
	n   uint64 // ever put
}

func (r *ring) put(e *event) {
	r.buf[r.n%uint64(len(r.buf))] = *e
	r.n++
}

func (r *ring) len() int { return int(min(r.n, uint64(len(r.buf)))) }

// at returns the i-th oldest event.
func (r *ring) at(i int) *event {
	return &r.buf[(r.n-uint64(r.len())+uint64(i))%uint64(len(r.buf))]
}

// after returns the index of the first event that follows seq.
func (r *ring) after(seq uint64) int {
	return sort.Search(r.len(), func(i int) bool { return r.at(i).seq > seq })
}

// history is what has happened, as far as it is kept. It is the loop's own.
type history struct {
	seq            uint64 // of the latest event
	run            int64
	turns, changes ring
	more           chan struct{} // closed at the next event; nil: nobody waits
}

func newHistory(run int64) history {
	return history{run: run, turns: ring{buf: make([]event, keptTurns)}, changes: ring{buf: make([]event, keptChanges)}}
}

func (h *history) add(r *ring, e *event) {
	h.seq++
	e.seq = h.seq
	r.put(e)
	if h.more != nil {
		close(h.more)
		h.more = nil
	}
}

// since returns the events after seq that concern the GPU, or all for "", up to
// maxEventsAnswer; what to ask for next; and how many after seq are gone.
func (h *history) since(seq uint64, uuid string) (found []event, next, lost uint64) {
	if seq > h.seq {
		seq = 0
	}
	i, j := h.turns.after(seq), h.changes.after(seq)
	lost = h.seq - seq - uint64(h.turns.len()-i) - uint64(h.changes.len()-j)
	for i < h.turns.len() || j < h.changes.len() {
		var e *event
		if j == h.changes.len() || i < h.turns.len() && h.turns.at(i).seq < h.changes.at(j).seq {
			e = h.turns.at(i)
			i++
		} else {
			e = h.changes.at(j)
			j++
		}
		if uuid != "" && e.uuid != uuid {
			continue
		}
		found = append(found, *e)
		if len(found) == maxEventsAnswer {
			return found, e.seq, lost
		}
	}
	return found, h.seq, lost
}

// observe takes down an action that was carried out, for events and metrics.
func (d *Daemon) observe(g *gpu, a sched.Action) {
	t := time.Now()
	switch a := a.(type) {
	case sched.Grant:
		g.stats.granted(t, &a)
		d.turn(t, g, a.Client, &event{kind: api.EventType_EVENT_TYPE_GRANT, epoch: a.Epoch,
			waited: a.Waited, concurrent: a.Concurrent, latency: a.Latency})
	case sched.Revoke:
		g.stats.revoked(a.Why)
		d.turn(t, g, a.Client, &event{kind: api.EventType_EVENT_TYPE_REVOKE, epoch: a.Epoch,
			reason: uint8(a.Why), n: uint32(a.Waiters)})
	case sched.Released:
		g.stats.released(t, &a)
		kind := api.EventType_EVENT_TYPE_RELEASE
		if a.Reason == sched.EndDeath {
			kind = api.EventType_EVENT_TYPE_RECLAIM
		}
		d.turn(t, g, a.Client, &event{kind: kind, epoch: a.Epoch,
			reason: uint8(a.Reason), held: a.Held, drained: a.Drained, fenced: a.Fenced})
	case sched.Adopt:
		d.turn(t, g, a.Client, &event{kind: api.EventType_EVENT_TYPE_ADOPT, epoch: a.Epoch})
	case sched.Pause:
		g.stats.pauses++
	case sched.Fence:
		e := d.eventOf(t, g, a.Client, &event{kind: api.EventType_EVENT_TYPE_FENCE, epoch: a.Epoch, text: string(d.fenceAction(g, a))})
		d.history.add(&d.history.changes, e)
	case sched.ModeChosen:
		d.log.WithFields(logrus.Fields{"gpu": g.UUID, "reason": a.Reason}).Infof("GPU %d: %v", g.Index, a.Mode)
		d.noteChange(g, &event{kind: api.EventType_EVENT_TYPE_MODE, concurrent: a.Mode == sched.Concurrent, text: a.Reason})
	}
}

// turn notes an event that a client causes.
func (d *Daemon) turn(t time.Time, g *gpu, id sched.ClientID, e *event) {
	d.history.add(&d.history.turns, d.eventOf(t, g, id, e))
}

// eventOf fills in when, where and who.
func (d *Daemon) eventOf(t time.Time, g *gpu, id sched.ClientID, e *event) *event {
	e.at, e.client = t.UnixNano(), id
	if g != nil {
		e.uuid, e.index = g.UUID, g.Index
	}
	if cl := d.clients[id]; cl != nil {
		e.peer = cl.Peer
		if cl.Container != "" {
			e.names = d.names[cl.Container]
		}
	}
	return e
}

// noteClient notes that a process came or went. n is what the kind says.
func (d *Daemon) noteClient(cl *client, kind api.EventType, n uint32) {
	d.turn(time.Now(), nil, cl.id, &event{kind: kind, n: n})
}

// noteChange notes an event that is no client's doing; g may be nil.
func (d *Daemon) noteChange(g *gpu, e *event) {
	d.history.add(&d.history.changes, d.eventOf(time.Now(), g, 0, e))
}

// noteSetting notes a setting that was changed, on one GPU or (nil) for those
// found later; of a tenant, by account, or "".
func (d *Daemon) noteSetting(g *gpu, account, setting string, old, new any) {
	c := &change{setting: setting, old: fmt.Sprint(old), new: fmt.Sprint(new)}
	if c.old == c.new {
		return
	}
	if account != "" {
		c.tenant, c.uid = d.tenantOf(account)
	}
	d.noteChange(g, &event{kind: api.EventType_EVENT_TYPE_SET, change: c})
}

// Events answers the control call. It is the only one that waits.
func (s controlService) Events(ctx context.Context, req *api.EventsRequest) (*api.EventsResponse, error) {
	timer := time.NewTimer(min(time.Duration(req.WaitNs), maxEventsWait))
	defer timer.Stop()
	since, last := req.Since, req.WaitNs <= 0
	for {
		var found []event
		var resp *api.EventsResponse
		var more <-chan struct{}
		var err error
		if askErr := s.d.ask(ctx, func() { found, resp, more, err = s.d.eventsSince(req, since) }); askErr != nil {
			return nil, askErr
		}
		if err != nil {
			return nil, err
		}
		var gather <-chan time.Time
		if len(found) > 0 {
			more = nil
			wait := eventsPace - time.Since(time.Unix(0, found[0].at))
			if last || len(found) == maxEventsAnswer || wait <= 0 || wait > eventsPace { // the latter: the clock was set
				resp.Events = apiEvents(found)
				return resp, nil
			}
			gather = time.After(wait)
		} else if since = resp.Next; last || resp.Lost > 0 {
			return resp, nil
		}
		select {
		case <-more:
		case <-gather:
		case <-timer.C:
			last = true
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-s.d.ended:
			return nil, errors.New("the scheduler is ending")
		}
	}
}

// eventsSince is the loop's part of Events: more is closed at the next event.
func (d *Daemon) eventsSince(req *api.EventsRequest, since uint64) (found []event, resp *api.EventsResponse, more <-chan struct{}, err error) {
	h := &d.history
	uuid := ""
	if req.Gpu != "" {
		g := d.findGPU(req.Gpu)
		if g == nil {
			return nil, nil, nil, noSuchGPU(req.Gpu)
		}
		uuid = g.UUID
	}
	if req.Run != 0 && req.Run != h.run {
		since = 0
	}
	resp = &api.EventsResponse{Run: h.run}
	found, resp.Next, resp.Lost = h.since(since, uuid)
	if h.more == nil {
		h.more = make(chan struct{})
	}
	return found, resp, h.more, nil
}

func apiEvents(events []event) []*api.Event {
	out := make([]*api.Event, 0, len(events))
	for i := range events {
		out = append(out, events[i].api())
	}
	return out
}

func (e *event) api() *api.Event {
	out := &api.Event{
		Sequence: e.seq, TimeNs: e.at, Type: e.kind, Uuid: e.uuid, Index: uint32(e.index),
		Client: uint64(e.client), Epoch: uint64(e.epoch), Reason: e.text,
		WaitedNs: int64(e.waited), HeldNs: int64(e.held), DrainedNs: int64(e.drained),
		Bytes: e.bytes, TookNs: int64(e.took),
		Fenced: e.fenced, Concurrent: e.concurrent, Latency: e.latency, Container: onlyNames(e.names),
	}
	if p := e.peer; p != nil {
		out.Pid, out.Uid = uint32(p.PID), p.UID
		if out.Container == nil {
			out.Container = &api.Container{Id: p.Container, PodUid: p.PodUID}
		}
	}
	switch e.kind {
	case api.EventType_EVENT_TYPE_REVOKE:
		out.Waiters, out.Reason = e.n, sched.RevokeReason(e.reason).String()
	case api.EventType_EVENT_TYPE_RELEASE, api.EventType_EVENT_TYPE_RECLAIM:
		out.Reason = sched.EndReason(e.reason).String()
	case api.EventType_EVENT_TYPE_BYPASS:
		out.Reason = fmt.Sprintf("%d entry points of CUDA bypass the shim", e.n)
	}
	if c := e.change; c != nil {
		out.Setting, out.Old, out.New, out.Container, out.Uid = c.setting, c.old, c.new, onlyNames(c.tenant), c.uid
	}
	return out
}

// onlyNames leaves out what a container asks for, which may be long.
func onlyNames(c *api.Container) *api.Container {
	if c == nil {
		return nil
	}
	return &api.Container{Id: c.Id, Name: c.Name, Namespace: c.Namespace, Pod: c.Pod, PodUid: c.PodUid}
}
