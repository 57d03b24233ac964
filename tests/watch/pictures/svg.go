// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"html"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The size of a character, and the border, in pixels.
const (
	charWidth  = 8.4
	lineHeight = 18
	border     = 12
)

const (
	paper = "#1b1f27"
	ink   = "#d7dce5"
)

// inks are the colours of SGR parameters.
var inks = map[int]string{31: "#ff6b6b", 32: "#7ed491", 33: "#f2c94c", 90: "#7a8394"}

// style is how text looks.
type style struct {
	ink    string
	invert bool
}

// svg draws lines of a terminal, with their colours.
func svg(screen string) string {
	lines := strings.Split(strings.TrimRight(screen, "\n "), "\n")
	width, height := columns*charWidth+2*border, float64(len(lines)*lineHeight+2*border)
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%.0f" height="%.0f" viewBox="0 0 %.0f %.0f" font-family="ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace" font-size="14">`+"\n", width, height, width, height)
	fmt.Fprintf(&b, `<rect width="100%%" height="100%%" rx="8" fill="%s"/>`+"\n", paper)
	for i, text := range lines {
		y, x := border+i*lineHeight, 0
		now := style{ink: ink}
		for len(text) > 0 {
			run, rest, escape := strings.Cut(text, "\x1b[")
			draw(&b, now, run, x, y)
			x += utf8.RuneCountInString(run)
			if text = rest; escape {
				codes, after, _ := strings.Cut(text, "m")
				now, text = now.changed(codes), after
			}
		}
	}
	b.WriteString("</svg>\n")
	return b.String()
}

// draw puts text at a column. textLength keeps columns in line, whatever the font.
func draw(b *strings.Builder, s style, text string, x, y int) {
	n := utf8.RuneCountInString(text)
	fill := s.ink
	at, long := border+float64(x)*charWidth, float64(n)*charWidth
	if s.invert {
		fmt.Fprintf(b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"/>`+"\n", at, y, long, lineHeight, s.ink)
		fill = paper
	}
	if strings.TrimSpace(text) != "" {
		fmt.Fprintf(b, `<text x="%.1f" y="%d" textLength="%.1f" lengthAdjust="spacingAndGlyphs" xml:space="preserve" fill="%s">%s</text>`+"\n", at, y+14, long, fill, html.EscapeString(text))
	}
}

// changed is the style after an escape sequence.
func (s style) changed(codes string) style {
	for _, code := range strings.Split(codes, ";") {
		n, _ := strconv.Atoi(code) // "" means 0
		switch {
		case n == 0:
			s = style{ink: ink}
		case n == 7:
			s.invert = true
		case n == 27:
			s.invert = false
		case n == 39:
			s.ink = ink
		case inks[n] != "":
			s.ink = inks[n]
		}
	}
	return s
}
