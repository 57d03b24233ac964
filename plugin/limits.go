// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/plugin/placement"
	sched "github.com/nvshare/nvshare/sched/api"
)

// With SetSpecs, containers ask for a part of one GPU by limits of their spec, which kube-scheduler
// counts. NRI does not tell them. They cannot change, so annotations may only lower them.

// Names of the resources in limits. Requests are equal to limits: both are promised, and are the most
// that a container has.
const (
	MemoryResource = "nvshare.com/gpu-memory" // GiB
	CoresResource  = "nvshare.com/gpu-cores"  // percent of the time
)

// Limits are what a container has of one GPU by its spec, or what several containers have together.
type Limits struct {
	Memory uint64 // GiB
	Cores  uint32 // percent of the time
}

func (l Limits) String() string {
	return fmt.Sprintf("%s: %d, %s: %d", MemoryResource, l.Memory, CoresResource, l.Cores)
}

func (l Limits) bytes() uint64 { return l.Memory << 30 }

func (l Limits) terms() sched.Terms {
	return sched.Terms{MemoryLimit: l.bytes(), CoreLimit: l.Cores, CoreRequest: l.Cores}
}

func (l Limits) plus(o Limits) Limits { return Limits{l.Memory + o.Memory, l.Cores + o.Cores} }

func (l Limits) least(o Limits) Limits { return Limits{min(l.Memory, o.Memory), min(l.Cores, o.Cores)} }

func (l Limits) without(o Limits) Limits {
	return Limits{l.Memory - min(l.Memory, o.Memory), l.Cores - min(l.Cores, o.Cores)}
}

// larger sorts the larger first.
func larger(a, b Limits) int {
	return cmp.Or(cmp.Compare(b.Memory, a.Memory), cmp.Compare(b.Cores, a.Cores))
}

// Specs asks the API server for a pod as it is now; one without a UID: there is none.
type Specs func(ctx context.Context, namespace, name string) (Pod, error)

// specLimit bounds how long a handler waits for Specs: a runtime drops a plugin that takes 2 s.
const specLimit = time.Second

// SetSpecs has containers ask by limits of their spec. SetPods and SetPod have to tell these. It must be
// called before Run, as ExpectPods.
func (p *Plugin) SetSpecs(ask Specs) { p.containers.specs = ask }

// limitsOf returns the limits of a container's spec, as they were told or else as the container had them
// before. The lock is held.
func (cs *Containers) limitsOf(pod *api.PodSandbox, ctr *api.Container) (l Limits, told bool) {
	if p := cs.live.of(pod.GetUid(), pod.GetNamespace(), pod.GetName()); p != nil && cs.specs != nil {
		return p.Limits[ctr.GetName()], true
	}
	c := describe(pod, ctr, Request{}, &Inventory{})
	l = recordedLimits(pod, ctr)
	for _, all := range []map[string]Container{cs.want, cs.ended} {
		for _, o := range all {
			if o.sameAs(c) {
				l = cmp.Or(l, o.Limits)
			}
		}
	}
	return l, false
}

// learnLimits asks the API server for a pod that nobody has told of: the runtime may be first. Without an
// answer, what the container had before is known, or the container is refused. The lock is not held.
func (p *Plugin) learnLimits(pod *api.PodSandbox, ctr *api.Container) error {
	cs := p.containers
	cs.mu.Lock()
	had, told := cs.limitsOf(pod, ctr)
	if told || cs.specs == nil {
		cs.mu.Unlock()
		return nil
	}
	cs.live.asking++
	cs.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), specLimit)
	defer cancel()
	found, err := cs.specs(ctx, pod.GetNamespace(), pod.GetName())
	cs.mu.Lock()
	defer cs.mu.Unlock()
	// The answer may be older than what was told meanwhile, and nobody would tell of a deleted pod again.
	if err == nil && found.UID == pod.GetUid() && cs.live.byUID[found.UID] == nil && !cs.live.dropped[found.UID] {
		cs.setPod(found, p.inventory.Load().gpus)
	}
	if cs.live.asking--; cs.live.asking == 0 {
		cs.live.dropped = nil
	}
	if err != nil && had == (Limits{}) && !carriesNode(pod) {
		return fmt.Errorf("the API server does not say what its resources.limits are: try again: %w", err)
	}
	return nil
}

// carriesNode tells whether the way to the API server may need a pod, which is then not refused for lack
// of an answer: one of the host's network, or a static one. If it asked for a GPU, the audit finds it.
func carriesNode(pod *api.PodSandbox) bool {
	source := pod.GetAnnotations()["kubernetes.io/config.source"] // which the kubelet writes over the pod's own
	spaces := pod.GetLinux().GetNamespaces()
	return source != "" && source != "api" ||
		len(spaces) > 0 && !slices.ContainsFunc(spaces, func(n *api.LinuxNamespace) bool { return n.GetType() == "network" })
}

// boundBySpec changes a request to what the container's spec says. The lock is held.
func (cs *Containers) boundBySpec(r *Request, pod *api.PodSandbox, ctr *api.Container) error {
	l, _ := cs.limitsOf(pod, ctr)
	if l == (Limits{}) || cs.Claims != nil {
		return nil
	}
	if key, value, said := annotationFor(pod.GetAnnotations(), Annotation, ctr.GetName()); said && r.Count != 1 {
		return annotationError(key, value, fmt.Errorf("kube-scheduler has counted one GPU for it (%v): give \"1\" or any, or remove the annotation", l))
	}
	r.Limits, r.Devices, r.Count = l, nil, 1
	r.Terms, _ = lowered(r.Terms, ClaimPart{Terms: l.terms()})
	if err := errors.Join(l.terms().Validate(), r.Terms.Validate()); err != nil {
		return fmt.Errorf("resources.limits %v (GiB, and percent of one GPU): %w", l, err)
	}
	return nil
}

