// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
)

// completions writes what completes nvsharectl's command lines in three shells into dir,
// laid out as below /usr/share.
func completions(root *cobra.Command, dir string) error {
	at := func(file string) string { return filepath.Join(dir, file) }
	for _, dir := range []string{"bash-completion/completions", "zsh/site-functions", "fish/vendor_completions.d"} {
		if err := os.MkdirAll(at(dir), 0o755); err != nil {
			return err
		}
	}
	return errors.Join(
		root.GenBashCompletionFileV2(at("bash-completion/completions/nvsharectl"), true),
		root.GenZshCompletionFile(at("zsh/site-functions/_nvsharectl")),
		root.GenFishCompletionFile(at("fish/vendor_completions.d/nvsharectl.fish"), true))
}
