// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

// withMIG gives GPU 0 of fakeHost, which has minor 1, two MIG devices.
func withMIG(t *testing.T, root string) {
	t.Helper()
	access := func(path string, minor int) {
		write(t, root+procCapabilities+"/gpu1/mig/"+path+"/access",
			fmt.Sprintf("DeviceFileMinor: %d\nDeviceFileMode: 292\nDeviceFileModify: 1\n", minor))
	}
	access("gi9", 84)
	access("gi9/ci0", 85)
	access("gi13", 120) // after gi9, though not by name
	access("gi13/ci0", 121)
	for _, n := range []int{84, 85, 120, 121} {
		write(t, fmt.Sprintf("%s%s/nvidia-cap%d", root, capsDir, n), "")
	}
}

func nodesOf(spec *specs.Spec, device string) (paths []string) {
	edits, err := Edits(&specs.Spec{Kind: spec.Kind, Devices: spec.Devices}, device)
	if err != nil {
		return []string{err.Error()}
	}
	for _, n := range edits.DeviceNodes {
		paths = append(paths, n.Path)
	}
	return paths
}

func TestMIGDevicesAsFound(t *testing.T) {
	root := fakeHost(t)
	withMIG(t, root)
	g := generate(t, Options{HostRoot: root})
	if got, want := Names(g.GPUs), []string{"0", "1", uuidA, uuidB, "0:0", "MIG-" + uuidA + ":9:0", "0:1", "MIG-" + uuidA + ":13:0", "all"}; !slices.Equal(got, want) {
		t.Errorf("names are %v, want %v", got, want)
	}
	const caps = capsDir + "/nvidia-cap"
	for device, want := range map[string][]string{
		"0:0": {"/dev/nvidia1", caps + "84", caps + "85"},
		"0:1": {"/dev/nvidia1", caps + "120", caps + "121"},
		// The whole GPU can be used through its MIG devices only.
		"0":   {"/dev/nvidia1", caps + "84", caps + "85", caps + "120", caps + "121"},
		"1":   {"/dev/nvidia0"},
		"all": {"/dev/nvidia1", caps + "84", caps + "85", caps + "120", caps + "121", "/dev/nvidia0"},
	} {
		for _, spec := range g.Specs {
			if got := nodesOf(spec, device); !slices.Equal(got, want) {
				t.Errorf("%s=%s gives %v, want %v", spec.Kind, device, got, want)
			}
		}
	}
	before := Fingerprint(Options{HostRoot: root})
	if err := os.RemoveAll(root + procCapabilities + "/gpu1/mig/gi13"); err != nil {
		t.Fatal(err)
	}
	if Fingerprint(Options{HostRoot: root}) == before {
		t.Error("a MIG device went and the fingerprint did not change")
	}
}

// An instance that is being made or taken down must not take the GPUs with it.
func TestMIGDeviceWithoutCapabilities(t *testing.T) {
	root := fakeHost(t)
	withMIG(t, root)
	if err := os.Remove(root + procCapabilities + "/gpu1/mig/gi9/ci0/access"); err != nil {
		t.Fatal(err)
	}
	g := generate(t, Options{HostRoot: root})
	if got := nodesOf(g.Spec(Kind), "0:0"); !slices.Contains(got, capsDir+"/nvidia-cap120") {
		t.Errorf("the remaining instance has %v", got)
	}
	// NVML may know instances whose files are hidden from this program.
	gpus := []GPU{{UUID: uuidA, DeviceNodes: []string{"/dev/nvidia0"}, Instances: []Instance{{UUID: "MIG-x"}}}}
	spec, err := Build(Kind, gpus, DriverBase(&Driver{}, gpus, "/hook"), DefaultPaths)
	if err != nil || slices.ContainsFunc(spec.Devices, func(d specs.Device) bool { return d.Name == "MIG-x" }) {
		t.Errorf("a MIG device without device nodes was declared: %v", err)
	}
}

