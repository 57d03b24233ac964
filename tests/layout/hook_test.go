// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// layers of the shim, from the ground up. A file includes headers of its own
// layer and of those below; hook/wire.h is for all.
var layers = []string{"os", "rm", "core", "memory", "swap", "cuda", "nvml"}

var (
	include  = regexp.MustCompile(`(?m)^#include "([^"]+)"`)
	comments = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	driver   = regexp.MustCompile(`\bcu[A-Z]\w*`)
)

type source struct {
	path, layer, unit, text string
	includes                []string
}

// hookSources reads the sources of all layers, and tells in which layer each
// header is. A unit is a header and the source of the same name.
func hookSources(t *testing.T) (sources []source, layerOf map[string]string) {
	t.Helper()
	layerOf = map[string]string{}
	for _, layer := range layers {
		files, err := filepath.Glob("../../hook/" + layer + "/*.[ch]")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			base := filepath.Base(f)
			s := source{path: layer + "/" + base, layer: layer, unit: layer + "/" + strings.TrimSuffix(strings.TrimSuffix(base, ".c"), ".h"), text: string(text)}
			for _, m := range include.FindAllStringSubmatch(s.text, -1) {
				s.includes = append(s.includes, m[1])
			}
			if strings.HasSuffix(base, ".h") {
				if other, twice := layerOf[base]; twice {
					t.Errorf("%s and %s/%s have the same name: a quoted include finds one of them", s.path, other, base)
				}
				layerOf[base] = layer
			}
			sources = append(sources, s)
		}
	}
	if len(sources) < 30 {
		t.Fatalf("found %d sources below hook: the pattern is wrong", len(sources))
	}
	return sources, layerOf
}

func TestHookIncludesPointDown(t *testing.T) {
	sources, layerOf := hookSources(t)
	for _, s := range sources {
		for _, header := range s.includes {
			layer, known := layerOf[header]
			switch {
			case header == "wire.h":
			case !known:
				t.Errorf("hook/%s includes %q, which is in no layer", s.path, header)
			case slices.Index(layers, layer) > slices.Index(layers, s.layer):
				t.Errorf("hook/%s includes %s/%s: %s is above %s", s.path, layer, header, layer, s.layer)
			}
		}
	}
}

// TestHookHasNoCircleOfIncludes looks at units: a source and its header count
// as one, so that two sources that call each other are seen.
func TestHookHasNoCircleOfIncludes(t *testing.T) {
	sources, layerOf := hookSources(t)
	edges := map[string]map[string]bool{}
	for _, s := range sources {
		if edges[s.unit] == nil {
			edges[s.unit] = map[string]bool{}
		}
		for _, header := range s.includes {
			if to := layerOf[header] + "/" + strings.TrimSuffix(header, ".h"); layerOf[header] != "" && to != s.unit {
				edges[s.unit][to] = true
			}
		}
	}
	reach := func(from string) map[string]bool {
		seen := map[string]bool{}
		var walk func(string)
		walk = func(u string) {
			for v := range edges[u] {
				if !seen[v] {
					seen[v] = true
					walk(v)
				}
			}
		}
		walk(from)
		return seen
	}
	done := map[string]bool{}
	for _, u := range slices.Sorted(maps.Keys(edges)) {
		there := reach(u)
		if !there[u] || done[u] {
			continue
		}
		var circle []string
		for _, v := range slices.Sorted(maps.Keys(there)) {
			if reach(v)[u] {
				circle = append(circle, v)
				done[v] = true
			}
		}
		t.Errorf("%d units of hook include each other: %s", len(circle), strings.Join(circle, " "))
	}
}

// TestHookCoreKnowsNoCUDA: the lower layers call the driver by core/driver.h.
func TestHookCoreKnowsNoCUDA(t *testing.T) {
	sources, _ := hookSources(t)
	for _, s := range sources {
		if s.layer != "os" && s.layer != "core" {
			continue
		}
		if found := driver.FindAllString(comments.ReplaceAllString(s.text, ""), -1); found != nil {
			t.Errorf("hook/%s names functions of the CUDA driver: %v", s.path, found)
		}
	}
}
