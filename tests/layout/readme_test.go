// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// pages lists the Markdown files of the tree.
func pages(t *testing.T) (paths []string) {
	t.Helper()
	for _, pattern := range []string{"../../*.md", "../../*/*.md", "../../*/*/*.md", "../../.github/*.md"} {
		found, err := filepath.Glob(pattern)
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: %v, %v", pattern, found, err)
		}
		for _, path := range found {
			if !strings.HasPrefix(path, "../../.") || strings.HasPrefix(path, "../../.github/") { // .build, say, which Glob matches too
				paths = append(paths, path)
			}
		}
	}
	return paths
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestEachFolderHasAPage(t *testing.T) {
	entries, err := os.ReadDir("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.IsDir() && !strings.HasPrefix(e.Name(), ".") {
			read(t, filepath.Join("../..", e.Name(), "README.md"))
		}
	}
}

var (
	link    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	noWord  = regexp.MustCompile(`[^a-z0-9 -]`)
)

// anchors returns the anchors that GitHub gives a page's headings.
func anchors(page string) map[string]bool {
	all := map[string]bool{}
	for _, h := range heading.FindAllStringSubmatch(page, -1) {
		all[strings.ReplaceAll(noWord.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-")] = true
	}
	return all
}

func TestLinksLeadSomewhere(t *testing.T) {
	links := 0
	for _, page := range pages(t) {
		for _, l := range link.FindAllStringSubmatch(read(t, page), -1) {
			if strings.Contains(l[1], "://") {
				continue
			}
			links++
			file, anchor, _ := strings.Cut(l[1], "#")
			target := page
			if file != "" {
				target = filepath.Join(filepath.Dir(page), file)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", page, l[1], err)
			} else if anchor != "" && !anchors(read(t, target))[anchor] {
				t.Errorf("%s links to %s, and %s has no such heading", page, l[1], target)
			}
		}
	}
	if links < 10 {
		t.Errorf("found %d links: the pattern is wrong", links)
	}
}

// The figures of tests/gpu name the raw results from which they come.
func TestFiguresHaveSources(t *testing.T) {
	for _, page := range []string{"../gpu/README.md", "../gpu/results/README.md"} {
		figuresHaveSources(t, page)
	}
}

func figuresHaveSources(t *testing.T, name string) {
	page := read(t, name)
	directory := map[string]string{}
	for _, d := range regexp.MustCompile("\\*(\\d+h?)\\*\\s+is\\s+`(results/[^`]*)`").FindAllStringSubmatch(page, -1) {
		directory[d[1]] = filepath.Join("../gpu", d[2])
	}
	sources := regexp.MustCompile(`\*(\d+h?)\*/([a-z0-9/.-]*[a-z0-9])`).FindAllStringSubmatch(page, -1)
	if len(directory) == 0 || len(sources) < 10 {
		t.Fatalf("%s: found %d sources in %v: the patterns are wrong", name, len(sources), directory)
	}
	for _, s := range sources {
		if _, err := os.Stat(filepath.Join(directory[s[1]], s[2])); err != nil {
			t.Errorf("%s names %s: %v", name, s[0], err)
		}
	}
}

// make help has a line for each target that people may call.
func TestHelpListsEveryTarget(t *testing.T) {
	makefile := strings.ReplaceAll(read(t, "../../Makefile"), "\\\n", " ")
	phony := regexp.MustCompile(`(?m)^\.PHONY:(.*)$`).FindStringSubmatch(makefile)
	if phony == nil {
		t.Fatal("the Makefile has no .PHONY")
	}
	targets := strings.Fields(phony[1])
	for _, target := range targets {
		if target != "root" && !regexp.MustCompile(`(?m)^`+target+`:.*## \S`).MatchString(makefile) {
			t.Errorf("make help does not show %s", target)
		}
	}
	for _, rule := range regexp.MustCompile(`(?m)^([a-z0-9-]+):.*## `).FindAllStringSubmatch(makefile, -1) {
		if !slices.Contains(targets, rule[1]) {
			t.Errorf("%s is not in .PHONY", rule[1])
		}
	}
}

// A shell has the flags with which the Makefile builds, after the line that CONTRIBUTING.md has for it.
func TestShellHasTheMakefilesFlags(t *testing.T) {
	const line = `eval "$(make -s env)"`
	if !strings.Contains(read(t, "../../.github/CONTRIBUTING.md"), line) {
		t.Fatalf("CONTRIBUTING.md has no %s", line)
	}
	cmd := exec.Command("sh", "-euc", line+"; go env GOFLAGS CGO_CFLAGS; echo $TAGS")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "GOFLAGS=") // of the make that runs this test
	out, err := cmd.CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if err != nil || len(lines) != 3 || !strings.HasSuffix(lines[0], " -trimpath -tags="+lines[2]) ||
		!strings.Contains(lines[1], "-Wno-deprecated-declarations") || lines[2] == "" {
		t.Errorf("%s: %v\n%s", line, err, out)
	}
	// make shell has the same: here the shell is one that prints them.
	printer := filepath.Join(t.TempDir(), "shell")
	if err := os.WriteFile(printer, []byte("#!/bin/sh\ngo env GOFLAGS CGO_CFLAGS; echo $TAGS; echo $NVSHARE_TEST_SIMGPU$MAKELEVEL\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	cmd = exec.Command("make", "-s", "shell", "BUILD=/built")
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "MAKEFLAGS=", "GOFLAGS=", "SHELL="+printer)
	if in, err := cmd.CombinedOutput(); err != nil || strings.TrimSpace(string(in)) != strings.TrimSpace(string(out))+"\n/built/simgpu" {
		t.Errorf("make shell: %v\n%s, want\n%s", err, in, out)
	}
}

// Docker looks for a Dockerfile unless it is told, and its BuildKit reads no .containerignore:
// the context would hold .build and .git.
func TestBuildxFindsItsFiles(t *testing.T) {
	for _, target := range []string{"buildx-load", "buildx-push"} {
		cmd := exec.Command("make", "-n", "-C", "../..", target, "IMAGE=registry.example/nvshare")
		cmd.Env = append(os.Environ(), "MAKEFLAGS=") // of the make that runs this test
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "docker buildx build -f Containerfile ") {
			t.Errorf("make %s: %v\n%s", target, err, out)
		}
	}
	for _, name := range []string{"/.build", "/.git"} {
		if !slices.Contains(strings.Fields(read(t, "../../.dockerignore")), name) {
			t.Errorf(".dockerignore lacks %s", name)
		}
	}
}

// Who chooses a test of the shim, or a case of one, is told what there is to choose from.
func TestChoiceOfAShimTest(t *testing.T) {
	fake := filepath.Join(t.TempDir(), "fake_test")
	if err := os.WriteFile(fake, []byte("#!/bin/sh\n[ $# = 0 ] || exit 1\necho its_only_case\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		command string
		fails   bool
		says    string
	}{
		{"make -s one", false, "memory_test"},
		{"make -s one TEST=nothing", true, "There is no nothing."},
		{"make -s one TEST=gate_test CASES=any", true, "gate_test has no cases"},
		{"make -s -n one TEST=memory_test CASES=any", false, "memory_test"},
		{"CASES=nothing ../../tests/suites/alone.sh sh preloaded.sh " + fake, true, "these: its_only_case"},
		{"CASES=nothing ../../tests/suites/alone.sh sh simulated.sh " + fake + " . 1 64 1", true, "these: its_only_case"},
	} {
		cmd := exec.Command("sh", "-c", c.command)
		cmd.Dir = "../../hook/test"
		cmd.Env = append(os.Environ(), "MAKEFLAGS=") // of the make that runs this test
		if out, err := cmd.CombinedOutput(); (err != nil) != c.fails || !strings.Contains(string(out), c.says) {
			t.Errorf("%s: %v\n%s", c.command, err, out)
		}
	}
}

// make -n shows what a target would do, in a clone that has nothing built, too.
func TestTargetsCanBeShown(t *testing.T) {
	args := []string{"-n", "-k", "-C", "../..", "BUILD=" + t.TempDir()}
	for _, rule := range regexp.MustCompile(`(?m)^([a-z0-9-]+):.*## `).FindAllStringSubmatch(read(t, "../../Makefile"), -1) {
		args = append(args, rule[1])
	}
	cmd := exec.Command("make", args...)
	cmd.Env = append(os.Environ(), "MAKEFLAGS=") // of the make that runs this test
	var said bytes.Buffer
	cmd.Stderr = &said
	if err := cmd.Run(); err != nil || len(args) < 40 {
		t.Errorf("make %s: %v\n%s", strings.Join(args, " "), err, said.String())
	}
}

// committed lists the files of the clone, from its top.
func committed(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("git", "-C", "../..", "ls-files", "-z").Output()
	if err != nil {
		t.Skipf("SKIPPED: this is no clone: %v", err)
	}
	return strings.Split(strings.TrimRight(string(out), "\x00"), "\x00")
}

// archaic are turns of phrase that a reader stumbles over.
var archaic = regexp.MustCompile(`(?i)\bof before\b( and after\b)?|\bfor want of\b|\bat one stroke\b|\bwhat there is of\b|\b(that|who|which) (is|are) no more\b`)

func TestEnglishIsPlain(t *testing.T) {
	for _, name := range committed(t) {
		if !slices.Contains([]string{".go", ".c", ".h", ".md", ".sh", ".proto", ".yaml"}, filepath.Ext(name)) || strings.Contains(name, "/results/") || name == "tests/layout/readme_test.go" {
			continue
		}
		text, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			continue // deleted, and not committed yet
		}
		for _, found := range archaic.FindAllString(string(text), -1) {
			if !strings.HasSuffix(found, "and after") {
				t.Errorf("%s: %q", name, found)
			}
		}
	}
}

// A program that was compiled in its folder is easily committed with it.
func TestNoProgramIsCommitted(t *testing.T) {
	for _, name := range committed(t) {
		f, err := os.Open(filepath.Join("../..", name))
		if err != nil {
			continue // deleted, and not committed yet
		}
		var magic [4]byte
		_, _ = f.Read(magic[:])
		f.Close()
		if string(magic[:]) == "\x7fELF" {
			t.Errorf("%s is a program", name)
		}
	}
}

// CHANGELOG.md has the form of Keep a Changelog 1.1: versions, newest first, with what changed by
// kind. The builds take their version from its first one.
func TestChangelogKeepsItsForm(t *testing.T) {
	page := read(t, "../../CHANGELOG.md")
	if !strings.HasPrefix(page, "# Changelog\n") {
		t.Error("CHANGELOG.md does not begin with # Changelog")
	}
	kinds := []string{"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
	version := regexp.MustCompile(`^\[\d+\.\d+\.\d+\] - (Unreleased|\d{4}-\d\d-\d\d)$|^\[Unreleased\]$`)
	versions := 0
	var seen []string // kinds of this version
	for _, h := range regexp.MustCompile(`(?m)^(##|###) (.*)$`).FindAllStringSubmatch(page, -1) {
		switch {
		case h[1] == "##":
			versions, seen = versions+1, nil
			if !version.MatchString(h[2]) {
				t.Errorf("%q is no version with its date, or Unreleased", h[2])
			}
		case versions == 0 || !slices.Contains(kinds, h[2]) || slices.Contains(seen, h[2]):
			t.Errorf("%q: want one of %v, once in a version", h[2], kinds)
		default:
			seen = append(seen, h[2])
		}
	}
	if !regexp.MustCompile(`(?m)^## \[\d`).MatchString(page) {
		t.Error("CHANGELOG.md names no version: the builds have theirs from it")
	}
}
