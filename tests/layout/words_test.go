// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// words are ours alone, or mean something else to a reader of messages and pages, with what the
// field says.
var words = map[string]string{
	"told":          "sent, asked, informed; of a setting: set",
	"heard":         "read, received",
	"seat":          "lock, leader",
	"seats":         "locks",
	"peek":          "read",
	"afar":          "remote",
	"aside":         "evicted, suspended",
	"crew":          "group",
	"owe":           "overrun, pay back",
	"owed":          "overrun, paid back",
	"owes":          "overrun, pays back",
	"roomy":         "large enough",
	"anew":          "again; of a process: restart",
	"mend":          "fix",
	"mends":         "fixes",
	"mended":        "fixed",
	"of late":       "recently",
	"unarbitrated":  "without scheduling",
	"arbitrated":    "scheduled",
	"arbitrates":    "schedules",
	"go around":     "bypass",
	"goes around":   "bypasses",
	"past the shim": "bypasses the shim",
}

// TestMessagesHaveWordsOfTheField reads the texts of programs, which may become messages, and the pages.
func TestMessagesHaveWordsOfTheField(t *testing.T) {
	var all []string
	for word := range words {
		all = append(all, regexp.QuoteMeta(word))
	}
	banned := regexp.MustCompile(`(?i)\b(` + strings.Join(all, "|") + `)\b`)
	check := func(where, text string) {
		for _, found := range banned.FindAllString(text, -1) {
			t.Errorf("%s: %q: say %s", where, found, words[strings.ToLower(found)])
		}
	}
	pages := regexp.MustCompile(`\.md$|^deployments/.*\.(yaml|json|txt|rules)$`)
	shim := regexp.MustCompile(`^hook/[^t].*\.[ch]$`)
	literal := regexp.MustCompile(`"(?:[^"\\\n]|\\.)*"`)
	programs := regexp.MustCompile(`^(cdi|plugin|sched)/.*\.go$`)
	generated := regexp.MustCompile(`_test\.go$|\.pb\.go$`)
	for _, name := range committed(t) {
		path := filepath.Join("../..", name)
		text, err := os.ReadFile(path)
		if err != nil || strings.Contains(name, "/results/") {
			continue // deleted, and not committed yet
		}
		switch {
		case pages.MatchString(name):
			check(name, string(text))
		case shim.MatchString(name):
			check(name, strings.Join(literal.FindAllString(string(text), -1), "\n"))
		}
		if !programs.MatchString(name) || generated.MatchString(name) {
			continue
		}
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, text, parser.SkipObjectResolution)
		if err != nil {
			continue
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
				if text, err := strconv.Unquote(lit.Value); err == nil {
					check(files.Position(lit.Pos()).String(), text)
				}
			}
			return true
		})
	}
}
