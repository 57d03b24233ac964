// SPDX-License-Identifier: Apache-2.0

package manual

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func program(more func(*cobra.Command, string) error) *cobra.Command {
	root := &cobra.Command{Use: "gpu-daemon", Short: "Shares GPUs", SilenceUsage: true, SilenceErrors: true, Run: func(*cobra.Command, []string) {}}
	sub := &cobra.Command{Use: "prepare", Short: "Makes directories", Run: func(*cobra.Command, []string) {}}
	sub.Flags().String("owner", "", "who owns them")
	root.CompletionOptions.DisableDefaultCmd = true
	root.AddCommand(sub, &cobra.Command{Use: "inner", Hidden: true, Run: func(*cobra.Command, []string) {}}, Command("8", "1.2", more))
	return root
}

func write(t *testing.T, more func(*cobra.Command, string) error) (dir string, err error) {
	t.Helper()
	dir = t.TempDir()
	root := program(more)
	root.SetArgs([]string{"pages", dir})
	return dir, root.Execute()
}

func TestPages(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "86400")
	dir, err := write(t, func(root *cobra.Command, dir string) error {
		return os.WriteFile(filepath.Join(dir, "more"), []byte(root.Name()), 0o644)
	})
	if err != nil {
		t.Fatal(err)
	}
	for file, wants := range map[string][]string{
		"man/man8/gpu-daemon.8":         {`.TH "GPU-DAEMON" "8" "Jan 1970" "nvshare 1.2"`, "Shares GPUs", "gpu-daemon-prepare(8)"},
		"man/man8/gpu-daemon-prepare.8": {"owner", "who owns them"},
		"more":                          {"gpu-daemon"},
	} {
		text, err := os.ReadFile(filepath.Join(dir, file))
		plain := strings.ReplaceAll(string(text), `\`, "")
		for _, want := range wants {
			if err != nil || !strings.Contains(plain, want) {
				t.Errorf("%s: %v, lacks %q:\n%s", file, err, want, plain)
			}
		}
	}
	if files, _ := filepath.Glob(filepath.Join(dir, "man/man8/*")); len(files) != 2 {
		t.Errorf("pages of hidden commands too: %q", files)
	}
}

func TestPagesBadDay(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if _, err := write(t, nil); err == nil || !strings.Contains(err.Error(), "SOURCE_DATE_EPOCH") {
		t.Errorf("got %v, want an error that names SOURCE_DATE_EPOCH", err)
	}
}

// Descriptions of flags are wrapped; what does not fit is found, and so is the type of a flag.
func TestWrap(t *testing.T) {
	root := program(nil)
	root.Long = "a line that goes on and on for more columns than a terminal has, and on, and on some more"
	root.Flags().String("a-flag", "", "`word` "+strings.Repeat("by word ", 20))
	Wrap(root)
	if found := Unfit(root); len(found) != 2 || !strings.Contains(found[0], "on and on") || !strings.Contains(found[1], "--owner string") {
		t.Errorf("%q", found)
	}
}
