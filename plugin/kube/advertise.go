// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-helpers/resource"
	"k8s.io/klog/v2"

	"github.com/nvshare/nvshare/plugin"
)

const (
	// patchRetry is when a patch of the node that failed is tried again.
	patchRetry = 5 * time.Second
	// withdrawLimit bounds the last patch, within the pod's grace period of 10 s.
	withdrawLimit = 3 * time.Second
	// maxLimit is more than any node has: sums of it do not overflow.
	maxLimit = 1 << 24
)

// limitsIn returns what a list of resources has of ours.
func limitsIn(list corev1.ResourceList) plugin.Limits {
	value := func(name corev1.ResourceName) uint64 {
		q := list[name]
		return uint64(min(max(q.Value(), 0), maxLimit))
	}
	return plugin.Limits{Memory: value(plugin.MemoryResource), Cores: uint32(value(plugin.CoresResource))}
}

// addSpec adds what a pod's spec asks for.
func addSpec(p *plugin.Pod, of *corev1.Pod) {
	p.Over = of.Status.Phase == corev1.PodSucceeded || of.Status.Phase == corev1.PodFailed
	p.Counted = limitsIn(resource.PodRequests(of, resource.PodResourcesOptions{}))
	for _, c := range slices.Concat(of.Spec.InitContainers, of.Spec.Containers) {
		if l := limitsIn(c.Resources.Limits); l != (plugin.Limits{}) {
			if p.Limits == nil {
				p.Limits = map[string]plugin.Limits{}
			}
			p.Limits[c.Name] = l
		}
	}
}

// Spec is a plugin.Specs. It needs no other right than the watch.
func (w *Watcher) Spec(ctx context.Context, namespace, name string) (p plugin.Pod, err error) {
	pods, err := w.events.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: named(name)})
	if err != nil {
		return p, err
	}
	for i := range pods.Items {
		p, _, _ = podOf(&pods.Items[i])
	}
	return p, nil
}

func named(name string) string {
	return fields.OneTermEqualSelector(metav1.ObjectNameField, name).String()
}

// Counts says what kube-scheduler is to count on the node. plugin.Plugin is one.
type Counts interface {
	Capacity() (l plugin.Limits, ok bool)
	Changed() <-chan struct{} // has a token when Capacity may return something else
}

// Advertise keeps the node's capacity as counts has it, until ctx ends; then it takes all back, so that no pod
// is placed where no plugin is. problem is told why the node does not have it; nil: it does.
//
// The kubelet copies capacity to what is allocatable, and never changes it, but when it registers a node
// anew: so the node is watched. What is missing costs running pods nothing when the kubelet restarts; less
// than they have would end them.
func (w *Watcher) Advertise(ctx context.Context, counts Counts, problem func(error)) {
	node := &nodeStore{seen: make(chan struct{}, 1)}
	nodes := w.events.client.CoreV1().Nodes()
	r := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = named(w.node)
			return nodes.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = named(w.node)
			return nodes.Watch(ctx, o)
		},
	}, w.events.client), &corev1.Node{}, node, cache.ReflectorOptions{Logger: &klog.Logger{}, Name: "node"})
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() { r.RunWithContext(klog.NewContext(ctx, klog.Logger{})) })
	for ctx.Err() == nil {
		var retry <-chan time.Time
		want, ok := counts.Capacity()
		if status := node.status.Load(); ok && status != nil && !advertises(status, want) {
			err := w.setCapacity(ctx, want)
			if ctx.Err() != nil {
				break
			}
			if err != nil {
				retry = time.After(patchRetry)
				err = fmt.Errorf("the node's %s and %s: %w", plugin.MemoryResource, plugin.CoresResource, err)
			}
			problem(err)
		}
		select {
		case <-ctx.Done():
		case <-node.seen:
		case <-counts.Changed():
		case <-retry:
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawLimit)
	defer cancel()
	if err := w.setCapacity(last, plugin.Limits{}); err != nil {
		w.log.Warnf("Kubernetes API: %s and %s stay in the node's capacity: %v", plugin.MemoryResource, plugin.CoresResource, err)
	}
}

// advertises tells whether a node has just what is wanted of ours; what is 0 is not there at all.
func advertises(status *corev1.NodeStatus, want plugin.Limits) bool {
	for _, list := range []corev1.ResourceList{status.Capacity, status.Allocatable} {
		_, memory := list[plugin.MemoryResource]
		_, cores := list[plugin.CoresResource]
		if limitsIn(list) != want || memory != (want.Memory != 0) || cores != (want.Cores != 0) {
			return false
		}
	}
	return true
}

// setCapacity changes the node's status. What is 0 is removed.
func (w *Watcher) setCapacity(ctx context.Context, l plugin.Limits) error {
	ctx, cancel := context.WithTimeout(ctx, postLimit)
	defer cancel()
	values := map[string]any{plugin.MemoryResource: nil, plugin.CoresResource: nil}
	if l.Memory != 0 {
		values[plugin.MemoryResource] = fmt.Sprint(l.Memory)
	}
	if l.Cores != 0 {
		values[plugin.CoresResource] = fmt.Sprint(l.Cores)
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"capacity": values, "allocatable": values}})
	if err == nil {
		_, err = w.events.client.CoreV1().Nodes().Patch(ctx, w.node, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	}
	if err == nil {
		w.log.Infof("the node has %v", l)
	}
	return err
}

// Withdraw removes from the node what a plugin that was killed has left there, once no pod uses it. It
// returns then, or when ctx ends.
func (w *Watcher) Withdraw(ctx context.Context, problem func(error)) {
	for {
		err := w.withdraw(ctx)
		if ctx.Err() != nil {
			return
		}
		problem(err)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(patchRetry):
		}
	}
}

func (w *Watcher) withdraw(ctx context.Context) error {
	node, err := w.events.client.CoreV1().Nodes().Get(ctx, w.node, metav1.GetOptions{})
	if err != nil || advertises(&node.Status, plugin.Limits{}) {
		return err
	}
	pods, err := w.events.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: w.mine()})
	if err != nil {
		return err
	}
	var users []string
	for i := range pods.Items {
		if p, _, _ := podOf(&pods.Items[i]); p.Counted != (plugin.Limits{}) && !p.Over {
			users = append(users, p.Namespace+"/"+p.Name)
		}
	}
	if len(users) > 0 {
		return fmt.Errorf("pods have %s or %s of this node, which gives GPUs by resource claims now: delete %s", plugin.MemoryResource, plugin.CoresResource, strings.Join(users, ", "))
	}
	return w.setCapacity(ctx, plugin.Limits{})
}

// nodeStore keeps the status of one node.
type nodeStore struct {
	status atomic.Pointer[corev1.NodeStatus] // nil: there is no such node, or it is not known yet
	seen   chan struct{}                     // has a token when it may be another one
}

var _ cache.ReflectorStore = (*nodeStore)(nil)

func (s *nodeStore) set(obj any) error {
	if n, ok := obj.(*corev1.Node); ok {
		s.status.Store(&n.Status)
	} else {
		s.status.Store(nil)
	}
	select {
	case s.seen <- struct{}{}:
	default: // a token is there already
	}
	return nil
}

func (s *nodeStore) Add(obj any) error    { return s.set(obj) }
func (s *nodeStore) Update(obj any) error { return s.set(obj) }
func (s *nodeStore) Delete(any) error     { return s.set(nil) }
func (s *nodeStore) Resync() error        { return nil }

func (s *nodeStore) Replace(objs []any, _ string) error {
	if len(objs) == 0 {
		return s.set(nil)
	}
	return s.set(objs[0])
}
