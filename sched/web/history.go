// SPDX-License-Identifier: Apache-2.0

package web

import (
	"cmp"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// The bounds of what is kept.
const (
	Minutes     = 24 * 60
	MaxTenants  = 32 // of a GPU in one minute
	MaxGPUs     = 64
	maxSegments = 2000 // of a GPU's latest minute
)

// others names the tenants of a minute beyond MaxTenants, and those that an answer does
// not name.
const others = "others"

// bucket is one minute of a GPU.
type bucket struct {
	minute  int64 // since 1970
	tenants map[string]*use
}

// use is what a tenant had in a minute.
type use struct {
	namespace string
	used      time.Duration
	memory    uint64 // the most, bytes
}

// Segment is a time in which a tenant had a GPU.
type Segment struct {
	Tenant string `json:"tenant"`
	From   int64  `json:"from"` // ms since 1970
	To     int64  `json:"to"`   // 0: it still has the GPU
	client uint64
}

// history is what a page shows of the past. The caller serialises its methods.
type history struct {
	buckets  map[string][]bucket                 // by GPU, the oldest first
	last     map[string]map[string]time.Duration // used so far, by GPU and tenant
	uptime   int64
	run      int64 // of the scheduler, of which the latest events are
	segments map[string][]Segment
}

func newHistory() *history {
	return &history{buckets: map[string][]bucket{}, last: map[string]map[string]time.Duration{}, segments: map[string][]Segment{}}
}

// add takes in a status.
func (h *history) add(now time.Time, r *api.StatusResponse) {
	anew := r.UptimeNs < h.uptime // another run of the scheduler counts from zero
	h.uptime = r.UptimeNs
	for i, g := range r.Gpus {
		if i == MaxGPUs {
			break
		}
		known := h.last[g.Uuid]
		first := known == nil
		if first || anew {
			known = map[string]time.Duration{}
		}
		seen := map[string]time.Duration{}
		b := h.bucket(now, g.Uuid)
		for _, u := range g.Tenants {
			name := api.Tenant(u.Container, u.Uid)
			used := time.Duration(u.UsedNs)
			seen[name] = used
			delta := max(used-known[name], 0)
			if first { // what was before this process has no minute
				delta = 0
			}
			if t := b.of(name, u.Container.GetNamespace(), delta > 0); t != nil {
				t.used += delta
				t.memory = max(t.memory, memoryOf(g, u))
			}
		}
		h.last[g.Uuid] = seen
	}
}

func memoryOf(g *api.GPU, u *api.TenantUse) uint64 {
	for _, m := range g.Memory {
		if m.Container.GetId() == u.Container.GetId() && (m.Container.GetId() != "" || m.Uid == u.Uid) {
			return m.UsedBytes
		}
	}
	return 0
}

// bucket returns the present minute of a GPU.
func (h *history) bucket(now time.Time, gpu string) *bucket {
	minute := now.Unix() / 60
	all := h.buckets[gpu]
	if n := len(all); n == 0 || all[n-1].minute != minute {
		all = append(all, bucket{minute: minute, tenants: map[string]*use{}})
	}
	for len(all) > Minutes || all[0].minute <= minute-Minutes {
		all = all[1:]
	}
	if cap(all) > 4*Minutes {
		all = slices.Clone(all)
	}
	h.buckets[gpu] = all
	return &all[len(all)-1]
}

// of returns the record of a tenant; nil: it needs none.
func (b *bucket) of(name, namespace string, worked bool) *use {
	if t := b.tenants[name]; t != nil || !worked {
		return t
	}
	if len(b.tenants) >= MaxTenants-1 {
		name, namespace = others, others
	}
	if b.tenants[name] == nil {
		b.tenants[name] = &use{namespace: namespace}
	}
	return b.tenants[name]
}

// take takes in an answer with events. Another run of the scheduler does not tell how the
// turns of the one before ended, and where events are lost, ends may be among them: whoever
// still has the GPU gets a segment by the next grant, or is adopted.
func (h *history) take(now time.Time, r *api.EventsResponse) {
	if r.Run != h.run || r.Lost > 0 {
		at := now.UnixMilli()
		if len(r.Events) > 0 {
			at = millis(r.Events[0])
		}
		h.end(at, func(Segment) bool { return true })
	}
	h.run = r.Run
	h.turns(r.Events)
}

// turns takes in events: grants begin segments, releases and deaths end them.
func (h *history) turns(events []*api.Event) {
	for _, e := range events {
		at := millis(e)
		ofClient := func(s Segment) bool { return s.client == e.Client }
		switch e.Type {
		case api.EventType_EVENT_TYPE_GRANT, api.EventType_EVENT_TYPE_ADOPT:
			h.endOn(e.Uuid, at, ofClient)
			s := append(h.segments[e.Uuid], Segment{Tenant: api.Tenant(e.Container, e.Uid), From: at, client: e.Client})
			h.segments[e.Uuid] = s[max(len(s)-maxSegments, 0):]
		case api.EventType_EVENT_TYPE_RELEASE, api.EventType_EVENT_TYPE_RECLAIM:
			h.endOn(e.Uuid, at, ofClient)
		case api.EventType_EVENT_TYPE_END: // of a process, and so on all its GPUs
			h.end(at, ofClient)
		}
	}
}

func millis(e *api.Event) int64 { return e.TimeNs / int64(time.Millisecond) }

// end ends those open segments of all GPUs.
func (h *history) end(at int64, which func(Segment) bool) {
	for gpu := range h.segments {
		h.endOn(gpu, at, which)
	}
}

func (h *history) endOn(gpu string, at int64, which func(Segment) bool) {
	for i, s := range h.segments[gpu] {
		if s.To == 0 && which(s) {
			h.segments[gpu][i].To = max(at, s.From)
		}
	}
}

// recent returns the segments of the latest minute.
func (h *history) recent(now time.Time, gpu string) []Segment {
	from := now.Add(-time.Minute).UnixMilli()
	s := slices.DeleteFunc(h.segments[gpu], func(s Segment) bool { return s.To != 0 && s.To < from })
	h.segments[gpu] = s
	return append([]Segment{}, s...) // a list in JSON, also of a GPU that nobody was granted
}

// Point is one minute of a GPU, for a browser.
type Point struct {
	Minute  int64              `json:"minute"`  // since 1970
	Tenants map[string]float64 `json:"tenants"` // part of the GPU's time
}

func (h *history) points(gpu string) []Point {
	out := []Point{}
	for _, b := range h.buckets[gpu] {
		p := Point{b.minute, map[string]float64{}}
		for name, t := range b.tenants {
			p.Tenants[name] = t.used.Minutes()
		}
		out = append(out, p)
	}
	return out
}

// Hours is what a namespace had of all GPUs in the latest day.
type Hours struct {
	Namespace string  `json:"namespace"` // "": outside Kubernetes
	GPUHours  float64 `json:"gpu_hours"`
}

func (h *history) hours() []Hours {
	sum := map[string]time.Duration{}
	for _, all := range h.buckets {
		for _, b := range all {
			for _, t := range b.tenants {
				sum[t.namespace] += t.used
			}
		}
	}
	out := []Hours{}
	for name, used := range sum {
		out = append(out, Hours{name, used.Hours()})
	}
	slices.SortFunc(out, func(a, b Hours) int {
		return cmp.Or(cmp.Compare(b.GPUHours, a.GPUHours), cmp.Compare(a.Namespace, b.Namespace))
	})
	return out
}

// nowJSON is what the page shows of the present.
type nowJSON struct {
	Time     int64     `json:"time"` // ms since 1970
	Error    string    `json:"error,omitempty"`
	Version  string    `json:"version"`
	Clients  uint32    `json:"clients"`
	Problems []string  `json:"problems"`
	Hidden   uint32    `json:"hidden_problems"` // that only root may read
	View     string    `json:"view,omitempty"`  // the one tenant that is named; "": all are
	GPUs     []gpuJSON `json:"gpus"`
}

type gpuJSON struct {
	Index    uint32       `json:"index"`
	UUID     string       `json:"uuid"`
	Name     string       `json:"name"`
	Memory   uint64       `json:"memory"`   // bytes
	Reserved uint64       `json:"reserved"` // bytes
	Taken    uint64       `json:"taken"`    // of each tenant its memory limit or what it has reserved, whichever is more, bytes
	Promised uint32       `json:"promised"` // percent of the time
	Quantum  float64      `json:"quantum"`  // seconds
	Way      string       `json:"way"`
	Reason   string       `json:"reason"`
	Swaps    bool         `json:"swaps"` // more memory may be promised than there is
	Tenants  []tenantJSON `json:"tenants"`
	Others   *api.Others  `json:"others,omitempty"`
	Segments []Segment    `json:"segments"`
}

type tenantJSON struct {
	Name   string  `json:"name"`
	State  string  `json:"state"`
	Got    float64 `json:"got"`
	Waited float64 `json:"waited"`
	Limit  uint32  `json:"core_limit"`
	Memory uint64  `json:"memory"`
	Away   uint64  `json:"away"`
	OfSize uint64  `json:"memory_limit"`
	OOM    uint64  `json:"out_of_memory"`
}

// now describes the present. The lock is held.
func (s *Server) now(t time.Time) nowJSON {
	out := nowJSON{Time: t.UnixMilli(), Problems: []string{}, GPUs: []gpuJSON{}}
	if s.err != nil {
		out.Error = s.err.Error()
	}
	r := s.status
	if r == nil {
		return out
	}
	out.Version, out.Clients = r.Version, r.Clients
	out.Problems = append(out.Problems, r.Problems...)
	if v := r.View; v != nil {
		out.View, out.Hidden = api.Tenant(v.Container, v.Uid), v.Problems
	}
	for i, g := range r.Gpus {
		if i == MaxGPUs {
			break
		}
		out.GPUs = append(out.GPUs, s.gpu(t, g))
	}
	return out
}

func (s *Server) gpu(t time.Time, g *api.GPU) gpuJSON {
	out := gpuJSON{
		Index: g.Index, UUID: g.Uuid, Name: g.Name, Memory: g.MemoryBytes,
		Reserved: g.Others.GetMemoryBytes(), Promised: g.Others.GetCoreRequest(), Others: g.Others,
		Quantum: time.Duration(g.QuantumNs).Seconds(), Way: g.Way, Reason: g.WayReason,
		Swaps: g.Swap.GetArenaLimitBytes() > 0, Tenants: []tenantJSON{}, Segments: s.history.recent(t, g.Uuid),
	}
	taken := map[string]uint64{} // also of tenants that are not there
	for _, m := range g.Memory {
		out.Reserved += m.UsedBytes
		taken[api.Tenant(m.Container, m.Uid)] = m.UsedBytes
	}
	for _, p := range api.Promised(g) {
		out.Promised += p.CoreRequest
		taken[api.Tenant(p.Container, p.Uid)] = max(taken[api.Tenant(p.Container, p.Uid)], p.MemoryBytes)
	}
	out.Taken = g.Others.GetMemoryBytes()
	for _, bytes := range taken {
		out.Taken += bytes
	}
	for _, u := range g.Tenants {
		one := tenantJSON{
			Name: api.Tenant(u.Container, u.Uid), State: "gone", Got: float64(u.GotPermille) / 1000, Waited: float64(u.WaitedPermille) / 1000,
			Limit: u.GetShare().GetCoreLimit(), Memory: memoryOf(g, u), OOM: u.OutOfMemory,
		}
		for _, m := range g.Memory {
			if api.Tenant(m.Container, m.Uid) == one.Name {
				one.OfSize = m.LimitBytes
			}
		}
		if u.Clients > 0 {
			one.State = "group" // unless clients have its name: a gang or an overlap group
		}
		for _, c := range g.Clients {
			if api.Tenant(c.Container, c.Uid) != one.Name {
				continue
			}
			one.Away += c.AwayBytes
			one.State = worse(one.State, stateName(c, u))
		}
		out.Tenants = append(out.Tenants, one)
	}
	return out
}

// states, the one that stands for a tenant first.
var states = []string{"fenced", "lost", "draining", "holding", "throttled", "waiting", "idle", "gone"}

func worse(a, b string) string {
	for _, s := range states {
		if s == a || s == b {
			return s
		}
	}
	return a
}

func stateName(c *api.Client, u *api.TenantUse) string {
	switch c.State {
	case api.ClientState_CLIENT_STATE_WAITING:
		if u.ThrottledNs > 0 {
			return "throttled"
		}
		return "waiting"
	case api.ClientState_CLIENT_STATE_HOLDING:
		return "holding"
	case api.ClientState_CLIENT_STATE_DRAINING:
		return "draining"
	case api.ClientState_CLIENT_STATE_LOST:
		return "lost"
	case api.ClientState_CLIENT_STATE_FENCED:
		return "fenced"
	}
	return "idle"
}
