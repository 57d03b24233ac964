// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/plugin/kube"
	"github.com/nvshare/nvshare/sched/api"
)

// liveFlags say how pods' annotations are watched.
type liveFlags struct {
	kubeconfig, node        string
	startupTaint, advertise bool
}

func (f *liveFlags) add(s *pflag.FlagSet) {
	s.StringVar(&f.kubeconfig, "kubeconfig", os.Getenv("KUBECONFIG"), "`file` that says how to reach the Kubernetes API (KUBECONFIG), where the annotations of this node's pods are watched, so that shares change while they run; in a pod none is needed")
	s.BoolVar(&f.startupTaint, "startup-taint", false, "remove the taint "+kube.StartupTaint+" from this node once the container runtime has registered the plugin; needs the right to get and patch nodes")
	s.BoolVar(&f.advertise, "advertise", false, "advertise "+plugin.MemoryResource+" (GiB) and "+plugin.CoresResource+" (percent of one GPU's time) as resources of this node, for which pods ask by resources.limits: for Kubernetes before 1.36, and not with --dra; needs the rights to list and watch nodes and to patch nodes/status")
	s.StringVar(&f.node, "node-name", os.Getenv("NODE_NAME"), "this node's `name` in Kubernetes (NODE_NAME; default: the host's)")
}

// live carries what happens to containers to the plugin and to their pods; nil:
// there is no API server.
type live struct {
	w *kube.Watcher
	p *plugin.Plugin

	seen map[string]bool // processes of which pods were told by bypassed
}

// watch tells p of pods' annotations until ctx ends. It returns nil where there is
// no API server.
func (f *liveFlags) watch(ctx context.Context, p *plugin.Plugin, log logrus.FieldLogger) (*live, error) {
	config, err := kube.Config(f.kubeconfig)
	switch {
	case err != nil && f.startupTaint:
		return nil, fmt.Errorf("--startup-taint: Kubernetes API: %w", err)
	case err != nil && f.advertise:
		return nil, fmt.Errorf("--advertise: Kubernetes API: %w", err)
	case errors.Is(err, kube.ErrNone):
		log.Infof("pods' annotations hold as they were at their creation: %v", err)
		return nil, nil
	case err != nil:
		log.Warnf("pods' annotations hold as they were at their creation: Kubernetes API: %v", err)
		return nil, nil
	}
	node, err := kube.NodeName(f.node)
	if err != nil {
		return nil, err
	}
	if f.advertise { // a handler may wait for an answer
		config.QPS, config.Burst = apiQPS, apiBurst
	}
	w, err := kube.New(config, node, p, log)
	if err != nil {
		return nil, err
	}
	log.Infof("watching the annotations of the pods of node %s at %s", node, config.Host)
	if f.advertise {
		w.WatchSpecs()
		p.SetSpecs(w.Spec)
	}
	p.ExpectPods()
	go w.Run(ctx)
	return &live{w: w, p: p}, nil
}

// answered is called with the scheduler's answer to each description.
func (l *live) answered(c plugin.Container, r *api.DescribeContainerResponse, err error) {
	if l == nil {
		return
	}
	if now := r.GetNew(); err == nil && now != nil {
		l.p.KeptByScheduler(c, now.Terms())
	}
	l.w.Answered(c, r, err)
}

// bypassed is called with the processes that use GPUs and are no clients of the
// scheduler, again and again. It is not called at the same time twice.
func (l *live) bypassed(all []*api.Unmanaged) {
	if l == nil {
		return
	}
	seen := map[string]bool{}
	for _, u := range all {
		c := u.Container
		id := fmt.Sprint(c.GetPodUid(), c.GetId(), u.Pid)
		seen[id] = l.seen[id] || l.w.WarnPod(c.GetPodUid(), c.GetName(), "GPUBypassed",
			fmt.Sprintf("process %d (%s) uses GPU %d without nvshare, so %s: it hides the shim, or is a static program", u.Pid, u.Command, u.Index, cmp.Or(u.Held, "nvshare does not schedule its work")))
	}
	l.seen = seen
}

// warn says something of a container on its pod, as often as the pod's events may come. One
// that is not known, as before the first list of pods, has no such bound.
func (l *live) warn(p plugin.Pod, container, reason, note string) {
	if !l.w.WarnPod(p.UID, container, reason, note) {
		l.w.Warn(p, container, reason, note)
	}
}

// unmanaged is called with each container that runs without nvshare.
func (l *live) unmanaged(u plugin.Unmanaged) {
	if l == nil {
		return
	}
	l.warn(plugin.Pod{UID: u.PodUID, Namespace: u.Namespace, Name: u.Pod}, u.Name, "GPUUnmanaged",
		fmt.Sprintf("runs without nvshare (asked for: %s): %s", cmp.Or(u.Asked, "nothing"), u.Why))
}

// event is called with the scheduler's events: a container's memory limit has refused
// memory, or a container's overlap group has failed.
func (l *live) event(e *api.Event) {
	if e.Container.GetPod() == "" {
		return
	}
	reason, note := "", fmt.Sprintf("GPU %d: %s", e.Index, e.Reason)
	switch e.Type {
	case api.EventType_EVENT_TYPE_OUT_OF_MEMORY:
		reason, note = "GPUOutOfMemory", fmt.Sprintf("%s; %s raises the limit", note, plugin.MemoryLimitAnnotation)
	case api.EventType_EVENT_TYPE_OOM_KILL:
		reason, note = "GPUOOMKilled", fmt.Sprintf("%s; %s raises the limit", note, plugin.MemoryLimitAnnotation)
	case api.EventType_EVENT_TYPE_OVERLAP:
		reason = "GPUOverlapGroup"
	}
	l.warn(plugin.Pod{UID: e.Container.PodUid, Namespace: e.Container.Namespace, Name: e.Container.Pod}, e.Container.Name, reason, note)
}
