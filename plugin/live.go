// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/cdi"
	sched "github.com/nvshare/nvshare/sched/api"
)

// What a pod's annotations say of shares may change while its containers run.
// The runtime knows annotations only as they were when the pod's sandbox was
// made; whoever watches the API server tells us what they are now, and that goes
// before. What cannot be met then changes nothing: the latest good value stays.

// shareAnnotations are the names of the annotations that may change.
var shareAnnotations = []string{
	MemoryLimitAnnotation, CoreLimitAnnotation, CoreRequestAnnotation,
	WeightAnnotation, PriorityAnnotation, GangAnnotation, MemoryModeAnnotation,
}

// Pod is a pod as the API server has it now.
type Pod struct {
	UID, Namespace, Name string
	Annotations          map[string]string // never changed
}

// Refusal says what of a pod's annotations does not hold for one of its
// containers, and why; what held before does.
type Refusal struct {
	Container Container // as it goes on
	Err       error
	Later     bool // it may become possible with the same annotations
}

// Fields names what a pod may say of its containers. As a container's Keep: what
// cannot be known now, so that the scheduler keeps what it was told before; the
// container's own values are for a scheduler that was not.
type Fields struct {
	MemoryLimit, CoreLimit, CoreRequest, Weight, Priority, Gang, MemoryMode bool
}

var everything = Fields{true, true, true, true, true, true, true}

// IsAnnotation says whether a key is one by which pods ask for GPUs or shares.
func IsAnnotation(key string) bool {
	return isAnnotation(key, annotationNames...)
}

// IsShareAnnotation says whether a key is one by which shares change.
func IsShareAnnotation(key string) bool {
	return isAnnotation(key, shareAnnotations...)
}

// UnknownAnnotations describes, for people, keys that look as if they asked for
// GPUs or shares and that no container of the pod gets anything by; "": there are
// none. They are no error, or pods made for a later nvshare could not run beside
// this one.
func UnknownAnnotations(annotations map[string]string) string {
	const most = 4
	var unknown []string
	for key := range annotations {
		name := scopeless(key)
		word, ours := strings.CutPrefix(name, "nvshare.com/")
		if !ours {
			word, ours = strings.CutSuffix(name, ".nvshare.com")
		}
		if ours && strings.HasPrefix(word, "gpu") && !IsAnnotation(key) {
			unknown = append(unknown, shown(key))
		}
	}
	if len(unknown) == 0 {
		return ""
	}
	slices.Sort(unknown)
	more := ""
	if n := len(unknown) - most; n > 0 {
		unknown, more = unknown[:most], fmt.Sprintf(" and %d more", n)
	}
	text := fmt.Sprintf("annotations without effect: %s%s; those of nvshare are %s", strings.Join(unknown, ", "), more, strings.Join(annotationNames, ", "))
	if slices.ContainsFunc(unknown, func(key string) bool { return isAnnotation(key, "nvshare.com/gpu-mode") }) {
		text += "; whether tenants take turns is a GPU's matter: nvsharectl -S on|off|auto --gpu"
	}
	return text
}

// annotationNames are all by which pods ask.
var annotationNames = append([]string{Annotation, AffinityAnnotation, AntiAffinityAnnotation, ExclusionAnnotation}, shareAnnotations...)

// scopeless returns a key without what says for which containers it is.
func scopeless(key string) string {
	if base, ok := strings.CutSuffix(key, "/pod"); ok {
		return base
	}
	base, _, _ := strings.Cut(key, "/container.")
	return base
}

// isAnnotation says whether a key is one of these names, for any container.
func isAnnotation(key string, names ...string) bool {
	key = scopeless(key)
	for _, name := range names {
		domain, word, _ := strings.Cut(name, "/")
		if key == name || key == word+"."+domain {
			return true
		}
	}
	return false
}

// following is what is known of pods' annotations. The zero value is for nodes
// where nobody tells: what the runtime says holds.
type following struct {
	expected bool // somebody will tell, but has not told all yet
	pods     map[string]*followed
}

// followed is a pod whose annotations we are told of.
type followed struct {
	Pod
	last   map[string]Request // by container: what held latest
	denied map[string]denial  // by container
}

// denial is what a pod says of a container and cannot be promised; zero: nothing.
type denial struct {
	request uint32 // percent
	memory  uint64 // bytes
}

// of returns the pod with this identity, nil if we are told nothing of it. The
// UID alone would let one who can make pods speak for another.
func (f *following) of(uid, namespace, name string) *followed {
	p := f.pods[uid]
	if p == nil || p.Namespace != namespace || p.Name != name {
		return nil
	}
	return p
}

// now returns a container with what its pod says now. The error says what of
// that cannot be met; the container then has its old values for it.
func (f *following) now(c Container) (Container, error) {
	p := f.of(c.PodUID, c.Namespace, c.Pod)
	if p == nil {
		if f.expected {
			c.Keep = everything
		}
		return c, nil
	}
	r, err := p.request(c.Name, Request{MemoryLimit: c.MemoryLimit, Share: c.Share})
	c.MemoryLimit, c.Share, c.Keep = r.MemoryLimit, r.Share, r.Keep
	p.last[c.Name] = r
	return c, err
}

