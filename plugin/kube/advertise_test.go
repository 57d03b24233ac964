// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/tests/kubeapi"
)

// books say what is to be advertised.
type books struct {
	changed chan struct{}

	mu    sync.Mutex
	now   plugin.Limits
	known bool
}

func (b *books) Changed() <-chan struct{} { return b.changed }

func (b *books) Capacity() (plugin.Limits, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now, b.known
}

func (b *books) set(memory uint64, cores uint32) {
	b.mu.Lock()
	b.now, b.known = plugin.Limits{Memory: memory, Cores: cores}, true
	b.mu.Unlock()
	b.changed <- struct{}{}
}

func resources(memory, cores string) corev1.ResourceList {
	list := corev1.ResourceList{}
	for name, value := range map[corev1.ResourceName]string{plugin.MemoryResource: memory, plugin.CoresResource: cores} {
		if value != "" {
			list[name] = resource.MustParse(value)
		}
	}
	return list
}

func with(list corev1.ResourceList) corev1.PodSpec {
	return corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Requests: list, Limits: list}}}}
}

// shows returns what a node has of ours, capacity and allocatable, beside the kubelet's cpu.
func shows(n *corev1.Node) string {
	var all []string
	for _, list := range []corev1.ResourceList{n.Status.Capacity, n.Status.Allocatable} {
		text := ""
		for _, name := range []corev1.ResourceName{"cpu", plugin.MemoryResource, plugin.CoresResource} {
			if q, ok := list[name]; ok {
				text += q.String() + " "
			}
		}
		all = append(all, strings.TrimSpace(text))
	}
	return strings.Join(all, ", ")
}

// The node has what is advertised, also after the kubelet has made it anew or has set it to zero, and nothing
// after the plugin's end. What others have there stays.
func TestAdvertise(t *testing.T) {
	s, b := kubeapi.New(t), &books{changed: make(chan struct{}, 1)}
	s.SetNode(func(n *corev1.Node) {
		n.Status.Capacity = corev1.ResourceList{"cpu": resource.MustParse("2")}
		n.Status.Allocatable = n.Status.Capacity
	})
	w, _ := startWatcher(t, s, newListener())
	problems := make(chan error, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		w.Advertise(ctx, b, func(err error) {
			if err != nil {
				problems <- err
			}
		})
		close(done)
	}()
	last := ""
	expect := func(when, want string) {
		t.Helper()
		for { // a patch may come twice, before the watch has told of the first one
			got := shows(await(t, s.Patched, when))
			if got == want {
				last = got
				return
			}
			if got != last {
				t.Fatalf("%s: the node has %s, want %s", when, got, want)
			}
		}
	}
	b.set(80, 100)
	expect("at the start", "2 80 100, 2 80 100")
	b.set(80, 100) // no patch
	b.set(56, 180)
	expect("a change", "2 56 180, 2 56 180")
	s.SetNode(func(n *corev1.Node) { n.Status.Capacity = resources("0", "0") })
	expect("set to zero", "56 180, 2 56 180")
	s.SetNode(func(n *corev1.Node) { n.Status = corev1.NodeStatus{} })
	expect("made anew", "56 180, 56 180")
	b.set(0, 100)
	expect("without memory", "100, 100")
	s.FailWith(403)
	b.set(7, 100)
	if err := await(t, problems, "the refusal"); err == nil || !strings.Contains(err.Error(), "Forbidden") {
		t.Errorf("without the right: %v", err)
	}
	s.FailWith(0)
	s.SetNode(func(*corev1.Node) {})
	expect("with the right", "7 100, 7 100")
	cancel()
	await(t, done, "the end of Advertise")
	for len(s.Patched) > 1 {
		<-s.Patched
	}
	if got := shows(await(t, s.Patched, "the end")); got != ", " {
		t.Errorf("at the end the node has %s", got)
	}
	for len(problems) > 0 {
		if err := <-problems; !strings.Contains(err.Error(), "Forbidden") {
			t.Error(err)
		}
	}
}

// Specs are told with the pods, and asked for.
func TestWatcherTellsOfSpecs(t *testing.T) {
	s, l := kubeapi.New(t), newListener()
	s.Specs()
	spec := with(resources("8", "25"))
	always := corev1.ContainerRestartPolicyAlways
	spec.InitContainers = []corev1.Container{
		{Name: "first", Resources: corev1.ResourceRequirements{Requests: resources("20", ""), Limits: resources("20", "")}},
		{Name: "sidecar", RestartPolicy: &always, Resources: corev1.ResourceRequirements{Requests: resources("1", "5"), Limits: resources("1", "5")}},
	}
	s.SetSpec("ml", "train", spec)
	s.Set("a", "ml", "train", nil)
	w := startSpecs(t, s, l)
	const want = "map[first:{20 0} main:{8 25} sidecar:{1 5}] map[first:true sidecar:false] {20 30} "
	told := func() string {
		l.mu.Lock()
		defer l.mu.Unlock()
		p := l.pods["a"]
		return describe(p)
	}
	if got := told(); got != want+"false" {
		t.Errorf("told of %s", got)
	}
	s.End("a")
	await(t, l.told, "the end of the pod")
	if got := told(); got != want+"true" {
		t.Errorf("told of %s", got)
	}
	if p, err := w.Spec(t.Context(), "ml", "train"); err != nil || p.UID != "a" || !strings.HasPrefix(describe(p), want) {
		t.Errorf("asked: %s, %v", describe(p), err)
	}
	if p, err := w.Spec(t.Context(), "ml", "other"); err != nil || p.UID != "" {
		t.Errorf("a pod that is not there: %+v, %v", p, err)
	}
}

// The runtime has a static pod by a UID that the API server does not know: what is kept for the mirror pod would
// never be taken. kube-scheduler counts it.
func TestStaticPodHasNoLimits(t *testing.T) {
	s, l := kubeapi.New(t), newListener()
	s.Specs()
	s.SetSpec("ml", "static", with(resources("8", "25")))
	s.SetSpec("ml", "plain", corev1.PodSpec{})
	for _, name := range []string{"plain", "static"} {
		s.Set(name, "ml", name, map[string]string{corev1.MirrorPodAnnotationKey: "hash"})
	}
	startSpecs(t, s, l)
	l.mu.Lock()
	got := describe(l.pods["static"])
	l.mu.Unlock()
	if got != "map[] map[] {8 25} false" {
		t.Errorf("told of %s", got)
	}
	if e := await(t, s.Events, "an event of this pod only"); e.Reason != "GPULimitsIgnored" || e.Regarding.Name != "static" {
		t.Errorf("event: %s of %s: %s", e.Reason, e.Regarding.Name, e.Note)
	}
}

// startSpecs returns a watcher of whole pods once it has told of all.
func startSpecs(t *testing.T, s *kubeapi.Server, l *listener) *Watcher {
	t.Helper()
	w, err := New(restConfig(s), kubeapi.Node, l, quiet())
	if err != nil {
		t.Fatal(err)
	}
	w.WatchSpecs()
	run(t, w)
	await(t, l.told, "all pods")
	return w
}

func describe(p plugin.Pod) string {
	limits := map[string]string{}
	for name, l := range p.Limits {
		limits[name] = fmt.Sprintf("{%d %d}", l.Memory, l.Cores)
	}
	return fmt.Sprintf("%v %v {%d %d} %v", limits, p.Init, p.Counted.Memory, p.Counted.Cores, p.Over)
}
