// SPDX-License-Identifier: Apache-2.0

// Package model checks lease.pml with Spin: the promises of gate, lease and scheduler
// together, in each order of their steps.
package model

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// A check is one run of the model checker over all states that the settings reach.
type check struct {
	name     string
	settings string // macros of lease.pml
	liveness bool   // the property "served", under weak fairness, instead of the assertions
	broken   bool   // a part is turned off: the checker must find two holders at a time
	more     bool   // only in make model, because lease.pml rarely changes
	full     bool   // takes a minute or more: only with NVSHARE_MODEL_FULL
}

var checks = []check{
	{name: "served", settings: "CRASHES=0 WHO=0", liveness: true},
	{name: "moves", settings: "CRASHES=0 MOVES"},
	{name: "no flag of calls in flight", settings: "CRASHES=0 NO_INFLIGHT", broken: true},
	{name: "holders not recorded", settings: "CRASHES=1 NO_PERSIST", broken: true},

	{name: "crash", settings: "CRASHES=1", more: true},
	{name: "channels on while a call is in flight", settings: "CRASHES=0 PREEMPTIONS=9 FINISH_EARLY", broken: true, more: true},
	{name: "early release before the grant is read", settings: "CRASHES=0 IDLE_EARLY", broken: true, more: true},
	{name: "released epoch opens again", settings: "CRASHES=0 NO_CLOSED", broken: true, more: true},

	{name: "moves and crash", settings: "CRASHES=1 MOVES", full: true},
	{name: "served though memory moves", settings: "CRASHES=0 MOVES WHO=0", liveness: true, full: true},
	{name: "moves and fence", settings: "CRASHES=0 MOVES FENCES=1", full: true},
	{name: "fence", settings: "CRASHES=0 FENCES=1", full: true},
	{name: "preempt", settings: "CRASHES=0 PREEMPTIONS=1", full: true},
	{name: "preempt and crash", settings: "CRASHES=1 PREEMPTIONS=1", full: true},
	{name: "preempt and cut", settings: "CRASHES=0 CUTS=1 PREEMPTIONS=1", full: true},
	{name: "preempt and kill", settings: "CRASHES=0 KILLS=1 PREEMPTIONS=1", full: true},
	{name: "served though drains are cut", settings: "CRASHES=0 PREEMPTIONS=1 WHO=0", liveness: true, full: true},
	{name: "cut", settings: "CRASHES=0 CUTS=1", full: true},
	{name: "kill", settings: "CRASHES=0 KILLS=1", full: true},
	{name: "served after a crash", settings: "CRASHES=1 WHO=0", liveness: true, full: true},
	{name: "next holder recorded", settings: "CRASHES=1 CHOSEN", full: true},
	{name: "next holder recorded and fence", settings: "CRASHES=0 CHOSEN FENCES=1", full: true},
}

func TestModel(t *testing.T) {
	for _, program := range []string{"spin", "gcc"} {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not installed: the model of grants is not checked (apt-get install spin gcc)", program)
		}
	}
	model, err := filepath.Abs("lease.pml")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			full := os.Getenv("NVSHARE_MODEL_FULL") != ""
			if c.full && !full {
				t.Skip("only with NVSHARE_MODEL_FULL=1")
			}
			if c.more && !full && os.Getenv("NVSHARE_MODEL") == "" {
				t.Skip("only in make model (NVSHARE_MODEL=1)")
			}
			t.Parallel()
			c.run(t, model)
		})
	}
}

// For each name of the code: where the model has it, or why not.
const (
	noScheduler = "a client without a scheduler is left out"
	noMatter    = "grants do not depend on it"
)

var states = map[string]string{
	"LEASE_UNUSED": "DETACHED", "LEASE_DETACHED": "DETACHED", "LEASE_ATTACHING": "ATTACHING", "LEASE_ATTACHED": "LINKED", "LEASE_REJECTED": noScheduler,
	"LEASE_CLOSED": "SHUT", "LEASE_OPEN": "OPEN", "LEASE_DRAINING": "DRAINING", "LEASE_DRAINED": "DRAINED", "LEASE_FREE": noScheduler,

	"LEASE_EV_USE": "LEASE_EV_UP", "LEASE_EV_UP": "LEASE_EV_UP", "LEASE_EV_DOWN": "LEASE_EV_DOWN", "LEASE_EV_ATTACHED": "on_attached", "LEASE_EV_GRANT": "open_gate",
	"LEASE_EV_REVOKE": "on_revoke", "LEASE_EV_WANT": "waiting", "LEASE_EV_LEAVE": "waiting", "LEASE_EV_WORD": "closed_gate", "LEASE_EV_NUDGE": "frames arrive, or the connection ends",
	"LEASE_EV_IDLE": "LEASE_EV_IDLE", "LEASE_EV_DRAINED": "LEASE_EV_DRAINED", "LEASE_EV_PREEMPTED": "LEASE_EV_PREEMPTED", "LEASE_EV_FINISHED": "LEASE_EV_FINISHED", "LEASE_EV_GIVE_UP": noScheduler,

	"NVS_REGISTER": "LEASE_EV_UP", "NVS_ATTACH": "ATTACH", "NVS_REQUEST": "REQUEST", "NVS_RELEASE": "RELEASE", "NVS_STATS": noMatter, "NVS_RESERVE": noMatter, "NVS_MOVED": "nvs_channel_filled", "NVS_UTIL": noMatter, "NVS_SLICE": noMatter, "NVS_CONTROLS": noMatter, "NVS_SUSPENDED": noMatter,
	"NVS_WELCOME": "LEASE_EV_UP", "NVS_ATTACHED": "ATTACHED", "NVS_GRANT": "GRANT", "NVS_REVOKE": "REVOKE", "NVS_NOTICE": "queued", "NVS_REFUSED": "cut", "NVS_RESERVED": noMatter, "NVS_ROOM": "MOVES", "NVS_ARENA": "MOVES", "NVS_SUSPEND": noMatter,
}

