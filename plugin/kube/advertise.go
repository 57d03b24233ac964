// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
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
	value := func(name corev1.ResourceName) int64 {
		q := list[name]
		return min(max(q.Value(), 0), maxLimit)
	}
	return plugin.Limits{Memory: uint64(value(plugin.MemoryResource)), Cores: uint32(value(plugin.CoresResource))}
}

// addSpec adds what a pod's spec asks for.
func addSpec(p *plugin.Pod, of *corev1.Pod) {
	p.Over = of.Status.Phase == corev1.PodSucceeded || of.Status.Phase == corev1.PodFailed
	p.Counted = limitsIn(resource.PodRequests(of, resource.PodResourcesOptions{}))
	// The runtime has a static pod by a UID that only the kubelet knows. Who may create pods may write the annotation
	// that says it.
	if _, p.Static = of.Annotations[corev1.MirrorPodAnnotationKey]; p.Static {
		return
	}
	p.Limits, p.Init = map[string]plugin.Limits{}, map[string]bool{}
	for _, c := range slices.Concat(of.Spec.InitContainers, of.Spec.Containers) {
		if l := limitsIn(c.Resources.Limits); l != (plugin.Limits{}) {
			p.Limits[c.Name] = l
		}
	}
	for _, c := range of.Spec.InitContainers {
		p.Init[c.Name] = c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways
	}
}

// Spec is a plugin.Specs. It needs no other right than the watch.
func (w *Watcher) Spec(ctx context.Context, namespace, name string) (p plugin.Pod, err error) {
	pods, err := w.events.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: named(name).String()})
	if err == nil && len(pods.Items) > 0 {
		p, _, _ = podOf(&pods.Items[0])
	}
	return p, err
}

func named(name string) fields.Selector {
	return fields.OneTermEqualSelector(metav1.ObjectNameField, name)
}

// Counts says what kube-scheduler is to count on the node. plugin.Plugin is one.
type Counts interface {
	Capacity() (l plugin.Limits, ok bool) // ok is false while it is not known
	Changed() <-chan struct{}             // has a token when Capacity may return something else
}

// Advertise keeps the node's capacity as counts has it, until ctx ends; then it takes all back, so that no pod
// is placed where no plugin is. problem is told why the node does not have it; nil: it does.
//
// The kubelet copies capacity to what is allocatable, and never changes it, but when it registers a node
// anew: so the node is watched. What is missing costs running pods nothing when the kubelet restarts; less
// than they have would end them.
func (w *Watcher) Advertise(ctx context.Context, counts Counts, problem func(error)) {
	seen := make(chan struct{}, 1)
	see := func(any) { plugin.Signal(seen) }
	nodes, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.NewListWatchFromClient(w.events.client.CoreV1().RESTClient(), "nodes", "", named(w.node)), ObjectType: &corev1.Node{},
		Handler: cache.ResourceEventHandlerFuncs{AddFunc: see, UpdateFunc: func(_, node any) { see(node) }, DeleteFunc: see},
	})
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() { informer.RunWithContext(klog.NewContext(ctx, klog.Logger{})) })
	lacks := func(want plugin.Limits) bool {
		node, there, _ := nodes.GetByKey(w.node)
		return there && !advertises(node.(*corev1.Node), want)
	}
	patched := false // the watch may not have told yet
	for ctx.Err() == nil {
		var retry <-chan time.Time
		if want, ok := counts.Capacity(); ok && lacks(want) {
			err := w.setCapacity(ctx, want)
			if patched = true; ctx.Err() != nil {
				break
			}
			if err != nil {
				retry = time.After(patchRetry)
			}
			problem(err)
		}
		select {
		case <-ctx.Done():
		case <-seen:
		case <-counts.Changed():
		case <-retry:
		}
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawLimit)
	defer cancel()
	if patched || lacks(plugin.Limits{}) {
		if err := w.setCapacity(last, plugin.Limits{}); err != nil {
			w.log.Warnf("Kubernetes API: it stays: %v", err)
		}
	}
}

// amounts are limits by name. What is 0 is not there at all.
func amounts(l plugin.Limits) map[corev1.ResourceName]int64 {
	return map[corev1.ResourceName]int64{plugin.MemoryResource: int64(l.Memory), plugin.CoresResource: int64(l.Cores)}
}

// advertises tells whether a node has just what is wanted of ours.
func advertises(node *corev1.Node, want plugin.Limits) bool {
	for name, n := range amounts(want) {
		for _, list := range []corev1.ResourceList{node.Status.Capacity, node.Status.Allocatable} {
			if q, there := list[name]; there != (n != 0) || q.Value() != n {
				return false
			}
		}
	}
	return true
}

// setCapacity changes the node's status.
func (w *Watcher) setCapacity(ctx context.Context, l plugin.Limits) error {
	ctx, cancel := context.WithTimeout(ctx, postLimit)
	defer cancel()
	values := map[corev1.ResourceName]any{}
	for name, n := range amounts(l) {
		if values[name] = nil; n != 0 {
			values[name] = fmt.Sprint(n)
		}
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"capacity": values, "allocatable": values}})
	if err == nil {
		_, err = w.events.client.CoreV1().Nodes().Patch(ctx, w.node, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	}
	if err != nil {
		return fmt.Errorf("the node's capacity of %s and %s: %w", plugin.MemoryResource, plugin.CoresResource, err)
	}
	w.log.Infof("the node's capacity has %v", l)
	return nil
}