var errDenied = errors.New("too much is promised")

// request reads what the pod says now of a container, for which last holds.
func (p *followed) request(container string, last Request) (r Request, err error) {
	err = r.parseShares(p.Annotations, container)
	d := p.denied[container]
	if d.request != 0 && r.Share.CoreRequest == d.request {
		err, r.Keep.CoreRequest = errors.Join(err, errDenied), true
	}
	if d.memory != 0 && r.MemoryLimit == d.memory {
		err, r.Keep.MemoryLimit = errors.Join(err, errDenied), true
	}
	r.restore(last)
	if s := &r.Share; s.CoreLimit != 0 && s.CoreRequest > s.CoreLimit {
		err = errors.Join(err, fmt.Errorf("a core request of %d %% is above the core limit of %d %%", s.CoreRequest, s.CoreLimit))
		r.Keep.CoreLimit, r.Keep.CoreRequest = true, true
		r.restore(last)
	}
	return r, err
}

// restore takes what is to be kept from what held before.
func (r *Request) restore(last Request) {
	s, l := &r.Share, last.Share
	keep(r.Keep.MemoryLimit, &r.MemoryLimit, last.MemoryLimit)
	keep(r.Keep.CoreLimit, &s.CoreLimit, l.CoreLimit)
	keep(r.Keep.CoreRequest, &s.CoreRequest, l.CoreRequest)
	keep(r.Keep.Weight, &s.Weight, l.Weight)
	keep(r.Keep.Priority, &s.Priority, l.Priority)
	keep(r.Keep.Gang, &s.Gang, l.Gang)
	keep(r.Keep.MemoryMode, &s.MemoryMode, l.MemoryMode)
}

func keep[T any](kept bool, to *T, old T) {
	if kept {
		*to = old
	}
}

// request is ParseRequest for a container with what its pod says now of shares.
// Which GPUs it asks for was said when the pod was created: a core request that
// comes or goes later neither gives nor takes one.
func (p *Plugin) request(pod *api.PodSandbox, ctr *api.Container, inv *Inventory) (Request, error) {
	annotations, kept := p.names.annotations(pod, ctr.GetName())
	r, err := ParseRequest(annotations, ctr.GetName(), inv.Devices())
	if asked, wrong := ParseRequest(pod.GetAnnotations(), ctr.GetName(), inv.Devices()); wrong == nil {
		r.Devices, r.Count = asked.Devices, asked.Count
	}
	if kept != (Fields{}) {
		r.Keep = kept
	}
	return r, err
}

// annotations returns a pod's annotations as they are now, for one of its
// containers: where they say what cannot be, what held latest. If nothing good
// was ever said, they are as wrong as they are.
func (n *Names) annotations(pod *api.PodSandbox, container string) (map[string]string, Fields) {
	n.mu.Lock()
	defer n.mu.Unlock()
	created := pod.GetAnnotations()
	p := n.follow.of(pod.GetUid(), pod.GetNamespace(), pod.GetName())
	if p == nil {
		if n.follow.expected {
			return created, everything
		}
		return created, Fields{}
	}
	now := maps.Clone(created)
	maps.DeleteFunc(now, func(key, _ string) bool { return IsShareAnnotation(key) })
	if now == nil {
		now = map[string]string{}
	}
	maps.Copy(now, p.Annotations)
	last, ok := p.last[container]
	if !ok && last.parseShares(created, container) != nil {
		return now, Fields{}
	}
	r, err := p.request(container, last)
	if err == nil {
		return now, Fields{}
	}
	r.write(now, container)
	return now, r.Keep
}

// write has annotations say what is kept.
func (r Request) write(annotations map[string]string, container string) {
	put := func(kept bool, name string, said bool, value string) {
		if !kept {
			return
		}
		for key, _, ok := annotationFor(annotations, name, container); ok; key, _, ok = annotationFor(annotations, name, container) {
			delete(annotations, key)
		}
		if said {
			annotations[name+"/container."+container] = value
		}
	}
	k, s := r.Keep, r.Share
	// A quantity with an exponent is in bytes, a bare number would be in MiB.
	put(k.MemoryLimit, MemoryLimitAnnotation, r.MemoryLimit != 0, fmt.Sprintf("%de0", r.MemoryLimit))
	put(k.CoreLimit, CoreLimitAnnotation, s.CoreLimit != 0, fmt.Sprint(s.CoreLimit))
	put(k.CoreRequest, CoreRequestAnnotation, s.CoreRequest != 0, fmt.Sprint(s.CoreRequest))
	put(k.Weight, WeightAnnotation, s.Weight != 0, fmt.Sprint(s.Weight))
	put(k.Priority, PriorityAnnotation, s.Priority != 0, sched.FormatPriority(s.Priority))
	put(k.Gang, GangAnnotation, s.Gang != "", s.Gang)
	put(k.MemoryMode, MemoryModeAnnotation, s.MemoryMode != 0, sched.FormatMemoryMode(s.MemoryMode))
}

