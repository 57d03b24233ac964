// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
)

// A replay is what a run recorded of some seconds, which the page plays.
type replay struct {
	Case    string       `json:"case"`
	Way     string       `json:"way"`
	Note    string       `json:"note"` // how they share
	Seconds float64      `json:"seconds"`
	Names   []string     `json:"names"`  // of the tenants
	Turns   [][3]float64 `json:"turns"`  // tenant, from, to; none: nobody recorded turns
	Moves   [][4]float64 `json:"moves"`  // tenant, from, to, GiB: negative where it left the GPU
	Tokens  bool         `json:"tokens"` // lines are the tokens that came in a step, else the GiB on the GPU
	Step    float64      `json:"step"`   // seconds
	Lines   [][]float64  `json:"lines"`  // of each tenant
}

// recorded is the replay in a line of servers.jsonl, in milliseconds and MiB.
type recorded struct {
	Tick   float64      `json:"tick_ms"`
	Tokens [][]float64  `json:"tokens"`
	Turns  [][3]float64 `json:"turns"`
	Moves  [][4]float64 `json:"moves"`
	Slices []float64    `json:"slices_ms"`
}

func (r *recorded) replay(load, way, note string) replay {
	p := replay{Case: load, Way: way, Note: note, Tokens: true, Step: r.Tick / 1000, Lines: r.Tokens}
	for i, line := range r.Tokens {
		name := fmt.Sprintf("server %d", i+1)
		if i < len(r.Slices) && r.Slices[i] > 0 {
			name += fmt.Sprintf(" (time slices of %g ms)", r.Slices[i])
		}
		p.Names = append(p.Names, name)
		p.Seconds = max(p.Seconds, p.Step*float64(len(line)-1))
	}
	for _, t := range r.Turns {
		p.Turns = append(p.Turns, [3]float64{t[0], t[1] / 1000, t[2] / 1000})
	}
	for _, m := range r.Moves {
		p.Moves = append(p.Moves, [4]float64{m[0], m[1] / 1000, m[2] / 1000, m[3] / 1024})
	}
	return p
}

// A timeline is what the step about swapping keeps of its scheduler.
type timeline struct {
	Samples []struct {
		At      int64 `json:"at_ns"`
		Clients []struct {
			PID      int     `json:"pid"`
			Resident float64 `json:"resident"`
		} `json:"clients"`
	} `json:"samples"`
	Events []event `json:"events"`
}

type event struct {
	At    int64   `json:"at_ns"`
	Type  string  `json:"type"`
	PID   int     `json:"pid"`
	Bytes float64 `json:"bytes"`
	Took  float64 `json:"took_ns"`
}

// replay begins with the first process, and ends with the last event.
func (t *timeline) replay(name string) (p replay, ok bool) {
	const step = 0.1 // is enough for a picture
	p = replay{Case: name, Way: "nvshare", Step: step}
	tenants, granted := map[int]int{}, map[int]float64{}
	var zero int64
	for _, e := range t.Events {
		if e.Type == "register" && zero == 0 {
			zero = e.At
		}
		at := float64(e.At-zero) / 1e9
		tenant := float64(tenants[e.PID])
		switch e.Type {
		case "register":
			tenants[e.PID] = len(p.Names)
			p.Names = append(p.Names, fmt.Sprintf("tenant %d", len(p.Names)+1))
		case "grant":
			granted[e.PID] = at
		case "release", "reclaim", "end":
			if from, holds := granted[e.PID]; holds {
				p.Turns = append(p.Turns, [3]float64{tenant, milli(from), milli(at)})
				delete(granted, e.PID)
			}
		case "swap_out":
			p.Moves = append(p.Moves, [4]float64{tenant, milli(at - e.Took/1e9), milli(at), -milli(e.Bytes / (1 << 30))})
		case "swap_in":
			p.Moves = append(p.Moves, [4]float64{tenant, milli(at - e.Took/1e9), milli(at), milli(e.Bytes / (1 << 30))})
		}
		p.Seconds = milli(at)
	}
	if zero == 0 || len(p.Turns) == 0 {
		return p, false
	}
	for pid, from := range granted { // whoever holds the GPU at the end
		p.Turns = append(p.Turns, [3]float64{float64(tenants[pid]), milli(from), p.Seconds})
	}
	p.Lines = make([][]float64, len(p.Names))
	now, i := make([]float64, len(p.Names)), 0
	for k := range int(p.Seconds/step) + 1 {
		for ; i < len(t.Samples) && float64(t.Samples[i].At-zero)/1e9 <= step*float64(k); i++ {
			for _, c := range t.Samples[i].Clients {
				if tenant, known := tenants[c.PID]; known {
					now[tenant] = c.Resident / (1 << 30)
				}
			}
		}
		for tenant := range now {
			p.Lines[tenant] = append(p.Lines[tenant], math.Round(100*now[tenant])/100)
		}
	}
	return p, true
}

// milli leaves three digits after the point.
func milli(v float64) float64 { return math.Round(1000*v) / 1000 }
