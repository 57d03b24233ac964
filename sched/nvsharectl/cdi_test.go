// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// simulated returns a directory that stands for a simulated GPU whose driver
// cannot be loaded, so that its configuration says what there is.
func simulated(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"lib/libcuda.so.1":      "",
		"lib/libnvidia-ml.so.1": "",
		"run/config":            "gpus=2\nmemory_mib=1024\n",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestCDIList(t *testing.T) {
	code, out, errs := ctl("cdi", "list", "--simgpu", simulated(t))
	want := `nvshare.com/gpu=0
nvshare.com/gpu=1
nvshare.com/gpu=GPU-51600000-0000-4000-8000-000000000000
nvshare.com/gpu=GPU-51600000-0000-4000-8000-000000000001
nvshare.com/gpu=all
`
	if code != exitOK || out != want || errs != "" {
		t.Errorf("exit %d, %s%s", code, out, errs)
	}
}

func TestCDIGenerate(t *testing.T) {
	sim, file := simulated(t), filepath.Join(t.TempDir(), "spec.yaml")
	lib := t.TempDir()
	if err := os.WriteFile(filepath.Join(lib, "libnvshare.so"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	args := []string{"cdi", "generate", "--simgpu", sim, "--run-dir", "/run/elsewhere", "--lib-dir", lib, "--hook", "/opt/hook"}
	code, printed, errs := ctl(args...)
	if code != exitOK || errs != "" {
		t.Fatalf("exit %d, %s", code, errs)
	}
	for _, want := range []string{"kind: nvshare.com/gpu\n", "/run/elsewhere/tenant", lib, "/opt/hook", "LD_PRELOAD"} {
		if !strings.Contains(printed, want) {
			t.Errorf("the spec lacks %q:\n%s", want, printed)
		}
	}
	code, out, errs := ctl(append(args, "--output", file)...)
	written, err := os.ReadFile(file)
	if code != exitOK || out != "" || !strings.Contains(errs, "2 GPUs") || err != nil || string(written) != printed {
		t.Errorf("exit %d, %q %q, file %v", code, out, errs, err)
	}
	code, _, errs = ctl("cdi", "list", "--simgpu", t.TempDir())
	if code != exitFailed || !strings.Contains(errs, "simulated GPU") {
		t.Errorf("nothing there: exit %d, %s", code, errs)
	}
	code, _, errs = ctl(append(args, "--output", filepath.Join(file, "spec.yaml"))...)
	if code != exitFailed || !strings.Contains(errs, file) {
		t.Errorf("cannot write: exit %d, %s", code, errs)
	}
	// Without the shim on the host no container could start.
	code, again, errs := ctl(append(args, "--lib-dir", "/nonexistent/lib")...)
	if code != exitOK || !strings.Contains(again, "/nonexistent/lib") || !strings.Contains(errs, "/nonexistent/lib/libnvshare.so") || !strings.Contains(errs, "nvshare-plugin --no-nri") {
		t.Errorf("no shim: exit %d, %s", code, errs)
	}
}

func put(t *testing.T, path, text string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// A spec is checked in the directory in which it was written.
func TestCDIValidate(t *testing.T) {
	home, run := t.TempDir(), t.TempDir()
	put(t, home+"/lib/libnvshare.so", "", 0o755)
	put(t, home+"/hook", "", 0o755)
	put(t, run+"/nvshare/tenant/x", "", 0o644)
	sim, dir := simulated(t), home+"/cdi"

	code, out, errs := ctl("cdi", "validate", "--cdi-dir", dir, "--simgpu", sim)
	if code != exitFailed || !strings.Contains(out, "BAD") || !strings.Contains(out, "cdi generate") || errs != "" {
		t.Errorf("before: exit %d, %s%s", code, out, errs)
	}
	generate := []string{"cdi", "generate", "--simgpu", sim, "--run-dir", run + "/nvshare", "--lib-dir", home + "/lib", "--hook", home + "/hook"}
	file := dir + "/nvshare.com-gpu.yaml"
	if code, _, errs = ctl(append(generate, "--output", file)...); code != exitOK || !strings.Contains(errs, "wrote "+file) {
		t.Fatalf("exit %d, %s", code, errs)
	}
	code, out, errs = ctl("cdi", "validate", "--cdi-dir", dir, "--simgpu", sim)
	if code != exitOK || !strings.HasPrefix(out, "ok ") || errs != "" {
		t.Errorf("exit %d, %s%s", code, out, errs)
	}
	// Two files with the same devices: engines find none of them.
	twin := dir + "/nvshare.yaml"
	if code, _, errs = ctl(append(generate, "--output", twin)...); code != exitOK || !strings.Contains(errs, "ignore both") {
		t.Errorf("a twin: exit %d, %s", code, errs)
	}
	if code, out, _ = ctl("cdi", "validate", "--cdi-dir", dir); code != exitFailed || !strings.Contains(out, twin) {
		t.Errorf("a twin: exit %d, %s", code, out)
	}
	for _, args := range [][]string{{"cdi"}, {"cdi", "validate", "x"}} {
		if code, _, _ := ctl(args...); code != exitUsage {
			t.Errorf("%v: exit %d", args, code)
		}
	}
}
