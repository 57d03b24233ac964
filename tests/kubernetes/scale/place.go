// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/nvshare/nvshare/tests/node"
)

// result is what a run showed. Times are seconds.
type result struct {
	setup
	Date    string             `json:"date"`
	Cores   int                `json:"processors"`
	Seconds float64            `json:"seconds"`         // from the first request for a pod to the last pod that is bound
	Created float64            `json:"created_seconds"` // of that, until the last pod existed
	CPU     map[string]float64 `json:"cpu_seconds"`     // of the programs, and of this one
	PerPod  float64            `json:"scheduler_cpu_ms_per_pod"`
	Others  float64            `json:"others_processors"` // processors that others on the machine kept busy meanwhile
	Load    string             `json:"load_before"`
	Wait    map[string]float64 `json:"wait_seconds"` // from a pod's creation until it is bound: quantiles
	Audit   audited            `json:"audit"`
	Bound   int                `json:"gpus_at_least"` // no placement needs fewer
	placed  []placement
	file    string // base name, of a run that was read
}

const boundPods = "spec.nodeName!="

// placement is one pod.
type placement struct {
	ask            ask
	created, bound float64 // seconds since the first request
	node, gpu      string
}

// clock reads how long a process has used processors, in seconds.
func clock(pid int) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	return ticks(strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])), 11, 12)
}

// busy reads how long the machine's processors were in use, in seconds.
func busy() float64 {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), "\n")
	return ticks(strings.Fields(first), 1, 2, 3, 6, 7)
}

func ticks(fields []string, of ...int) (sum float64) {
	for _, i := range of {
		n, _ := strconv.ParseFloat(fields[i], 64)
		sum += n / 100 // USER_HZ
	}
	return sum
}

// place makes the pods and waits until each is bound.
func place(ctx context.Context, c kubernetes.Interface, parts []*node.Process, s setup, asks []ask) (*result, error) {
	r := &result{setup: s, Date: time.Now().UTC().Format(time.RFC3339), Cores: goruntime.NumCPU(), CPU: map[string]float64{}, Wait: map[string]float64{}, placed: make([]placement, len(asks))}
	if err := warmUp(ctx, c, asks[0]); err != nil {
		return nil, err
	}
	if load, err := os.ReadFile("/proc/loadavg"); err == nil {
		r.Load = strings.TrimSpace(string(load))
	}
	watched, stop := context.WithCancel(ctx)
	defer stop()
	seen := make(chan *corev1.Pod, len(asks))
	w := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = boundPods
			return c.CoreV1().Pods(namespace).List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = boundPods
			return c.CoreV1().Pods(namespace).Watch(ctx, o)
		},
	}
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{ListerWatcher: cache.ToListWatcherWithWatchListSemantics(w, c), ObjectType: &corev1.Pod{}, Handler: cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { seen <- o.(*corev1.Pod) },
	}})
	go informer.RunWithContext(watched)
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return nil, fmt.Errorf("watch the pods: %w", ctx.Err())
	}
	cpu := func() map[string]float64 {
		all := map[string]float64{"this program": clock(os.Getpid()), "machine": busy()}
		for _, p := range parts {
			all[p.Name] = clock(p.PID())
		}
		return all
	}
	before := cpu()
	begin := time.Now()
	since := func() float64 { return time.Since(begin).Seconds() }
	made := make(chan error, 1)
	go func() {
		err := each(ctx, len(asks), func(ctx context.Context, i int) error {
			_, err := c.CoreV1().Pods(namespace).Create(ctx, podOf(i, asks[i]), metav1.CreateOptions{})
			r.placed[i].ask, r.placed[i].created = asks[i], since()
			return err
		})
		r.Created = since()
		made <- err
	}()
	bound := make(map[string]float64, len(asks))
	nodes := make(map[string]string, len(asks))
	say := time.NewTicker(10 * time.Second)
	defer say.Stop()
	for existing := false; len(bound) < len(asks) || !existing; {
		select {
		case p := <-seen:
			if bound[p.Name] == 0 {
				bound[p.Name], nodes[p.Name] = since(), p.Spec.NodeName
			}
		case err := <-made:
			if existing = true; err != nil {
				return nil, fmt.Errorf("make the pods: %w", err)
			}
		case <-say.C:
			fmt.Printf("%.0f s: %d pods are bound\n", since(), len(bound))
		case <-ctx.Done():
			return nil, fmt.Errorf("%d of %d pods are bound: %w", len(bound), len(asks), ctx.Err())
		}
	}
	r.Seconds = since()
	after := cpu()
	var ours float64
	for name, end := range after {
		if r.CPU[name] = round(end - before[name]); name != "machine" {
			ours += end - before[name]
		}
	}
	r.Others = round((after["machine"] - before["machine"] - ours) / r.Seconds)
	r.PerPod = round(1000 * r.CPU["kube-scheduler"] / float64(len(asks)))
	var waits []float64
	for i := range r.placed {
		p := &r.placed[i]
		p.bound, p.node = bound[podName(i)], nodes[podName(i)]
		waits = append(waits, max(0, p.bound-p.created))
	}
	slices.Sort(waits)
	for name, q := range map[string]float64{"p50": 0.5, "p99": 0.99, "max": 1} {
		r.Wait[name] = round(waits[min(len(waits)-1, int(q*float64(len(waits))))])
	}
	r.Seconds, r.Created = round(r.Seconds), round(r.Created)
	return r, nil
}

