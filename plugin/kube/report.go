// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/sched/api"
)

// terms are what was last said of a container.
type terms struct {
	id string // of the container
	api.Terms
}

// termsOf returns a container's terms with its gang as the pod names it.
func termsOf(c *api.Container, s *api.Share, memoryLimit uint64) terms {
	t := api.TermsOf(s, memoryLimit)
	t.Gang = strings.TrimPrefix(t.Gang, c.Namespace+"/")
	return terms{c.Id, t}
}

// refuse says which of a pod's annotations were refused, unless the same was said
// before. It has the pod tried again later where that may help. The lock is held.
func (w *Watcher) refuse(p *pod, all []plugin.Refusal) {
	said := p.refused
	p.refused = map[string]string{}
	for _, r := range all {
		if r.Container.PodUID != p.UID {
			continue
		}
		name, why := r.Container.Name, strings.ReplaceAll(r.Err.Error(), "\n", "; ")
		if p.refused[name] = why; said[name] != why {
			w.say(p, name, warning, "GPUShareRefused", why+"; what held before stays")
		}
		if r.Later {
			w.queue.AddAfter(p.UID, again)
		}
	}
}

// Answered says on a container's pod what the scheduler answered to its description:
// what has changed, or why the scheduler refuses.
func (w *Watcher) Answered(c plugin.Container, r *api.DescribeContainerResponse, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.pods[c.PodUID]
	if p == nil || p.Namespace != c.Namespace || p.Name != c.Pod {
		return
	}
	switch status.Code(err) {
	case codes.OK:
	case codes.InvalidArgument, codes.ResourceExhausted:
		w.say(p, c.Name, warning, "GPUShareRefused", "the scheduler refuses: "+status.Convert(err).Message())
		return
	default: // the plugin describes the container again
		return
	}
	if r.GetNew() == nil {
		return // an older scheduler
	}
	was, known := p.described[c.Name]
	now := termsOf(r.New, r.New.Share, r.New.MemoryLimitBytes)
	p.described[c.Name] = now
	if !known || was.id != c.ID {
		if r.Old == nil {
			return // the container is new: it has what it asked for
		}
		was = termsOf(r.New, r.Old.Share, r.Old.MemoryLimitBytes)
	}
	if kind, reason, note := changed(was, now, r); note != "" {
		w.say(p, c.Name, kind, reason, note)
	}
}

// changed puts a change into words; the note is empty if nobody would see one.
func changed(was, now terms, r *api.DescribeContainerResponse) (kind, reason, note string) {
	kind, reason = normal, "GPUShareChanged"
	var parts []string
	for _, f := range api.Fields {
		old, new := f.Format(was.Terms), f.Format(now.Terms)
		if old == new {
			continue
		}
		part := fmt.Sprintf("%s %s (was %s)", f.Name, new, old)
		for _, g := range r.Changes {
			if in := f.Format(termsOf(r.New, g.New, g.NewMemoryBytes).Terms); in != new {
				kind, reason = warning, "GPUShareOverruled"
				part += fmt.Sprintf(", without effect on GPU %d: %s, set with nvsharectl, holds there", g.Index, in)
			}
		}
		parts = append(parts, part)
	}
	for _, g := range r.Changes {
		if g.NewMemoryBytes != 0 && g.UsedMemoryBytes > g.NewMemoryBytes && g.NewMemoryBytes != g.OldMemoryBytes {
			parts = append(parts, fmt.Sprintf("GPU %d: %s in use, it gets no more until it has freed enough", g.Index, api.FormatMemory(g.UsedMemoryBytes)))
		}
	}
	return kind, reason, strings.Join(parts, "; ")
}

// Warn says something else of a container on its pod. Warnings beyond the queue are
// left out.
func (w *Watcher) Warn(p plugin.Pod, container, reason, note string) {
	w.events.add(p, container, warning, reason, note)
}

// WarnPod is Warn for a pod that is known by its UID only, and within the limit of the
// pod's events; false: this node has no such pod, or the Watcher does not know yet.
func (w *Watcher) WarnPod(uid, container, reason, note string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	p := w.pods[uid]
	if p != nil {
		w.say(p, container, warning, reason, note)
	}
	return p != nil
}

// say makes an event, unless the pod has had too many. The lock is held.
func (w *Watcher) say(p *pod, container, kind, reason, note string) {
	if p.limit == nil {
		p.limit = flowcontrol.NewTokenBucketPassiveRateLimiter(float32(1/eventEvery.Seconds()), eventBurst)
	}
	if !p.limit.TryAccept() {
		return
	}
	w.log.Infof("pod %s/%s, container %q: %s: %s", p.Namespace, p.Name, container, reason, note)
	w.events.add(p.Pod, container, kind, reason, note)
}
