// SPDX-License-Identifier: Apache-2.0

package manual

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// Columns is how wide the help of a program is at most: a terminal's usual width.
const Columns = 80

// Wrap has descriptions of flags fit into Columns. Other texts have to fit as they are.
func Wrap(root *cobra.Command) {
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), "Flags.FlagUsages", "Flags.FlagUsagesWrapped "+strconv.Itoa(Columns)))
}

// Main runs a program to its end. status is what it exits with after an error: usage where
// the command line was wrong.
func Main(ctx context.Context, cmd *cobra.Command, status *int, usage int) {
	called, err := cmd.ExecuteContextC(ctx)
	if err == nil {
		return
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", cmd.Name(), err)
	if *status == usage {
		fmt.Fprintf(os.Stderr, "Run %s --help\n", called.CommandPath())
	}
	os.Exit(*status)
}

// withCommands returns a command and all below it.
func withCommands(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, c := range cmd.Commands() {
		all = append(all, withCommands(c)...)
	}
	return all
}

// goTypes are the names that pflag gives to values without a name of their own.
var goTypes = regexp.MustCompile(`^ +(-., )?--[a-z-]+ (string|strings|int|uint\d*)\b`)

// Unfit returns the lines of the help of a program and its commands that are wider than
// Columns, other than by one long word, or that name a type of Go in place of what a flag wants.
func Unfit(root *cobra.Command) (lines []string) {
	for _, cmd := range withCommands(root) {
		var text strings.Builder
		cmd.SetOut(&text)
		_ = cmd.Help()
		for line := range strings.Lines(text.String()) {
			line = strings.TrimRight(line, "\n")
			if utf8.RuneCountInString(line) > Columns && len(strings.Fields(line)) > 1 || goTypes.MatchString(line) {
				lines = append(lines, cmd.CommandPath()+": "+line)
			}
		}
	}
	return lines
}