// Follow says that pods' annotations will be told: until they are, containers
// that the scheduler knows keep what it knows of them. It must be called before
// Run.
func (p *Plugin) Follow() {
	p.names.mu.Lock()
	defer p.names.mu.Unlock()
	p.names.follow.expected = true
}

// SetPods says what the annotations of all pods of this node are now.
func (p *Plugin) SetPods(all []Pod) (refused []Refusal) {
	n := p.names
	listed := make(map[string]bool, len(all))
	for _, pod := range all {
		listed[pod.UID] = true
		refused = append(refused, p.SetPod(pod)...) // one by one: handlers may come between
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.follow.expected = false
	maps.DeleteFunc(n.follow.pods, func(uid string, _ *followed) bool { return !listed[uid] })
	for id, c := range n.want {
		// Unknown to the API server: what the runtime says is all there is.
		if c.Keep == everything && !listed[c.PodUID] {
			c.Keep = Fields{}
			n.want[id] = c
			n.poke()
		}
	}
	return refused
}

// SetPod says what the annotations of one pod are now. With the same it tries
// again what was refused.
func (p *Plugin) SetPod(pod Pod) []Refusal {
	gpus := p.inventory.Load().gpus
	p.names.mu.Lock()
	defer p.names.mu.Unlock()
	return p.names.setPod(pod, gpus)
}

// DropPod says that a pod is no more.
func (p *Plugin) DropPod(uid string) {
	p.names.mu.Lock()
	defer p.names.mu.Unlock()
	delete(p.names.follow.pods, uid)
}

// setPod is SetPod with the lock held.
func (n *Names) setPod(pod Pod, gpus []cdi.GPU) (refused []Refusal) {
	f := n.follow.pods[pod.UID]
	if f == nil {
		if n.follow.pods == nil {
			n.follow.pods = map[string]*followed{}
		}
		f = &followed{last: map[string]Request{}}
		n.follow.pods[pod.UID] = f
	}
	f.Pod, f.denied = pod, map[string]denial{}
	f.Annotations = maps.Clone(pod.Annotations)
	maps.DeleteFunc(f.Annotations, func(key, _ string) bool { return !IsShareAnnotation(key) })
	for id, old := range n.want {
		if old.PodUID != pod.UID {
			continue
		}
		c, err := n.follow.now(old)
		denied, why := n.deniable(old, c, gpus)
		if why != nil {
			f.denied[c.Name] = denied
			c, _ = n.follow.now(old)
			err = errors.Join(err, why)
		}
		if err != nil {
			refused = append(refused, Refusal{Container: c, Err: err, Later: why != nil})
		}
		if c.Share.CoreRequest != old.Share.CoreRequest || c.MemoryLimit != old.MemoryLimit { // the scheduler has yet to say so
			n.promises = slices.DeleteFunc(slices.Clone(n.promises), func(p Promise) bool { return p.ID == id })
		}
		if c != old {
			n.want[id] = c
			n.poke()
		}
	}
	return refused
}

// deniable says what of a container's new terms cannot be promised. A memory
// limit is a promise where the plugin chose the GPU, and to who had one already.
func (n *Names) deniable(old, c Container, gpus []cdi.GPU) (d denial, err error) {
	more := c.Share.CoreRequest > old.Share.CoreRequest
	larger := c.Placed && old.MemoryLimit != 0 && c.MemoryLimit > old.MemoryLimit
	if !more && !larger {
		return d, nil
	}
	for _, g := range n.devices(gpus, c) {
		if !c.uses(g.UUID) {
			continue
		}
		said := func(name string, why error) error {
			key, value, _ := annotationFor(n.follow.pods[c.PodUID].Annotations, name, c.Name)
			return errors.Join(err, annotationError(key, value, why))
		}
		if more && d.request == 0 {
			if why := keepable(c.Share.CoreRequest, g); why != nil {
				d.request, err = c.Share.CoreRequest, said(CoreRequestAnnotation, why)
			}
		}
		if !larger || d.memory != 0 {
			continue
		}
		var sum uint64
		for _, t := range g.Tenants {
			sum += t.Memory
		}
		if sum+c.MemoryLimit > g.Memory {
			d.memory, err = c.MemoryLimit, said(MemoryLimitAnnotation, fmt.Errorf("cannot be promised: of the %s of %s, %s are to %d others",
				sched.FormatMemory(g.Memory), g.Name, sched.FormatMemory(sum), len(g.Tenants)))
		}
	}
	return d, err
}

// Kept says what the scheduler has kept of a container that it was told of, so
// that a container started again gets it too.
func (p *Plugin) Kept(c Container, memoryLimit uint64, share Share) {
	n := p.names
	n.mu.Lock()
	defer n.mu.Unlock()
	if c.Keep == (Fields{}) || n.want[c.ID] != c { // told once more, or otherwise
		return
	}
	now := c
	now.MemoryLimit, now.Share = memoryLimit, share
	n.want[c.ID] = now
	if f := n.follow.of(c.PodUID, c.Namespace, c.Pod); f != nil {
		f.last[c.Name] = Request{MemoryLimit: memoryLimit, Share: share, Keep: c.Keep}
	}
}
