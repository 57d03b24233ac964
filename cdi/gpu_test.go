// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"
	specs "tags.cncf.io/container-device-interface/specs-go"
)

func TestProcFSListsInBusOrder(t *testing.T) {
	got, err := ProcFS{Root: fakeHost(t)}.List(context.Background())
	driver := Model{DriverVersion: "580.159.04"}
	want := []GPU{
		{Index: 0, UUID: uuidA, Name: "NVIDIA H200", PCIBusID: "0000:17:00.0", Model: driver, Minor: 1, DeviceNodes: []string{"/dev/nvidia1"}},
		{Index: 1, UUID: uuidB, Name: "NVIDIA H200", PCIBusID: "0000:9b:00.0", Model: driver, Minor: 0, DeviceNodes: []string{"/dev/nvidia0"}},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
}

func TestProcFSErrors(t *testing.T) {
	good := information("NVIDIA H200", uuidA, "0000:17:00.0", 1)
	for name, c := range map[string]struct {
		text string
		gpus int
		says string
	}{
		"good":         {good, 1, ""},
		"excluded":     {strings.Replace(good, "Excluded:\t No", "Excluded:\t Yes", 1), 0, ""},
		"unknown UUID": {strings.Replace(good, uuidA, "GPU-????????-????-????-????-????????????", 1), 0, "nvidia-smi"},
		"no UUID":      {strings.Replace(good, "GPU UUID", "X", 1), 0, "UUID"},
		"no minor":     {strings.Replace(good, "Device Minor", "X", 1), 0, "no device minor"},
		"odd minor":    {strings.Replace(good, "Minor: \t 1", "Minor: \t one", 1), 0, `"one"`},
		"empty":        {"", 0, "no device minor"},
	} {
		root := t.TempDir()
		write(t, filepath.Join(root, procGPUs, "0000:17:00.0/information"), c.text)
		gpus, err := ProcFS{Root: root}.List(context.Background())
		if len(gpus) != c.gpus || (err == nil) != (c.says == "") || (err != nil && !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: got %v, %v", name, gpus, err)
		}
	}
}

// A GPU that fails keeps its index, and takes no others with it.
func TestBrokenGPUIsLeftOut(t *testing.T) {
	root, log := fakeHost(t), new(bytes.Buffer)
	o := Options{HostRoot: root, Log: &logrus.Logger{Out: log, Formatter: &logrus.TextFormatter{}, Level: logrus.WarnLevel}}
	file := filepath.Join(root, procGPUs, "0000:17:00.0/information")
	whole := Fingerprint(o)
	for _, text := range []string{information("NVIDIA H200", "GPU-????????-????-????-????-????????????", "0000:17:00.0", 1), "", "Model: \t\t NVIDIA H200\n"} {
		write(t, file, text)
		log.Reset()
		gpus, err := Discover(t.Context(), o)
		if err != nil || len(gpus) != 1 || gpus[0].UUID != uuidB || gpus[0].Index != 1 {
			t.Errorf("%q: got %v, %v", text, gpus, err)
		}
		if !strings.Contains(log.String(), "0000:17:00.0") {
			t.Errorf("%q: the log is %q", text, log)
		}
		if Fingerprint(o) == whole {
			t.Errorf("%q: no change of the node", text)
		}
	}
	if err := errors.Join(os.Remove(file), os.Mkdir(file, 0o755)); err != nil {
		t.Fatal(err)
	}
	if gpus, err := Discover(t.Context(), o); err != nil || len(gpus) != 1 || gpus[0].UUID != uuidB || gpus[0].Index != 1 {
		t.Errorf("unreadable: got %v, %v", gpus, err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	write(t, file, information("NVIDIA H200", uuidA, "0000:17:00.0", 1))
	if Fingerprint(o) != whole {
		t.Error("nobody sees that it is back")
	}
}

// What NVML cannot open is still there for those who ask, in its place.
func TestUnopenedGPUsAreAdded(t *testing.T) {
	o := Options{HostRoot: fakeHost(t)}
	a, b := GPU{UUID: uuidA, MemoryBytes: 1}, GPU{Index: 1, UUID: uuidB, MemoryBytes: 2}
	for name, opened := range map[string][]GPU{"both": {a, b}, "the first": {a}, "the second": {b}, "another one": {{UUID: "GPU-c"}, b}} {
		got := AddUnopened(t.Context(), o, slices.Clone(opened))
		if len(got) != 2 || got[0].Index != 0 || got[1].Index != 1 || got[1].UUID != uuidB {
			t.Fatalf("%s: %+v", name, got)
		}
		if got[0].Unopened != (name == "the second") || got[1].Unopened != (name == "the first") {
			t.Errorf("%s: opened %v, %v", name, !got[0].Unopened, !got[1].Unopened)
		}
		if want := opened[0]; got[want.Index].MemoryBytes != want.MemoryBytes || got[want.Index].UUID != want.UUID {
			t.Errorf("%s: %+v has taken the place of %+v", name, got, want)
		}
	}
	if got := AddUnopened(t.Context(), Options{HostRoot: t.TempDir()}, nil); len(got) != 0 {
		t.Errorf("without driver: %+v", got)
	}
	if got := AddUnopened(t.Context(), Options{HostRoot: o.HostRoot, SimDir: "sim"}, nil); len(got) != 0 {
		t.Errorf("simulated: %+v", got)
	}
}

func TestDiscoverWithoutDriverFindsNothing(t *testing.T) {
	gpus, err := Discover(context.Background(), Options{HostRoot: t.TempDir()})
	if err != nil || len(gpus) != 0 {
		t.Errorf("got %v, %v", gpus, err)
	}
}

func TestSimulatedFromConfig(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		config string
		gpus   int
		says   string
	}{
		"no config":  {"", 1, ""},
		"two":        {"gpus=2\nmemory_mib=4096\nlog_records=7\n", 2, ""},
		"no number":  {"gpus=many\n", 0, "many"},
		"too many":   {"gpus=100000\n", 0, "more than"},
		"none there": {"gpus=0\n", 0, ""},
	} {
		write(t, filepath.Join(dir, "run/config"), c.config)
		gpus, err := Simulated{Dir: dir}.fromConfig(dir)
		if len(gpus) != c.gpus || (err == nil) != (c.says == "") || (err != nil && !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: got %v, %v", name, gpus, err)
		}
		if name == "two" && (gpus[1].UUID != "GPU-51600000-0000-4000-8000-000000000001" || gpus[1].MemoryBytes != 4<<30) {
			t.Errorf("second GPU is %+v", gpus[1])
		}
	}
}

func TestSimulatedNeedsItsLibrary(t *testing.T) {
	_, err := Discover(context.Background(), Options{SimDir: t.TempDir()})
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "libnvidia-ml.so.1") {
		t.Errorf("got %v", err)
	}
}

// What NVML fails to say is said to be missing, so that somebody looks again.
func TestPartialLooks(t *testing.T) {
	failed := errors.New("Unknown Error")
	for name, c := range map[string]struct {
		partial bool
		err     error
		want    bool
	}{
		"NVML answers": {}, "one GPU fails": {partial: true, want: true}, "NVML fails": {err: failed, want: true}, "no NVML": {err: ErrNoNVML},
	} {
		nvml := func(context.Context) ([]GPU, bool, error) { return nil, c.partial, c.err }
		if _, partial, err := (Options{}).list(t.Context(), nvml); partial != c.want || err != nil {
			t.Errorf("%s: partial %v, %v", name, partial, err)
		}
	}
}

// The simulated library answers go-nvml as NVIDIA's does. NVSHARE_TEST_SIMGPU
// names its directory; the Makefile sets it.
func TestSimulatedThroughNVML(t *testing.T) {
	lib := os.Getenv("NVSHARE_TEST_SIMGPU")
	if lib == "" {
		t.Skip("NVSHARE_TEST_SIMGPU is not set")
	}
	dir := t.TempDir()
	for _, name := range simLibraries {
		data, err := os.ReadFile(filepath.Join(lib, name))
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, "lib", name), string(data))
	}
	write(t, filepath.Join(dir, "run/config"), "gpus=2\nmemory_mib=1024\n")
	got, err := Simulated{Dir: dir}.List(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	want, err := Simulated{Dir: dir}.fromConfig(dir)
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		if want := (Model{Architecture: "Hopper", ComputeCapability: "9.0", DriverVersion: "580.0.0-simgpu", CUDAVersion: "13.0"}); got[i].Model != want {
			t.Errorf("GPU %d is a %+v, want %+v", i, got[i].Model, want)
		}
		got[i].PCIBusID, got[i].Model = "", Model{}
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("through NVML %+v\nfrom the configuration %+v", got, want)
	}

	s := Sampler{SimDir: dir}
	for range 2 { // NVML stays started
		samples, err := s.Sample(context.Background())
		if err != nil || len(samples) != len(want) {
			t.Fatalf("samples %v, %v", samples, err)
		}
		for i, sample := range samples {
			if sample.UUID != want[i].UUID || sample.Utilization != 0 || sample.MemoryUtilization != 0 || sample.Watts != 90 || sample.Celsius != 35 ||
				sample.MemoryTotal != 1<<30 || sample.MemoryUsed != 0 || sample.MemoryFree != 1<<30 ||
				sample.Processes == nil || len(sample.Processes) != 0 {
				t.Errorf("GPU %d: %+v", i, sample)
			}
		}
	}
	// Errors that end all work on a GPU are told; one of a program is none, and neither is
	// what was before the first sample.
	write(t, filepath.Join(dir, "run/xid"), "0 79\n1 13\n1 48\n")
	samples, err := s.Sample(context.Background())
	if err != nil || samples[0].Faults != 1 || !strings.Contains(samples[0].Fault, "Xid 79") || samples[1].Faults != 1 || !strings.Contains(samples[1].Fault, "Xid 48") {
		t.Errorf("samples %+v, %v", samples, err)
	}
	later := Sampler{SimDir: dir}
	if samples, err = later.Sample(context.Background()); err != nil || samples[0].Faults != 0 {
		t.Errorf("a later sampler: %+v, %v", samples, err)
	}
	// Nobody keeps the driver from being unloaded between two samples.
	later.Release(t.Context())
	state := filepath.Join(dir, "run") // stands for device nodes
	if s.Release(t.Context()); uses(t, state) {
		t.Error("the driver is open after Release")
	}
	write(t, filepath.Join(dir, "run/xid"), "0 79\n1 13\n1 48\n0 48\n")
	if samples, err := s.Sample(context.Background()); err != nil || samples[0].Faults != 1 || samples[1].Faults != 1 || !uses(t, state) {
		t.Errorf("samples after Release: %+v, %v", samples, err)
	}
	s.Release(t.Context())
}

