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

// runtimes checks what NVIDIA's CUDA runtime looks up, and what it gets. At its start it
// looks up each entry point that it may use. Then it asks for tables that the simulated
// driver lacks, and reports an error. tests/gpu runs it on a real GPU.
func runtimes(t *testing.T) {
	check(t, "CUDA runtime, static", staticRuntime)
	for version, source := range map[string]struct{ suite, name string }{
		"11.2": {"bullseye", "libcudart11.0"},
		"11.8": {"bookworm", "libcudart11.0"},
		"12.4": {"trixie", "libcudart12"},
	} {
		check(t, "CUDA runtime "+version, func(t *testing.T) {
			t.Parallel()
			root := image(t, "cudart-"+version, source.suite, "amd64", "--only", source.name)
			found, _ := filepath.Glob(root + "/usr/lib/*/libcudart.so.1?.*.*")
			if len(found) != 1 {
				t.Fatalf("no runtime in %s", root)
			}
			lookUps(t, program("runtime"), found[0])
		})
	}
}

// STATIC_CUDART names a libcudart_static.a, which is in a very large package only.
const staticEnv = "STATIC_CUDART"

func staticRuntime(t *testing.T) {
	archive := os.Getenv(staticEnv)
	if archive == "" {
		t.Skip(staticEnv + " names no libcudart_static.a")
	}
	file := filepath.Join(t.TempDir(), "runtime")
	cc(t, "-DSTATIC", "-o", file, "programs/runtime.c", archive, "-ldl", "-lrt", "-lpthread", "-lm")
	lookUps(t, file)
}

// exported are the names that the shim interposes.
func exported(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, line := range strings.Split(string(must(exec.Command("nm", "-D", "--defined-only", shim).Output())(t)), "\n") {
		if f := strings.Fields(line); len(f) == 3 {
			names[f[2]] = true
		}
	}
	return names
}

// lookUps compares a run with the shim and one without. The runtime must look up the same
// names and get the same results. For each function that the shim interposes it must get
// the shim's function of the same name, and so with the same stream semantics; otherwise
// the driver's.
func lookUps(t *testing.T, argv ...string) {
	t.Helper()
	var lines [2][]string
	var said [2]string
	for i, preload := range [][]string{{program("libwatches.so")}, {program("libwatches.so"), shim}} {
		file := filepath.Join(t.TempDir(), "watched")
		cmd := exec.Command(argv[0], argv[1:]...)
		cmd.Env = append(environment(preload...), "NVSHARE_SIMGPU_DIR="+apart, "NVSHARE_RUN_DIR="+apart, "WATCH_TO="+file)
		text, err := output(t, cmd)
		if err != nil {
			t.Fatalf("%v: %v, said %q", argv, err, text)
		}
		said[i] = text
		lines[i] = strings.Split(strings.TrimSpace(string(must(os.ReadFile(file))(t))), "\n")
	}
	if said[0] != said[1] {
		t.Errorf("without the shim it says %q, with it %q", said[0], said[1])
	}
	if len(lines[0]) != len(lines[1]) {
		t.Fatalf("without the shim it looks %d names up, with it %d", len(lines[0]), len(lines[1]))
	}
	interposed, ours := exported(t), 0
	for i, line := range lines[0] {
		f := strings.Fields(line)
		if symbol := f[len(f)-1]; interposed[symbol] {
			f[len(f)-2] = "libnvshare.so"
			ours++
		}
		if want := strings.Join(f, " "); lines[1][i] != want {
			t.Errorf("with the shim the runtime looks up %q, want %q", lines[1][i], want)
		}
	}
	if ours == 0 {
		t.Error("the runtime got no function of the shim")
	}
	t.Logf("%d look-ups, %d lead to the shim; %s", len(lines[0]), ours, strings.TrimSpace(said[1]))
}
