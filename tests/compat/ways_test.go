//go:build compat

// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// ways runs programs that reach the driver in different ways.
func ways(t *testing.T) {
	for name, argv := range map[string][]string{
		"linked":                         {program("probe-linked"), "linked"},
		"linked, dlsym of the default":   {program("probe-linked"), "default"},
		"linked, dlsym of the next":      {program("probe-linked"), "next"},
		"dlopen and dlsym":               {program("probe"), "dlsym"},
		"the resolver of 11.3":           {program("probe"), "resolver"},
		"the resolver, legacy streams":   {program("probe"), "legacy"},
		"the resolver, streams a thread": {program("probe"), "thread"},
		"four threads at once":           {program("probe"), "threads", "dlsym"},
		"in a child":                     {program("probe"), "fork", "dlsym"},
		"cgo, linked":                    {program("go-linked")},
		"cgo, dlopen":                    {program("go-dlopen")},
		"Go without cgo":                 {program("go-purego")},
		"Python, two libraries":          {"python3", "programs/two.py"},
		"at the end of a chain":          {"sh", "-c", `python3 -c 'import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))' "$@"; exit $?`, "sh", program("probe"), "dlsym"},
		"through env and xargs":          {"env", "A=1", "sh", "-c", `exec 3<&0; echo dlsym | xargs sh -c '"$0" "$1" <&3' "$0"`, program("probe")},
	} {
		check(t, name, func(t *testing.T) {
			t.Parallel()
			need(t, argv[0])
			if strings.Contains(name, "chain") {
				need(t, "python3")
			}
			managed(t, command(argv[0], argv[1:]...))
		})
	}
}

// besideOthers preloads other people's libraries too, before and after the shim.
func besideOthers(t *testing.T) {
	own := func(name string) func() string { return func() string { return program(name) } }
	installed := func(pattern string) func() string {
		return func() string {
			for _, dir := range []string{"/usr/lib/*/", "/usr/lib/*/faketime/", "/usr/lib64/", "/usr/lib/gcc/*/*/"} {
				if found, _ := filepath.Glob(dir + pattern); len(found) > 0 {
					return found[0]
				}
			}
			return ""
		}
	}
	for name, find := range map[string]func() string{
		"one that interposes dlsym":    own("libfinds.so"),
		"an allocator that asks dlsym": own("libmallocs.so"),
		"jemalloc":                     installed("libjemalloc.so.2"),
		"tcmalloc":                     installed("libtcmalloc_minimal.so.4"),
		"libeatmydata":                 installed("libeatmydata.so"),
		"libfaketime":                  installed("libfaketime.so.1"),
		"the address sanitizer":        installed("libasan.so.[0-9]"),
		"the thread sanitizer":         installed("libtsan.so.[0-9]"),
	} {
		for _, order := range []string{"before", "after"} {
			check(t, name+" "+order, func(t *testing.T) {
				t.Parallel()
				lib := find()
				if lib == "" {
					t.Skip("the library is not installed")
				}
				preload := []string{lib, shim}
				if order == "after" {
					preload = []string{shim, lib}
				}
				for _, argv := range [][]string{{program("probe"), "dlsym"}, {program("probe"), "thread"}, {program("probe-linked"), "linked"}} {
					// The thread sanitizer fails where mappings are random by 32 bits.
					cmd := exec.Command("setarch", append([]string{"-R"}, argv...)...)
					// Memory that a process keeps to its end is not a leak here.
					cmd.Env = append(environment(preload...), "ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0", "LSAN_OPTIONS=detect_leaks=0")
					if name == "libfaketime" {
						// libfaketime changes the clock and the sleeps on which the simulated
						// GPU depends. So its process gets a GPU of its own, under the same
						// grants.
						cmd.Env = append(cmd.Env, "FAKETIME=-10d", "FAKETIME_DONT_FAKE_MONOTONIC=1", "NVSHARE_SIMGPU_DIR="+apart)
					}
					managed(t, cmd)
				}
			})
		}
	}
}

