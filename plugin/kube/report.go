// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/sched/api"
)

// terms are what a container may have, for people, in the order of names.
type terms struct {
	id     string // of the container
	values [len(names)]string
}

var names = [...]string{"memory limit", "core limit", "core request", "weight", "priority", "gang", "memory mode"}

func termsOf(c *api.Container, memory uint64, s *api.Share) terms {
	return terms{c.Id, [len(names)]string{
		api.FormatMemory(memory), api.FormatPercent(s.GetCoreLimit()), api.FormatPercent(s.GetCoreRequest()),
		api.FormatWeight(s.GetWeight()), api.FormatPriority(s.GetPriority()),
		api.FormatGang(strings.TrimPrefix(s.GetGang(), c.Namespace+"/")),
		api.FormatMemoryMode(s.GetMemoryMode()),
	}}
}

// refuse says what of a pod's annotations was refused, unless that was said
// already, and has what may become possible tried again. The lock is held.
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

// Told says what came of telling the scheduler of a container: its answer, or
// why it refuses.
func (w *Watcher) Told(c plugin.Container, r *api.DescribeContainerResponse, err error) {
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
	default: // it is told again
		return
	}
	if r.GetNew() == nil {
		return // a scheduler of before this could be asked
	}
	was, known := p.described[c.Name]
	now := termsOf(r.New, r.New.MemoryLimitBytes, r.New.Share)
	p.described[c.Name] = now
	if !known || was.id != c.ID {
		if r.Old == nil {
			return // it is new, and so has what it asked for
		}
		was = termsOf(r.New, r.Old.MemoryLimitBytes, r.Old.Share)
	}
	if was != now {
		kind, reason, note := changed(was, now, r)
		w.say(p, c.Name, kind, reason, note)
	}
}

// changed puts a change into words.
func changed(was, now terms, r *api.DescribeContainerResponse) (kind, reason, note string) {
	kind, reason = normal, "GPUShareChanged"
	var parts []string
	for i, name := range names {
		if was.values[i] == now.values[i] {
			continue
		}
		part := fmt.Sprintf("%s %s (was %s)", name, now.values[i], was.values[i])
		for _, g := range r.Changes {
			if in := termsOf(r.New, g.NewMemoryBytes, g.New); in.values[i] != now.values[i] {
				kind, reason = warning, "GPUShareOverruled"
				part += fmt.Sprintf(", without effect on GPU %d: %s, set with nvsharectl, holds there", g.Index, in.values[i])
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

// Warn says something else of a container on its pod. What is too much is left
// out.
func (w *Watcher) Warn(p plugin.Pod, container, reason, note string) {
	w.events.add(p, container, warning, reason, note)
}

// say makes an event. The lock is held.
func (w *Watcher) say(p *pod, container, kind, reason, note string) {
	if p.limit == nil {
		p.limit = newLimit()
	}
	if !p.limit.TryAccept() {
		return
	}
	w.log.Infof("pod %s/%s, container %q: %s: %s", p.Namespace, p.Name, container, reason, note)
	w.events.add(p.Pod, container, kind, reason, note)
}
