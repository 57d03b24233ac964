// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/cdi"
	sched "github.com/nvshare/nvshare/sched/api"
)

// Keys by which a pod says what its containers may have of each GPU's time.
const (
	CoreLimitAnnotation   = "nvshare.com/gpu-core-limit"
	CoreRequestAnnotation = "nvshare.com/gpu-core-request"
	WeightAnnotation      = "nvshare.com/gpu-weight"
	PriorityAnnotation    = "nvshare.com/gpu-priority"
	GangAnnotation        = "nvshare.com/gpu-gang"
)

// Share is what a container may have of each GPU's time and is promised; see
// package api for the fields. What is zero is not said.
type Share struct {
	CoreLimit   uint32 // percent
	CoreRequest uint32 // percent
	Weight      uint32
	Priority    sched.Priority
	Gang        string
}

// parseShares reads what annotations say of a container that has nothing to do
// with what this node has.
func (r *Request) parseShares(annotations map[string]string, container string) error {
	var errs []error
	read := func(name string, parse func(string) error) (said string) {
		key, value, ok := annotationFor(annotations, name, container)
		if !ok {
			return ""
		}
		if err := parse(strings.TrimSpace(value)); err != nil {
			errs = append(errs, annotationError(key, value, err))
		}
		return fmt.Sprintf("%s=%q", key, shown(value))
	}
	s := &r.Share
	read(MemoryLimitAnnotation, set(&r.MemoryLimit, sched.ParseMemory))
	limit := read(CoreLimitAnnotation, set(&s.CoreLimit, sched.ParsePercent))
	request := read(CoreRequestAnnotation, set(&s.CoreRequest, sched.ParsePercent))
	read(WeightAnnotation, set(&s.Weight, sched.ParseWeight))
	read(PriorityAnnotation, set(&s.Priority, sched.ParsePriority))
	read(GangAnnotation, set(&s.Gang, sched.ParseGang))
	if s.CoreLimit != 0 && s.CoreRequest > s.CoreLimit {
		errs = append(errs, fmt.Errorf("annotation %s: above %s", request, limit))
		s.CoreRequest = s.CoreLimit
	}
	return errors.Join(errs...)
}

// shares says for the log what there is beside devices.
func (r Request) shares() string {
	s := "memory limit " + sched.FormatMemory(r.MemoryLimit)
	add := func(said bool, format string, args ...any) {
		if said {
			s += ", " + fmt.Sprintf(format, args...)
		}
	}
	add(r.Share.CoreLimit != 0, "core limit %d%%", r.Share.CoreLimit)
	add(r.Share.CoreRequest != 0, "core request %d%%", r.Share.CoreRequest)
	add(r.Share.Weight != 0, "weight %d", r.Share.Weight)
	add(r.Share.Priority != 0, "priority %s", sched.FormatPriority(r.Share.Priority))
	add(r.Share.Gang != "", "gang %s", sched.FormatGang(r.Share.Gang))
	return s
}

// set has a parser's result stored, if there is one.
func set[T any](to *T, parse func(string) (T, error)) func(string) error {
	return func(text string) error {
		v, err := parse(text)
		if err == nil {
			*to = v
		}
		return err
	}
}

// Promise is a part of a GPU that somebody was promised.
type Promise struct {
	ID      string // of the container; "": a user's processes outside containers
	Who     string // for people
	UUID    string // of the GPU
	Percent uint32

	described bool // by a plugin
}

// maxHolders is how many of them an error names.
const maxHolders = 8

// learn takes note of what the scheduler knows: requests that were changed
// since, and those of others than our containers.
func (n *Names) learn(ids []string, promises []Promise) {
	for i := range promises {
		promises[i].described = slices.Contains(ids, promises[i].ID)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.promises = promises
}

// Admit is Add for a container that does not exist yet. It fails, and changes
// nothing, if one of its GPUs would be promised to more than 100 % by the
// requests of all. gpus are this node's.
//
// A container whose GPUs are not known counts on each of them.
func (n *Names) Admit(c Container, gpus []cdi.GPU) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, g := range gpus {
		if c.Share.CoreRequest == 0 || !c.uses(g.UUID) {
			continue
		}
		if err := keepable(c.Share.CoreRequest, g, n.promised(g.UUID, c)); err != nil {
			return err
		}
	}
	n.want[c.ID] = c
	n.poke()
	return nil
}

// promised returns what others than c are promised of a GPU.
func (n *Names) promised(uuid string, c Container) (others []Promise) {
	// Of a container that is started again, the runtime may report the end
	// after the new one's begin.
	old := func(o Container) bool { return o.ID == c.ID || o.sameAs(c) }
	said := map[string]bool{}
	for _, p := range n.promises {
		o, ours := n.want[p.ID]
		if p.UUID != uuid || ours && old(o) || !ours && p.described { // the latter has ended
			continue
		}
		said[p.ID] = true
		others = append(others, p)
	}
	for id, o := range n.want {
		if o.Share.CoreRequest != 0 && o.uses(uuid) && !said[id] && !old(o) {
			others = append(others, Promise{ID: id, Who: o.String(), Percent: o.Share.CoreRequest})
		}
	}
	return others
}

// keepable says why a part of a GPU cannot be promised beside others.
func keepable(percent uint32, g cdi.GPU, others []Promise) error {
	var sum uint32
	for _, p := range others {
		sum += p.Percent
	}
	if sum+percent <= 100 {
		return nil
	}
	slices.SortFunc(others, func(a, b Promise) int {
		return cmp.Or(cmp.Compare(b.Percent, a.Percent), cmp.Compare(a.Who, b.Who))
	})
	var who []string
	for _, p := range others[:min(len(others), maxHolders)] {
		who = append(who, fmt.Sprintf("%d %% to %s", p.Percent, p.Who))
	}
	if more := len(others) - len(who); more > 0 {
		who = append(who, fmt.Sprintf("the rest to %d more", more))
	}
	return fmt.Errorf("%d %% of GPU %d (%s) cannot be promised: %d %% are already, %s; at most %d %% are left",
		percent, g.Index, g.UUID, sum, strings.Join(who, ", "), 100-min(sum, 100))
}

// uses says whether a container has a GPU.
func (c Container) uses(uuid string) bool {
	return c.GPUs == "" || slices.Contains(strings.Split(c.GPUs, ","), uuid)
}

// sameAs says whether the two are one container of a pod, started twice.
func (c Container) sameAs(o Container) bool {
	return c.Name == o.Name && c.Pod == o.Pod && c.Namespace == o.Namespace && c.PodUID == o.PodUID
}

func (c Container) String() string { return c.Namespace + "/" + c.Pod + "/" + c.Name }