// A capability file that tells nothing leaves its GPU out, and no other.
func TestOddMIGCapability(t *testing.T) {
	root, log := fakeHost(t), new(bytes.Buffer)
	withMIG(t, root)
	o := Options{HostRoot: root, Log: &logrus.Logger{Out: log, Formatter: &logrus.TextFormatter{}, Level: logrus.WarnLevel}}
	file, whole := root+procCapabilities+"/gpu1/mig/gi13/access", Fingerprint(o)
	good, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	write(t, file, "nonsense\n")
	gpus, err := Discover(t.Context(), o)
	if err != nil || len(gpus) != 1 || gpus[0].UUID != uuidB || gpus[0].Index != 1 {
		t.Errorf("got %v, %v", gpus, err)
	}
	if !strings.Contains(log.String(), "gi13") {
		t.Errorf("the log is %q", log)
	}
	if Fingerprint(o) == whole {
		t.Error("no change of the node")
	}
	write(t, file, string(good))
	if Fingerprint(o) != whole {
		t.Error("nobody sees that it is back")
	}
}

func TestMIGDevicesFromNVIDIA(t *testing.T) {
	gpus := []GPU{{UUID: uuidA, DeviceNodes: []string{"/dev/nvidia0"}, Instances: []Instance{
		{Index: 0, UUID: "MIG-a", DeviceNodes: []string{capsDir + "/nvidia-cap1"}},
		{Index: 2, DeviceNodes: []string{capsDir + "/nvidia-cap2"}}, // UUID unknown; the numbers have gaps
	}}}
	const text = `cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits: {env: [NVIDIA_VISIBLE_DEVICES=void]}
devices:
  - {name: "0:0", containerEdits: {deviceNodes: [{path: /dev/nvidia0}, {path: /dev/nvidia-caps/nvidia-cap1}]}}
  - {name: "0:2", containerEdits: {deviceNodes: [{path: /dev/nvidia0}, {path: /dev/nvidia-caps/nvidia-cap2}]}}
`
	load := func(text string) *cdi.Spec {
		t.Helper()
		file := t.TempDir() + "/nvidia.yaml"
		write(t, file, text)
		spec, err := cdi.ReadSpec(file, 0)
		if err != nil {
			t.Fatal(err)
		}
		return spec
	}
	base, _, err := NVIDIABase(load(text), gpus)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := Build(Kind, gpus, base, DefaultPaths)
	if err != nil {
		t.Fatal(err)
	}
	for device, want := range map[string][]string{
		"0:0":   {"/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1"},
		"MIG-a": {"/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1"},
		"0:2":   {"/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap2"},
		"0":     {"/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap1", "/dev/nvidia-caps/nvidia-cap2"},
	} {
		if got := nodesOf(spec, device); !slices.Equal(got, want) {
			t.Errorf("%s gives %v, want %v", device, got, want)
		}
	}
	// After a change of the MIG layout NVIDIA's spec is outdated.
	for old, says := range map[string]string{`"0:2"`: "0:2", "nvidia-cap2": "nvidia-cap2"} {
		changed := strings.Replace(text, old, map[bool]string{true: `"0:1"`, false: "nvidia-cap7"}[old[0] == '"'], 1)
		if _, _, err := NVIDIABase(load(changed), gpus); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("without %s: %v", old, err)
		}
	}
}

// The hook knows what a container has by marks: a MIG device's must not be its GPU's too. A
// GPU whose MIG devices cannot be given keeps its own.
func TestMarksOfMIGDevices(t *testing.T) {
	gpus := []GPU{
		{UUID: uuidA, DeviceNodes: []string{"/dev/nvidia0"}, Instances: []Instance{
			{Index: 0, UUID: "MIG-a", DeviceNodes: []string{capsDir + "/nvidia-cap1"}},
			{Index: 1, UUID: "MIG-b", DeviceNodes: []string{capsDir + "/nvidia-cap2"}},
		}},
		{UUID: uuidB, DeviceNodes: []string{"/dev/nvidia1"}, Instances: []Instance{{UUID: "MIG-c"}}},
	}
	h := describeHook(DefaultPaths, gpus, DriverBase(&Driver{}, gpus, "/hook"))
	want := []string{"--gpu", "MIG-a=" + capsDir + "/nvidia-cap1", "--gpu", "MIG-b=" + capsDir + "/nvidia-cap2", "--gpu", uuidB + "=/dev/nvidia1"}
	if got := h.Args[4:]; !slices.Equal(got, want) {
		t.Errorf("marks are %q, want %q", got, want)
	}
}

func TestInstanceNames(t *testing.T) {
	g := GPU{Index: 3, Instances: []Instance{{Index: 1, UUID: "MIG-b"}}}
	if got, want := Names([]GPU{g}), []string{"3", "", "3:1", "MIG-b", "all"}; !reflect.DeepEqual(got, want) {
		t.Errorf("names are %q, want %q", got, want)
	}
}