// unmanaged checks that processes that the shim does not hold, or that do not use a GPU,
// run as without the shim.
func unmanaged(t *testing.T) {
	check(t, "environment thrown away", func(t *testing.T) {
		t.Parallel()
		alone(t, command("env", "-i", "LD_LIBRARY_PATH="+built("simgpu"), "NVSHARE_SIMGPU_DIR="+apart, program("probe"), "dlsym"))
	})
	check(t, "setuid", func(t *testing.T) {
		t.Parallel()
		needRoot(t)
		// In such a program the loader ignores LD_PRELOAD and LD_LIBRARY_PATH.
		file := filepath.Join(filepath.Dir(run), "setuid")
		cc(t, "-DLINKED", "-pthread", "-o", file, "programs/probe.c", "-L"+built("simgpu"), "-l:libcuda.so.1", "-ldl", "-Wl,--disable-new-dtags,-rpath,"+driverFor(t))
		if err := os.Chmod(file, 0o755|os.ModeSetuid); err != nil {
			t.Fatal(err)
		}
		cmd := command(file, "linked")
		cmd.Env = append(environment(shim), "NVSHARE_SIMGPU_DIR="+apart)
		cmd.SysProcAttr = nobody()
		alone(t, cmd)
	})
	check(t, "without a scheduler", func(t *testing.T) {
		t.Parallel()
		cmd := command(program("probe"), "dlsym")
		cmd.Env = append(environment(shim), "NVSHARE_SIMGPU_DIR="+apart, "NVSHARE_RUN_DIR="+t.TempDir())
		alone(t, cmd)
	})
	for name, file := range map[string]string{"a static program": "plain-static", "musl": "plain-musl", "no CUDA": "plain"} {
		check(t, name, func(t *testing.T) {
			t.Parallel()
			if _, err := os.Stat(program(file)); err != nil {
				t.Skip("the program could not be built on this machine")
			}
			cmd := command(program(file))
			if text, err := output(t, cmd); err != nil || text != "plain: all is well\n" {
				t.Errorf("%v, printed %q", err, text)
			}
		})
	}
	// A sanitizer looks up the functions that it interposes before it works itself.
	for name, flags := range map[string][]string{
		"built with the thread sanitizer":           {"-fsanitize=thread"},
		"built with the address sanitizer":          {"-fsanitize=address"},
		"built with the address sanitizer inside":   {"-fsanitize=address", "-static-libasan"},
		"built with the undefined sanitizer inside": {"-fsanitize=undefined", "-static-libubsan"},
	} {
		check(t, name, func(t *testing.T) {
			t.Parallel()
			need(t, "setarch")
			file := filepath.Join(t.TempDir(), "plain")
			cc(t, append(flags, "-pthread", "-o", file, "programs/plain.c", "-ldl")...)
			cmd := command("setarch", "-R", file)
			cmd.Env = append(cmd.Env, "ASAN_OPTIONS=verify_asan_link_order=0") // as deployments/watch.md says
			if text, err := output(t, cmd); err != nil || text != "plain: all is well\n" {
				t.Errorf("%v, printed %q", err, text)
			}
		})
	}
	check(t, "a static Go program", func(t *testing.T) {
		t.Parallel()
		text, err := output(t, command(built("bin/nvsharectl"), "--version"))
		if err != nil || !strings.HasPrefix(text, "nvsharectl") {
			t.Errorf("%v, printed %q", err, text)
		}
	})
	for _, argv := range [][]string{
		{"bash", "-c", "echo $((6 * 7)); true | cat; (exit 3)"},
		{"sh", "-c", "ls / | sort | head -n 3"},
		{"perl", "-e", "use POSIX; print floor(2.5), \"\\n\"; system('true'); exit 4"},
		{"python3", "-c", "import ctypes, json, socket, ssl, threading; t = threading.Thread(target=print, args=(1,)); t.start(); t.join(); socket.socketpair()"},
		{"gdb", "--version"},
		{"git", "--version"},
		{"curl", "--version"},
		{"awk", "BEGIN { print 2 ^ 10 }"},
		{"tar", "-cf", "/dev/null", "programs"},
		{"openssl", "version"},
		{"node", "-e", "console.log(process.version)"},
		{"gcc", "--version"},
		{"env"},
	} {
		check(t, "unharmed: "+argv[0], func(t *testing.T) {
			t.Parallel()
			need(t, argv[0])
			same(t, argv...)
		})
	}
}

// same checks that a program prints the same, ends in the same way, and makes the same
// sockets, processes and threads with the shim as without.
func same(t *testing.T, argv ...string) {
	t.Helper()
	_, noTrace := exec.LookPath("strace")
	var said, ended, did [2]string
	for i, preload := range []string{"", shim} {
		argv := argv
		trace := filepath.Join(t.TempDir(), "trace")
		if noTrace == nil {
			argv = append([]string{"strace", "-f", "-qq", "-o", trace, "-e", "signal=none",
				"-e", "trace=socket,socketpair,connect,bind,sendmsg,recvmsg,memfd_create,clone,clone3,fork,vfork,execve,exit_group", "-E", "LD_PRELOAD=" + preload}, argv...)
		}
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Env = environment()
		if noTrace != nil {
			cmd.Env = append(cmd.Env, "LD_PRELOAD="+preload)
		}
		text, _ := output(t, cmd)
		said[i], ended[i] = strings.ReplaceAll(text, shim, ""), cmd.ProcessState.String()
		if noTrace == nil {
			did[i] = calls(t, trace)
		}
	}
	if said[0] != said[1] || ended[0] != ended[1] {
		t.Errorf("without the shim %s, printed %q; with it %s, printed %q", ended[0], said[0], ended[1], said[1])
	}
	if did[0] != did[1] {
		t.Errorf("without the shim it made these calls: %s; with it: %s", did[0], did[1])
	}
}
