// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/cdi"
)

// A container in an overlap group looks for MPS where the hook mounts it, and its core limit
// is its part of the processors.
func TestOverlapGroupOfAPod(t *testing.T) {
	p := New(quiet(), NewContainers(quiet()))
	p.SetInventory(inventory(t))
	pod, ctr := asking("a", "0", "")
	pod.Annotations[OverlapAnnotation], pod.Annotations[CoreLimitAnnotation] = "small", "40"
	ctr.User = &api.User{Uid: 1000}
	ctr.Env = []string{"CUDA_MPS_PIPE_DIRECTORY=relative"}
	adjust, _, err := p.CreateContainer(context.Background(), pod, ctr)
	if err != nil {
		t.Fatal(err)
	}
	env, removed := envOf(adjust)
	if env["CUDA_MPS_PIPE_DIRECTORY"] != cdi.ContainerMPSDir || !slices.Contains(removed, "CUDA_MPS_PIPE_DIRECTORY") || env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] != "40" {
		t.Errorf("environment %v, without %v", env, removed)
	}
	if d := adjust.GetCDIDevices(); len(d) != 2 || d[1].Name != "nvshare.com/gpu-nri=overlap" {
		t.Errorf("devices %v", d)
	}
	if adjust.Annotations[OverlapAnnotation] != "small" {
		t.Errorf("annotations %v: the hook looks for the group's", adjust.Annotations)
	}
	if c := p.containers.want[ctr.Id]; c.UID != 1000 || c.Terms.Overlap != "small" {
		t.Errorf("described as %+v", c)
	}
}

// Where /usr of a container is a volume, nothing can be mounted there: its environment names
// another directory, and the sockets come there.
func TestOverlapDirectoryOfAContainer(t *testing.T) {
	for said, want := range map[string]string{"": cdi.ContainerMPSDir, "=/run/mps": "/run/mps", "=": cdi.ContainerMPSDir, "=/": cdi.ContainerMPSDir, "=/run/../mps": cdi.ContainerMPSDir} {
		p := New(quiet(), NewContainers(quiet()))
		p.SetInventory(inventory(t))
		pod, ctr := asking("a", "0", "")
		pod.Annotations[OverlapAnnotation] = "small"
		ctr.User = &api.User{Uid: 1000}
		if said != "" {
			ctr.Env = []string{"CUDA_MPS_PIPE_DIRECTORY" + said}
		}
		adjust, _, err := p.CreateContainer(context.Background(), pod, ctr)
		if err != nil {
			t.Fatal(err)
		}
		if env, _ := envOf(adjust); env["CUDA_MPS_PIPE_DIRECTORY"] != want {
			t.Errorf("%q: environment %v, want %s", said, env, want)
		}
	}
}

// A pod that cannot be in an overlap group is told why, and is not described.
func TestNoOverlapGroupOfAPod(t *testing.T) {
	for want, change := range map[string]func(*api.PodSandbox, *api.Container){
		"exactly one GPU":   func(pod *api.PodSandbox, _ *api.Container) { pod.Annotations[Annotation] = "nvshare.com/gpu=all" },
		"as which user":     func(_ *api.PodSandbox, ctr *api.Container) { ctr.User = nil },
		"is not an overlap": func(pod *api.PodSandbox, _ *api.Container) { pod.Annotations[OverlapAnnotation] = "a/b" },
		"hostUsers: false": func(_ *api.PodSandbox, ctr *api.Container) {
			ctr.Linux = &api.LinuxContainer{Namespaces: []*api.LinuxNamespace{{Type: "user"}}}
		},
	} {
		p := New(quiet(), NewContainers(quiet()))
		p.SetInventory(inventory(t))
		pod, ctr := asking("a", "0", "")
		pod.Annotations[OverlapAnnotation], ctr.User = "small", &api.User{}
		change(pod, ctr)
		if _, _, err := p.CreateContainer(context.Background(), pod, ctr); err == nil || !strings.Contains(err.Error(), OverlapAnnotation+"=") || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if len(p.containers.want) > 0 {
			t.Errorf("%q: refused, and described as %v", want, p.containers.want)
		}
	}
}
