// SPDX-License-Identifier: Apache-2.0

package manual

import (
	"regexp"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// Columns is how wide the help of a program is at most: a terminal's usual width.
const Columns = 80

// narrowest bounds the search for a width in which flags fit.
const narrowest = 60

// Wrap has the help of a program and its commands fit into Columns. Paragraphs and rows of
// tables are wrapped; examples have to fit as they are.
func Wrap(root *cobra.Command) {
	cobra.AddTemplateFunc("fit", fit)
	template := root.UsageTemplate()
	for _, flags := range []string{".LocalFlags", ".InheritedFlags"} {
		template = strings.ReplaceAll(template, flags+".FlagUsages", "fit "+flags)
	}
	root.SetUsageTemplate(template)
	for _, cmd := range withCommands(root) {
		cmd.Long = paragraphs(cmd.Long)
	}
}

// withCommands returns a command and all below it.
func withCommands(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, c := range cmd.Commands() {
		all = append(all, withCommands(c)...)
	}
	return all
}

// fit describes flags. pflag breaks no word that is wider than its column, as names of
// variables can be: with fewer columns it puts the text below the flag, where there is room.
func fit(flags *pflag.FlagSet) (text string) {
	for n := Columns; n >= narrowest; n-- {
		if text = flags.FlagUsagesWrapped(n); len(wide(text)) == 0 {
			break
		}
	}
	return text
}

// wide returns the lines that do not fit into Columns.
func wide(text string) (lines []string) {
	for line := range strings.Lines(text) {
		if line = strings.TrimRight(line, "\n"); utf8.RuneCountInString(line) > Columns {
			lines = append(lines, line)
		}
	}
	return lines
}

// row is the line of a table: a word, two blanks or more, and what it means.
var row = regexp.MustCompile(`^(\s*\S+( \S+)*\s{2,})\S`)

// paragraphs wraps a text. Lines that belong together are joined first.
func paragraphs(text string) string {
	var out []string
	var words []string
	indent := 0
	flush := func() {
		if len(words) > 0 {
			out = append(out, fill(words, indent)...)
		}
		words = nil
	}
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		column := len(line) - len(strings.TrimLeft(line, " "))
		switch head := row.FindStringSubmatch(line); {
		case line == "":
			flush()
			out, indent = append(out, ""), 0
		case head != nil && (len(words) == 0 || column < indent || column == 0):
			flush()
			indent = utf8.RuneCountInString(head[1])
			words = append([]string{head[1] + strings.Fields(line[len(head[1]):])[0]}, strings.Fields(line[len(head[1]):])[1:]...)
		case column != indent || len(words) == 0:
			flush()
			indent = column
			words = strings.Fields(line)
			words[0] = line[:column] + words[0]
		default:
			words = append(words, strings.Fields(line)...)
		}
	}
	flush()
	return strings.Join(out, "\n")
}

// fill puts words into lines. The first word has its own indentation.
func fill(words []string, indent int) (lines []string) {
	line := words[0]
	for _, w := range words[1:] {
		if utf8.RuneCountInString(line)+1+utf8.RuneCountInString(w) < Columns {
			line += " " + w
			continue
		}
		lines = append(lines, line)
		line = strings.Repeat(" ", indent) + w
	}
	return append(lines, line)
}

// goTypes are the names that pflag gives to values without a name of their own.
var goTypes = regexp.MustCompile(`^ +(-., )?--[a-z-]+ (string|strings|int|uint\d*)\b`)

// Unfit returns the lines of the help of a program and its commands that are wider than
// Columns, or that name a type of Go in place of what a flag wants.
func Unfit(root *cobra.Command) (lines []string) {
	for _, cmd := range withCommands(root) {
		var text strings.Builder
		cmd.SetOut(&text)
		_ = cmd.Help()
		found := wide(text.String())
		for line := range strings.Lines(text.String()) {
			if goTypes.MatchString(line) {
				found = append(found, strings.TrimRight(line, "\n"))
			}
		}
		for _, line := range found {
			lines = append(lines, cmd.CommandPath()+": "+line)
		}
	}
	return lines
}
