// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	mostFileLines     = 500
	mostFunctionLines = 60
)

// tables may have any length: one looks a line up, and reads them never as a whole.
var tables = []string{"hook/wire.h"}

var (
	generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)
	// A C function: what stands before its parameters at the begin of a line, and its body from brace to brace.
	cFunction = regexp.MustCompile(`(?ms)^[^\s#/{}][^;{}]*?(\w+)\([^;{}]*\)\n\{\n.*?^\}$`)
)

type function struct {
	name  string
	lines int
}

func goFunctions(t *testing.T, path string, text []byte) (all []function) {
	t.Helper()
	positions := token.NewFileSet()
	file, err := parser.ParseFile(positions, path, text, 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok {
			all = append(all, function{f.Name.Name, positions.Position(f.End()).Line - positions.Position(f.Pos()).Line + 1})
		}
	}
	return all
}

func cFunctions(text []byte) (all []function) {
	for _, m := range cFunction.FindAllSubmatch(text, -1) {
		body := m[0][bytes.Index(m[0], []byte("\n{\n"))+1:]
		all = append(all, function{string(m[1]), bytes.Count(body, []byte("\n")) + 1})
	}
	return all
}

// isProduction tells whether a file is neither a test nor what tests use.
func isProduction(path string) bool {
	for _, dir := range strings.Split(filepath.Dir(path), "/") {
		if dir == "test" || dir == "fuzz" || dir == "testdata" {
			return false
		}
	}
	return slices.Contains([]string{".go", ".c", ".h"}, filepath.Ext(path)) && !strings.HasSuffix(path, "_test.go")
}

func TestFilesAndFunctionsAreShort(t *testing.T) {
	files, functions := map[string]int{}, map[string]int{}
	for _, root := range []string{"hook", "sched", "cdi", "plugin"} {
		err := fs.WalkDir(os.DirFS("../.."), root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !isProduction(path) {
				return err
			}
			text, err := os.ReadFile("../../" + path)
			if err != nil || generated.Match(text) {
				return err
			}
			language := filepath.Ext(path)
			files[language]++
			if lines := bytes.Count(text, []byte("\n")); lines > mostFileLines && !slices.Contains(tables, path) {
				t.Errorf("%s has %d lines, %d at most: find the part that has a name of its own", path, lines, mostFileLines)
			}
			all := cFunctions(text)
			if language == ".go" {
				all = goFunctions(t, path, text)
			}
			functions[language] += len(all)
			for _, f := range all {
				if f.lines > mostFunctionLines {
					t.Errorf("%s: %s has %d lines, %d at most: find the part that has a name of its own", path, f.name, f.lines, mostFunctionLines)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, language := range []string{".go", ".c"} {
		if files[language] < 50 || functions[language] < 500 {
			t.Errorf("found %d files and %d functions of %s: the pattern is wrong", files[language], functions[language], language)
		}
	}
	t.Logf("files %v, functions %v", files, functions)
}
