// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/cdi"
)

// inventory has two GPUs whose device nodes are some of this machine's.
func inventory(t testing.TB) *Inventory {
	t.Helper()
	gpus := []cdi.GPU{
		{Index: 0, UUID: known[2], DeviceNodes: []string{"/dev/null"}},
		{Index: 1, UUID: uuid, DeviceNodes: []string{"/dev/nvshare-missing"}},
	}
	driver := &cdi.Driver{
		Libraries:   []cdi.Library{{File: "/l/libcuda.so.1.2", Paths: []string{"/l/libcuda.so.1"}, Soname: "/l/libcuda.so.1"}},
		DeviceNodes: []string{"/dev/zero"},
	}
	spec, err := cdi.Build(cdi.KindNRI, gpus, cdi.DriverBase(driver, gpus, cdi.DefaultPaths.Hook), cdi.DefaultPaths)
	if err != nil {
		t.Fatal(err)
	}
	inv := NewInventory(spec, gpus)
	if !slices.Equal(inv.Devices(), known) {
		t.Fatalf("devices are %v", inv.Devices())
	}
	return inv
}

func TestMergePreload(t *testing.T) {
	const shim = cdi.ShimPath
	for own, want := range map[string]string{
		"":                         shim,
		" : ":                      shim,
		"/user.so":                 shim + ":/user.so",
		"/a.so:/b.so":              shim + ":/a.so:/b.so",
		"/a.so /b.so":              shim + ":/a.so /b.so",
		" /a.so : /b.so ":          shim + ":/a.so : /b.so",
		shim:                       shim,
		shim + ":/a.so":            shim + ":/a.so",
		"/a.so " + shim + ":/b.so": shim + ":/a.so /b.so",
		"/a.so:" + shim:            shim + ":/a.so",
		shim + " " + shim:          shim,
		"/x" + shim:                shim + ":/x" + shim,
		"$LIB/a.so:libmimalloc.so": shim + ":$LIB/a.so:libmimalloc.so",
	} {
		got := mergePreload(own)
		if got != want {
			t.Errorf("mergePreload(%q) = %q, want %q", own, got, want)
		}
		if again := mergePreload(got); again != got {
			t.Errorf("merging %q again gives %q", got, again)
		}
	}
}

func envOf(a *api.ContainerAdjustment) (set map[string]string, removed []string) {
	set = map[string]string{}
	for _, e := range a.GetEnv() {
		if key, marked := e.IsMarkedForRemoval(); marked {
			removed = append(removed, key)
		} else {
			set[key] = e.Value
		}
	}
	return set, removed
}

func TestAdjustNamesCDIDevices(t *testing.T) {
	for name, c := range map[string]struct {
		ask, given []string // devices; CDI names that the runtime knows of
		env        []string
		want       []string // CDI names; nil: untouched
		preload    string
	}{
		"nothing":               {nil, nil, []string{"LD_PRELOAD=/u.so"}, nil, ""},
		"one":                   {[]string{"0"}, nil, nil, []string{"nvshare.com/gpu-nri=0"}, cdi.ShimPath},
		"two":                   {[]string{"1", "0"}, nil, []string{"PATH=/bin"}, []string{"nvshare.com/gpu-nri=1", "nvshare.com/gpu-nri=0"}, cdi.ShimPath},
		"own preload":           {[]string{"all"}, nil, []string{"LD_PRELOAD=/u.so"}, []string{"nvshare.com/gpu-nri=all"}, cdi.ShimPath + ":/u.so"},
		"last preload counts":   {[]string{"0"}, nil, []string{"LD_PRELOAD=/a.so", "LD_PRELOAD=/b.so"}, []string{"nvshare.com/gpu-nri=0"}, cdi.ShimPath + ":/b.so"},
		"given already":         {[]string{"0"}, []string{"nvshare.com/gpu=0"}, []string{"LD_PRELOAD=" + cdi.ShimPath}, nil, ""},
		"given as ours":         {[]string{"0"}, []string{"nvshare.com/gpu-nri=0"}, nil, []string{}, cdi.ShimPath},
		"all given":             {[]string{"0", "1"}, []string{"nvshare.com/gpu=all"}, []string{"LD_PRELOAD=" + cdi.ShimPath}, nil, ""},
		"one given":             {[]string{"0", "1"}, []string{"nvshare.com/gpu=0"}, []string{"LD_PRELOAD=" + cdi.ShimPath}, []string{"nvshare.com/gpu-nri=1"}, cdi.ShimPath},
		"another vendor's":      {[]string{"0"}, []string{"nvidia.com/gpu=0"}, nil, []string{"nvshare.com/gpu-nri=0"}, cdi.ShimPath},
		"given but not asked":   {nil, []string{"nvshare.com/gpu=0"}, []string{"LD_PRELOAD=" + cdi.ShimPath}, nil, ""},
		"a similar environment": {[]string{"0"}, nil, []string{"MY_LD_PRELOAD=/x.so"}, []string{"nvshare.com/gpu-nri=0"}, cdi.ShimPath},
	} {
		ctr := &api.Container{Env: c.env}
		for _, g := range c.given {
			ctr.CDIDevices = append(ctr.CDIDevices, &api.CDIDevice{Name: g})
		}
		a, err := Adjust(Request{Devices: c.ask}, ctr, false)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if c.want == nil {
			if a != nil {
				t.Errorf("%s: changed by %v", name, a)
			}
			continue
		}
		var got []string
		for _, d := range a.GetCDIDevices() {
			got = append(got, d.Name)
		}
		set, removed := envOf(a)
		if !slices.Equal(got, c.want) || len(set) != 1 || set["LD_PRELOAD"] != c.preload {
			t.Errorf("%s: devices %v, environment %v", name, got, set)
		}
		// Without the removal, a plugin before us that set it would be a conflict.
		if _, had := lookupEnv(c.env, "LD_PRELOAD"); had != slices.Contains(removed, "LD_PRELOAD") {
			t.Errorf("%s: removed %v", name, removed)
		}
		if len(a.GetMounts()) != 0 || a.GetHooks() != nil || a.GetLinux() != nil {
			t.Errorf("%s: more than named: %v", name, a)
		}
	}
}

