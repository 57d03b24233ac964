// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.yaml.in/yaml/v3"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

var update = flag.Bool("update", false, "write the golden specs anew")

// golden compares a spec with testdata/<name>.
func golden(t *testing.T, name string, spec *specs.Spec) {
	t.Helper()
	got, err := Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (go test -update writes it anew); got\n%s", file, got)
	}
}

func generate(t *testing.T, o Options) *Generated {
	t.Helper()
	g, err := Generate(context.Background(), o, DefaultPaths)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestGoldenFromDriver(t *testing.T) {
	g := generate(t, Options{HostRoot: fakeHost(t)})
	golden(t, "driver.gpu.yaml", g.Spec(Kind))
	golden(t, "driver.gpu-nri.yaml", g.Spec(KindNRI))
}

func TestGoldenFromNVIDIA(t *testing.T) {
	root := fakeHost(t)
	fixture, err := os.ReadFile("testdata/nvidia.yaml")
	if err != nil {
		t.Fatal(err)
	}
	write(t, root+"/var/run/cdi/nvidia.yaml", string(fixture))
	log, records := logtest.NewNullLogger()
	g := generate(t, Options{HostRoot: root, Log: log})
	golden(t, "nvidia.gpu.yaml", g.Spec(Kind))
	golden(t, "nvidia.gpu-nri.yaml", g.Spec(KindNRI))
	if !strings.Contains(g.Source, "/var/run/cdi/nvidia.yaml") {
		t.Errorf("source is %q", g.Source)
	}
	if last := records.LastEntry(); last == nil || last.Level != logrus.WarnLevel || !strings.Contains(last.Message, "additionalGids") {
		t.Errorf("no warning about additionalGids: %v", last)
	}
}

func TestGoldenSimulated(t *testing.T) {
	gpus, err := Simulated{}.fromConfig("testdata/none")
	if err != nil {
		t.Fatal(err)
	}
	base := SimulatedBase("/sim", gpus, DefaultPaths.Hook)
	for _, kind := range []string{Kind, KindNRI} {
		spec, err := Build(kind, gpus, base, DefaultPaths)
		if err != nil {
			t.Fatal(err)
		}
		golden(t, "simgpu."+strings.TrimPrefix(kind, "nvshare.com/")+".yaml", spec)
	}
}

func TestOutdatedNVIDIASpecIsNotUsed(t *testing.T) {
	fixture, err := os.ReadFile("testdata/nvidia.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		old, new string // in NVIDIA's spec
		says     string
	}{
		"a GPU is missing":            {`name: "1"`, `name: "7"`, uuidB},
		"it is of an earlier driver":  {"hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04", "hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.550.1", "libcuda.so.550.1"},
		"its hook was uninstalled":    {"path: /usr/bin/nvidia-cdi-hook", "path: /usr/bin/nvidia-ctk-gone", "nvidia-ctk-gone"},
		"GPUs have changed places":    {"/dev/nvidia1", "/dev/nvidia5", uuidA},
		"the first GPU was exchanged": {"name: GPU-6a1c0b1e-0000-4000-8000-00000000000a\n      containerEdits:\n        deviceNodes:\n            - path: /dev/nvidia1", "name: GPU-6a1c0b1e-0000-4000-8000-00000000000a\n      containerEdits:\n        deviceNodes:\n            - path: /dev/nvidia0", "/dev/nvidia1"},
	} {
		root := fakeHost(t)
		text := strings.Replace(string(fixture), c.old, c.new, 1)
		if name == "GPUs have changed places" {
			text = strings.ReplaceAll(string(fixture), c.old, c.new)
		}
		if text == string(fixture) {
			t.Fatalf("%s: the fixture lacks %q", name, c.old)
		}
		write(t, root+"/etc/cdi/nvidia.yaml", text)
		log, records := logtest.NewNullLogger()
		g := generate(t, Options{HostRoot: root, Log: log})
		if !strings.Contains(g.Source, "as found") {
			t.Errorf("%s: source is %q", name, g.Source)
		}
		if e := records.AllEntries(); len(e) == 0 || !strings.Contains(e[0].Message, c.says) || !strings.Contains(e[0].Message, "/etc/cdi/nvidia.yaml") {
			t.Errorf("%s: the warning does not name %s: %v", name, c.says, e)
		}
	}
}

// NVIDIA's spec may be JSON, in either directory, beside one of another class;
// that of the later directory counts.
func TestNVIDIASpecIsFound(t *testing.T) {
	fixture, err := os.ReadFile("testdata/nvidia.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var plain any
	if err := yaml.Unmarshal(fixture, &plain); err != nil {
		t.Fatal(err)
	}
	asJSON, err := json.Marshal(plain)
	if err != nil {
		t.Fatal(err)
	}
	mig := "cdiVersion: 0.5.0\nkind: nvidia.com/mig\ndevices: [{name: '0', containerEdits: {env: [A=b]}}]\n"
	for name, c := range map[string]struct {
		files map[string]string
		from  string
	}{
		"JSON":             {map[string]string{"/etc/cdi/nvidia.json": string(asJSON)}, "/etc/cdi/nvidia.json"},
		"both directories": {map[string]string{"/etc/cdi/a.yaml": string(fixture), "/var/run/cdi/b.yaml": string(fixture)}, "/var/run/cdi/b.yaml"},
		"another class":    {map[string]string{"/etc/cdi/a.yaml": mig, "/var/run/cdi/b.yaml": string(fixture)}, "/var/run/cdi/b.yaml"},
		"the later is not for these GPUs": {map[string]string{"/etc/cdi/a.yaml": string(fixture),
			"/var/run/cdi/b.yaml": "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: '7', containerEdits: {env: [A=b]}}]\n"}, "/etc/cdi/a.yaml"},
	} {
		root := fakeHost(t)
		for file, text := range c.files {
			write(t, root+file, text)
		}
		g := generate(t, Options{HostRoot: root})
		if g.Source != "NVIDIA's CDI spec "+root+c.from {
			t.Errorf("%s: source is %q, want %s", name, g.Source, c.from)
		}
		one, err := Edits(g.Spec(KindNRI), uuidA)
		if err != nil {
			t.Fatal(err)
		}
		if len(one.Hooks) != 2 || one.Hooks[0].Path != "/usr/bin/nvidia-cdi-hook" || !slices.Contains(one.Hooks[1].Args, "--preload") || !containsNode(one.DeviceNodes, "/dev/nvidia1") || !containsMount(one.Mounts, "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04") {
			t.Errorf("%s: edits %+v", name, one)
		}
	}
}

func TestNoGPUMeansNoSpec(t *testing.T) {
	g := generate(t, Options{HostRoot: t.TempDir()})
	if len(g.Specs) != 0 || g.Spec(Kind) != nil {
		t.Errorf("got %v", g.Specs)
	}
	if _, err := Build(Kind, nil, Base{}, DefaultPaths); err == nil {
		t.Error("an empty spec was built")
	}
}

// What was taken from elsewhere and given to one spec must not change through
// another.
func TestSpecsShareNothing(t *testing.T) {
	g := generate(t, Options{HostRoot: fakeHost(t)})
	before, err := Marshal(g.Spec(KindNRI))
	if err != nil {
		t.Fatal(err)
	}
	s := g.Spec(Kind)
	s.ContainerEdits.Env[0] = "X=1"
	s.ContainerEdits.Mounts[0].HostPath = "/x"
	s.ContainerEdits.Mounts[0].Options[0] = "x"
	*s.ContainerEdits.Hooks[0].Timeout = 99
	for i := range s.Devices {
		if s.Devices[i].ContainerEdits.DeviceNodes[0].Path == "/x" {
			t.Errorf("device %s shares its nodes with another", s.Devices[i].Name)
		}
		s.Devices[i].ContainerEdits.DeviceNodes[0].Path = "/x"
	}
	if after, _ := Marshal(g.Spec(KindNRI)); !bytes.Equal(before, after) {
		t.Error("the other spec changed too")
	}
}

func TestSpecsNeedNothingNewerThanTheyDeclare(t *testing.T) {
	files, err := filepath.Glob("testdata/*.gpu*.yaml")
	if err != nil || len(files) != 6 {
		t.Fatalf("golden specs: %v, %v", files, err)
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		spec, err := cdi.ParseSpec(data)
		if err != nil {
			t.Fatal(err)
		}
		if min, err := specs.MinimumRequiredVersion(spec); err != nil || min != "0.5.0" || spec.Version != "0.5.0" {
			t.Errorf("%s declares %s, needs %s, %v", f, spec.Version, min, err)
		}
	}
}

// An engine loads the written files and injects each device.
func TestEngineInjects(t *testing.T) {
	// Device nodes of this machine, because the library looks at them.
	gpus := []GPU{
		{Index: 0, UUID: uuidA, DeviceNodes: []string{"/dev/null"}},
		{Index: 1, UUID: uuidB, DeviceNodes: []string{"/dev/zero"}},
	}
	d := &Driver{Libraries: []Library{{"/l/libcuda.so.1.2", []string{"/l/libcuda.so.1"}, "/l/libcuda.so.1"}}, DeviceNodes: []string{"/dev/full"}}
	dir := t.TempDir()
	for _, kind := range []string{Kind, KindNRI} {
		spec, err := Build(kind, gpus, DriverBase(d, gpus, DefaultPaths.Hook), DefaultPaths)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Write(dir, spec); err != nil {
			t.Fatal(err)
		}
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil || len(cache.GetErrors()) != 0 || len(cache.ListDevices()) != 12 {
		t.Fatalf("errors %v, devices %v", cache.GetErrors(), cache.ListDevices())
	}
	spec := &oci.Spec{Process: &oci.Process{Env: []string{"CUDA_VISIBLE_DEVICES=7"}}, Linux: &oci.Linux{}}
	_, err = cache.InjectDevices(spec, Kind+"="+AnyDevice)
	if err != nil || len(spec.Linux.Devices) != 3 || len(spec.Linux.Resources.Devices) != 3 ||
		!slices.Contains(spec.Process.Env, "CUDA_VISIBLE_DEVICES="+uuidA) || !slices.Contains(spec.Process.Env, AnyMark) {
		t.Errorf("any: %v, device nodes %v, environment %v", err, spec.Linux, spec.Process.Env)
	}
	for names, nodes := range map[string][]string{
		"0":              {"/dev/full", "/dev/null"},
		uuidB:            {"/dev/full", "/dev/zero"},
		"all":            {"/dev/full", "/dev/null", "/dev/zero"},
		"0 1 " + uuidA:   {"/dev/full", "/dev/null", "/dev/zero"},
		"all 0 " + uuidB: {"/dev/full", "/dev/null", "/dev/zero"},
	} {
		for _, kind := range []string{Kind, KindNRI} {
			var devices []string
			for _, n := range strings.Fields(names) {
				devices = append(devices, kind+"="+n)
			}
			spec := &oci.Spec{Process: &oci.Process{Env: []string{"LD_PRELOAD=/user.so", "NVIDIA_VISIBLE_DEVICES=all", "NVSHARE_RUN_DIR=/tmp/mine"}}, Linux: &oci.Linux{}}
			if _, err := cache.InjectDevices(spec, devices...); err != nil {
				t.Errorf("%v: %v", devices, err)
				continue
			}
			var gotNodes, gotMounts []string
			for _, d := range spec.Linux.Devices {
				gotNodes = append(gotNodes, d.Path)
			}
			for _, m := range spec.Mounts {
				gotMounts = append(gotMounts, m.Source+" "+m.Destination)
			}
			slices.Sort(gotNodes)
			slices.Sort(gotMounts)
			if !slices.Equal(gotNodes, nodes) {
				t.Errorf("%v: device nodes %v, want %v", devices, gotNodes, nodes)
			}
			want := []string{"/l/libcuda.so.1.2 /l/libcuda.so.1", "/var/lib/nvshare/lib/current /usr/lib/nvshare", "/var/run/nvshare/tenant /var/run/nvshare"}
			if !slices.Equal(gotMounts, want) {
				t.Errorf("%v: mounts %v", devices, gotMounts)
			}
			env := []string{"LD_PRELOAD=" + ShimPath, nvidiaVoid, "NVSHARE_RUN_DIR=/var/run/nvshare"}
			if kind == KindNRI {
				env = []string{"LD_PRELOAD=/user.so", nvidiaVoid, "NVSHARE_RUN_DIR=/tmp/mine"} // the plugin's to change
			}
			slices.Sort(spec.Process.Env)
			if !slices.Equal(spec.Process.Env, env) {
				t.Errorf("%v: environment %v, want %v", devices, spec.Process.Env, env)
			}
			joins := 0 // a pod's container has a device of its own for that
			if kind == Kind {
				joins = 1
			}
			h := spec.Hooks.CreateContainer
			if len(h) == 0 || h[0].Path != DefaultPaths.Hook || !slices.Contains(h[0].Args, "--preload") || len(h) != 1+joins || joins == 1 && h[1].Args[1] != "join" {
				t.Errorf("%v: hooks %v", devices, h)
			}
		}
	}
}

// A container that may move can open the GPUs that are like the first one, MIG devices aside.
func TestAnyDevice(t *testing.T) {
	node := func(path string) []string { return []string{path} }
	gpus := []GPU{
		{Index: 0, UUID: "GPU-0", Name: "H200", DeviceNodes: node("/dev/nvidia0"), Instances: []Instance{{UUID: "MIG-0", DeviceNodes: node("/dev/nvidia-caps/1")}}},
		{Index: 1, UUID: "GPU-1", Name: "H200", DeviceNodes: node("/dev/nvidia1")},
		{Index: 2, UUID: "GPU-2", Name: "L4", DeviceNodes: node("/dev/nvidia2")},
		{Index: 3, UUID: "GPU-3", Name: "H200", DeviceNodes: node("/dev/nvidia3")},
	}
	edits := anyOf(gpus, DriverBase(&Driver{}, gpus, "/hook"))
	var paths []string
	for _, n := range edits.DeviceNodes {
		paths = append(paths, n.Path)
	}
	if !slices.Equal(paths, []string{"/dev/nvidia1", "/dev/nvidia3"}) || !slices.Equal(edits.Env, []string{"CUDA_VISIBLE_DEVICES=GPU-1", AnyMark}) {
		t.Errorf("%v, %v", paths, edits.Env)
	}
	if anyOf(gpus[:1], DriverBase(&Driver{}, gpus[:1], "/hook")) != nil {
		t.Error("a device, although there are MIG devices only")
	}
}

// Without an environment of its own a hook would have the one that an image says.
func TestHooksHaveTheirOwnEnvironment(t *testing.T) {
	gpus := []GPU{{UUID: uuidA, DeviceNodes: []string{"/dev/nvidia0"}}}
	spec, err := Build(Kind, gpus, DriverBase(&Driver{}, gpus, "/hook"), DefaultPaths)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range spec.ContainerEdits.Hooks {
		if !slices.Equal(h.Env, hookEnv) {
			t.Errorf("hook %s has the environment %q", h.Args[1], h.Env)
		}
	}
}

func TestEdits(t *testing.T) {
	g := generate(t, Options{HostRoot: fakeHost(t)})
	spec := g.Spec(KindNRI)
	one, err := Edits(spec, "0")
	if err != nil || len(one.DeviceNodes) != 4 {
		t.Errorf("0: %v, %v", one.DeviceNodes, err)
	}
	all, err := Edits(spec, "all")
	if err != nil || len(all.DeviceNodes) != 5 {
		t.Errorf("all: %v, %v", all.DeviceNodes, err)
	}
	several, err := Edits(spec, "1", "all", uuidA)
	if err != nil || len(several.DeviceNodes) != 5 || !reflect.DeepEqual(several.Mounts, all.Mounts) {
		t.Errorf("several: %v, %v", several.DeviceNodes, err)
	}
	if _, err := Edits(spec, "99"); err == nil || !strings.Contains(err.Error(), `"99"`) {
		t.Errorf("99: %v", err)
	}
}
