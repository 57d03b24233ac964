// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/nvshare/nvshare/plugin"
)

const (
	// pause is the least time between two changes of one pod.
	pause = 100 * time.Millisecond
	// again is when what cannot be promised is tried again.
	again = 10 * time.Second
)

// Pods receives pods' annotations. plugin.Plugin is one. The methods do not block.
type Pods interface {
	SetPods([]plugin.Pod) []plugin.Refusal
	SetPod(plugin.Pod) []plugin.Refusal
	DropPod(uid string)
}

// Watcher passes on the annotations of one node's pods, and says on the pods what
// came of them.
type Watcher struct {
	log    logrus.FieldLogger
	lister metadata.ResourceInterface
	specs  bool // whole pods are watched, and not their metadata only
	node   string
	to     Pods
	events *events
	queue  workqueue.TypedDelayingInterface[string] // UIDs of pods to pass on

	mu     sync.Mutex
	pods   map[string]*pod // by UID
	failed int             // requests since the latest that succeeded
}

// pod is a pod of this node.
type pod struct {
	plugin.Pod
	changed   time.Time                      // when it was last passed on
	described map[string]terms               // by container: the terms of the last description
	refused   map[string]string              // by container: the last refusal that was said
	unknown   string                         // unknown annotations, as they were last said
	limit     flowcontrol.PassiveRateLimiter // of events; nil before the first
}

// New returns a Watcher of a node's pods. Nothing is asked before Run.
func New(c *rest.Config, node string, to Pods, log logrus.FieldLogger) (*Watcher, error) {
	client, err := rest.HTTPClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API: %w", err)
	}
	m, err := metadata.NewForConfigAndClient(c, client)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API: %w", err)
	}
	k, err := kubernetes.NewForConfigAndClient(c, client)
	if err != nil {
		return nil, fmt.Errorf("the Kubernetes API: %w", err)
	}
	return &Watcher{
		log: log, node: node, to: to, pods: map[string]*pod{},
		lister: m.Resource(schema.GroupVersionResource{Version: "v1", Resource: "pods"}),
		events: &events{client: k, node: node, log: log, queue: make(chan *eventsv1.Event, maxWaiting)},
		queue:  workqueue.NewTypedDelayingQueue[string](),
	}, nil
}

// WatchSpecs has Pods told what the pods' specs ask for, too. It must be called before Run.
func (w *Watcher) WatchSpecs() { w.specs = true }

// Run watches until ctx ends.
func (w *Watcher) Run(ctx context.Context) {
	// Without a logger client-go writes to the global klog. Its errors are noted below.
	ctx = klog.NewContext(ctx, klog.Logger{})
	var expected runtime.Object = &metav1.PartialObjectMetadata{}
	listed := func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return w.lister.List(ctx, o) }
	watched := w.lister.Watch
	if w.specs {
		pods := w.events.client.CoreV1().Pods("")
		expected, watched = &corev1.Pod{}, pods.Watch
		listed = func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return pods.List(ctx, o) }
	}
	r := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = w.mine()
			list, err := listed(ctx, o)
			w.note(ctx, err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = w.mine()
			wi, err := watched(ctx, o)
			w.note(ctx, err)
			return wi, err
		},
	}, w.lister), expected, store{w}, cache.ReflectorOptions{Logger: &klog.Logger{}, Name: "pods"})
	var parts sync.WaitGroup
	defer parts.Wait()
	parts.Go(func() { w.events.run(ctx) })
	parts.Go(w.work)
	defer w.queue.ShutDown()
	r.RunWithContext(ctx)
}

func (w *Watcher) mine() string { return fields.OneTermEqualSelector("spec.nodeName", w.node).String() }

// note keeps the log to one line per outage. One failure alone is no outage: an
// old server refuses the streaming list that is tried first.
func (w *Watcher) note(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		if w.failed > 1 {
			w.log.Info("Kubernetes API: pods' annotations are watched again")
		}
		w.failed = 0
		return
	}
	if w.failed++; w.failed == 2 {
		w.log.Warnf("Kubernetes API: shares of running pods stay as they are until their annotations can be watched, which needs an API server and the right to list and watch pods: %v", err)
	}
}

