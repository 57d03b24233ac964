// SPDX-License-Identifier: Apache-2.0

// Package manual writes the man pages of a program from its cobra commands. The same tree,
// environment and SOURCE_DATE_EPOCH give the same bytes.
package manual

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
)

// Command returns the hidden command "pages DIRECTORY" of a program: the program writes
// the man pages of its visible commands into DIRECTORY/man/manSECTION, as below /usr/share.
// Section is 1 for commands and 8 for daemons, as man(1) numbers them. more, which may be
// nil, then writes into the same directory.
func Command(section, version string, more func(root *cobra.Command, dir string) error) *cobra.Command {
	return &cobra.Command{
		Use:    "pages DIRECTORY",
		Short:  "Write the manual into a directory, laid out as below /usr/share",
		Args:   cobra.ExactArgs(1),
		Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			root, dir := cmd.Root(), args[0]
			to := filepath.Join(dir, "man/man"+section)
			if err := os.MkdirAll(to, 0o755); err != nil {
				return err
			}
			root.DisableAutoGenTag = true // it holds the day of the build
			var day time.Time
			if text := os.Getenv("SOURCE_DATE_EPOCH"); text != "" {
				seconds, err := strconv.ParseInt(text, 10, 64)
				if err != nil {
					return fmt.Errorf("SOURCE_DATE_EPOCH: %w: give the seconds since 1970", err)
				}
				day = time.Unix(seconds, 0).UTC()
			}
			err := doc.GenManTree(root, &doc.GenManHeader{Section: section,
				Source: "nvshare " + version, Manual: "nvshare", Date: &day}, to)
			if more != nil {
				err = errors.Join(err, more(root, dir))
			}
			return err
		},
	}
}

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

// Commands returns a command and all below it.
func Commands(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, c := range cmd.Commands() {
		all = append(all, Commands(c)...)
	}
	return all
}

// goTypes are the names that pflag gives to values without a name of their own.
var goTypes = regexp.MustCompile(`^ +(-., )?--[a-z-]+ (string|strings|int|uint\d*)\b`)

// Unfit returns the lines of the help of a program and its commands that are wider than
// Columns, other than by one long word, or that name a type of Go in place of what a flag wants.
func Unfit(root *cobra.Command) (lines []string) {
	for _, cmd := range Commands(root) {
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
