// SPDX-License-Identifier: Apache-2.0

package web

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/nvshare/nvshare/sched/api"
)

// nowJSON is what the page shows of the present.
type nowJSON struct {
	Time     int64         `json:"time"`   // of the status, ms since 1970
	Health   string        `json:"health"` // for people
	Problems []problemJSON `json:"problems"`
	GPUs     []gpuJSON     `json:"gpus"`
}

type problemJSON struct {
	Text   string `json:"text"`
	Remedy string `json:"remedy"`
}

type gpuJSON struct {
	Index    uint32        `json:"index"`
	UUID     string        `json:"uuid"`
	Name     string        `json:"name"`
	Memory   uint64        `json:"memory"`   // bytes
	Reserved uint64        `json:"reserved"` // bytes
	Taken    uint64        `json:"taken"`    // the sum of promises, and what others have, bytes
	Promised uint32        `json:"promised"` // percent of the time
	About    string        `json:"about"`    // how it is shared, and what those have who are not named, for people
	Swaps    bool          `json:"swaps"`    // more memory may be promised than there is
	Tenants  []tenantJSON  `json:"tenants"`
	Promises []promiseJSON `json:"promises"`
	Segments []Segment     `json:"segments"`
}

type tenantJSON struct {
	Name   string  `json:"name"`
	State  string  `json:"state"`
	Got    float64 `json:"got"`
	Waited float64 `json:"waited"`
	Limit  uint32  `json:"core_limit"`
	Memory uint64  `json:"memory"`
	Host   uint64  `json:"host"`
	File   uint64  `json:"file"`
	OfSize uint64  `json:"memory_limit"`
	OOM    uint64  `json:"out_of_memory"`
}

// promiseJSON is what a tenant may count on, also one that is not there.
type promiseJSON struct {
	Tenant string `json:"tenant"`
	Core   uint32 `json:"core"`   // percent of the time
	Memory uint64 `json:"memory"` // its limit or what it has reserved, whichever is more, bytes
}

// now describes the present. The lock is held.
func (s *Server) now() nowJSON {
	out := nowJSON{Time: s.history.at.UnixMilli(), Problems: []problemJSON{}, GPUs: []gpuJSON{}}
	r := s.status
	switch {
	case s.err != nil:
		out.Health = "no answer: " + s.err.Error()
	case r != nil:
		out.Health = healthOf(r)
	}
	if r == nil {
		return out
	}
	for i, text := range r.Problems {
		out.Problems = append(out.Problems, problemJSON{text, api.Remedy(api.CodeOf(r, i))})
	}
	if n := r.View.GetProblems(); n > 0 {
		out.Problems = append(out.Problems, problemJSON{fmt.Sprintf("%d that only root may read", n), "sudo nvsharectl"})
	}
	for _, g := range r.Gpus[:min(len(r.Gpus), MaxGPUs)] {
		out.GPUs = append(out.GPUs, s.gpu(g))
	}
	return out
}

func healthOf(r *api.StatusResponse) string {
	health := "OK"
	if n := len(r.Problems) + int(r.View.GetProblems()); n > 0 {
		health = fmt.Sprintf("Problems: %d", n)
	}
	health += fmt.Sprintf(". Scheduler %s, processes: %d", r.Version, r.Clients)
	if v := r.View; v != nil {
		health += "; only " + api.Tenant(v.Container, v.Uid) + " is named"
	}
	return health
}

func (s *Server) gpu(g *api.GPU) gpuJSON {
	out := gpuJSON{
		Index: g.Index, UUID: g.Uuid, Name: g.Name, Memory: g.MemoryBytes, Promises: promisesOf(g),
		Reserved: g.Others.GetMemoryBytes(), Promised: g.Others.GetCoreRequest(), Taken: g.Others.GetMemoryBytes(),
		About: aboutOf(g), Swaps: g.Swap.GetArenaLimitBytes() > 0, Tenants: []tenantJSON{}, Segments: s.history.recent(g.Uuid),
	}
	for _, p := range out.Promises {
		out.Promised, out.Taken = out.Promised+p.Core, out.Taken+p.Memory
	}
	for _, m := range g.Memory {
		out.Reserved += m.UsedBytes
	}
	for _, t := range api.TenantsOf(g) {
		if u, has := t.Use, memoryOf(g, t); u.Container != nil {
			out.Tenants = append(out.Tenants, tenantJSON{
				Name: api.Tenant(t.Container, t.Uid), State: t.State(), Got: float64(u.GotPermille) / 1000, Waited: float64(u.WaitedPermille) / 1000,
				Limit: u.GetShare().GetCoreLimit(), Memory: t.Memory.UsedBytes, Host: has.host, File: has.file, OfSize: t.Memory.LimitBytes, OOM: u.OutOfMemory,
			})
		}
	}
	slices.SortFunc(out.Tenants, func(a, b tenantJSON) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

func aboutOf(g *api.GPU) string {
	text := api.Sharing(g)
	if l := g.Load; l != nil {
		text += fmt.Sprintf("; %d %% busy, %d W, %d °C", l.BusyPercent, l.Watts, l.Celsius)
	}
	if o := g.Others; o != nil {
		text += fmt.Sprintf("; others: %d tenants, %d holding, %d waiting, %d %% of the time", o.Tenants, o.Holding, o.Waiting, o.GotPermille/10)
	}
	return text
}

// promisesOf lists what each tenant may count on.
func promisesOf(g *api.GPU) []promiseJSON {
	out := []promiseJSON{}
	for _, p := range api.Promised(g) {
		out = append(out, promiseJSON{api.Tenant(p.Container, p.Uid), p.CoreRequest, p.MemoryBytes})
	}
	for _, m := range g.Memory {
		name := api.Tenant(m.Container, m.Uid)
		i := slices.IndexFunc(out, func(p promiseJSON) bool { return p.Tenant == name })
		if i < 0 && m.UsedBytes > 0 {
			out = append(out, promiseJSON{Tenant: name, Memory: m.UsedBytes})
		} else if i >= 0 {
			out[i].Memory = max(out[i].Memory, m.UsedBytes)
		}
	}
	return out
}
