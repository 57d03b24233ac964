// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/plugin/placement"
	sched "github.com/nvshare/nvshare/sched/api"
)

// Container is one container that uses GPUs: its names, its terms and its GPUs.
// Equal values describe the container to the scheduler in the same way. Its lists are never changed.
type Container struct {
	ID        string // the runtime's, as in the cgroup's name
	Name      string
	Namespace string
	Pod       string
	PodUID    string
	Terms     sched.Terms
	Keep      sched.FieldSet   // see Request
	GPUs      []string         // UUIDs of those that it has; none: not known
	Reach     []string         // UUIDs of the GPUs that it can open, if it may move among them
	Labels    placement.Labels // of all namespaces: <namespace>/<label>
	Sandbox   string           // the pod's, by the runtime's ID
	Placed    bool             // the plugin chose the GPUs
	UID       uint32           // of the user that it runs as
	Claims    []string         // names of its shares; none: it has no claim
	Limits    Limits           // of its spec
}

// uses tells whether a container has a GPU, or may have it.
func (c Container) uses(uuid string) bool {
	return len(c.GPUs) == 0 || slices.Contains(c.GPUs, uuid)
}

func (c Container) equal(o Container) bool { return reflect.DeepEqual(c, o) }

// sameAs tells whether the two are one container of a pod, started twice.
func (c Container) sameAs(o Container) bool {
	return c.Name == o.Name && c.Pod == o.Pod && c.Namespace == o.Namespace && c.PodUID == o.PodUID
}

func (c Container) String() string { return c.Namespace + "/" + c.Pod + "/" + c.Name }

// Containers holds the containers of this node that use GPUs, admits new ones, and
// tells the scheduler of all. Handlers change memory only; Run tells the scheduler
// in its own time.
type Containers struct {
	// These are set before Run.

	OnGPUs        func() // is called each time that GPU may return something else, and waits for nothing
	PromiseMemory uint64 // percent of each GPU's memory that memory limits may add up to where the plugin chooses; above 100 only with swapping
	Claims        Claims // give this node's GPUs, and containers that ask by annotations are refused; nil: pods ask by annotations
	// MayExclude tells whether a namespace's pods may keep others off their GPUs by a label: it takes whole
	// GPUs from all namespaces, and is no promise that anybody counts.
	MayExclude func(namespace string) bool
	// MostCore is what the core requests of a namespace add up to at most, percent of each GPU: a promise
	// takes time from all namespaces, and no quota counts annotations.
	MostCore func(namespace string) uint32

	log       logrus.FieldLogger
	ping      time.Duration // between requests for the scheduler's State
	callLimit time.Duration // a call to the scheduler has to be answered
	wake      chan struct{} // holds a token when there may be something to tell

	changed chan struct{} // see Changed
	specs   Specs         // nil: limits of specs are not looked at

	Health Health // of the plugin; Run tells the scheduler of problems

	registered chan struct{} // see Registered

	mu            sync.Mutex
	want          map[string]Container // by ID
	complete      bool                 // want holds all containers that exist
	ended         map[string]Container // that the runtime may start again: see admit
	promises      []Promise            // of the scheduler's latest State
	gpus          map[string]GPUState  // by UUID, of the scheduler's latest State
	noState       bool                 // the scheduler's state has not come
	stateDeadline time.Time            // until when none is chosen without it; zero: see mustAwaitState
	live          livePods
	now           func() time.Time // the clock of stateDeadline
}

// NewContainers returns an empty set of containers.
func NewContainers(log logrus.FieldLogger) *Containers {
	cs := &Containers{
		log: log, ping: pingInterval, callLimit: callLimit, wake: make(chan struct{}, 1), OnGPUs: func() {},
		want: map[string]Container{}, ended: map[string]Container{}, PromiseMemory: 100,
		MayExclude: func(string) bool { return true },
		MostCore:   func(string) uint32 { return 100 },
		now:        time.Now, registered: make(chan struct{}), changed: make(chan struct{}, 1), noState: true,
	}
	cs.Health.OnChange(cs.poke)
	return cs
}

// Registered is closed once the plugin has been registered with the container runtime, which
// has said which containers there are. From then on the runtime asks the plugin about each
// new one.
func (cs *Containers) Registered() <-chan struct{} { return cs.registered }

// mustAwaitState tells whether no GPU may be chosen now, because the scheduler has not said how much memory the GPUs have,
// and which of them do work. That holds for stateLimit from the beginning of Run. Before Run, stateLimit begins when it is asked
// first: the earlier plugin may stay for long, and a runtime that asks this one first would
// refuse all. The lock is held.
func (cs *Containers) mustAwaitState() bool {
	if cs.noState && cs.stateDeadline.IsZero() {
		cs.stateDeadline = cs.now().Add(stateLimit)
	}
	return cs.noState && cs.now().Before(cs.stateDeadline)
}

// GPU returns what the scheduler knows of a GPU.
func (cs *Containers) GPU(uuid string) GPUState {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.gpus[uuid]
}

// knows tells whether a container has GPUs, as far as the plugin was told.
func (cs *Containers) knows(id string) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	_, known := cs.want[id]
	return known
}

// Remove forgets a container; an unknown one is no error.
func (cs *Containers) Remove(id string) {
	cs.change(func() { delete(cs.want, id); delete(cs.ended, id); delete(cs.live.unjudged, id) })
}

// End frees the GPUs and promises of a container whose processes have ended. Until
// it is removed it may be started again, under another ID.
func (cs *Containers) End(id string) {
	cs.change(func() {
		c, ok := cs.want[id]
		if !ok {
			return
		}
		delete(cs.want, id)
		maps.DeleteFunc(cs.ended, func(_ string, o Container) bool { return o.sameAs(c) })
		cs.ended[id] = c
	})
}

// EndPod forgets all containers of a pod's sandbox, also those that the runtime
// failed to create and never reported as ended.
func (cs *Containers) EndPod(sandbox string) {
	if sandbox == "" {
		return
	}
	cs.change(func() {
		gone := func(_ string, c Container) bool { return c.Sandbox == sandbox }
		maps.DeleteFunc(cs.want, gone)
		maps.DeleteFunc(cs.ended, gone)
	})
}

// replace forgets all containers but these, and those that have ended and are not
// removed yet. The lock is held.
func (cs *Containers) replace(all, ended []Container) {
	if !cs.complete {
		cs.complete = true
		close(cs.registered)
	}
	cs.want, cs.ended = byID(all), byID(ended)
	cs.poke()
}

func byID(all []Container) map[string]Container {
	m := make(map[string]Container, len(all))
	for _, c := range all {
		m[c.ID] = c
	}
	return m
}

func (cs *Containers) change(f func()) {
	cs.mu.Lock()
	f()
	cs.mu.Unlock()
	cs.poke()
}
