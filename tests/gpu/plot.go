// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"html"
	"math"
	"os"
	"path/filepath"
	"strings"
)

const (
	plotWidth, plotHeight       = 960, 300 // of a panel, with its margins
	plotLeft, plotRight         = 60, 20
	plotTop, plotBottom         = 30, 40
	plotPaper, plotInk, plotRed = "#ffffff", "#333333", "#c03028"
)

var plotColours = []string{"#2060a8", "#c87818", "#388840", "#884898", "#707070", "#a85050"}

type point struct{ x, y float64 }

// A series is a line of a panel.
type series struct {
	name   string
	points []point
}

// A panel is a diagram.
type panel struct {
	title, x, y string
	lines       []series
	marks       []float64 // upright lines
	level       float64   // a level line, if it is not 0
	levelName   string
}

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
	where := panel{title: fmt.Sprintf("Two tenants of %.4g GiB on a GPU of %.4g GiB: on the GPU", float64(c.TenantMiB)/1024, float64(c.GPUMiB)/1024),
		x: "s", y: "GiB"}
	speed := panel{title: "Moved, of both together", x: "s", y: "GB/s", level: c.Link.OutBoth + c.Link.InBoth, levelName: "the link, both ways"}
	if c.Timeline != nil && len(c.Timeline.Samples) > 0 {
		all := c.Timeline.Samples
		zero := all[0].At
		at := func(ns int64) float64 { return float64(ns-zero) / 1e9 }
		lines := map[uint32]*series{}
		var order []*series
		out, in := series{name: "out"}, series{name: "in"}
		for i, s := range all {
			for _, k := range s.Clients {
				l := lines[k.PID]
				if l == nil {
					l = &series{name: fmt.Sprintf("tenant %d", len(order)+1)}
					lines[k.PID], order = l, append(order, l)
				}
				l.points = append(l.points, point{at(s.At), float64(k.Resident) / (1 << 30)})
			}
			if i == 0 || s.Out < all[i-1].Out || s.In < all[i-1].In || s.At <= all[i-1].At {
				continue
			}
			took := float64(s.At - all[i-1].At)
			out.points = append(out.points, point{at(s.At), float64(s.Out-all[i-1].Out) / took})
			in.points = append(in.points, point{at(s.At), float64(s.In-all[i-1].In) / took})
		}
		for _, l := range order {
			where.lines = append(where.lines, *l)
		}
		speed.lines = []series{out, in}
		for _, s := range c.Switches {
			where.marks = append(where.marks, at(s.At+c.RealToClock))
		}
	}
	return svg(where, speed)
}

// plotMakespan shows how much faster than one after the other all were.
func plotMakespan(r *makespanResult) string {
	var panels []panel
	for _, kind := range r.Kinds {
		p := panel{title: kind.Name + ": one after the other / together", x: "memory promised / GPU", y: "times", level: 1, levelName: "as one after the other"}
		lines := map[string]*series{}
		var order []string
		for _, c := range r.Cases {
			if c.Kind != kind.Name || c.Faster == 0 {
				continue
			}
			if lines[c.Quantum] == nil {
				lines[c.Quantum] = &series{name: c.Quantum}
				order = append(order, c.Quantum)
			}
			lines[c.Quantum].points = append(lines[c.Quantum].points, point{c.Promised, c.Faster})
		}
		for _, q := range order {
			p.lines = append(p.lines, *lines[q])
		}
		panels = append(panels, p)
	}
	return svg(panels...)
}

// svg draws panels one below the other.
func svg(panels ...panel) string {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", plotWidth, plotHeight*len(panels))
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="%s"/>`+"\n", plotPaper)
	for i, p := range panels {
		fmt.Fprintf(&b, `<g transform="translate(0 %d)">`+"\n", i*plotHeight)
		p.draw(&b)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func (p panel) draw(b *strings.Builder) {
	low, high, top := math.Inf(1), math.Inf(-1), p.level
	for _, l := range p.lines {
		for _, q := range l.points {
			low, high, top = min(low, q.x), max(high, q.x), max(top, q.y)
		}
	}
	if low > high {
		low, high = 0, 1
	}
	if low == high {
		low, high = low-0.5, high+0.5
	}
	if top <= 0 {
		top = 1
	}
	top *= 1.05
	width, height := float64(plotWidth-plotLeft-plotRight), float64(plotHeight-plotTop-plotBottom)
	x := func(v float64) float64 { return plotLeft + (v-low)/(high-low)*width }
	y := func(v float64) float64 { return plotTop + (1-v/top)*height }
	text := func(x, y float64, anchor, colour, s string) {
		fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s">%s</text>`+"\n", x, y, anchor, colour, html.EscapeString(s))
	}
	line := func(x1, y1, x2, y2 float64, colour, more string) {
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"%s/>`+"\n", x1, y1, x2, y2, colour, more)
	}
	text(plotLeft, 18, "start", plotInk, p.title)
	for _, at := range p.marks {
		if at >= low && at <= high {
			line(x(at), plotTop, x(at), plotTop+height, "#dddddd", "")
		}
	}
	line(plotLeft, plotTop, plotLeft, plotTop+height, plotInk, "")
	line(plotLeft, plotTop+height, plotLeft+width, plotTop+height, plotInk, "")
	for step, v := tick(top), 0.0; v <= top; v += step {
		line(plotLeft-4, y(v), plotLeft, y(v), plotInk, "")
		text(plotLeft-8, y(v)+4, "end", plotInk, fmt.Sprintf("%.4g", v))
	}
	step := tick(high - low)
	for v := math.Ceil(low/step) * step; v <= high; v += step {
		line(x(v), plotTop+height, x(v), plotTop+height+4, plotInk, "")
		text(x(v), plotTop+height+18, "middle", plotInk, fmt.Sprintf("%.4g", v))
	}
	text(plotLeft-8, plotTop-8, "end", plotInk, p.y)
	text(plotLeft+width, plotTop+height+34, "end", plotInk, p.x)
	if p.level > 0 {
		line(plotLeft, y(p.level), plotLeft+width, y(p.level), plotRed, ` stroke-dasharray="4 3"`)
		text(plotLeft+width, y(p.level)-4, "end", plotRed, p.levelName)
	}
	for i, l := range p.lines {
		colour := plotColours[i%len(plotColours)]
		var points []string
		for _, q := range l.points {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(q.x), y(q.y)))
			if len(l.points) < 20 {
				fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x(q.x), y(q.y), colour)
			}
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s"/>`+"\n", strings.Join(points, " "), colour)
		text(plotLeft+10+float64(i)*110, plotTop+height+34, "start", colour, "— "+l.name)
	}
}

// tick is a round distance, for up to ten ticks.
func tick(span float64) float64 {
	step := math.Pow(10, math.Floor(math.Log10(span/2)))
	for _, k := range []float64{1, 2, 5, 10} {
		if span/(step*k) <= 10 {
			return step * k
		}
	}
	return step * 10
}