// warmUp waits until a pod is bound, so that all parts know all nodes, and removes the pod
// and its claim.
func warmUp(ctx context.Context, c kubernetes.Interface, a ask) error {
	const name = "first"
	pod := podOf(0, a)
	pod.Name = name
	if _, err := c.CoreV1().Pods(namespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return err
	}
	if err := node.Until(ctx, "the first pod to be bound", func() error {
		p, err := c.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		if err == nil && p.Spec.NodeName == "" {
			err = fmt.Errorf("it is not: %v", p.Status.Conditions)
		}
		return err
	}); err != nil {
		return err
	}
	now := int64(0) // there is no kubelet
	if err := c.CoreV1().Pods(namespace).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		return err
	}
	// Without the garbage collector the claim goes by hand, once the controller has freed it.
	return node.Until(ctx, "the claim of the first pod to be gone", func() error {
		list, err := c.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, claim := range list.Items {
			if claim.DeletionTimestamp == nil {
				if err := c.ResourceV1().ResourceClaims(namespace).Delete(ctx, claim.Name, metav1.DeleteOptions{}); err != nil {
					return err
				}
			}
		}
		if len(list.Items) > 0 {
			return fmt.Errorf("%d claims", len(list.Items))
		}
		return nil
	})
}

// write writes the run to out.json, and each pod to out.csv.
func (r *result) write(out string) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	fmt.Println(string(data))
	var pods bytes.Buffer
	w := csv.NewWriter(&pods)
	rows := [][]string{{"pod", "cores", "memory_mib", "created_ms", "bound_ms", "node", "gpu"}}
	ms := func(s float64) string { return strconv.Itoa(int(1000 * s)) }
	for i, p := range r.placed {
		rows = append(rows, []string{podName(i), strconv.FormatInt(p.ask.Cores, 10), strconv.FormatInt(p.ask.Memory>>20, 10), ms(p.created), ms(p.bound), p.node, p.gpu[max(0, len(p.gpu)-1):]})
	}
	if err := w.WriteAll(rows); err != nil {
		return err
	}
	return errors.Join(os.WriteFile(out+".json", append(data, '\n'), 0o644), os.WriteFile(out+".csv", pods.Bytes(), 0o644))
}

func round(x float64) float64 { return float64(int64(x*1000+0.5)) / 1000 }

func sortInts(s []int64) { slices.Sort(s) }
