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

// What a pod's annotations say of terms may change while its containers run. The
// runtime knows annotations only as they were when the pod's sandbox was made.
// Whoever watches the API server tells the plugin what they are now, and these go
// before. What cannot be met then changes nothing: the latest good value stays.

// Pod is a pod as the API server has it now.
type Pod struct {
	UID, Namespace, Name string
	Annotations          map[string]string // never changed

	// With SetSpecs:
	Limits  map[string]Limits // by container
	Init    map[string]bool   // the containers that end before the next one starts
	Counted Limits            // of the whole pod, as kube-scheduler counts it
	Static  bool              // the runtime has it by another UID: it has no Limits
	Over    bool              // it has ended, and kube-scheduler counts it no more
}

// Refusal says which of a pod's annotations change nothing for one of its
// containers, and why.
type Refusal struct {
	Container Container // with the terms that stay
	Err       error
	Later     bool // the same annotations may become possible
}

// IsAnnotation tells whether pods ask for GPUs or terms by a key.
func IsAnnotation(key string) bool {
	return isAnnotation(key, annotationNames()...)
}

// IsShareAnnotation tells whether a key says terms, which may change.
func IsShareAnnotation(key string) bool {
	return isAnnotation(key, termsAnnotations()...)
}

// misspelt returns an error for each annotation of a container that is none of nvshare's and is like
// one: without it the container would not have what its pod says.
func misspelt(annotations map[string]string, container string) (err error) {
	var words []string
	for _, name := range annotationNames() {
		words = append(words, strings.TrimPrefix(name, domain))
	}
	for _, key := range slices.Sorted(maps.Keys(annotations)) {
		name := scopeless(key)
		switch strings.TrimPrefix(key, name) {
		case "", "/pod", "/container." + container:
		default:
			continue
		}
		if word, ours := unknownWord(key); ours && len(word) <= maxShown {
			if meant := sched.Misspelt(word, words); meant != "" {
				err = errors.Join(err, annotationError(shown(key), annotations[key], fmt.Errorf("unknown (did you mean %s?)", strings.Replace(name, word, meant, 1))))
			}
		}
	}
	return err
}

// domain begins the names of annotations.
const domain = "nvshare.com/"

// unknownWord returns the word of a key that looks like one of nvshare's and is none.
func unknownWord(key string) (word string, ours bool) {
	name := scopeless(key)
	if word, ours = strings.CutPrefix(name, domain); !ours {
		word, ours = strings.CutSuffix(name, ".nvshare.com")
	}
	return word, ours && strings.HasPrefix(word, "gpu") && !IsAnnotation(key)
}

