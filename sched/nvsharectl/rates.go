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
			rates.tenants = append(rates.tenants, tenantRates{t, used.Seconds() / interval.Seconds(), perSecond(t.grants(), o.grants(), interval)})
		}
		all = append(all, rates)
	}
	return all, interval
}

// used is the time under grants so far.
func (t *tenant) used() int64 {
	if t.use.Container != nil {
		return t.use.UsedNs
	}
	var n int64
	for _, c := range t.clients { // an older scheduler
		n += c.HeldNs
	}
	return n
}

func (t *tenant) grants() (n uint64) {
	for _, c := range t.clients {
		n += c.Grants
	}
	return max(n, t.use.Grants)
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
}

func newTopJSON(old, r *api.StatusResponse) topJSON {
	all, interval := ratesOf(old, r)
	out := topJSON{Seconds: interval.Seconds(), Healthy: len(r.Problems) == 0, GPUs: []topGPUJSON{}}
	for _, g := range all {
		one := topGPUJSON{g.gpu.Index, g.gpu.Uuid, []topTenantJSON{}}
		for _, t := range g.tenants {
			state, _, _ := t.state()
			one.Tenants = append(one.Tenants, topTenantJSON{t.name(), state, t.part, float64(t.use.WaitedPermille) / 1000, t.grants, t.memory.UsedBytes, t.memory.LimitBytes})
		}
		out.GPUs = append(out.GPUs, one)
	}
	return out
}