// promised returns what is kept free for a container: what kube-scheduler has counted, also while
// annotations lower it.
func (c Container) promised() (core uint32, memory uint64) {
	return max(c.Terms.CoreRequest, c.Limits.Cores), max(c.Terms.MemoryLimit, c.Limits.bytes())
}

// Changed has a token when Capacity may return something else.
func (p *Plugin) Changed() <-chan struct{} { return p.containers.changed }

// Capacity returns what kube-scheduler is to count as this node's: what the node's pods have by their
// specs, and the largest part of one GPU that is left, because a container has one GPU. For one GPU this is
// all of it, for several kube-scheduler places no pod that fits on none of them. Where claims give the GPUs it
// is nothing, and removes what an earlier plugin has left. ok is false until runtime, API server and scheduler
// have said what there is.
func (p *Plugin) Capacity() (c Limits, ok bool) {
	gpus := p.inventory.Load().givable()
	cs := p.containers
	var problem error
	defer func() { cs.Health.Problem("capacity", problem) }()
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if !cs.complete || cs.live.expected || cs.noState && cs.Claims == nil {
		return c, false
	}
	if cs.Claims != nil {
		for _, o := range cs.want {
			if o.Limits != (Limits{}) {
				problem = fmt.Errorf("containers have %s or %s of this node, which resource claims do not count: delete their pods", MemoryResource, CoresResource)
			}
		}
		return c, true
	}
	for _, pod := range cs.live.byUID {
		if !pod.Over {
			c = c.plus(pod.Counted)
		}
	}
	devices := cs.devices(gpus, Container{})
	for _, d := range devices {
		if d.Memory == 0 {
			problem = fmt.Errorf("the memory of %s is not known, so %s is without it: overlays/nvml (Helm: nvml.enabled) or the scheduler's --gpu-memory tells it", d.Name, MemoryResource)
		}
	}
	core, memory := placement.Hole(devices)
	return c.plus(Limits{memory >> 30, core}), true
}

// awaited returns containers that kube-scheduler has counted and that are not there, or not there again.
// The lock is held.
func (cs *Containers) awaited(except Container) (wait []Container) {
	had, there, begun := map[string]Limits{}, map[[2]string]bool{}, map[string]bool{}
	begin := func(o Container) {
		pod := cs.live.byUID[o.PodUID]
		begun[o.PodUID] = begun[o.PodUID] || pod != nil && !pod.Init[o.Name]
	}
	count := func(o Container) {
		had[o.PodUID] = had[o.PodUID].plus(o.Limits)
		there[[2]string{o.PodUID, o.Name}] = true
		begin(o)
	}
	count(except)
	for _, o := range cs.want {
		if o.ID != except.ID && !o.sameAs(except) {
			count(o)
		}
	}
	for _, o := range cs.ended {
		begin(o)
	}
	for uid, pod := range cs.live.byUID {
		// Init containers are not counted beside the others: no more waits than was counted. The large come
		// first, which need it on one GPU, but where init containers have ended those that go on.
		names := slices.SortedFunc(maps.Keys(pod.Limits), func(a, b string) int {
			if init := pod.Init[a]; begun[uid] && init != pod.Init[b] {
				if init {
					return 1
				}
				return -1
			}
			return cmp.Or(larger(pod.Limits[a], pod.Limits[b]), cmp.Compare(a, b))
		})
		left := pod.Counted.without(had[uid])
		for _, name := range names {
			if there[[2]string{uid, name}] || pod.Over {
				continue
			}
			part := pod.Limits[name].least(left)
			if left = left.without(part); part != (Limits{}) {
				wait = append(wait, Container{PodUID: uid, Namespace: pod.Namespace, Pod: pod.Name, Name: name, Limits: part})
			}
		}
	}
	return wait
}

// keepCounted adds to devices what kube-scheduler has counted for containers that are awaited, so that nobody
// else is given it. The lock is held.
func (cs *Containers) keepCounted(devices []placement.Device, except Container) {
	wait := cs.awaited(except)
	// They come from a map, and what is large fits on fewer GPUs. In this order each gets what the order says,
	// whoever is created first.
	order := func(a, b Container) int {
		return cmp.Or(larger(a.Limits, b.Limits), cmp.Compare(a.PodUID, b.PodUID), cmp.Compare(a.Name, b.Name))
	}
	slices.SortFunc(wait, order)
	for _, c := range wait {
		if except.Limits != (Limits{}) && order(c, except) > 0 {
			break
		}
		core, memory := c.promised()
		chosen, _ := placement.Choose(devices, placement.Request{Count: 1, Core: core, Memory: memory, Had: cs.had(c)})
		for i := range devices {
			if d := &devices[i]; slices.Contains(chosen, d.UUID) {
				d.Tenants = append(d.Tenants, placement.Tenant{Name: c.String() + ", which waits", Core: core, Memory: memory, Outside: true, Hidden: c.Namespace != except.Namespace})
			}
		}
	}
}
