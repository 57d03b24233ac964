// SPDX-License-Identifier: Apache-2.0

// Package layout guards the shape of the tree: which package may import
// which, and what stands at the top level.
package layout

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/nvshare/nvshare/"

// rules: what a package may reach inside this module, directly or not.
// A package that is not listed here fails the test, so that each new one gets
// its place on purpose.
var rules = map[string][]string{
	"cdi":                      {"cdi/ldcache"},
	"cdi/ldcache":              {},
	"cdi/nvshare-cdi-hook":     {"cdi/ldcache", "sched/api"},
	"plugin":                   {"plugin/placement", "cdi", "cdi/ldcache", "sched/api"},
	"plugin/kube":              {"plugin", "plugin/placement", "cdi", "cdi/ldcache", "sched/api"},
	"plugin/dra":               {"plugin", "plugin/placement", "cdi", "cdi/ldcache", "sched/api"},
	"plugin/nvshare-plugin":    {"plugin", "plugin/dra", "plugin/kube", "plugin/placement", "cdi", "cdi/ldcache", "sched/api", "sched/journal", "sched/manual"},
	"plugin/placement":         {},
	"sched":                    core,
	"sched/base":               {},
	"sched/residency":          {"sched/base"},
	"sched/account":            {"sched/base"},
	"sched/gang":               {"sched/base"},
	"sched/timeslice":          {"sched/base"},
	"sched/wire":               {},
	"sched/api":                {},
	"sched/checkpoint":         {},
	"sched/cuda":               {},
	"sched/cgroup":             {},
	"sched/placement":          {},
	"sched/segments":           {},
	"sched/journal":            {},
	"sched/manual":             {},
	"sched/nvshare-checkpoint": {"sched/checkpoint", "sched/segments", "sched/wire", "sched/api"},
	"sched/daemon":             {"sched", "sched/api", "sched/cgroup", "sched/checkpoint", "sched/daemon/admission", "sched/daemon/arena", "sched/daemon/away", "sched/daemon/history", "sched/daemon/loop", "sched/daemon/memory", "sched/daemon/metrics", "sched/daemon/moves", "sched/daemon/node", "sched/daemon/overlap", "sched/daemon/page", "sched/daemon/peer", "sched/daemon/rundir", "sched/daemon/settings", "sched/daemon/state", "sched/daemon/store", "sched/daemon/tenants", "sched/daemon/timer", "sched/daemon/watch", "sched/placement", "sched/segments", "sched/warden/order", "sched/web", "sched/wire"},
	"sched/daemon/admission":   {},
	"sched/daemon/arena":       {"sched", "sched/cgroup", "sched/daemon/loop", "sched/daemon/timer", "sched/segments"},
	"sched/daemon/away":        {"sched", "sched/api", "sched/cgroup", "sched/checkpoint", "sched/daemon/admission", "sched/daemon/arena", "sched/daemon/history", "sched/daemon/loop", "sched/daemon/memory", "sched/daemon/metrics", "sched/daemon/node", "sched/daemon/page", "sched/daemon/peer", "sched/daemon/state", "sched/daemon/store", "sched/daemon/tenants", "sched/daemon/timer", "sched/segments", "sched/wire"},
	"sched/daemon/history":     {"sched", "sched/api", "sched/daemon/peer"},
	"sched/daemon/loop":        {"sched", "sched/daemon/timer"},
	"sched/daemon/memory":      {"sched", "sched/api", "sched/cgroup", "sched/checkpoint", "sched/daemon/admission", "sched/daemon/arena", "sched/daemon/history", "sched/daemon/loop", "sched/daemon/metrics", "sched/daemon/node", "sched/daemon/page", "sched/daemon/peer", "sched/daemon/state", "sched/daemon/tenants", "sched/daemon/timer", "sched/segments", "sched/wire"},
	"sched/daemon/metrics":     {"sched", "sched/wire", "sched/api", "sched/daemon/peer"},
	"sched/daemon/moves":       {"sched", "sched/api", "sched/cgroup", "sched/checkpoint", "sched/daemon/admission", "sched/daemon/arena", "sched/daemon/away", "sched/daemon/history", "sched/daemon/loop", "sched/daemon/memory", "sched/daemon/metrics", "sched/daemon/node", "sched/daemon/page", "sched/daemon/peer", "sched/daemon/state", "sched/daemon/store", "sched/daemon/tenants", "sched/daemon/timer", "sched/placement", "sched/segments", "sched/wire"},
	"sched/daemon/node":        {"sched", "sched/api", "sched/cgroup", "sched/checkpoint", "sched/daemon/admission", "sched/daemon/arena", "sched/daemon/history", "sched/daemon/loop", "sched/daemon/metrics", "sched/daemon/page", "sched/daemon/peer", "sched/daemon/timer", "sched/segments", "sched/wire"},
	"sched/daemon/overlap":     {"sched/api", "sched/daemon/peer"},
	"sched/daemon/page":        {"sched/wire"},
	"sched/daemon/peer":        {},
	"sched/daemon/rundir":      {"sched/wire", "sched/api"},
	"sched/daemon/settings":    {"sched", "sched/api", "sched/daemon/loop", "sched/daemon/peer", "sched/daemon/state", "sched/daemon/timer", "sched/wire"},
	"sched/daemon/state":       {"sched", "sched/daemon/loop", "sched/daemon/timer"},
	"sched/daemon/store":       {"sched", "sched/cgroup", "sched/daemon/arena", "sched/daemon/loop", "sched/daemon/peer", "sched/daemon/timer", "sched/segments"},
	"sched/daemon/tenants":     {"sched", "sched/api", "sched/cgroup", "sched/checkpoint", "sched/daemon/admission", "sched/daemon/arena", "sched/daemon/history", "sched/daemon/loop", "sched/daemon/metrics", "sched/daemon/node", "sched/daemon/page", "sched/daemon/peer", "sched/daemon/state", "sched/daemon/timer", "sched/segments", "sched/wire"},
	"sched/daemon/timer":       {"sched"},
	"sched/daemon/watch":       {"sched", "sched/api", "sched/cgroup", "sched/checkpoint", "sched/daemon/admission", "sched/daemon/arena", "sched/daemon/history", "sched/daemon/loop", "sched/daemon/metrics", "sched/daemon/node", "sched/daemon/page", "sched/daemon/peer", "sched/daemon/state", "sched/daemon/tenants", "sched/daemon/timer", "sched/segments", "sched/warden/order", "sched/wire"},
	"sched/nvshare-scheduler":  {"cdi", "cdi/ldcache", "sched", "sched/api", "sched/cgroup", "sched/checkpoint", "sched/daemon", "sched/daemon/admission", "sched/daemon/arena", "sched/daemon/away", "sched/daemon/history", "sched/daemon/loop", "sched/daemon/memory", "sched/daemon/metrics", "sched/daemon/moves", "sched/daemon/node", "sched/daemon/overlap", "sched/daemon/page", "sched/daemon/peer", "sched/daemon/rundir", "sched/daemon/settings", "sched/daemon/state", "sched/daemon/store", "sched/daemon/tenants", "sched/daemon/timer", "sched/daemon/watch", "sched/journal", "sched/manual", "sched/placement", "sched/segments", "sched/warden/order", "sched/web", "sched/wire"},
	"sched/nvshare-warden":     {"sched/cgroup", "sched/warden", "sched/warden/order", "sched/warden/rm", "sched/api", "sched/journal", "sched/manual"},
	"sched/warden":             {"sched/api", "sched/cgroup", "sched/warden/order", "sched/warden/rm"},
	"sched/warden/order":       {},
	"sched/warden/rm":          {},
	"sched/web":                {"sched/api"},
	"sched/web/page/uplot":     {},
	"sched/nvsharectl":         {"sched/api", "sched/cgroup", "sched/checkpoint", "sched/cuda", "sched/manual", "sched/web", "cdi", "cdi/ldcache"},
}

