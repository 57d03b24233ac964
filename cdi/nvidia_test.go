// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"strings"
	"testing"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"
)

// What engines do with several specs of NVIDIA's must not leave a host without
// GPUs: the best one is used, and the log says what is wrong.
func TestSeveralNVIDIASpecs(t *testing.T) {
	fixture, err := os.ReadFile("testdata/nvidia.yaml")
	if err != nil {
		t.Fatal(err)
	}
	good := string(fixture)
	outdated := strings.ReplaceAll(good, "libcuda.so.580.159.04", "libcuda.so.1.1")
	hour := func(ago int) time.Time { return time.Now().Add(-time.Duration(ago) * time.Hour) }
	for name, c := range map[string]struct {
		files map[string]string // by path: which text
		age   map[string]int    // hours; 0 otherwise
		uses  string
		says  string
	}{
		"two in one directory, the newer is right": {
			map[string]string{"/etc/cdi/a.yaml": outdated, "/etc/cdi/b.yaml": good}, map[string]int{"/etc/cdi/a.yaml": 5}, "/etc/cdi/b.yaml", ""},
		"two in one directory, the newer is outdated": {
			map[string]string{"/etc/cdi/a.yaml": good, "/etc/cdi/b.yaml": outdated}, map[string]int{"/etc/cdi/a.yaml": 5}, "/etc/cdi/a.yaml", "libcuda.so.1.1"},
		"two directories: the later one wins": {
			map[string]string{"/etc/cdi/nvidia.yaml": good, "/var/run/cdi/nvidia.yaml": good}, map[string]int{"/var/run/cdi/nvidia.yaml": 5}, "/var/run/cdi/nvidia.yaml", ""},
		"two directories: the later one is outdated": {
			map[string]string{"/etc/cdi/nvidia.yaml": good, "/var/run/cdi/nvidia.yaml": outdated}, nil, "/etc/cdi/nvidia.yaml", "libcuda.so.1.1"},
		"one is broken": {
			map[string]string{"/etc/cdi/nvidia.yaml": good, "/var/run/cdi/nvidia.yaml": "kind: nvidia.com/gpu\nx: [\n"}, nil, "/etc/cdi/nvidia.yaml", ""},
		"one is of no valid version": {
			map[string]string{"/etc/cdi/nvidia.yaml": good, "/var/run/cdi/nvidia.yaml": "cdiVersion: 99.0.0\nkind: nvidia.com/gpu\n"}, nil, "/etc/cdi/nvidia.yaml", "cannot be used"},
		"all are outdated": {
			map[string]string{"/etc/cdi/nvidia.yaml": outdated, "/var/run/cdi/nvidia.yaml": outdated}, nil, "driver", "libcuda.so.1.1"},
	} {
		root := fakeHost(t)
		for file, text := range c.files {
			write(t, root+file, text)
			if err := os.Chtimes(root+file, hour(c.age[file]), hour(c.age[file])); err != nil {
				t.Fatal(err)
			}
		}
		log, records := logtest.NewNullLogger()
		g := generate(t, Options{HostRoot: root, Log: log})
		if !strings.Contains(g.Source, c.uses) {
			t.Errorf("%s: it is built on %q", name, g.Source)
		}
		var said []string
		for _, r := range records.AllEntries() {
			said = append(said, r.Message)
		}
		if !strings.Contains(strings.Join(said, "\n"), c.says) {
			t.Errorf("%s: no word of %q, but %q", name, c.says, said)
		}
	}
}

// What the specs take from the host can go away, and come back, while NVIDIA's spec stays.
func TestFingerprintShowsHostFiles(t *testing.T) {
	fixture, err := os.ReadFile("testdata/nvidia.yaml")
	if err != nil {
		t.Fatal(err)
	}
	root := fakeHost(t)
	write(t, root+"/etc/cdi/nvidia.yaml", string(fixture))
	hook, smi := root+"/usr/bin/nvidia-cdi-hook", root+"/usr/bin/nvidia-smi"
	o := Options{HostRoot: root}
	for _, step := range []struct{ source, old, new string }{
		{"NVIDIA's CDI spec", hook, hook + ".away"},
		{"as found", smi, smi + ".away"}, // of the driver, which has no other trace of it
		{"as found", hook + ".away", hook},
		{"NVIDIA's CDI spec", hook, hook + ".away"},
	} {
		g := generate(t, o)
		if !strings.Contains(g.Source, step.source) {
			t.Errorf("before %s: it is built on %q", step.new, g.Source)
		}
		before := Fingerprint(o, g.HostFiles...)
		if before != Fingerprint(o, generate(t, o).HostFiles...) {
			t.Errorf("before %s: it changes by itself", step.new)
		}
		if err := os.Rename(step.old, step.new); err != nil {
			t.Fatal(err)
		}
		if Fingerprint(o, g.HostFiles...) == before {
			t.Errorf("%s is now %s: unchanged", step.old, step.new)
		}
	}
}

func TestWSL2IsRefusedWithTheReason(t *testing.T) {
	root := t.TempDir()
	write(t, root+"/proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2\n")
	write(t, root+"/dev/dxg", "")
	write(t, root+"/usr/lib/wsl/lib/libcuda.so.1", "")
	if _, err := Generate(t.Context(), Options{HostRoot: root}, DefaultPaths); err != ErrWSL {
		t.Errorf("got %v", err)
	}
	// A machine of Azure has the Linux driver.
	write(t, root+"/dev/nvidiactl", "")
	if _, err := Discover(t.Context(), Options{HostRoot: root}); err != nil {
		t.Errorf("with the Linux driver: %v", err)
	}
}

// GPUs whose memory is the host's are refused, by what the driver calls them, or by the file of Jetson's system.
func TestIntegratedGPUsAreRefusedWithTheReason(t *testing.T) {
	for model, says := range map[string]string{"NVIDIA GB10": "GPU 0 is an NVIDIA GB10", "Orin (nvgpu)": "Orin", "NVIDIA Thor": "Thor", "NVIDIA GB100": "", "NVIDIA H200": ""} {
		root := fakeHost(t)
		write(t, root+procGPUs+"/0000:17:00.0/information", information(model, uuidA, "0000:17:00.0", 1))
		_, err := Generate(t.Context(), Options{HostRoot: root}, DefaultPaths)
		if (err == nil) != (says == "") || err != nil && (!strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "the host's memory")) {
			t.Errorf("%s: %v", model, err)
		}
	}
	root := t.TempDir()
	write(t, root+"/etc/nv_tegra_release", "# R36 (release)")
	if _, err := Discover(t.Context(), Options{HostRoot: root}); err == nil || !strings.Contains(err.Error(), "Jetson") {
		t.Errorf("a Jetson: %v", err)
	}
}
