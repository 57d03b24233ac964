// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// gpuRates is what has happened on a GPU between two answers of the scheduler.
type gpuRates struct {
	gpu     *api.GPU
	tenants []tenantRates
}

type tenantRates struct {
	*tenant
	part   float64 // of the GPU's time, 0 to 1
	grants float64 // per second
	moved  float64 // bytes per second between GPU and host
}

// ratesOf compares two answers. It returns what lies between them, by GPU.
func ratesOf(old, r *api.StatusResponse) (all []gpuRates, interval time.Duration) {
	interval = time.Duration(r.UptimeNs - old.UptimeNs)
	if interval <= 0 { // another scheduler: all it has done
		old, interval = &api.StatusResponse{}, max(time.Duration(r.UptimeNs), 1)
	}
	for _, g := range r.Gpus {
		was := map[string]*tenant{}
		for _, o := range old.Gpus {
			if o.Uuid == g.Uuid {
				for _, t := range tenantsOf(o) {
					was[t.key()] = t
				}
			}
		}
		rates := gpuRates{gpu: g}
		for _, t := range tenantsOf(g) {
			o := was[t.key()]
			if o == nil {
				o = &tenant{use: &api.TenantUse{}}
			}
			used := time.Duration(max(t.used()-o.used(), 0))
			rates.tenants = append(rates.tenants, tenantRates{tenant: t, part: used.Seconds() / interval.Seconds(),
				grants: perSecond(t.grants(), o.grants(), interval), moved: perSecond(t.moved(o), 0, interval)})
		}
		all = append(all, rates)
	}
	return all, interval
}

// used is the time under grants so far.
func (t *tenant) used() int64 {
	return t.use.UsedNs
}

func (t *tenant) grants() (n uint64) {
	for _, c := range t.clients {
		n += c.Grants
	}
	return max(n, t.use.Grants)
}

// moved returns how many bytes the tenant's processes moved since an earlier answer.
func (t *tenant) moved(since *tenant) (bytes uint64) {
	before := map[uint64]uint64{}
	for _, c := range since.clients {
		before[c.Id] = c.SwappedOutBytes + c.SwappedInBytes
	}
	for _, c := range t.clients {
		if old, there := before[c.Id]; there { // a process that came moved nothing in a known time
			bytes += max(c.SwappedOutBytes+c.SwappedInBytes, old) - old
		}
	}
	return bytes
}

// perSecond is the rate of a counter; one that fell began anew.
func perSecond(now, before uint64, interval time.Duration) float64 {
	if now < before {
		before = 0
	}
	return float64(now-before) / interval.Seconds()
}

type topJSON struct {
	Seconds float64      `json:"seconds"` // that the rates are of
	Healthy bool         `json:"healthy"`
	GPUs    []topGPUJSON `json:"gpus"`
}

type topGPUJSON struct {
	Index   uint32          `json:"index"`
	UUID    string          `json:"uuid"`
	Tenants []topTenantJSON `json:"tenants"`
}

type topTenantJSON struct {
	Tenant      string  `json:"tenant"`
	State       string  `json:"state"`
	Gets        float64 `json:"gets"`   // part of the GPU's time, in these seconds
	Waited      float64 `json:"waited"` // part of the latest five seconds
	Grants      float64 `json:"grants_per_second"`
	MemoryBytes uint64  `json:"memory_bytes"`
	LimitBytes  uint64  `json:"limit_bytes"`

	Due           float64  `json:"due"` // part of the GPU's time that it gets now if it wants it
	ResidentBytes uint64   `json:"resident_bytes"`
	AwayBytes     uint64   `json:"away_bytes"`
	Moved         float64  `json:"moved_bytes_per_second"`
	WaitP50       *float64 `json:"wait_p50_seconds,omitempty"` // of the latest minute; absent: no grants
	WaitP99       *float64 `json:"wait_p99_seconds,omitempty"`
}

func newTopJSON(old, r *api.StatusResponse) topJSON {
	all, interval := ratesOf(old, r)
	out := topJSON{Seconds: interval.Seconds(), Healthy: problems(r) == 0, GPUs: []topGPUJSON{}}
	for _, g := range all {
		one := topGPUJSON{g.gpu.Index, g.gpu.Uuid, []topTenantJSON{}}
		for _, t := range g.tenants {
			state, _, _ := t.state()
			line := topTenantJSON{Tenant: t.name(), State: state, Gets: t.part, Waited: float64(t.use.WaitedPermille) / 1000, Grants: t.grants,
				MemoryBytes: t.memory.UsedBytes, LimitBytes: t.memory.LimitBytes, Due: float64(t.use.PromisedPermille) / 1000,
				ResidentBytes: t.resident(g.gpu), AwayBytes: t.away(), Moved: t.moved}
			if s := t.use.Waits; s.GetCount() > 0 {
				p50, p99 := seconds(s.P50Ns), seconds(s.P99Ns)
				line.WaitP50, line.WaitP99 = &p50, &p99
			}
			one.Tenants = append(one.Tenants, line)
		}
		out.GPUs = append(out.GPUs, one)
	}
	return out
}