// uses tells whether this process has a file below dir mapped or open.
func uses(t *testing.T, dir string) bool {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	open, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range open {
		if file, err := os.Readlink(fd); err == nil && strings.HasPrefix(file, dir) {
			return true
		}
	}
	return strings.Contains(string(maps), dir)
}

func TestFindDriver(t *testing.T) {
	d, err := FindDriver(Options{HostRoot: fakeHost(t)})
	if err != nil {
		t.Fatal(err)
	}
	lib := "/usr/lib/x86_64-linux-gnu/"
	want := &Driver{
		Version: driverVersion,
		Libraries: []Library{
			{lib + "libcuda.so." + driverVersion, []string{lib + "libcuda.so", lib + "libcuda.so.1", lib + "libcuda.so." + driverVersion}, lib + "libcuda.so.1"},
			{lib + "libnvidia-gpucomp.so." + driverVersion, []string{lib + "libnvidia-gpucomp.so." + driverVersion}, lib + "libnvidia-gpucomp.so." + driverVersion},
			{lib + "libnvidia-ml.so." + driverVersion, []string{lib + "libnvidia-ml.so.1", lib + "libnvidia-ml.so." + driverVersion}, lib + "libnvidia-ml.so.1"},
			{lib + "libnvidia-nvvm70.so.4", []string{lib + "libnvidia-nvvm70.so.4"}, lib + "libnvidia-nvvm70.so.4"},
			// The host lacks the link; containers need the name all the same.
			{lib + "libnvidia-ptxjitcompiler.so." + driverVersion, []string{lib + "libnvidia-ptxjitcompiler.so.1", lib + "libnvidia-ptxjitcompiler.so." + driverVersion}, lib + "libnvidia-ptxjitcompiler.so.1"},
			{lib + "libnvidia-tileiras.so." + driverVersion, []string{lib + "libnvidia-tileiras.so." + driverVersion}, lib + "libnvidia-tileiras.so." + driverVersion},
		},
		NvidiaSMI:   "/usr/bin/nvidia-smi",
		DeviceNodes: []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"},
	}
	if !reflect.DeepEqual(d, want) {
		t.Errorf("got  %+v\nwant %+v", d, want)
	}
}

