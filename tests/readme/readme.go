// SPDX-License-Identifier: Apache-2.0

package readme

import (
	"os"
	"regexp"
	"strings"
)

// A Block is a fenced block of a page. One without a language is what programs print.
type Block struct{ Language, Text string }

var (
	fenced  = regexp.MustCompile("(?ms)^```([a-z]*)\n(.*?)^```$")
	comment = regexp.MustCompile(`\s+#.*$`)
)

// Blocks returns the fenced blocks of a page.
func Blocks(page string) (all []Block, err error) {
	text, err := os.ReadFile(page)
	for _, block := range fenced.FindAllStringSubmatch(string(text), -1) {
		all = append(all, Block{block[1], block[2]})
	}
	return all, err
}

// Commands returns the lines of a page's sh blocks, without comments, joined where they go
// on.
func Commands(page string) (all []string, err error) {
	blocks, err := Blocks(page)
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
