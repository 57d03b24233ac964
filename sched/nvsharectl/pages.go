// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/nvshare/nvshare/sched/api"
)

// pagesCommand writes the man pages and the shells' completions, as make release does.
func pagesCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "pages DIRECTORY",
		Short:  "Write the man pages and completions into a directory, laid out as below /usr/share",
		Args:   cobra.ExactArgs(1),
		Hidden: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			root := cmd.Root()
			at := func(file string) string { return filepath.Join(args[0], file) }
			for _, dir := range []string{"man/man1", "bash-completion/completions", "zsh/site-functions", "fish/vendor_completions.d"} {
				if err := os.MkdirAll(at(dir), 0o755); err != nil {
					return err
				}
			}
			root.DisableAutoGenTag = true // the same tree gives the same bytes
			var day time.Time
			if seconds, err := strconv.ParseInt(os.Getenv("SOURCE_DATE_EPOCH"), 10, 64); err == nil {
				day = time.Unix(seconds, 0).UTC()
			}
			return errors.Join(
				doc.GenManTree(root, &doc.GenManHeader{Title: "NVSHARECTL", Section: "1", Source: "nvshare " + api.Version, Manual: "nvshare", Date: &day}, at("man/man1")),
				root.GenBashCompletionFileV2(at("bash-completion/completions/nvsharectl"), true),
				root.GenZshCompletionFile(at("zsh/site-functions/_nvsharectl")),
				root.GenFishCompletionFile(at("fish/vendor_completions.d/nvsharectl.fish"), true))
		},
	}
}