// core lists the parts of the scheduler's core, which sched puts together. Who may import sched reaches
// them too.
var core = []string{"sched/base", "sched/residency", "sched/timeslice", "sched/gang", "sched/account"}

// standardOnly lists the packages that import nothing but the standard library.
var standardOnly = []string{"sched", "sched/base", "sched/account", "sched/gang", "sched/timeslice", "sched/residency", "sched/cgroup", "sched/cuda", "sched/placement", "sched/wire", "plugin/placement"}

func goList(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Dir = "../.."
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %v: %v", args, err)
	}
	return strings.Fields(string(out))
}

func TestImportsPointOneWay(t *testing.T) {
	for _, line := range goList(t, "-f", `{{.ImportPath}}{{range .Deps}},{{.}}{{end}}`, "./...") {
		pkg, list, _ := strings.Cut(line, ",")
		name := strings.TrimPrefix(pkg, module)
		if strings.HasPrefix(name, "tests/") {
			continue
		}
		allowed, known := rules[name]
		if !known {
			t.Errorf("package %s has no rule: give it its place in rules", name)
			continue
		}
		for dep := range strings.SplitSeq(list, ",") {
			rel, ours := strings.CutPrefix(dep, module)
			switch {
			case ours && slices.Contains(core, rel) && slices.Contains(allowed, "sched"):
			case ours && !slices.Contains(allowed, rel):
				t.Errorf("%s imports %s: allowed are %v", name, rel, allowed)
			case slices.Contains(standardOnly, name) && !ours && strings.Contains(strings.Split(dep, "/")[0], "."):
				t.Errorf("%s imports %s: it may use the standard library only", name, dep)
			}
		}
	}
}

func TestCoreHasNoClockOrIO(t *testing.T) {
	for _, pkg := range append([]string{"sched", "sched/placement", "tests/sim", "plugin/placement"}, core...) {
		files, err := filepath.Glob("../../" + pkg + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatalf("no files in %s: %v", pkg, err)
		}
		for _, f := range files {
			if strings.HasSuffix(f, "_test.go") {
				continue
			}
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			for _, bad := range []string{"time.Now", "time.Since", "time.After", "time.Sleep", "\tgo ", "\"os\"", "\"net\"", "\"sync\""} {
				if strings.Contains(string(text), bad) {
					t.Errorf("%s contains %q: the core is a pure state machine", f, bad)
				}
			}
		}
	}
}

func TestTopLevel(t *testing.T) {
	want := []string{"CHANGELOG.md", "Containerfile", "LICENSE", "Makefile", "README.md",
		"cdi", "deployments", "go.mod", "go.sum", "hook", "plugin", "sched", "tests"}
	entries, err := os.ReadDir("../..")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			got = append(got, e.Name())
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("top level holds\n%v\nwant\n%v", got, want)
	}
}