// The model covers the code's states, events and frames. A new one needs an entry here
// that says where the model has it, or why not.
func TestModelKnowsTheCode(t *testing.T) {
	model, err := os.ReadFile("lease.pml")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for file, enums := range map[string][]string{"core/lease.h": {"lease_link", "lease_gate", "lease_event_type"}, "wire.h": {"nvs_type"}} {
		text, err := os.ReadFile(filepath.Join("..", "..", "hook", file))
		if err != nil {
			t.Fatal(err)
		}
		for _, enum := range enums {
			_, body, _ := strings.Cut(string(text), "enum "+enum+" {")
			body, _, ok := strings.Cut(body, "\n};")
			if !ok {
				t.Fatalf("%s has no enum %s", file, enum)
			}
			for line := range strings.Lines(body) {
				name := regexp.MustCompile(`^\s*([A-Z][A-Z_]*)`).FindString(line)
				if name = strings.TrimSpace(name); name == "" {
					continue
				}
				found++
				switch in := states[name]; {
				case in == "":
					t.Errorf("%s: the model does not know %s", file, name)
				case !strings.Contains(in, " ") && !strings.Contains(string(model), in):
					t.Errorf("%s is %s in the model, which has no such thing", name, in)
				}
			}
		}
	}
	if found != len(states) {
		t.Errorf("the code has %d of %d names", found, len(states))
	}
}

func (c check) run(t *testing.T, model string) {
	dir := t.TempDir()
	command := func(name string, args ...string) string {
		cmd := exec.Command(name, args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		// pan exits with 0 also when it finds an error.
		if err != nil {
			t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
		}
		return string(out)
	}
	generate := []string{"-a"}
	for _, s := range strings.Fields(c.settings) {
		generate = append(generate, "-D"+s)
	}
	command("spin", append(generate, model)...)

	optimise := "-O0"
	if c.full || !c.broken && strings.Contains(c.settings, "CRASHES=1") {
		optimise = "-O2" // here the search takes longer than compiling
	}
	compile := []string{optimise, "-w", "-DCOLLAPSE", "-o", "pan", "pan.c"}
	search := []string{"-m2000000"}
	if c.liveness {
		compile = append(compile, "-DNFAIR=3") // room for nine processes
		search = append(search, "-a", "-f")
	} else {
		compile = append(compile, "-DSAFETY", "-DNOCLAIM")
	}
	command("gcc", compile...)

	out := command("./pan", search...)
	_, counted, _ := strings.Cut(out, "State-vector")
	t.Logf("%s: %s", c.settings, firstLines(counted, 2))
	if strings.Contains(out, "max search depth too small") || strings.Contains(out, "out of memory") || counted == "" {
		t.Fatalf("the search did not end:\n%s", out)
	}
	found := !strings.Contains(out, "errors: 0\n")
	overlap := strings.Contains(out, "assertion violated") && strings.Contains(out, "work[")
	switch {
	case c.broken && !overlap:
		t.Errorf("%s: the checker does not find two processes on the GPU:\n%s", c.settings, out)
	case !c.broken && found:
		trail := command("spin", append([]string{"-t", "-k", "lease.pml.trail", "-p"}, append(generate[1:], model)...)...)
		t.Errorf("%s: %s\nthe way there ends with:\n%s", c.settings, out, lastLines(trail, 60))
	}
}

func firstLines(s string, n int) string {
	lines := strings.SplitN(s, "\n", n+1)
	return strings.Join(lines[:min(n, len(lines))], ",")
}

func lastLines(s string, n int) string {
	lines := bytes.Split([]byte(s), []byte("\n"))
	return string(bytes.Join(lines[max(0, len(lines)-n):], []byte("\n")))
}