// store receives the pods from the reflector.
type store struct{ *Watcher }

var _ cache.ReflectorStore = store{}

// podOf returns a pod with nvshare's annotations and what its spec asks for, if that is there, and the
// text about unknown annotations.
func podOf(obj any) (p plugin.Pod, unknown string, ok bool) {
	m, ok := obj.(metav1.Object)
	if !ok {
		return plugin.Pod{}, "", false
	}
	ours := map[string]string{}
	for key, value := range m.GetAnnotations() {
		if plugin.IsAnnotation(key) {
			ours[key] = value
		}
	}
	p = plugin.Pod{UID: string(m.GetUID()), Namespace: m.GetNamespace(), Name: m.GetName(), Annotations: ours}
	if whole, ok := obj.(*corev1.Pod); ok {
		addSpec(&p, whole)
	}
	return p, plugin.UnknownAnnotations(m.GetAnnotations()), true
}

func (s store) Add(obj any) error { return s.Update(obj) }

// Update is called for each change of a pod, including its status.
func (s store) Update(obj any) error {
	p, unknown, ok := podOf(obj)
	if !ok {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.pods[p.UID]
	if k != nil && maps.Equal(k.Annotations, p.Annotations) && k.unknown == unknown && k.Over == p.Over {
		return nil
	}
	s.queue.AddAfter(p.UID, time.Until(s.set(p, unknown).changed.Add(pause)))
	return nil
}

// set notes the current state of a pod. The lock is held.
func (w *Watcher) set(p plugin.Pod, unknown string) *pod {
	k := w.pods[p.UID]
	if k == nil {
		k = &pod{Pod: p, described: map[string]terms{}, refused: map[string]string{}}
		w.pods[p.UID] = k
		if p.Static && p.Counted != (plugin.Limits{}) {
			w.say(k, "", warning, "GPULimitsIgnored", "limits of a static pod give no GPU: its annotations may ask for one")
		}
	} else if len(k.described) > 0 && !maps.Equal(choice(k.Annotations), choice(p.Annotations)) {
		w.say(k, "", warning, "GPUChoiceStays", "which GPUs containers get, and next to whom, was decided when the pod was created: to change it, delete the pod and create it again")
	}
	k.Pod = p
	if k.unknown != unknown {
		k.unknown = unknown
		if unknown != "" {
			w.say(k, "", warning, "GPUAnnotationUnknown", unknown)
		}
	}
	return k
}

// choice returns the annotations that say which GPUs a pod gets.
func choice(annotations map[string]string) map[string]string {
	c := maps.Clone(annotations)
	maps.DeleteFunc(c, func(key, _ string) bool { return plugin.IsShareAnnotation(key) })
	return c
}

func (s store) Delete(obj any) error {
	if p, _, ok := podOf(obj); ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.pods, p.UID)
		s.to.DropPod(p.UID)
	}
	return nil
}

// Replace is called with all pods of the node, at the start and after an outage.
func (s store) Replace(objs []any, _ string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []plugin.Pod
	gone := maps.Clone(s.pods)
	for _, obj := range objs {
		if p, unknown, ok := podOf(obj); ok {
			s.set(p, unknown).changed = time.Now()
			delete(gone, p.UID)
			all = append(all, p)
		}
	}
	for uid := range gone {
		delete(s.pods, uid)
	}
	refused := s.to.SetPods(all)
	for _, p := range s.pods {
		s.refuse(p, refused)
	}
	return nil
}

func (s store) Resync() error { return nil }

// work passes on pods that have changed.
func (w *Watcher) work() {
	for {
		uid, end := w.queue.Get()
		if end {
			return
		}
		w.mu.Lock()
		if p := w.pods[uid]; p != nil {
			if wait := time.Until(p.changed.Add(pause)); wait > 0 { // it changed again while it was about to be passed on
				w.queue.AddAfter(uid, wait)
			} else {
				p.changed = time.Now()
				w.refuse(p, w.to.SetPod(p.Pod))
			}
		}
		w.mu.Unlock()
		w.queue.Done(uid)
	}
}