func TestInjectsCDI(t *testing.T) {
	for runtime, want := range map[string]bool{
		"containerd 1.6.20~ds1": false, "containerd 1.7.0": false, "containerd v1.7.29": false, "containerd 1.7.24-0ubuntu1": false,
		"containerd 1.7.30": true, "containerd v1.7.99": true,
		"containerd 2.0.0": false, "containerd v2.0.14": false, "containerd 2.0": false,
		"containerd 2.1.0": true, "containerd v2.4.2": true, "containerd 2.4.2+unknown": true, "containerd 3.0": true,
		"containerd unknown": false, "containerd ": false, "containerd 0a1b2c": false,
		"cri-o 1.33.9": false, "cri-o 1.34.0": true, "cri-o 2.0": true,
		"other 9.9.9": false,
	} {
		name, version, _ := strings.Cut(runtime, " ")
		if got := injectsCDI(name, version); got != want {
			t.Errorf("injectsCDI(%q, %q) = %v", name, version, got)
		}
	}
}

// An image or a pod cannot send the shim to another scheduler than the node's.
func TestRunDirectoryIsTheNodes(t *testing.T) {
	for value, changed := range map[string]bool{"/tmp/mine": true, "": true, "/var/run/nvshare": false} {
		ctr := &api.Container{Env: []string{"NVSHARE_RUN_DIR=" + value}}
		a, err := Adjust(Request{Devices: []string{"0"}}, ctr, false)
		if err != nil {
			t.Fatal(err)
		}
		set, removed := envOf(a)
		if changed && (set["NVSHARE_RUN_DIR"] != "/var/run/nvshare" || !slices.Contains(removed, "NVSHARE_RUN_DIR")) {
			t.Errorf("%q: set %v, removed %v", value, set, removed)
		}
	}
	if a, err := Adjust(Request{}, &api.Container{Env: []string{"NVSHARE_RUN_DIR=/tmp/mine"}}, false); a != nil || err != nil {
		t.Errorf("a container that asks for nothing: %v, %v", a, err)
	}
}

// The shim takes any other word for open.
func TestSchedulerLossIsAKnownWord(t *testing.T) {
	for value, ok := range map[string]bool{"open": true, "closed": true, "": true, "close": false, "CLOSED": false} {
		ctr := &api.Container{Env: []string{"NVSHARE_SCHEDULER_LOSS=" + value}}
		_, err := Adjust(Request{Devices: []string{"0"}}, ctr, false)
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "give open") {
			t.Errorf("%q: %v", value, err)
		}
		if a, err := Adjust(Request{}, ctr, false); a != nil || err != nil {
			t.Errorf("a container that asks for nothing: %v, %v", a, err)
		}
	}
}

// The kind for this plugin alone does not set LD_PRELOAD. Whoever was given such a
// device by other means gets the shim all the same.
func TestDevicesOfTheInternalKindGetTheShim(t *testing.T) {
	ctr := &api.Container{Env: []string{"LD_PRELOAD=/u.so", "NVSHARE_RUN_DIR=/tmp/mine"}, CDIDevices: []*api.CDIDevice{{Name: "nvshare.com/gpu-nri=0"}}}
	for _, ask := range [][]string{nil, {"0"}} {
		a, err := Adjust(Request{Devices: ask}, ctr, false)
		if err != nil {
			t.Fatal(err)
		}
		set, removed := envOf(a)
		if set["LD_PRELOAD"] != cdi.ShimPath+":/u.so" || set["NVSHARE_RUN_DIR"] != "/var/run/nvshare" || !slices.Equal(removed, []string{"LD_PRELOAD", "NVSHARE_RUN_DIR"}) || len(a.GetCDIDevices()) != 0 {
			t.Errorf("asked for %v: set %v, removed %v, devices %v", ask, set, removed, a.GetCDIDevices())
		}
	}
}

// A runtime may inject a device of that kind before NRI and not tell of it, as CRI-O and containerd before
// 2.3 do: the mount of the shim does.
func TestUntoldDevicesGetTheShim(t *testing.T) {
	p := New(quiet(), NewContainers(quiet()))
	p.SetInventory(inventory(t))
	ctr := &api.Container{Id: "c", Name: "main", Env: []string{"LD_PRELOAD=/u.so", "NVSHARE_RUN_DIR=/tmp/mine"},
		Mounts: []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}}
	a, _, err := p.CreateContainer(t.Context(), pod(nil), ctr)
	if err != nil {
		t.Fatal(err)
	}
	if set, _ := envOf(a); set["LD_PRELOAD"] != cdi.ShimPath+":/u.so" || set["NVSHARE_RUN_DIR"] != "/var/run/nvshare" {
		t.Errorf("set %v", set)
	}
}
