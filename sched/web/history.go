// SPDX-License-Identifier: Apache-2.0

package web

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// The bounds of what is kept.
const (
	Minutes     = 24 * 60
	MaxTenants  = 32 // of a GPU in one minute
	MaxGPUs     = 64
	maxSegments = 4000 // of a GPU's latest minute
)

// others names the tenants of a minute beyond MaxTenants, and those that an answer does
// not name.
const others = "others"

// bucket is one minute of a GPU.
type bucket struct {
	from    int64         // s since 1970: when its first status came
	took    time.Duration // of which used is
	tenants map[string]*use
}

// use is what a tenant had in a minute.
type use struct {
	namespace string
	used      time.Duration
	memory    memory // at last
}

// memory is where a tenant's memory is, in bytes.
type memory struct{ gpu, host, file uint64 }

// Segment is a time in which a tenant had a GPU, or its memory moved.
type Segment struct {
	Tenant string `json:"tenant"`
	From   int64  `json:"from"` // ms since 1970
	To     int64  `json:"to"`   // 0: it still has the GPU
	Moves  bool   `json:"moves"`
	client uint64
}

// history is what a page shows of the past. The caller serialises its methods.
type history struct {
	buckets  map[string][]bucket                 // by GPU, the oldest first
	last     map[string]map[string]time.Duration // used so far, by GPU and tenant
	uptime   int64
	at       time.Time // of the latest status
	run      int64     // of the scheduler, of which the latest events are
	segments map[string][]Segment
}

func newHistory() *history {
	return &history{buckets: map[string][]bucket{}, last: map[string]map[string]time.Duration{}, segments: map[string][]Segment{}}
}

func (h *history) add(now time.Time, r *api.StatusResponse) {
	anew := r.UptimeNs < h.uptime // another run of the scheduler counts from zero
	took := now.Sub(h.at)
	h.uptime, h.at = r.UptimeNs, now
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
		for _, t := range b.tenants {
			t.memory = memory{}
		}
		if !first {
			b.took += took
		}
		for _, tenant := range api.TenantsOf(g) {
			u, name := tenant.Use, api.Tenant(tenant.Container, tenant.Uid)
			if u.Container == nil {
				continue
			}
			used := time.Duration(u.UsedNs)
			seen[tenant.Key()] = used // others may have its name
			delta := max(used-known[tenant.Key()], 0)
			if first { // what was before this process has no minute
				delta = 0
			}
			has := memoryOf(g, tenant)
			if t := b.of(name, u.Container.GetNamespace(), delta > 0 || has != memory{}); t != nil {
				t.used += delta
				t.memory = memory{t.memory.gpu + has.gpu, t.memory.host + has.host, t.memory.file + has.file}
			}
		}
		h.last[g.Uuid] = seen
		h.hold(now, g)
	}
}

// hold begins the segments of clients whose grant is older than the events that are known.
func (h *history) hold(now time.Time, g *api.GPU) {
	for _, c := range g.Clients {
		open := func(s Segment) bool { return s.client == c.Id && s.To == 0 }
		if c.Epoch != 0 && !slices.ContainsFunc(h.segments[g.Uuid], open) {
			h.append(g.Uuid, Segment{Tenant: api.Tenant(c.Container, c.Uid), From: now.UnixMilli() - c.SinceNs/1e6, client: c.Id})
		}
	}
}

func (h *history) append(gpu string, one Segment) {
	s := append(h.segments[gpu], one)
	h.segments[gpu] = s[max(len(s)-maxSegments, 0):]
}

// memoryOf adds up where the memory of a tenant's processes is.
func memoryOf(g *api.GPU, t *api.GPUTenant) (m memory) {
	for _, c := range t.Clients {
		if g.Swap == nil {
			m.gpu += c.MemoryBytes
			continue
		}
		file := min(c.FileBytes, c.AwayBytes)
		m = memory{m.gpu + c.ResidentBytes, m.host + c.AwayBytes - file, m.file + file}
	}
	return m
}

