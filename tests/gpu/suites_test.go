// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// suitesOf is what suites.py needs to run a suite that is made up on the simulated GPU.
type suitesOf struct {
	dir, build string
	env        []string
}

// newSuites makes a suite of two programs and one of a file of tests. Some of them behave differently when they
// are preloaded.
func newSuites(t *testing.T) *suitesOf {
	simgpu := os.Getenv("NVSHARE_TEST_SIMGPU")
	if simgpu == "" {
		t.Skip("NVSHARE_TEST_SIMGPU is not set: make shell sets it")
	}
	dir, err := os.MkdirTemp("", "nvshare-suites-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &suitesOf{dir: dir, build: filepath.Dir(simgpu), env: append(os.Environ(), "NVSHARE_SIMGPU="+dir+"/gpu",
		"NVSHARE_SIMGPU_DIR="+dir+"/gpu/run", "LD_LIBRARY_PATH="+dir+"/gpu/lib")}
	// The neighbour, which is another user, uses the simulated GPU too.
	script := `set -e; umask 022; chmod 755 . && mkdir -p gpu/run samples/a tests && chmod 777 gpu/run && cp -a "$1" gpu/lib
		echo memory_mib=4096 >gpu/run/config
		cc -o samples/a/same "$2/work.c" gpu/lib/libcuda.so.1 && cc -DTELLS -o samples/a/tells "$2/work.c" gpu/lib/libcuda.so.1
		cp "$2/test_gpu.py" tests/ && echo "#!/bin/sh" >samples/a/no-program && chmod +x samples/a/no-program`
	data, err := filepath.Abs("testdata/suites")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sh", "-c", script, "sh", simgpu, data)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return s
}

// suitesRow is a line of suites.jsonl: a run, or what it found.
type suitesRow struct {
	Mode, Name, Test, Kind, Ended string
	Texts                         []string
	Tests                         map[string]int
}

