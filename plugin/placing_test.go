// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/cdi"
)

// gpuID is the UUID of a simulated GPU.
func gpuID(i int) string { return fmt.Sprintf("GPU-51600000-0000-4000-8000-%012x", i) }

// simulated is the inventory of a node with n GPUs of 16 GiB without device
// nodes, as simulated ones are.
func simulated(t testing.TB, n int) *Inventory {
	t.Helper()
	var gpus []cdi.GPU
	for i := range n {
		gpus = append(gpus, cdi.GPU{Index: i, UUID: gpuID(i), MemoryBytes: 16 * gib})
	}
	driver := &cdi.Driver{Libraries: []cdi.Library{{File: "/l/libcuda.so.1.2", Paths: []string{"/l/libcuda.so.1"}, Soname: "/l/libcuda.so.1"}}}
	spec, err := cdi.Build(cdi.KindNRI, gpus, cdi.DriverBase(driver, gpus, cdi.DefaultPaths.Hook), cdi.DefaultPaths)
	if err != nil {
		t.Fatal(err)
	}
	return NewInventory(spec, gpus)
}

// placing is a plugin on such a node, and what it was asked for.
type placing struct {
	*Plugin
	t    testing.TB
	pods map[string]*api.PodSandbox
	ctrs map[string]*api.Container
}

// withState is an empty set of containers, where the scheduler has said its state.
func withState() *Containers {
	cs := NewContainers(quiet())
	cs.noState = false
	return cs
}

func newPlacing(t testing.TB, n int) *placing {
	p := &placing{New(quiet(), withState()), t, map[string]*api.PodSandbox{}, map[string]*api.Container{}}
	p.SetInventory(simulated(t, n))
	return p
}

// says makes annotations of "key=value" with keys below nvshare.com.
func says(annotations ...string) map[string]string {
	m := map[string]string{}
	for _, a := range annotations {
		key, value, _ := strings.Cut(a, "=")
		m["nvshare.com/"+key] = value
	}
	return m
}

// podOf is a pod of one container, both of this name; the container has this ID.
func podOf(name, id string, annotations map[string]string) (*api.PodSandbox, *api.Container) {
	return &api.PodSandbox{Id: "sandbox-" + name, Name: name, Namespace: "ml", Uid: "uid-" + name, Annotations: annotations},
		&api.Container{Id: id, PodSandboxId: "sandbox-" + name, Name: "main"}
}

// create returns the indices of the GPUs that a container is given, or why it is
// refused.
func (p *placing) create(name string, annotations ...string) (string, error) {
	return p.createAs(name, "id-"+name, annotations...)
}

func (p *placing) createAs(name, id string, annotations ...string) (string, error) {
	pod, ctr := podOf(name, id, says(annotations...))
	adjust, _, err := p.CreateContainer(context.Background(), pod, ctr)
	if err != nil {
		return "", err
	}
	p.pods[pod.Id], p.ctrs[id] = pod, applied(ctr, adjust)
	return indices(p.t, adjust), nil
}

// applied is a container as the runtime shows it later.
func applied(ctr *api.Container, adjust *api.ContainerAdjustment) *api.Container {
	ctr = &api.Container{Id: ctr.Id, PodSandboxId: ctr.PodSandboxId, Name: ctr.Name, State: api.ContainerState_CONTAINER_RUNNING}
	if adjust != nil {
		ctr.Annotations = adjust.GetAnnotations()
		ctr.Mounts = []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}
	}
	return ctr
}

// indices are those of the GPUs that an adjustment gives. What is injected and
// what is written down must agree.
func indices(t testing.TB, adjust *api.ContainerAdjustment) string {
	t.Helper()
	var all []string
	written := strings.FieldsFunc(adjust.GetAnnotations()[PlacementAnnotation], func(r rune) bool { return r == ',' })
	for i := range 100 {
		if slices.Contains(written, gpuID(i)) {
			all = append(all, fmt.Sprint(i))
		}
	}
	names := cdiNames(adjust)
	for i, name := range names {
		names[i] = strings.TrimPrefix(name, cdi.KindNRI+"=")
	}
	if len(names) != len(written) || len(all) != len(written) {
		t.Errorf("injected are %q, written down %q", names, written)
	}
	return strings.Join(all, " ")
}

func (p *placing) stop(name string) {
	if _, err := p.StopContainer(context.Background(), nil, &api.Container{Id: "id-" + name}); err != nil {
		p.t.Error(err)
	}
	if c := p.ctrs["id-"+name]; c != nil {
		ended := proto.Clone(c).(*api.Container) // the audit still looks at what the runtime has told
		ended.State = api.ContainerState_CONTAINER_STOPPED
		p.ctrs["id-"+name] = ended
	}
}

func (p *placing) remove(name string) {
	if err := p.RemoveContainer(context.Background(), nil, &api.Container{Id: "id-" + name}); err != nil {
		p.t.Error(err)
	}
	delete(p.ctrs, "id-"+name)
}

// restarted is the plugin after its end and new beginning: all that it knows is
// what the runtime tells.
func (p *placing) restarted(n int, before ...func(*placing)) *placing {
	q := newPlacing(p.t, n)
	for _, set := range before {
		set(q)
	}
	q.pods, q.ctrs = p.pods, p.ctrs
	if _, err := q.Synchronize(context.Background(), slices.Collect(maps.Values(q.pods)), slices.Collect(maps.Values(q.ctrs))); err != nil {
		p.t.Fatal(err)
	}
	return q
}
