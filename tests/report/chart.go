// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"html"
	"math"
	"strings"
	"unicode/utf8"
)

// A chart has level bars in groups: one group for each label, one bar for each series.
type chart struct {
	unit   string
	series []string
	labels []string
	values [][]float64
}

func (c *chart) add(label string, values ...float64) {
	c.labels, c.values = append(c.labels, label), append(c.values, values)
}

var colours = []string{"#707070", "#2060a8", "#388840", "#c87818", "#884898", "#a85050", "#309098", "#a89000", "#c860a8", "#503820"}

// svg draws the chart. A line stands at 1, which is what one alone gets.
func (c *chart) svg(title string) string {
	const (
		bars, right, top = 500, 60, 60
		bar, gap         = 14, 12
	)
	left := 100
	for _, label := range c.labels {
		left = max(left, 20+7*utf8.RuneCountInString(label)) // the font's letters are 6 to 7 wide
	}
	width := max(left+bars+right, 10+120*len(c.series))
	most := 1.0
	for _, group := range c.values {
		for _, v := range group {
			if v > most { // which NaN is not
				most = v
			}
		}
	}
	x := func(v float64) float64 { return float64(left) + v/most*bars }
	height := top + len(c.labels)*gap + 30
	for _, group := range c.values {
		height += bar * measured(group)
	}
	var b, figures strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/><text x="10" y="20" font-size="15">%s</text>`+"\n", width, height, html.EscapeString(title))
	for i, name := range c.series {
		at := 10 + i*120
		fmt.Fprintf(&b, `<rect x="%d" y="30" width="12" height="12" fill="%s"/><text x="%d" y="41">%s</text>`+"\n", at, colours[i%len(colours)], at+17, html.EscapeString(name))
	}
	y := top
	for i, label := range c.labels {
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end">%s</text>`+"\n", left-8, y+measured(c.values[i])*bar/2+4, html.EscapeString(label))
		for j, v := range c.values[i] {
			if math.IsNaN(v) {
				continue
			}
			fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", left, y, v/most*bars, bar-2, colours[j%len(colours)])
			fmt.Fprintf(&figures, `<text x="%.1f" y="%d" font-size="10" stroke="#ffffff" stroke-width="3" paint-order="stroke">%.2f</text>`+"\n", x(v)+4, y+bar-4, v)
			y += bar
		}
		y += gap
	}
	fmt.Fprintf(&b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#c03028"/><text x="%.1f" y="%d" text-anchor="middle">1</text><text x="%d" y="20" text-anchor="end">%s</text>`+"\n",
		x(1), top-6, x(1), y, x(1), y+14, width-10, html.EscapeString(c.unit))
	return b.String() + figures.String() + "</svg>\n"
}

// measured is how many of a group were: the others are NaN.
func measured(group []float64) (n int) {
	for _, v := range group {
		if !math.IsNaN(v) {
			n++
		}
	}
	return n
}
