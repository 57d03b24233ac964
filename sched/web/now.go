// SPDX-License-Identifier: Apache-2.0

package web

import (
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

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
