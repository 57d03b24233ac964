// SPDX-License-Identifier: Apache-2.0

// Package history keeps the latest events of the scheduler, for `nvsharectl
// events`.
//
// What it guarantees:
//
//   - Adding an event costs no search, no format and no allocation: the
//     scheduler does so at each turn of a GPU.
//   - Tenants cannot push out what is rare: events that tenants cause by taking turns, those
//     that they cause otherwise, and other events have room of their own.
//   - Who reads learns how many events are gone, and gets each of the others
//     once and in order.
//
// A Log belongs to one goroutine.
package history

import (
	"fmt"
	"slices"
	"sort"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

const (
	// keptTurns is how many events are kept that tenants cause by taking turns, coming and
	// going; keptCaused how many that they cause otherwise; keptChanges how many of the others.
	keptTurns   = 16384
	keptCaused  = 1024
	keptChanges = 1024
	// MaxAnswer is how many events Since returns at most. It keeps an answer
	// under the 4 MiB of a ttrpc message, with the longest names.
	MaxAnswer = 1000
)

// Event is something that has happened. One is made for each turn of a GPU, so
// it is small, and nothing is looked up or formatted before somebody asks. What
// it points to is never changed.
type Event struct {
	Seq        uint64 // set by the Log
	At         int64  // since 1970, ns
	Kind       api.EventType
	Reason     uint8 // sched.RevokeReason or sched.EndReason
	Fenced     bool
	Concurrent bool
	Latency    bool
	N          uint32 // waiters, or bypassed entry points
	Index      int    // of the GPU
	UUID       string // of the GPU; "": none
	Client     base.ClientID
	Peer       *peer.Peer     // of the client; nil: no client, or unknown
	Names      *api.Container // of the client's container, if the plugin said them
	Epoch      base.Epoch
	Waited     time.Duration
	Limited    time.Duration
	Held       time.Duration
	Drained    time.Duration
	Text       string
	Bytes      uint64
	Took       time.Duration
	Change     *Change
}

// Change is a setting that was changed.
type Change struct {
	Setting, Old, New string
	Tenant            *api.Container // nil: not of a tenant
	UID               uint32
}

// ring keeps the latest events that were put into it.
type ring struct {
	buf []Event
	n   uint64 // ever put
}

func (r *ring) put(e *Event) {
	r.buf[r.n%uint64(len(r.buf))] = *e
	r.n++
}

func (r *ring) len() int { return int(min(r.n, uint64(len(r.buf)))) }

// at returns the i-th oldest event.
func (r *ring) at(i int) *Event {
	return &r.buf[(r.n-uint64(r.len())+uint64(i))%uint64(len(r.buf))]
}

// after returns the index of the first event that follows seq.
func (r *ring) after(seq uint64) int {
	return sort.Search(r.len(), func(i int) bool { return r.at(i).Seq > seq })
}

// Log is what has happened, as far as it is kept.
type Log struct {
	run                    int64
	seq                    uint64 // of the latest event
	turns, caused, changes ring
	more                   chan struct{} // closed at the next event; nil: nobody waits
}

// New returns an empty Log. run tells this Log from those of other schedulers.
func New(run int64) *Log {
	return &Log{run: run, turns: ring{buf: make([]Event, keptTurns)}, caused: ring{buf: make([]Event, keptCaused)}, changes: ring{buf: make([]Event, keptChanges)}}
}

// Run is what New was told.
func (l *Log) Run() int64 { return l.run }

// AddTurn adds an event that a tenant causes by what all of them do all the time.
func (l *Log) AddTurn(e *Event) { l.add(&l.turns, e) }

// AddCaused adds another event that a tenant causes. They outlive turns, as long as no tenant
// causes many.
func (l *Log) AddCaused(e *Event) { l.add(&l.caused, e) }

// AddChange adds an event that no tenant causes. They are rare, and outlive all others.
func (l *Log) AddChange(e *Event) { l.add(&l.changes, e) }

func (l *Log) add(r *ring, e *Event) {
	l.seq++
	e.Seq = l.seq
	r.put(e)
	if l.more != nil {
		close(l.more)
		l.more = nil
	}
}

// More returns a channel that is closed when the next event is added.
func (l *Log) More() <-chan struct{} {
	if l.more == nil {
		l.more = make(chan struct{})
	}
	return l.more
}

// AwaitedByAny reports whether somebody was given a channel that is still open.
func (l *Log) AwaitedByAny() bool { return l.more != nil }

// Since returns the events after seq that concern the GPU, or all for "", and are of one
// of the kinds, if there are any, up to MaxAnswer; what to ask for next; and how many
// after seq are gone.
func (l *Log) Since(seq uint64, uuid string, kinds ...api.EventType) (found []Event, next, lost uint64) {
	if seq > l.seq {
		seq = 0
	}
	rings := [...]*ring{&l.turns, &l.caused, &l.changes}
	var at [len(rings)]int
	lost = l.seq - seq
	for i, r := range rings {
		at[i] = r.after(seq)
		lost -= uint64(r.len() - at[i])
	}
	for {
		var e *Event
		from := 0
		for i, r := range rings {
			if at[i] < r.len() && (e == nil || r.at(at[i]).Seq < e.Seq) {
				e, from = r.at(at[i]), i
			}
		}
		if e == nil {
			break
		}
		at[from]++
		if uuid != "" && e.UUID != uuid || len(kinds) > 0 && !slices.Contains(kinds, e.Kind) {
			continue
		}
		found = append(found, *e)
		if len(found) == MaxAnswer {
			return found, e.Seq, lost
		}
	}
	return found, l.seq, lost
}

// API returns the events as the control API has them.
func API(events []Event) []*api.Event {
	out := make([]*api.Event, 0, len(events))
	for i := range events {
		out = append(out, events[i].api())
	}
	return out
}

func (e *Event) api() *api.Event {
	out := &api.Event{
		Sequence: e.Seq, TimeNs: e.At, Type: e.Kind, Uuid: e.UUID, Index: uint32(e.Index),
		Client: uint64(e.Client), Epoch: uint64(e.Epoch), Reason: e.Text,
		WaitedNs: int64(e.Waited), LimitedNs: int64(e.Limited), HeldNs: int64(e.Held), DrainedNs: int64(e.Drained),
		Bytes: e.Bytes, TookNs: int64(e.Took),
		Fenced: e.Fenced, Concurrent: e.Concurrent, Latency: e.Latency, Container: onlyNames(e.Names),
	}
	if p := e.Peer; p != nil {
		out.Pid, out.Uid = uint32(p.PID), p.UID
		if out.Container == nil {
			out.Container = &api.Container{Id: p.Container, PodUid: p.PodUID}
		}
	}
	switch e.Kind {
	case api.EventType_EVENT_TYPE_REVOKE:
		out.Waiters, out.Reason = e.N, sched.RevokeReason(e.Reason).String()
	case api.EventType_EVENT_TYPE_RELEASE, api.EventType_EVENT_TYPE_RECLAIM:
		out.Reason = sched.EndReason(e.Reason).String()
	case api.EventType_EVENT_TYPE_BYPASS:
		out.Reason = fmt.Sprintf("%d entry points of CUDA bypass the shim", e.N)
	}
	if c := e.Change; c != nil {
		out.Setting, out.Old, out.New, out.Container, out.Uid = c.Setting, c.Old, c.New, onlyNames(c.Tenant), c.UID
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
