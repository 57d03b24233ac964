// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"github.com/nvshare/nvshare/sched/api"
)

// streams are the outputs of a command.
type streams struct {
	out, err io.Writer
	colour   bool
	size     func() (rows, cols int) // of the terminal; nil: the output is no terminal
}

// sink is an output that remembers why it took less than it was given.
type sink struct {
	io.Writer
	err error
}

func (s *sink) Write(text []byte) (int, error) {
	n, err := s.Writer.Write(text)
	s.err = cmp.Or(s.err, err)
	return n, err
}

// width is how many columns a line may have.
func (s streams) width() int {
	if s.size == nil {
		return math.MaxInt
	}
	_, cols := s.size()
	return max(cols, 60) // less makes no sense of a table
}

// SGR parameters.
const (
	red    = "31"
	green  = "32"
	yellow = "33"
	grey   = "90"
	marked = "7" // reverse video
)

func (s streams) paint(colour, text string) string {
	if !s.colour || colour == "" {
		return text
	}
	return "\x1b[" + colour + "m" + text + "\x1b[0m"
}

// standard returns the streams of this process. They have colour only on a terminal
// and without NO_COLOR (no-color.org).
func standard() streams {
	fd := int(os.Stdout.Fd())
	s := streams{out: os.Stdout, err: os.Stderr}
	if _, err := unix.IoctlGetTermios(fd, unix.TCGETS); err != nil || os.Getenv("TERM") == "dumb" {
		return s
	}
	s.colour = os.Getenv("NO_COLOR") == ""
	s.size = func() (rows, cols int) {
		size, err := unix.IoctlGetWinsize(fd, unix.TIOCGWINSZ)
		if err != nil || size.Row == 0 || size.Col == 0 {
			return 24, 80
		}
		return int(size.Row), int(size.Col)
	}
	return s
}

// table is text in columns. Unlike text/tabwriter it does not count colours as text.
type table struct {
	head    []string
	rows    [][]string
	colours []map[int]string // of each row, by column
	// names is the column whose cells are shortened where the terminal is too narrow;
	// 0: none.
	names int
	gap   int            // spaces between columns; 0: two
	whole map[int]string // colours of whole rows, which go before those of cells
}

func (t *table) spaces() int {
	if t.gap != 0 {
		return t.gap
	}
	return 2
}

// fit shortens the cells of the column names until all columns have room.
func (t *table) fit(widths []int, room int) {
	for i, w := range widths {
		if i != t.names {
			room -= w + t.spaces()
		}
	}
	if t.names == 0 || room >= widths[t.names] {
		return
	}
	widths[t.names] = max(room, 8)
	for _, row := range t.rows {
		row[t.names] = ending(row[t.names], widths[t.names])
	}
}

// add adds a row. It makes cells printable, because some come from tenants.
func (t *table) add(colours map[int]string, cells ...string) {
	for i, c := range cells {
		cells[i] = printable(c)
	}
	t.rows = append(t.rows, cells)
	t.colours = append(t.colours, colours)
}

func printable(s string) string {
	if s == "" {
		return "-"
	}
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

// widths returns how many columns of the terminal each cell needs.
func (t *table) widths() []int {
	widths := make([]int, len(t.head))
	for _, row := range append([][]string{t.head}, t.rows...) {
		for i, cell := range row {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	return widths
}

// total is how wide the table is with nothing shortened.
func (t *table) total() int {
	total := t.spaces() * (len(t.head) - 1)
	for _, w := range t.widths() {
		total += w
	}
	return total
}

func (t *table) print(s streams) {
	for _, line := range t.lines(s) {
		fmt.Fprintln(s.out, line)
	}
}

// lines returns the head and the rows.
func (t *table) lines(s streams) (lines []string) {
	widths := t.widths()
	t.fit(widths, s.width())
	line := func(row []string, whole string, colours map[int]string) string {
		var b strings.Builder
		for i, cell := range row {
			if whole == "" {
				cell = s.paint(colours[i], cell)
			}
			b.WriteString(cell)
			if i < len(row)-1 {
				b.WriteString(strings.Repeat(" ", widths[i]-utf8.RuneCountInString(row[i])+t.spaces()))
			}
		}
		return s.paint(whole, b.String())
	}
	lines = append(lines, line(t.head, "", nil))
	for i, row := range t.rows {
		lines = append(lines, line(row, t.whole[i], t.colours[i]))
	}
	return lines
}

// form is the flag --output: one of some forms, the first of which is the default.
type form struct {
	value *string
	forms []string
}

func (f form) String() string { return *f.value }
func (f form) Type() string   { return strings.Join(f.forms, "|") }
func (f form) Set(s string) error {
	if !slices.Contains(f.forms, s) {
		return fmt.Errorf("it is none of %s", strings.Join(f.forms, ", "))
	}
	*f.value = s
	return nil
}

// addForm gives a command the flag; about is said of it besides its forms.
func addForm(cmd *cobra.Command, value *string, about string, forms ...string) {
	*value = forms[0]
	cmd.Flags().VarP(form{value, forms}, "output", "o", about)
}

// safely escapes what json.Marshal leaves as it is and terminals obey: the control characters
// from U+007F to U+009F, which names of processes and containers may have. JSON has them in
// strings only, and yaml refuses them.
func safely(text []byte, err error) ([]byte, error) {
	var out []byte
	for _, r := range string(text) {
		if r >= 0x7f && r <= 0x9f {
			out = fmt.Appendf(out, `\u%04x`, r)
		} else {
			out = utf8.AppendRune(out, r)
		}
	}
	return out, err
}

// encode writes v for programs, as json or yaml. Both have the names of v's JSON.
func encode(io streams, format string, v any) error {
	text, err := safely(json.MarshalIndent(v, "", "  "))
	if err == nil && format == "yaml" {
		text, err = yaml.JSONToYAML(text)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(io.out, "%s\n", strings.TrimSuffix(string(text), "\n"))
	return err
}

// durationFlag is a flag: a number of seconds, or with a unit, as every duration of
// nvsharectl.
type durationFlag time.Duration

func (d *durationFlag) String() string { return time.Duration(*d).String() }
func (d *durationFlag) Type() string   { return "time" }
func (d *durationFlag) Set(s string) error {
	v, err := api.ParseDuration(s)
	if err == nil {
		*d = durationFlag(v)
	}
	return err
}
