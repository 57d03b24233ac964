// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/nvshare/nvshare/tests/plot"
)

// plotFile makes the pictures of a file of results beside it.
func plotFile(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	dir := filepath.Dir(path)
	if filepath.Base(path) == "makespan.json" {
		var r makespanResult
		if err := json.Unmarshal(data, &r); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		return save(dir, "makespan.svg", plotMakespan(&r))
	}
	var cases []*swapCase
	if err := json.Unmarshal(data, &cases); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for _, c := range cases {
		if err := save(dir, c.Name+".svg", plotSwap(c)); err != nil {
			return err
		}
	}
	return nil
}

// plotSwap shows where the tenants' memory was, and how fast it moved.
func plotSwap(c *swapCase) string {
	where := plot.Panel{Title: fmt.Sprintf("Two tenants of %.4g GiB on a GPU of %.4g GiB: on the GPU", float64(c.TenantMiB)/1024, float64(c.GPUMiB)/1024),
		X: "s", Y: "GiB"}
	speed := plot.Panel{Title: "Moved, of both together", X: "s", Y: "GB/s", Level: c.Link.OutBoth + c.Link.InBoth, LevelName: "the link, both ways"}
	if c.Timeline != nil && len(c.Timeline.Samples) > 0 {
		all := c.Timeline.Samples
		zero := all[0].At
		at := func(ns int64) float64 { return float64(ns-zero) / 1e9 }
		lines := map[uint32]*plot.Series{}
		var order []*plot.Series
		out, in := plot.Series{Name: "out"}, plot.Series{Name: "in"}
		for i, s := range all {
			for _, k := range s.Clients {
				l := lines[k.PID]
				if l == nil {
					l = &plot.Series{Name: fmt.Sprintf("tenant %d", len(order)+1)}
					lines[k.PID], order = l, append(order, l)
				}
				l.Points = append(l.Points, plot.Point{X: at(s.At), Y: float64(k.Resident) / (1 << 30)})
			}
			if i == 0 || s.Out < all[i-1].Out || s.In < all[i-1].In || s.At <= all[i-1].At {
				continue
			}
			took := float64(s.At - all[i-1].At)
			out.Points = append(out.Points, plot.Point{X: at(s.At), Y: float64(s.Out-all[i-1].Out) / took})
			in.Points = append(in.Points, plot.Point{X: at(s.At), Y: float64(s.In-all[i-1].In) / took})
		}
		for _, l := range order {
			where.Lines = append(where.Lines, *l)
		}
		speed.Lines = []plot.Series{out, in}
		for _, s := range c.Switches {
			where.Marks = append(where.Marks, at(s.At+c.RealToClock))
		}
	}
	return plot.SVG(where, speed)
}

// plotMakespan shows how much faster than one after the other all were.
func plotMakespan(r *makespanResult) string {
	var panels []plot.Panel
	for _, kind := range r.Kinds {
		p := plot.Panel{Title: kind.Name + ": one after the other / together", X: "memory promised / GPU", Y: "times", Level: 1, LevelName: "as one after the other"}
		lines := map[string]*plot.Series{}
		var order []string
		for _, c := range r.Cases {
			if c.Kind != kind.Name || c.Faster == 0 {
				continue
			}
			if lines[c.Quantum] == nil {
				lines[c.Quantum] = &plot.Series{Name: c.Quantum}
				order = append(order, c.Quantum)
			}
			lines[c.Quantum].Points = append(lines[c.Quantum].Points, plot.Point{X: c.Promised, Y: c.Faster})
		}
		for _, q := range order {
			p.Lines = append(p.Lines, *lines[q])
		}
		panels = append(panels, p)
	}
	return plot.SVG(panels...)
}
