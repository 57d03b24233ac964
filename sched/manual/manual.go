// SPDX-License-Identifier: Apache-2.0

package manual

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

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