// bucket returns the present minute of a GPU.
func (h *history) bucket(now time.Time, gpu string) *bucket {
	minute := now.Unix() / 60
	all := h.buckets[gpu]
	if n := len(all); n == 0 || all[n-1].from/60 != minute {
		all = append(all, bucket{from: now.Unix(), tenants: map[string]*use{}})
	}
	for len(all) > Minutes || all[0].from/60 <= minute-Minutes {
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

// turns takes in events: grants begin segments, releases and deaths end them. Moves of memory have both.
func (h *history) turns(events []*api.Event) {
	for _, e := range events {
		at := millis(e)
		ofClient := func(s Segment) bool { return s.client == e.Client }
		switch e.Type {
		case api.EventType_EVENT_TYPE_GRANT, api.EventType_EVENT_TYPE_ADOPT:
			h.endOn(e.Uuid, at, ofClient)
			h.append(e.Uuid, Segment{Tenant: api.Tenant(e.Container, e.Uid), From: at, client: e.Client})
		case api.EventType_EVENT_TYPE_SWAP_OUT, api.EventType_EVENT_TYPE_SWAP_IN:
			h.append(e.Uuid, Segment{Tenant: api.Tenant(e.Container, e.Uid), From: at - e.TookNs/1e6, To: at, Moves: true, client: e.Client})
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
func (h *history) recent(gpu string) []Segment {
	from := h.at.Add(-time.Minute).UnixMilli()
	s := slices.DeleteFunc(h.segments[gpu], func(s Segment) bool { return s.To != 0 && s.To < from })
	h.segments[gpu] = s
	return append([]Segment{}, s...) // a list in JSON, also of a GPU that nobody was granted
}

// Day is what a browser draws of a GPU: an entry of each tenant's columns for each time.
type Day struct {
	Times   []int64             `json:"times"` // s since 1970: when each minute began, and the end of the last one
	Tenants map[string]*Columns `json:"tenants"`
}

// Columns are what a tenant had: the part of the GPU's time, and bytes of memory.
type Columns struct {
	Used []float64 `json:"used"`
	GPU  []uint64  `json:"gpu"`
	Host []uint64  `json:"host"`
	File []uint64  `json:"file"`
}

// day returns the columns of the MaxTenants-1 tenants that had most of the GPU's time, and of all
// others together: a day may have thousands of short jobs.
func (h *history) day(gpu string) Day {
	all := h.buckets[gpu]
	out := Day{Tenants: map[string]*Columns{}}
	if len(all) == 0 {
		return out
	}
	n := len(all) + 1
	for _, name := range mostOf(all, MaxTenants-1) {
		out.Tenants[name] = newColumns(n)
	}
	for i, b := range append(slices.Clone(all), all[len(all)-1]) { // the last entry is as the one before
		out.Times = append(out.Times, b.from)
		for name, t := range b.tenants {
			c := out.Tenants[name]
			if c == nil {
				if c = out.Tenants[others]; c == nil {
					c = newColumns(n)
					out.Tenants[others] = c
				}
			}
			if b.took > 0 {
				c.Used[i] += t.used.Seconds() / b.took.Seconds()
			}
			c.GPU[i], c.Host[i], c.File[i] = c.GPU[i]+t.memory.gpu, c.Host[i]+t.memory.host, c.File[i]+t.memory.file
		}
	}
	out.Times[n-1] = h.at.Unix()
	return out
}

func newColumns(n int) *Columns {
	return &Columns{make([]float64, n), make([]uint64, n), make([]uint64, n), make([]uint64, n)}
}

// mostOf names the n tenants with the most time.
func mostOf(all []bucket, n int) []string {
	used := map[string]time.Duration{}
	for _, b := range all {
		for name, t := range b.tenants {
			used[name] += t.used
		}
	}
	names := slices.SortedFunc(maps.Keys(used), func(a, b string) int {
		return cmp.Or(cmp.Compare(used[b], used[a]), cmp.Compare(a, b))
	})
	return names[:min(n, len(names))]
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
