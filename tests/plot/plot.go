// SPDX-License-Identifier: Apache-2.0

// Package plot draws results of measurements: panels with lines, as SVG.
package plot

import (
	"fmt"
	"html"
	"math"
	"strings"
)

const (
	panelWidth, panelHeight = 960, 300 // of a panel, with its margins
	marginLeft, marginRight = 60, 20
	marginTop, marginBottom = 30, 40
	paper, ink, red         = "#ffffff", "#333333", "#c03028"
)

var colours = []string{"#2060a8", "#c87818", "#388840", "#884898", "#707070", "#a85050"}

// A Point is a value of a line.
type Point struct{ X, Y float64 }

// A Series is a line of a panel.
type Series struct {
	Name   string
	Points []Point
}

// A Panel is a diagram.
type Panel struct {
	Title, X, Y string
	Lines       []Series
	Marks       []float64 // upright lines
	Level       float64   // a level line, if it is not 0
	LevelName   string
}

// SVG draws panels one below the other.
func SVG(panels ...Panel) string {
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", panelWidth, panelHeight*len(panels))
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" fill="%s"/>`+"\n", paper)
	for i, p := range panels {
		fmt.Fprintf(&b, `<g transform="translate(0 %d)">`+"\n", i*panelHeight)
		p.draw(&b)
		b.WriteString("</g>\n")
	}
	b.WriteString("</svg>\n")
	return b.String()
}

func (p Panel) draw(b *strings.Builder) {
	low, high, top := math.Inf(1), math.Inf(-1), p.Level
	for _, l := range p.Lines {
		for _, q := range l.Points {
			low, high, top = min(low, q.X), max(high, q.X), max(top, q.Y)
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
	width, height := float64(panelWidth-marginLeft-marginRight), float64(panelHeight-marginTop-marginBottom)
	x := func(v float64) float64 { return marginLeft + (v-low)/(high-low)*width }
	y := func(v float64) float64 { return marginTop + (1-v/top)*height }
	text := func(x, y float64, anchor, colour, s string) {
		fmt.Fprintf(b, `<text x="%.1f" y="%.1f" text-anchor="%s" fill="%s">%s</text>`+"\n", x, y, anchor, colour, html.EscapeString(s))
	}
	line := func(x1, y1, x2, y2 float64, colour, more string) {
		fmt.Fprintf(b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"%s/>`+"\n", x1, y1, x2, y2, colour, more)
	}
	text(marginLeft, 18, "start", ink, p.Title)
	for _, at := range p.Marks {
		if at >= low && at <= high {
			line(x(at), marginTop, x(at), marginTop+height, "#dddddd", "")
		}
	}
	line(marginLeft, marginTop, marginLeft, marginTop+height, ink, "")
	line(marginLeft, marginTop+height, marginLeft+width, marginTop+height, ink, "")
	for step, v := tick(top), 0.0; v <= top; v += step {
		line(marginLeft-4, y(v), marginLeft, y(v), ink, "")
		text(marginLeft-8, y(v)+4, "end", ink, fmt.Sprintf("%.4g", v))
	}
	step := tick(high - low)
	for v := math.Ceil(low/step) * step; v <= high; v += step {
		line(x(v), marginTop+height, x(v), marginTop+height+4, ink, "")
		text(x(v), marginTop+height+18, "middle", ink, fmt.Sprintf("%.4g", v))
	}
	text(marginLeft-8, marginTop-8, "end", ink, p.Y)
	text(marginLeft+width, marginTop+height+34, "end", ink, p.X)
	if p.Level > 0 {
		line(marginLeft, y(p.Level), marginLeft+width, y(p.Level), red, ` stroke-dasharray="4 3"`)
		text(marginLeft+width, y(p.Level)-4, "end", red, p.LevelName)
	}
	for i, l := range p.Lines {
		colour := colours[i%len(colours)]
		var points []string
		for _, q := range l.Points {
			points = append(points, fmt.Sprintf("%.1f,%.1f", x(q.X), y(q.Y)))
			if len(l.Points) < 20 {
				fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"/>`+"\n", x(q.X), y(q.Y), colour)
			}
		}
		fmt.Fprintf(b, `<polyline points="%s" fill="none" stroke="%s"/>`+"\n", strings.Join(points, " "), colour)
		text(marginLeft+10+float64(i)*110, marginTop+height+34, "start", colour, "— "+l.Name)
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
