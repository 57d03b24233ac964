// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"cmp"
	"math"
	"slices"
)

// Options narrow what is judged.
type Options struct {
	// Since and Until cut the evidence to a window, in nanoseconds; 0 is open.
	Since, Until int64
}

// Usage is what a tenant or a process had of one GPU. Times are in nanoseconds.
//
// A wait lasts from the end of a turn to the begin of the next one. If none follows and
// others had turns, it lasts to the process's death or the end of the evidence. A process
// without work also seems to wait.
type Usage struct {
	Tenant      string   `json:"tenant"`
	Process     *Process `json:"process,omitempty"` // nil for a tenant
	Busy        int64    `json:"busy_ns"`           // time in which the GPU worked for it
	Occupied    int64    `json:"occupied_ns"`       // time in which it kept others out
	Share       float64  `json:"share"`             // of the busy time of all, 0..1
	Turns       int      `json:"turns"`             // runs without another process between
	LongestTurn int64    `json:"longest_turn_ns"`
	LongestWait int64    `json:"longest_wait_ns"`
	Work        int      `json:"work"` // kernels, copies, memsets
}

// Occupation is a stretch of time in which one process had a GPU.
type Occupation struct {
	Process Process `json:"process"`
	Begin   int64   `json:"begin_ns"`
	End     int64   `json:"end_ns"`
}

// Overlaps are the times when more than one process had a GPU.
type Overlaps struct {
	Count int            `json:"count"` // occupations that began during another's
	Total int64          `json:"total_ns"`
	First *[2]Occupation `json:"first,omitempty"`
}

// GPUReport is the verdict on one GPU.
type GPUReport struct {
	GPU       string   `json:"gpu"`
	Begin     int64    `json:"begin_ns"`
	End       int64    `json:"end_ns"`
	Tenants   []Usage  `json:"tenants"`
	Processes []Usage  `json:"processes"`
	Overlaps  Overlaps `json:"overlaps"`
}

// Report is the verdict on all GPUs that had work, ordered by UUID.
type Report struct {
	GPUs []GPUReport `json:"gpus"`
	Lost uint64      `json:"lost_records"` // evidence missing at the beginning
}

// Overlaps is the sum over all GPUs.
func (r Report) Overlaps() int {
	n := 0
	for _, g := range r.GPUs {
		n += g.Overlaps.Count
	}
	return n
}

// Judge judges the evidence. It lists tenants and processes in the order of their first
// work.
func Judge(t Trace, o Options) Report {
	exits := map[Process]int64{}
	for _, l := range t.Lives {
		exits[l.Process] = l.Exit
	}
	byGPU := map[string][]Interval{}
	for _, iv := range t.Intervals {
		if iv, ok := cut(iv, exits[iv.Process], o); ok {
			byGPU[iv.GPU] = append(byGPU[iv.GPU], iv)
		}
	}
	r := Report{GPUs: []GPUReport{}, Lost: t.Lost}
	for gpu, ivs := range byGPU {
		r.GPUs = append(r.GPUs, judgeGPU(gpu, ivs, exits))
	}
	slices.SortFunc(r.GPUs, func(a, b GPUReport) int { return cmp.Compare(a.GPU, b.GPU) })
	return r
}

// cut ends an interval at its process's death and at the window's edges. The interval's
// busy time shrinks with its length.
func cut(iv Interval, exit int64, o Options) (Interval, bool) {
	full := iv.End - iv.Start
	if exit > 0 {
		iv.End = min(iv.End, exit)
	}
	if o.Until > 0 {
		iv.End = min(iv.End, o.Until)
	}
	iv.Submit = max(iv.Submit, o.Since)
	iv.Start = max(iv.Start, o.Since)
	if iv.Submit >= iv.End {
		return iv, false
	}
	iv.Start = min(iv.Start, iv.End)
	if left := iv.End - iv.Start; left < full {
		iv.Busy = int64(float64(iv.Busy) * float64(left) / float64(full))
	}
	return iv, true
}

