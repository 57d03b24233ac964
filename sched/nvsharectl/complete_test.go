// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// Shells complete to the tenants and GPUs that there are.
func TestCompletion(t *testing.T) {
	r := sample()
	r.Containers = []*api.Container{{Id: "x", Name: "train", Engine: "podman"}}
	dir := serve(t, &fake{status: r})
	for args, want := range map[string][]string{
		"why ":                            {"ml/train-a/main", "user 1000"},
		"set ":                            {"ml/train-a/main", "user 1000"},
		"suspend ":                        {"ml/train-a/main", "user 1000"},
		"migrate ":                        {"ml/train-a/main"},
		"doctor test --gpu ":              {"0\tNVIDIA SimGPU"},
		"set --container ":                {"train", "ml/train-b/main"},
		"events --tenant ":                {"ml/train-a/main"},
		"events --type ":                  {"turn", "out-of-memory"},
		"status --gpu ":                   {"0\tNVIDIA SimGPU"},
		"set --priority ":                 {"latency"},
		"-o ":                             {"yaml"},
		"config ":                         {"list", "reset", "set"},
		"config set ":                     {"turn-length\t", "anti-thrash\t", "swap-share\t"},
		"config set anti-thrash ":         {"on", "off", "auto"},
		"config set turn-length 1 --gpu ": {"0\tNVIDIA SimGPU"},
		"config reset ":                   {"turn-length\t"},
		"config reset turn-length ":       {"swap-share\t"},
		"stat":                            {"status"},
	} {
		words := strings.Split(args, " ")
		code, out, errs := ctl(append(append([]string{"__complete", "--run-dir", dir}, words[:len(words)-1]...), words[len(words)-1])...)
		for _, w := range want {
			if code != exitOK || !strings.Contains("\n"+out, "\n"+w) {
				t.Errorf("%q: exit %d, %q lacks %q; %s", args, code, out, w, errs)
			}
		}
	}
}

// Each type of event that is offered is one that the command takes.
func TestCompletionOfTypes(t *testing.T) {
	dir := serve(t, &fake{status: sample()})
	_, out, _ := ctl("__complete", "--run-dir", dir, "events", "--type", "")
	types := strings.Fields(out)
	if len(types) < 10 || types[len(types)-1] != ":4" {
		t.Fatalf("offered: %q", out)
	}
	for _, name := range types[:len(types)-1] {
		if code, _, errs := ctl("--run-dir", dir, "events", "--type", name); code == exitUsage {
			t.Errorf("%s is offered: %s", name, errs)
		}
	}
}

// What is offered is what the command takes.
func TestCompletionOfOutput(t *testing.T) {
	for args, want := range map[string]string{
		"-o":                    "table wide json yaml :4",
		"status -o":             "table wide json yaml :4",
		"events -o":             "text json :4",
		"why -o":                "text json yaml :4",
		"cdi generate --output": ":0", // files
	} {
		_, out, errs := ctl(append(append([]string{"__complete"}, strings.Fields(args)...), "")...)
		if got := strings.Join(strings.Fields(out), " "); got != want {
			t.Errorf("%s: got %q, want %q; %s", args, got, want, errs)
		}
	}
}

func TestPages(t *testing.T) {
	dir := t.TempDir()
	if code, _, errs := ctl("pages", dir); code != exitOK {
		t.Fatalf("exit %d, %s", code, errs)
	}
	for file, want := range map[string]string{
		"man/man1/nvsharectl.1":                     "nvsharectl",
		"man/man1/nvsharectl-why.1":                 "waiting",
		"bash-completion/completions/nvsharectl":    "__complete",
		"zsh/site-functions/_nvsharectl":            "#compdef nvsharectl",
		"fish/vendor_completions.d/nvsharectl.fish": "complete -c nvsharectl",
	} {
		if text, err := os.ReadFile(filepath.Join(dir, file)); err != nil || !strings.Contains(string(text), want) {
			t.Errorf("%s: %v, %d bytes without %q", file, err, len(text), want)
		}
	}
}