// run runs suites.py, which ends with status, and returns what it found in each mode, and its table.
func (s *suitesOf) run(t *testing.T, status int, env []string, args ...string) (map[string][]string, string) {
	t.Helper()
	results := filepath.Join(t.TempDir(), "results")
	cmd := exec.Command("python3", append([]string{"suites.py", results, "--bundle", s.build, "--neighbour", "busy",
		"--swap-memory", "512Mi", "--memory-limit", "1Gi", "--at-a-time", "2"}, args...)...)
	cmd.Env = append(slices.Clone(s.env), env...)
	out, err := cmd.CombinedOutput()
	if ended := (*exec.ExitError)(nil); err != nil && !errors.As(err, &ended) || cmd.ProcessState.ExitCode() != status {
		log, _ := os.ReadFile(filepath.Join(results, "scheduler.log"))
		t.Fatalf("%v, want status %d\n%s%s", err, status, out, log)
	}
	lines, err := os.ReadFile(filepath.Join(results, "suites.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	found := map[string][]string{}
	for line := range bytes.Lines(lines) {
		var row suitesRow
		if err := json.Unmarshal(line, &row); err != nil {
			t.Fatalf("%v\n%s", err, line)
		}
		if _, test, _ := strings.Cut(row.Test, "::"); row.Kind != "" {
			found[row.Mode] = append(found[row.Mode], row.Kind+" "+row.Name+" "+test+": "+strings.Join(row.Texts, ", "))
		}
	}
	table, err := os.ReadFile(filepath.Join(results, "suites.md"))
	if err != nil {
		t.Fatal(err)
	}
	return found, string(table)
}

var suitesModes = []string{"auto", "turns", "swap", "limit"}

// What a program prints only with the shim is found in each mode. What changes natively is none of it.
func TestSuitesOfPrograms(t *testing.T) {
	s := newSuites(t)
	found, table := s.run(t, 1, nil, "--samples", s.dir+"/samples")
	want := []string{"difference a/tells : has not alone, has preloaded"}
	for _, mode := range suitesModes {
		if !slices.Equal(found[mode], want) {
			t.Errorf("%s: found %q, want %q", mode, found[mode], want)
		}
	}
	for _, says := range []string{"| samples | 2 | 2 exit 0;", "| jax | not given |", "- difference (auto, turns, swap, limit): samples/a/tells: has preloaded"} {
		if !strings.Contains(table, says) {
			t.Errorf("the table has not %q:\n%s", says, table)
		}
	}

	explained := filepath.Join(s.dir, "explained")
	if err := os.WriteFile(explained, []byte("# why\nauto samples/a/tells: has (not )?(alone|preloaded)$  # it looks at LD_PRELOAD\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	found, table = s.run(t, 0, nil, "--samples", s.dir+"/samples", "--modes", "auto", "--explained", explained)
	if got := found["auto"]; len(got) != 1 || !strings.HasPrefix(got[0], "explained a/tells") || !strings.Contains(table, "has preloaded (it looks at LD_PRELOAD)") {
		t.Errorf("found %q\n%s", got, table)
	}
}

// Tests are compared one by one, also those after which their process crashes. A test that is only different
// after another one is named apart.
func TestSuitesOfTests(t *testing.T) {
	s := newSuites(t)
	want := []string{
		"difference test_gpu.py : exit 3, natively exit 0",
		"difference test_gpu.py GPU::test_2_differs: failed, natively passed",
		"same alone test_gpu.py GPU::test_3_depends_on_the_first: failed, natively passed",
		"difference test_gpu.py TheLast::test_ends_its_process: did not end, natively passed",
	}
	s.both(t, "", func(t *testing.T, env ...string) {
		found, table := s.run(t, 1, env, "--numba", s.dir+"/tests", "--modes", "turns")
		if got := found["turns"]; !slices.Equal(got, want) {
			t.Errorf("found %q, want %q", got, want)
		}
		if says := "| numba | 1 | 1 failed, 4 passed, 1 skipped;"; !strings.Contains(table, says) {
			t.Errorf("the table has not %q:\n%s", says, table)
		}
	})
}

// both has a check use unittest, and then pytest where there is one. Python finds modules in path.
func (s *suitesOf) both(t *testing.T, path string, check func(t *testing.T, env ...string)) {
	noPytest := filepath.Join(s.dir, "no-pytest")
	if err := errors.Join(os.Mkdir(noPytest, 0o755), os.WriteFile(filepath.Join(noPytest, "pytest.py"), []byte("raise ImportError\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Run("unittest", func(t *testing.T) { check(t, "PYTHONPATH="+noPytest+":"+path) })
	t.Run("pytest", func(t *testing.T) {
		if out, err := exec.Command("python3", "-c", "import pytest").CombinedOutput(); err != nil {
			t.Skipf("python3 has no pytest: %s", out)
		}
		check(t, "PYTHONPATH="+path)
	})
}

// Tests of an installed package run as its modules, also where it lies elsewhere than its name says.
func TestSuitesOfAPackage(t *testing.T) {
	s := newSuites(t)
	site := filepath.Join(s.dir, "site")
	for file, text := range map[string]string{
		"things/__init__.py":                               "__path__.append(__path__[0] + '_gpu/things')\n",
		"things_gpu/__init__.py":                           "",
		"things_gpu/things/gpu/__init__.py":                "",
		"things_gpu/things/gpu/tests/__init__.py":          "",
		"things_gpu/things/gpu/tests/usecases.py":          "NAME = 'things.gpu.tests.test_name'\n",
		"things_gpu/things/gpu/tests/driver/__init__.py":   "",
		"things_gpu/things/gpu/tests/driver/test_other.py": "import unittest\nclass Other(unittest.TestCase):\n    def test(self):\n        from ..usecases import NAME\n",
		"things_gpu/things/gpu/tests/test_name.py": "import unittest\nfrom .usecases import NAME\nclass Name(unittest.TestCase):\n" +
			"    def test(self):\n        self.assertEqual(NAME, __name__)\n",
	} {
		file = filepath.Join(site, file)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	s.both(t, site, func(t *testing.T, env ...string) {
		if strings.HasSuffix(t.Name(), "/pytest") && exec.Command("python3", "-c", "import pytest; assert pytest.version_tuple >= (8, 1)").Run() != nil {
			t.Skip("pytest before 8.1 does not import such a package by its name")
		}
		// Without a call of the driver the shim is not at work.
		found, table := s.run(t, 2, env, "--numba", "things.gpu.tests", "--modes", "auto")
		if want := []string{"failed  : the shim was not at work"}; !slices.Equal(found["auto"], want) || !strings.Contains(table, "| numba | 2 | 2 passed;") {
			t.Errorf("found %q\n%s", found["auto"], table)
		}
	})
}

// What takes too long natively is left out of the modes, and named: a whole file without pytest.
func TestSuitesLeaveOut(t *testing.T) {
	s := newSuites(t)
	test := "import time, unittest\nclass Waits(unittest.TestCase):\n    def test(self):\n        time.sleep(3600)\n"
	if err := os.WriteFile(filepath.Join(s.dir, "tests", "test_waits.py"), []byte(test), 0o600); err != nil {
		t.Fatal(err)
	}
	s.both(t, "", func(t *testing.T, env ...string) {
		if strings.HasSuffix(t.Name(), "/pytest") {
			return // TestSuitesRunTheRest
		}
		found, table := s.run(t, 1, env, "--numba", s.dir+"/tests", "--modes", "auto", "--bound", "15")
		if want := []string{"left out test_waits.py : takes longer than 15 s natively"}; !slices.Equal(found["native"], want) {
			t.Errorf("found %q, want %q", found["native"], want)
		}
		if len(found["auto"]) == 0 || slices.ContainsFunc(found["auto"], func(f string) bool { return strings.Contains(f, "waits") }) {
			t.Errorf("found %q", found["auto"])
		}
		for _, says := range []string{"| numba | 2 | 1 failed, 1 left out, 4 passed, 1 skipped;", "- left out (native): numba/test_waits.py: takes longer than 15 s natively"} {
			if !strings.Contains(table, says) {
				t.Errorf("the table has not %q:\n%s", says, table)
			}
		}
	})
}

// With pytest the rest of a file runs: without the test at which it stands, or as far as it comes in the time.
func TestSuitesRunTheRest(t *testing.T) {
	s := newSuites(t)
	stands := "import os, time, unittest\nclass Stands(unittest.TestCase):\n    def test_1(self):\n        pass\n    def test_2(self):\n        time.sleep(3600)\n" +
		"    def test_3(self):\n        self.assertNotIn('LD_PRELOAD', os.environ)\n"
	files := map[string]string{"test_stands.py": stands, "test_stands_twice.py": stands + "    def test_4(self):\n        time.sleep(3600)\n    def test_5(self):\n        pass\n"}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(s.dir, "tests", name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.both(t, "", func(t *testing.T, env ...string) {
		if strings.HasSuffix(t.Name(), "unittest") {
			return // TestSuitesLeaveOut
		}
		found, _ := s.run(t, 1, env, "--numba", s.dir+"/tests", "--modes", "auto", "--bound", "10", "--only", "stands|gpu")
		want := []string{
			"left out test_stands.py Stands::test_2: takes longer than 10 s natively",
			"left out test_stands_twice.py Stands::test_2: takes longer than 10 s natively",
			"left out test_stands_twice.py : takes longer than 10 s natively",
		}
		if !slices.Equal(found["native"], want) {
			t.Errorf("found %q, want %q", found["native"], want)
		}
		for _, want := range []string{
			"difference test_stands.py Stands::test_3: failed, natively passed",
			"difference test_stands_twice.py Stands::test_3: failed, natively passed",
		} {
			if !slices.Contains(found["auto"], want) {
				t.Errorf("found %q, which has not %q", found["auto"], want)
			}
		}
	})
}

// Whoever ends suites.py ends what it runs.
func TestSuitesLeaveNothing(t *testing.T) {
	s := newSuites(t)
	pid, file := filepath.Join(s.dir, "pid"), filepath.Join(s.dir, "tests", "test_waits.py")
	test := "import os, time, unittest\nclass Waits(unittest.TestCase):\n    def test(self):\n" +
		"        open('" + pid + ".new', 'w').write(str(os.getpid()))\n        os.rename('" + pid + ".new', '" + pid + "')\n        time.sleep(3600)\n"
	if err := os.WriteFile(file, []byte(test), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("python3", "suites.py", filepath.Join(t.TempDir(), "results"), "--bundle", s.build, "--numba", s.dir+"/tests", "--at-a-time", "1", "--only", "waits")
	cmd.Env = s.env
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var text []byte
	for end := time.Now().Add(5 * time.Minute); text == nil && time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		text, _ = os.ReadFile(pid)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); cmd.ProcessState.ExitCode() != 143 {
		t.Errorf("it ended with %v", err)
	}
	if _, err := os.Stat("/proc/" + string(text)); err == nil {
		t.Errorf("process %s goes on", text)
	}
}

// A mode in which the shim was not at work says nothing, and that is not "no difference".
func TestSuitesWithoutTheShim(t *testing.T) {
	s := newSuites(t)
	bundle := filepath.Join(s.dir, "bundle")
	if err := os.MkdirAll(filepath.Join(bundle, "lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(s.build, "bin"), filepath.Join(bundle, "bin")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(s.dir, "gpu/lib/libcuda.so.1"), filepath.Join(bundle, "lib/libnvshare.so")); err != nil {
		t.Fatal(err)
	}
	s.build = bundle
	found, _ := s.run(t, 2, nil, "--samples", s.dir+"/samples", "--modes", "auto", "--only", "same")
	if want := []string{"failed  : the shim was not at work"}; !slices.Equal(found["auto"], want) {
		t.Errorf("found %q, want %q", found["auto"], want)
	}
}
