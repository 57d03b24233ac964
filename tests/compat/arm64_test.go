//go:build compat

// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
)

func needArm64(t *testing.T) {
	t.Helper()
	if runtime.GOARCH == "arm64" {
		t.Skip("this machine is one: its own tests say it")
	}
	need(t, "qemu-aarch64", "aarch64-linux-gnu-gcc")
}

// emulated is a command that the emulator runs with the C library below root, which is of
// the other architecture.
func emulated(root, preload, libraries string, argv ...string) *exec.Cmd {
	args := []string{"-L", root, "-E", "LD_LIBRARY_PATH=" + libraries}
	if preload != "" {
		args = append(args, "-E", "LD_PRELOAD="+preload)
	}
	cmd := exec.Command("qemu-aarch64", append(args, argv...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "NVSHARE_RUN_DIR=" + run, "NVSHARE_SIMGPU_DIR=" + sim}
	return cmd
}

const arm64Root = "/usr/aarch64-linux-gnu"

// arm64 runs emulated programs with the shim and the simulated GPU of their architecture,
// under this machine's scheduler, next to this machine's programs.
func arm64(t *testing.T) {
	at := func(name string) string { return program("arm64/" + name) }
	for name, c := range map[string]struct{ preload, program, way string }{
		"linked":                           {at("lib/libnvshare.so"), at("compat/probe-linked"), "linked"},
		"dlsym of the next":                {at("lib/libnvshare.so"), at("compat/probe-linked"), "next"},
		"dlopen and dlsym":                 {at("lib/libnvshare.so"), at("compat/probe"), "dlsym"},
		"the resolver, streams a thread":   {at("lib/libnvshare.so"), at("compat/probe"), "thread"},
		"before one that interposes dlsym": {at("lib/libnvshare.so") + ":" + at("compat/libfinds.so"), at("compat/probe"), "legacy"},
		"after one that interposes dlsym":  {at("compat/libfinds.so") + ":" + at("lib/libnvshare.so"), at("compat/probe"), "dlsym"},
	} {
		check(t, "arm64: "+name, func(t *testing.T) {
			t.Parallel()
			needArm64(t)
			managed(t, emulated(arm64Root, c.preload, at("simgpu"), c.program, c.way))
		})
	}
	check(t, "arm64: in a child", func(t *testing.T) {
		t.Parallel()
		needArm64(t)
		managed(t, emulated(arm64Root, at("lib/libnvshare.so"), at("simgpu"), at("compat/probe"), "fork", "dlsym"))
	})
}

// notEmulated lists tests that fail because of the emulator. It has a thread of its own
// in each process, keeps descriptors open, is slow at times, fails at forks beside busy
// threads, does vfork as fork, lacks parts of prctl, and is not registered with the kernel
// for execve.
var notEmulated = []string{
	"forks", "descriptors_nobody_asked_for", "depth_follows_short_work", "small_allocations_stay_in_the_process",
	"forks_while_threads_are_at_work", "fork_in_a_handler_at_the_gate", "exec_is_a_new_client",
	"loss_takes_back_a_suspension",
}

// arm64Tests are the shim's own tests, emulated: of what is written for an architecture, and with make compat of all.
func arm64Tests(t *testing.T) {
	dir := program("arm64/hook-test")
	own := program("arm64/lib/libnvshare.so")
	other := filepath.Join(dir, "libinterposer.so")
	var again atomic.Bool // the first that fails runs once more, as in preloaded.sh
	test := func(name, preload string, argv ...string) {
		check(t, "arm64: "+name, func(t *testing.T) {
			t.Parallel()
			needArm64(t)
			argv := slices.Clone(argv)
			argv[0] = filepath.Join(dir, argv[0])
			run := func() (string, error) {
				cmd := emulated(arm64Root, preload, dir, argv...)
				cmd.Env = append(cmd.Env, "NVSHARE_RUN_DIR=/nonexistent", "TMPDIR="+os.TempDir())
				return output(t, cmd)
			}
			text, err := run()
			if err != nil && !again.Swap(true) {
				if _, later := run(); later == nil {
					fmt.Printf("PASSED AGAIN: arm64 %s: %v\n%s\n", name, err, text)
					return
				}
			}
			if err != nil {
				t.Errorf("%v: %v\n%s", argv, err, text)
			}
		})
	}
	test("golden", "", "golden", "--check", "../golden/v1")
	test("resolve", own, "resolve_test")
	test("resolve, linked", own, "resolve_linked_test")
	test("gate", own, "gate_test", "1")
	test("interposer before", other+":"+own, "reach_linked_test", "interposer_before_us")
	test("interposer after", own+":"+other, "reach_linked_test", "interposer_after_us")
	suites := []string{"submit_test", "reach_test"}
	if images { // what depends on no architecture: make test has it on this one
		test("lease", "", "lease_test")
		suites = append(suites, "client_test", "recovery_test", "process_test", "place_test")
	}
	for _, suite := range suites {
		file := filepath.Join(dir, suite)
		if _, err := os.Stat(file); err != nil {
			continue
		}
		if _, err := exec.LookPath("qemu-aarch64"); err != nil {
			continue
		}
		// Without arguments the test prints the names of its cases.
		names, err := emulated(arm64Root, "", dir, file).Output()
		if err != nil {
			t.Errorf("%s does not name its cases: %v", suite, err)
		}
		for _, name := range strings.Fields(string(names)) {
			if !slices.Contains(notEmulated, name) {
				test(name, own, suite, name)
			}
		}
	}
}