// Where distributions and installers put the driver: every name that a
// container needs leads to a file that the host has.
func TestFindDriverLayouts(t *testing.T) {
	const version = "550.1.2"
	file := func(root, path, soname string) { write(t, root+path, string(sharedLibrary(soname, 62))) }
	for name, c := range map[string]struct {
		build     func(root string)
		libraries map[string]string // by soname's path in the container: the host's file
		smi       string
		devRoot   string
	}{
		"beside the host's libraries": {func(r string) {
			file(r, "/usr/local/nvidia/lib64/libcuda.so."+version, "libcuda.so.1")
			link(t, "libcuda.so."+version, r+"/usr/local/nvidia/lib64/libcuda.so.1")
		}, map[string]string{"/usr/local/nvidia/lib64/libcuda.so.1": "/usr/local/nvidia/lib64/libcuda.so." + version}, "", ""},
		"Debian's alternatives": {func(r string) {
			lib, current := "/usr/lib/x86_64-linux-gnu/", "/usr/lib/x86_64-linux-gnu/nvidia/current/"
			file(r, current+"libcuda.so."+version, "libcuda.so.1")
			file(r, current+"libnvidia-ml.so."+version, "libnvidia-ml.so.1")
			file(r, current+"libnvidia-nvvm.so."+version, "libnvidia-nvvm.so.4") // without an alternative
			for _, l := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
				link(t, strings.TrimSuffix(l, "1")+version, r+current+l)
				link(t, current+l, r+"/etc/alternatives/nvidia--"+l+"-x86_64-linux-gnu")
				link(t, "/etc/alternatives/nvidia--"+l+"-x86_64-linux-gnu", r+lib+l)
			}
			write(t, r+"/usr/lib/nvidia/current/nvidia-smi", "")
			link(t, "/usr/lib/nvidia/current/nvidia-smi", r+"/etc/alternatives/nvidia--nvidia-smi")
			link(t, "/etc/alternatives/nvidia--nvidia-smi", r+"/usr/bin/nvidia-smi")
			write(t, r+"/dev/nvidiactl", "")
		}, map[string]string{
			"/usr/lib/x86_64-linux-gnu/libcuda.so.1":                       "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so." + version,
			"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1":                  "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so." + version,
			"/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-nvvm.so.4": "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-nvvm.so." + version,
		}, "/usr/lib/nvidia/current/nvidia-smi", ""},
		"RHEL, with 32-bit libraries": {func(r string) {
			write(t, r+"/usr/lib/libcuda.so."+version, string(sharedLibrary("libcuda.so.1", 3)))
			file(r, "/usr/lib64/libcuda.so."+version, "libcuda.so.1")
			link(t, "libcuda.so."+version, r+"/usr/lib64/libcuda.so.1")
			write(t, r+"/dev/nvidiactl", "")
		}, map[string]string{"/usr/lib64/libcuda.so.1": "/usr/lib64/libcuda.so." + version}, "", ""},
		"the GPU Operator's container": {func(r string) {
			d := r + "/run/nvidia/driver"
			file(d, "/usr/lib/x86_64-linux-gnu/libcuda.so."+version, "libcuda.so.1")
			// An absolute link, which holds in the container that made it.
			link(t, "/usr/lib/x86_64-linux-gnu/libcuda.so."+version, d+"/usr/lib/x86_64-linux-gnu/libcuda.so.1")
			write(t, d+"/usr/bin/nvidia-smi", "")
			write(t, d+"/dev/nvidiactl", "")
		}, map[string]string{"/usr/lib/x86_64-linux-gnu/libcuda.so.1": "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so." + version},
			"/run/nvidia/driver/usr/bin/nvidia-smi", "/run/nvidia/driver"},
		"the same, with the host's device nodes": {func(r string) {
			file(r, "/run/nvidia/driver/usr/lib64/libcuda.so."+version, "libcuda.so.1")
			write(t, r+"/run/nvidia/driver/dev/nvidiactl", "")
			write(t, r+"/dev/nvidiactl", "")
		}, map[string]string{"/usr/lib64/libcuda.so.1": "/run/nvidia/driver/usr/lib64/libcuda.so." + version}, "", ""},
		"GKE": {func(r string) {
			file(r, "/home/kubernetes/bin/nvidia/lib64/libcuda.so."+version, "libcuda.so.1")
			link(t, "libcuda.so."+version, r+"/home/kubernetes/bin/nvidia/lib64/libcuda.so.1")
			write(t, r+"/home/kubernetes/bin/nvidia/bin/nvidia-smi", "")
			write(t, r+"/dev/nvidiactl", "")
		}, map[string]string{"/usr/local/nvidia/lib64/libcuda.so.1": "/home/kubernetes/bin/nvidia/lib64/libcuda.so." + version},
			"/home/kubernetes/bin/nvidia/bin/nvidia-smi", ""},
	} {
		for _, module := range []bool{true, false} {
			root := t.TempDir()
			c.build(root)
			if module {
				write(t, root+"/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+version+"  Mon\n")
				// An older version's files, left on the host, are not it.
				file(root, "/usr/lib64/libcuda.so.470.1", "libcuda.so.1")
			} else if name == "the same, with the host's device nodes" {
				continue // nothing says which version is used
			}
			d, err := FindDriver(Options{HostRoot: root})
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			got := map[string]string{}
			for _, l := range d.Libraries {
				got[l.Soname] = l.File
				if !host(root).exists(l.File) || !slices.Contains(l.Paths, l.Soname) {
					t.Errorf("%s: %+v", name, l)
				}
			}
			if d.Version != version || !reflect.DeepEqual(got, c.libraries) || d.NvidiaSMI != c.smi || d.DevRoot != c.devRoot {
				t.Errorf("%s: got %+v", name, d)
			}
			gpus := []GPU{{UUID: uuidA, DeviceNodes: []string{"/dev/nvidia3"}}}
			base := DriverBase(d, gpus, "/hook")
			if _, err := Build(Kind, gpus, base, DefaultPaths); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			n := base.PerGPU[0].DeviceNodes[0]
			if n.Path != "/dev/nvidia3" || c.devRoot != "" && n.HostPath != c.devRoot+"/dev/nvidia3" || c.devRoot == "" && n.HostPath != "" {
				t.Errorf("%s: device node %+v", name, n)
			}
		}
	}
}

