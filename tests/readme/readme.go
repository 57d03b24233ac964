// SPDX-License-Identifier: Apache-2.0

package readme

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// A Block is a fenced block of a page. One without a language is what programs print.
type Block struct{ Language, Text string }

var (
	fenced  = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")
	comment = regexp.MustCompile(`\s+#.*$`)
)

// Pages returns the pages that users read, README.md first, of the tree at top.
func Pages(top string) (all []string) {
	for _, page := range []string{"README.md", "deployments/install.md", "deployments/containers.md", "sched/sharing.md",
		"sched/oversubscription.md", "deployments/watch.md", ".github/CONTRIBUTING.md"} {
		all = append(all, filepath.Join(top, page))
	}
	return all
}

// Blocks returns the fenced blocks of pages.
func Blocks(pages ...string) (all []Block, err error) {
	for _, page := range pages {
		text, e := os.ReadFile(page)
		err = errors.Join(err, e)
		for _, block := range fenced.FindAllStringSubmatch(string(text), -1) {
			all = append(all, Block{block[1], block[2]})
		}
	}
	return all, err
}

// Commands returns the lines of the pages' sh blocks, without comments, joined where they go
// on.
func Commands(pages ...string) (all []string, err error) {
	blocks, err := Blocks(pages...)
	for _, block := range blocks {
		if block.Language != "sh" {
			continue
		}
		for line := range strings.Lines(strings.ReplaceAll(block.Text, "\\\n", " ")) {
			if line = comment.ReplaceAllString(strings.TrimSpace(line), ""); line != "" {
				all = append(all, line)
			}
		}
	}
	return all, err
}