// UnknownAnnotations describes, for people, keys that look like nvshare's and have
// no effect; "": there are none. Those that are not misspelt are no error: the pod may be made
// for a later nvshare.
func UnknownAnnotations(annotations map[string]string) string {
	const most = 4
	var unknown []string
	for key := range annotations {
		if _, ours := unknownWord(key); ours {
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
	text := fmt.Sprintf("annotations without effect: %s%s; those of nvshare are %s", strings.Join(unknown, ", "), more, strings.Join(annotationNames(), ", "))
	if slices.ContainsFunc(unknown, func(key string) bool { return isAnnotation(key, "nvshare.com/gpu-mode") }) {
		text += "; whether tenants take turns is a GPU's matter: nvsharectl -S on|off|auto --gpu"
	}
	return text
}

// annotationNames returns the names of all annotations by which pods ask.
func annotationNames() []string {
	return append([]string{Annotation, AffinityAnnotation, AntiAffinityAnnotation, ExclusionAnnotation}, termsAnnotations()...)
}

// termsAnnotations returns the names of the annotations that may change.
func termsAnnotations() (names []string) {
	for _, f := range sched.Fields {
		names = append(names, f.Annotation())
	}
	return names
}

// scopeless returns a key without its scope.
func scopeless(key string) string {
	if base, ok := strings.CutSuffix(key, "/pod"); ok {
		return base
	}
	base, _, _ := strings.Cut(key, "/container.")
	return base
}

// isAnnotation tells whether a key is one of these names, of any scope.
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

// livePods are pods whose annotations are known as they are now. The zero value is
// for nodes where nobody tells: the annotations of the runtime hold.
type livePods struct {
	expected bool                // somebody will tell, but has not told all yet
	unjudged map[string]unjudged // by ID: SetPods has them audited
	byUID    map[string]*livePod
	asking   int             // handlers that wait for an answer about a pod
	dropped  map[string]bool // by UID, since one of them asked
}

// livePod is a pod whose annotations are known as they are now.
type livePod struct {
	Pod
	latest map[string]sched.Terms // by container: the latest good ones
	denied map[string]denial      // by container
}

// denial is what a pod says of a container and cannot be promised; zero: nothing.
type denial struct {
	request uint32 // percent
	memory  uint64 // bytes
}

var errDenied = errors.New("too much is promised")

// of returns the pod with this identity, nil if it is not known. The UID alone
// would let one who can make pods speak for another.
func (l *livePods) of(uid, namespace, name string) *livePod {
	p := l.byUID[uid]
	if p == nil || p.Namespace != namespace || p.Name != name {
		return nil
	}
	return p
}

// terms returns what a container of the pod may have now. Where the annotations say
// nonsense or what cannot be promised, it keeps the latest good value: of the
// container, or else the earlier ones. The error says where, and why.
func (p *livePod) terms(container string, before sched.Terms) (t sched.Terms, keep sched.FieldSet, err error) {
	if latest, ok := p.latest[container]; ok {
		before = latest
	}
	t, keep, err = parseTerms(p.Annotations, container)
	d := p.denied[container]
	if d.request != 0 && t.CoreRequest == d.request {
		err, keep = errors.Join(err, errDenied), keep|sched.CoreRequestField
	}
	if d.memory != 0 && t.MemoryLimit == d.memory {
		err, keep = errors.Join(err, errDenied), keep|sched.MemoryLimitField
	}
	t.Copy(before, keep)
	if why := t.Consistent(); why != nil {
		err, keep = errors.Join(err, why), keep|coreFields
		t.Copy(before, coreFields)
	}
	return t, keep, err
}

// request returns what a container asks for: GPUs as its pod was created, terms as
// the pod says now. Terms that cannot be met are an error only if the pod never
// said good ones. The lock is held.
func (cs *Containers) request(pod *api.PodSandbox, container string, devices []string) (Request, error) {
	created := pod.GetAnnotations()
	r, choiceErr, err := parseRequest(created, container, devices)
	if r.Labels.Exclusion != "" && !cs.MayExclude(pod.GetNamespace()) {
		r.Labels.Exclusion = ""
		key, value, _ := annotationFor(created, ExclusionAnnotation, container)
		choiceErr = errors.Join(choiceErr, annotationError(key, value, fmt.Errorf("not allowed in namespace %q: see --exclusion-namespaces of nvshare-plugin (Helm: plugin.exclusionNamespaces)", pod.GetNamespace())))
	}
	p := cs.live.of(pod.GetUid(), pod.GetNamespace(), pod.GetName())
	if p == nil {
		if cs.live.expected {
			r.Keep = sched.AllFields
		}
		return r, errors.Join(choiceErr, err)
	}
	_, good := p.latest[container]
	wrong := err != nil
	fixed := r.Terms
	if r.Terms, r.Keep, err = p.terms(container, r.Terms); err != nil && wrong && !good {
		return r, errors.Join(choiceErr, err)
	}
	r.Terms.Copy(fixed, sched.FixedFields)
	p.latest[container] = r.Terms
	if wrong {
		r.imply(created, container) // by the core request as it was corrected
	}
	return r, choiceErr
}

// annotation returns the annotation that says a container's terms or GPUs, as its
// pod has it now. The lock is held.
func (cs *Containers) annotation(pod *api.PodSandbox, name, container string) (key, value string, ok bool) {
	annotations := pod.GetAnnotations()
	if p := cs.live.of(pod.GetUid(), pod.GetNamespace(), pod.GetName()); p != nil && IsShareAnnotation(name) {
		annotations = p.Annotations
	}
	return annotationFor(annotations, name, container)
}

// ExpectPods says that SetPods will be called. Until then, containers that the
// scheduler knows keep their terms. ExpectPods must be called before Run.
func (p *Plugin) ExpectPods() {
	p.containers.mu.Lock()
	defer p.containers.mu.Unlock()
	p.containers.live.expected, p.containers.live.unjudged = true, map[string]unjudged{}
}

// SetPods gives the plugin the annotations of all pods of this node as they are now.
func (p *Plugin) SetPods(all []Pod) (refused []Refusal) {
	cs := p.containers
	listed := make(map[string]bool, len(all))
	for _, pod := range all {
		listed[pod.UID] = true
		refused = append(refused, p.SetPod(pod)...) // one by one: handlers may come between
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	later := cs.live.unjudged
	cs.live.expected, cs.live.unjudged = false, nil
	go func() {
		for _, u := range later {
			p.judgeSpec(u.pod, u.ctr)
		}
	}()
	Signal(cs.changed)
	maps.DeleteFunc(cs.live.byUID, func(uid string, _ *livePod) bool { return !listed[uid] })
	for id, c := range cs.want {
		// The API server does not know the pod: the annotations of the runtime hold.
		if c.Keep == sched.AllFields && !listed[c.PodUID] && len(c.Claims) == 0 {
			c.Keep = 0
			cs.want[id] = c
			cs.poke()
		}
	}
	return refused
}

// SetPod gives the plugin the annotations of one pod as they are now. The same
// annotations again try once more what was refused.
func (p *Plugin) SetPod(pod Pod) []Refusal {
	gpus := p.inventory.Load().gpus
	p.containers.mu.Lock()
	defer p.containers.mu.Unlock()
	return p.containers.setPod(pod, gpus)
}

// DropPod says that a pod was deleted. Its containers keep their terms until they
// end.
func (p *Plugin) DropPod(uid string) {
	p.containers.mu.Lock()
	defer p.containers.mu.Unlock()
	live := &p.containers.live
	delete(live.byUID, uid)
	if live.asking > 0 {
		if live.dropped == nil {
			live.dropped = map[string]bool{}
		}
		live.dropped[uid] = true
	}
	Signal(p.containers.changed)
}

// setPod is SetPod with the lock held.
func (cs *Containers) setPod(pod Pod, gpus []cdi.GPU) (refused []Refusal) {
	p := cs.live.byUID[pod.UID]
	if p == nil {
		if cs.live.byUID == nil {
			cs.live.byUID = map[string]*livePod{}
		}
		p = &livePod{latest: map[string]sched.Terms{}}
		cs.live.byUID[pod.UID] = p
	}
	p.Pod, p.denied = pod, map[string]denial{}
	Signal(cs.changed)
	p.Annotations = maps.Clone(pod.Annotations)
	maps.DeleteFunc(p.Annotations, func(key, _ string) bool { return !IsShareAnnotation(key) })
	for id, old := range cs.want {
		if cs.live.of(old.PodUID, old.Namespace, old.Pod) != p {
			continue
		}
		c := old
		take := func() (err error) {
			c.Terms, c.Keep, err = p.terms(c.Name, old.Terms)
			switch {
			case len(c.Claims) > 0:
				err = errors.Join(err, cs.boundByClaims(&c, old))
			case c.Limits != Limits{}:
				err = errors.Join(err, boundSaying(&c.Terms, ClaimPart{Terms: c.Limits.terms()}, "the pod's spec"))
			}
			return err
		}
		err := take()
		denied, why := cs.deniable(old, c, gpus)
		if why != nil {
			p.denied[c.Name] = denied
			_ = take() // said above
			err = errors.Join(err, why)
		}
		c.Terms.Copy(old.Terms, sched.FixedFields)
		p.latest[c.Name] = c.Terms
		if err != nil {
			refused = append(refused, Refusal{Container: c, Err: err, Later: why != nil})
		}
		if c.Terms.CoreRequest != old.Terms.CoreRequest || c.Terms.MemoryLimit != old.Terms.MemoryLimit {
			// The scheduler has promised the old value: it has yet to be told.
			cs.promises = slices.DeleteFunc(slices.Clone(cs.promises), func(p Promise) bool { return p.ID == id })
		}
		if !c.equal(old) {
			cs.want[id] = c
			cs.poke()
		}
	}
	return refused
}

// deniable returns which of a container's new terms cannot be promised, and why. A
// memory limit is a promise where the plugin chose the GPU and there was a limit
// before.
func (cs *Containers) deniable(old, c Container, gpus []cdi.GPU) (d denial, err error) {
	if len(c.Claims) > 0 {
		return d, nil
	}
	request, limit := c.Terms.CoreRequest, c.Terms.MemoryLimit
	core, memory := old.promised()
	more := request > core
	larger := c.Placed && memory != 0 && limit > memory
	if !more && !larger {
		return d, nil
	}
	for _, g := range cs.devices(gpus, c) {
		if !c.uses(g.UUID) {
			continue
		}
		deny := func(name string, why error) {
			key, value, _ := annotationFor(cs.live.byUID[c.PodUID].Annotations, name, c.Name)
			err = errors.Join(err, annotationError(key, value, why))
		}
		if more && d.request == 0 {
			if why := g.Keep(request); why != nil {
				d.request = request
				deny(CoreRequestAnnotation, why)
			}
		}
		if !larger || d.memory != 0 || g.Memory == 0 { // not known, so not counted
			continue
		}
		var sum uint64
		for _, t := range g.Tenants {
			sum += t.Memory
		}
		if sum+limit > g.Memory {
			d.memory = limit
			deny(MemoryLimitAnnotation, fmt.Errorf("cannot be promised: of the %s of %s, %s are to %d others",
				sched.FormatMemory(g.Memory), g.Name, sched.FormatMemory(sum), len(g.Tenants)))
		}
	}
	return d, err
}

// KeptByScheduler takes the terms that the scheduler has kept of a container, so
// that the container has them when it is started again.
func (p *Plugin) KeptByScheduler(c Container, terms sched.Terms) {
	cs := p.containers
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if c.Keep == 0 || !c.equal(cs.want[c.ID]) { // a later description is on its way
		return
	}
	kept := c
	kept.Terms = terms
	cs.want[c.ID] = kept
	if p := cs.live.of(c.PodUID, c.Namespace, c.Pod); p != nil {
		p.latest[c.Name] = terms
	}
}