func TestFindDriverErrors(t *testing.T) {
	if _, err := FindDriver(Options{HostRoot: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "install") || !strings.Contains(err.Error(), "/usr/lib64") {
		t.Errorf("without driver: %v", err)
	}
	root := fakeHost(t)
	if err := os.Remove(root + "/usr/lib/x86_64-linux-gnu/libcuda.so." + driverVersion); err != nil {
		t.Fatal(err)
	}
	if _, err := FindDriver(Options{HostRoot: root}); err == nil || !strings.Contains(err.Error(), "same version") {
		t.Errorf("library of another version: %v", err)
	}
}

func TestFingerprintShowsChanges(t *testing.T) {
	root := fakeHost(t)
	o := Options{HostRoot: root}
	seen := []string{Fingerprint(o)}
	if Fingerprint(o) != seen[0] {
		t.Fatal("it changes by itself")
	}
	for name, change := range map[string]func(){
		"a GPU appears":        func() { write(t, root+procGPUs+"/0000:ff:00.0/information", "") },
		"a device node":        func() { write(t, root+"/dev/nvidia-modeset", "") },
		"NVIDIA writes a spec": func() { write(t, root+"/etc/cdi/nvidia.yaml", "x") },
		"an operator's driver": func() { write(t, root+"/run/nvidia/driver/usr/lib64/libcuda.so.1.2", "") },
		"a node beside it":     func() { write(t, root+"/run/nvidia/driver/dev/nvidia0", "") },
		"the driver changes":   func() { write(t, root+"/proc/driver/nvidia/version", "NVRM version: x 1.2 y") },
	} {
		change()
		now := Fingerprint(o)
		if slices.Contains(seen, now) {
			t.Errorf("%s: unchanged", name)
		}
		seen = append(seen, now)
	}
	// Claims come and go with pods; their files are written beside these, under other names.
	claim := ClaimFile(root+"/etc/cdi", "00000001-0000-4000-8000-000000000000")
	// So do those of other drivers.
	another := root + "/etc/cdi/k8s.gpu.nvidia.com-claim_00000002.json"
	for _, file := range []string{claim, filepath.Join(root, "/etc/cdi", "."+filepath.Base(claim)+".123.tmp"), another} {
		write(t, file, `{"cdiVersion": "0.5.0", "kind": "k8s.gpu.nvidia.com/claim"}`)
		if Fingerprint(o) != seen[len(seen)-1] {
			t.Errorf("%s changes it", file)
		}
	}
}

func TestOnHostFollowsLinksInsideTheRoot(t *testing.T) {
	root := t.TempDir()
	link(t, "/run", root+"/var/run")
	write(t, root+"/run/cdi/x.yaml", "")
	for path, want := range map[string]string{
		"/var/run/cdi":        root + "/run/cdi",
		"/var/run/new/deeper": root + "/run/new/deeper",
		"/none":               root + "/none",
		"/":                   root,
	} {
		if got := OnHost(root, path); got != want {
			t.Errorf("OnHost(%s) = %s, want %s", path, got, want)
		}
	}
	if got := OnHost("", "/var/run/cdi"); got != "/var/run/cdi" {
		t.Errorf("without a root: %s", got)
	}
}

// The sockets of NVIDIA's daemons reach containers, the driver container's too. A host that has none at
// first is looked at again when one comes.
func TestSocketsOfDaemons(t *testing.T) {
	const persistenced, manager = "/run/nvidia-persistenced/socket", "/run/nvidia-fabricmanager/socket"
	root := fakeHost(t)
	before := Fingerprint(Options{HostRoot: root})
	write(t, root+persistenced, "")
	write(t, root+manager, "")
	if Fingerprint(Options{HostRoot: root}) == before {
		t.Error("nobody looks again when a socket comes")
	}
	g := generate(t, Options{HostRoot: root})
	for _, path := range []string{persistenced, manager} {
		for _, kind := range []string{Kind, KindNRI} {
			if m := g.Spec(kind).ContainerEdits.Mounts; !containsMount(m, path) {
				t.Errorf("%s lacks %s", kind, path)
			}
		}
		if !slices.Contains(g.HostFiles, path) {
			t.Errorf("nobody looks again when %s goes: %v", path, g.HostFiles)
		}
	}
	const place = "/run/nvidia/driver"
	d := &Driver{Sockets: []string{place + persistenced}}
	if m := DriverBase(d, nil, "").Common.Mounts; len(m) != 1 || m[0].HostPath != place+persistenced || m[0].ContainerPath != persistenced {
		t.Errorf("of a driver container: %+v", m)
	}
}

// The driver may be where only the administrator knows. It goes before those that are found, and a change
// there is seen.
func TestDriverRoot(t *testing.T) {
	root := fakeHost(t)
	const elsewhere = "/opt/driver"
	lib := "/usr/lib64/"
	o := Options{HostRoot: root, DriverRoot: elsewhere}
	before := Fingerprint(o)
	write(t, root+elsewhere+lib+"libcuda.so."+driverVersion, string(sharedLibrary("libcuda.so.1", 62)))
	if Fingerprint(o) == before {
		t.Error("nobody looks again when the driver comes")
	}
	m := generate(t, o).Spec(KindNRI).ContainerEdits.Mounts
	if !slices.ContainsFunc(m, func(m *specs.Mount) bool {
		return m.HostPath == elsewhere+lib+"libcuda.so."+driverVersion && m.ContainerPath == lib+"libcuda.so.1"
	}) {
		t.Errorf("the mounts are %+v", m)
	}
	if err := os.RemoveAll(root + elsewhere); err != nil {
		t.Fatal(err)
	}
	if !containsMount(generate(t, o).Spec(KindNRI).ContainerEdits.Mounts, "/usr/lib/x86_64-linux-gnu/libcuda.so.1") {
		t.Error("the driver of the host is not found")
	}
}
