// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	oci "github.com/opencontainers/runtime-spec/specs-go"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	nvcdi "github.com/nvshare/nvshare/cdi"
)

// apply changes a container's OCI spec by an adjustment, in the order in which
// NRI's runtimes do: environment, hooks, CDI devices, devices, mounts. Without a
// cache, CDI devices are dropped, without a word.
func apply(t *testing.T, spec *oci.Spec, a *api.ContainerAdjustment, cache *cdi.Cache) {
	t.Helper()
	set, removed := envOf(a)
	spec.Process.Env = slices.DeleteFunc(spec.Process.Env, func(e string) bool {
		key, _, _ := strings.Cut(e, "=")
		_, replaced := set[key]
		return replaced || slices.Contains(removed, key)
	})
	for k, v := range set {
		spec.Process.Env = append(spec.Process.Env, k+"="+v)
	}
	for _, h := range a.GetHooks().GetCreateContainer() {
		hook := oci.Hook{Path: h.Path, Args: h.Args, Env: h.Env}
		if h.Timeout != nil {
			timeout := int(h.Timeout.Value)
			hook.Timeout = &timeout
		}
		if spec.Hooks == nil {
			spec.Hooks = &oci.Hooks{}
		}
		spec.Hooks.CreateContainer = append(spec.Hooks.CreateContainer, hook)
	}
	if names := cdiNames(a); cache != nil && len(names) > 0 {
		if _, err := cache.InjectDevices(spec, names...); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range a.GetLinux().GetDevices() {
		major, minor := d.Major, d.Minor
		device := oci.LinuxDevice{Path: d.Path, Type: d.Type, Major: major, Minor: minor}
		if d.FileMode != nil {
			device.FileMode = d.FileMode.Get()
		}
		spec.Linux.Devices = append(spec.Linux.Devices, device)
		spec.Linux.Resources.Devices = append(spec.Linux.Resources.Devices, oci.LinuxDeviceCgroup{Allow: true, Type: d.Type, Major: &major, Minor: &minor, Access: d.AccessString()})
	}
	for _, m := range a.GetMounts() {
		spec.Mounts = append(spec.Mounts, oci.Mount{Source: m.Source, Destination: m.Destination, Type: m.Type, Options: m.Options})
	}
}

// contents says what of a spec matters to a container.
func contents(spec *oci.Spec) []string {
	var s []string
	for _, e := range spec.Process.Env {
		s = append(s, "env "+e)
	}
	for _, d := range spec.Linux.Devices {
		s = append(s, fmt.Sprintf("device %s %s %d:%d", d.Path, d.Type, d.Major, d.Minor))
	}
	for _, d := range spec.Linux.Resources.Devices {
		s = append(s, fmt.Sprintf("allow %v %s %d:%d %s", d.Allow, d.Type, *d.Major, *d.Minor, d.Access))
	}
	for _, m := range spec.Mounts {
		options := slices.Sorted(slices.Values(m.Options))
		s = append(s, fmt.Sprintf("mount %s at %s %v", m.Source, m.Destination, options))
	}
	if spec.Hooks != nil {
		for _, h := range spec.Hooks.CreateContainer {
			s = append(s, fmt.Sprintf("hook %s %q %v %d", h.Path, h.Args, h.Env, *h.Timeout))
		}
	}
	slices.Sort(s)
	return s
}

// Whatever the runtime does with CDI devices that plugins name, a container ends
// up with the same: one is told by the runtime's name and version alone.
func TestAllRuntimesGiveTheSame(t *testing.T) {
	inv := inventory(t)
	dir := t.TempDir()
	if _, err := nvcdi.Write(dir, inv.spec); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, c := range []struct {
		runtime, version string
		injects          bool // what it does, by its source
	}{
		{"containerd", "v2.4.2", true}, {"containerd", "v2.1.0", true}, {"containerd", "v1.7.30", true},
		{"containerd", "1.7.29", false}, {"containerd", "1.7.24~ds1-6", false}, {"containerd", "v2.0.14", false},
		{"cri-o", "1.34.2", true}, {"cri-o", "1.31.0", false}, {"something-else", "9.0", false},
	} {
		t.Run(c.runtime+" "+c.version, func(t *testing.T) {
			r := newRuntime(t, c.version)
			r.name = c.runtime
			r.start()
			defer r.stop()
			run(t, r, NewContainers(quiet()))
			await(t, r.synced, "the registration")
			a, err := r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), ctr("main", "PATH=/bin", "LD_PRELOAD=/user.so"))
			if err != nil {
				t.Fatal(err)
			}
			spec := &oci.Spec{Process: &oci.Process{Env: []string{"PATH=/bin", "LD_PRELOAD=/user.so"}}, Linux: &oci.Linux{Resources: &oci.LinuxResources{}}}
			if c.injects {
				apply(t, spec, a, cache)
			} else {
				apply(t, spec, a, nil)
			}
			got := contents(spec)
			if want == nil {
				want = got
				if len(want) < 9 || !slices.Contains(want, "env LD_PRELOAD="+nvcdi.ShimPath+":/user.so") {
					t.Fatalf("it is %q", want)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("a container has\n%s\nwith the first runtime it had\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
			}
		})
	}
}

// Runtimes with NRI up to 0.8, containerd 1.7 and 2.0 among them, refuse a plugin
// that subscribes to an event that they do not know.
func TestEventsAreKnownToOldRuntimes(t *testing.T) {
	for name, implemented := range map[string]bool{
		"UpdatePodSandbox":            implements[stub.UpdatePodInterface](),
		"PostUpdatePodSandbox":        implements[stub.PostUpdatePodInterface](),
		"ValidateContainerAdjustment": implements[stub.ValidateContainerAdjustmentInterface](),
	} {
		if implemented {
			t.Errorf("the plugin handles %s: containerd 1.7 and 2.0 would not register it", name)
		}
	}
}

func implements[T any]() bool {
	_, ok := any(&session{}).(T)
	return ok
}