func judgeGPU(gpu string, ivs []Interval, exits map[Process]int64) GPUReport {
	occ := occupations(ivs)
	turns := turnsOf(occ)
	g := GPUReport{GPU: gpu, Begin: occ[0].Begin, Overlaps: overlapsOf(occ)}
	for _, o := range occ {
		g.End = max(g.End, o.End)
	}
	byProcess := map[Process]*Usage{}
	var order []Process
	for _, o := range occ {
		u := byProcess[o.Process]
		if u == nil {
			u = &Usage{Tenant: o.Process.Tenant, Process: &o.Process}
			byProcess[o.Process] = u
			order = append(order, o.Process)
		}
		u.Occupied += o.End - o.Begin
	}
	var total int64
	for _, iv := range ivs {
		u := byProcess[iv.Process]
		u.Busy += iv.Busy
		u.Work += iv.Count
		total += iv.Busy
	}
	lastEnd := map[Process]int64{}
	for _, t := range turns {
		u := byProcess[t.Process]
		u.Turns++
		u.LongestTurn = max(u.LongestTurn, t.End-t.Begin)
		if u.Turns > 1 {
			u.LongestWait = max(u.LongestWait, t.Begin-lastEnd[t.Process])
		}
		lastEnd[t.Process] = t.End
	}
	// A process that lived on without another turn waited too, if others had turns.
	for _, p := range order {
		until := g.End
		if exit := exits[p]; exit > 0 {
			until = min(until, exit)
		}
		if others(turns, p, lastEnd[p], until) {
			byProcess[p].LongestWait = max(byProcess[p].LongestWait, until-lastEnd[p])
		}
	}
	for _, p := range order {
		u := byProcess[p]
		if total > 0 {
			u.Share = float64(u.Busy) / float64(total)
		}
		g.Processes = append(g.Processes, *u)
	}
	g.Tenants = sumTenants(g.Processes, total)
	return g
}

// others tells whether a turn of another process began in [from, to).
func others(turns []Occupation, p Process, from, to int64) bool {
	return slices.ContainsFunc(turns, func(t Occupation) bool {
		return t.Process != p && t.Begin >= from && t.Begin < to
	})
}

// occupations joins the intervals of each process where they touch, and
// orders the result by begin.
func occupations(ivs []Interval) []Occupation {
	sorted := slices.Clone(ivs)
	slices.SortStableFunc(sorted, func(a, b Interval) int { return cmp.Compare(a.Submit, b.Submit) })
	last := map[Process]int{}
	var occ []Occupation
	for _, iv := range sorted {
		if i, ok := last[iv.Process]; ok && iv.Submit <= occ[i].End {
			occ[i].End = max(occ[i].End, iv.End)
			continue
		}
		last[iv.Process] = len(occ)
		occ = append(occ, Occupation{iv.Process, iv.Submit, iv.End})
	}
	return occ
}

// turnsOf joins consecutive occupations of the same process.
func turnsOf(occ []Occupation) []Occupation {
	var turns []Occupation
	for _, o := range occ {
		if n := len(turns); n > 0 && turns[n-1].Process == o.Process {
			turns[n-1].End = max(turns[n-1].End, o.End)
			continue
		}
		turns = append(turns, o)
	}
	return turns
}

// overlapsOf sweeps occupations in order of begin.
func overlapsOf(occ []Occupation) Overlaps {
	var v Overlaps
	var open []Occupation // not ended yet
	var covered int64     // overlap is counted up to here
	for _, o := range occ {
		open = slices.DeleteFunc(open, func(p Occupation) bool { return p.End <= o.Begin })
		if len(open) > 0 {
			v.Count++
			longest := open[0]
			for _, p := range open {
				if p.End > longest.End {
					longest = p
				}
			}
			if v.First == nil {
				v.First = &[2]Occupation{longest, o}
			}
			from, to := max(o.Begin, covered), min(o.End, longest.End)
			if to > from {
				v.Total += to - from
				covered = to
			}
		}
		open = append(open, o)
	}
	return v
}

func sumTenants(processes []Usage, total int64) []Usage {
	var out []Usage
	at := map[string]int{}
	for _, p := range processes {
		i, ok := at[p.Tenant]
		if !ok {
			i = len(out)
			at[p.Tenant] = i
			out = append(out, Usage{Tenant: p.Tenant})
		}
		u := &out[i]
		u.Busy += p.Busy
		u.Occupied += p.Occupied
		u.Turns += p.Turns
		u.Work += p.Work
		u.LongestTurn = max(u.LongestTurn, p.LongestTurn)
		u.LongestWait = max(u.LongestWait, p.LongestWait)
		if total > 0 {
			u.Share = float64(u.Busy) / float64(total)
		}
	}
	return out
}

// Handover is what happened on a GPU after one tenant was killed.
type Handover struct {
	Held bool    `json:"held"`   // no other tenant has submitted between the victim's last work and its death
	Gap  int64   `json:"gap_ns"` // from the kill to the next tenant's first submission
	Next Process `json:"next"`
}

// Regrant finds which tenant had a GPU next after a tenant was killed at a time
// (nanoseconds of CLOCK_MONOTONIC, see Now). False means that none had.
func Regrant(t Trace, gpu, victim string, killed int64) (Handover, bool) {
	var h Handover
	found, last := false, int64(math.MinInt64)
	for _, iv := range t.Intervals {
		if iv.GPU != gpu {
			continue
		}
		if iv.Submit <= killed && iv.Submit >= last {
			last, h.Held = iv.Submit, iv.Process.Tenant == victim
		}
		if iv.Process.Tenant != victim && iv.Submit >= killed && (!found || iv.Submit-killed < h.Gap) {
			h.Gap, h.Next, found = iv.Submit-killed, iv.Process, true
		}
	}
	return h, found
}
