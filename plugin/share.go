// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/plugin/placement"
	sched "github.com/nvshare/nvshare/sched/api"
)

// Keys by which a pod says what its containers may have of each GPU's time.
const (
	CoreLimitAnnotation   = "nvshare.com/gpu-core-limit"
	CoreRequestAnnotation = "nvshare.com/gpu-core-request"
	WeightAnnotation      = "nvshare.com/gpu-weight"
	PriorityAnnotation    = "nvshare.com/gpu-priority"
	GangAnnotation        = "nvshare.com/gpu-gang"
	MemoryModeAnnotation  = "nvshare.com/gpu-memory-mode"
)

// Share is what a container may have of each GPU's time and is promised; see
// package api for the fields. What is zero is not said.
type Share struct {
	CoreLimit   uint32 // percent
	CoreRequest uint32 // percent
	Weight      uint32
	Priority    sched.Priority
	Gang        string
	MemoryMode  sched.MemoryMode
}

// parseShares reads what annotations say of a container that has nothing to do
// with what this node has.
func (r *Request) parseShares(annotations map[string]string, container string) error {
	var errs []error
	read := func(name string, wrong *bool, parse func(string) error) (said string) {
		key, value, ok := annotationFor(annotations, name, container)
		if !ok {
			return ""
		}
		if err := parse(strings.TrimSpace(value)); err != nil {
			errs = append(errs, annotationError(key, value, err))
			*wrong = true
		}
		return fmt.Sprintf("%s=%q", key, shown(value))
	}
	s, k := &r.Share, &r.Keep
	read(MemoryLimitAnnotation, &k.MemoryLimit, set(&r.MemoryLimit, sched.ParseMemory))
	limit := read(CoreLimitAnnotation, &k.CoreLimit, set(&s.CoreLimit, sched.ParsePercent))
	request := read(CoreRequestAnnotation, &k.CoreRequest, set(&s.CoreRequest, sched.ParsePercent))
	read(WeightAnnotation, &k.Weight, set(&s.Weight, sched.ParseWeight))
	read(PriorityAnnotation, &k.Priority, set(&s.Priority, sched.ParsePriority))
	read(GangAnnotation, &k.Gang, set(&s.Gang, sched.ParseGang))
	read(MemoryModeAnnotation, &k.MemoryMode, set(&s.MemoryMode, sched.ParseMemoryMode))
	if s.CoreLimit != 0 && s.CoreRequest > s.CoreLimit {
		errs = append(errs, fmt.Errorf("annotation %s: above %s", request, limit))
		s.CoreRequest = s.CoreLimit
		k.CoreLimit, k.CoreRequest = true, true
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
	add(r.Share.MemoryMode != 0, "memory mode %s", sched.FormatMemoryMode(r.Share.MemoryMode))
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
	Percent uint32 // of its time; 0: none
	Memory  uint64 // limit, bytes; 0: none

	described bool // by a plugin
}

// maxHolders is how many of them an error names.
const maxHolders = 8

// learn takes note of what the scheduler knows: requests that were changed
// since, and those of others than our containers.
func (n *Names) learn(k Known) {
	for i := range k.Promises {
		k.Promises[i].described = slices.Contains(k.IDs, k.Promises[i].ID)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.promises = k.Promises
	if len(k.Memory) > 0 { // it has just been started, or is an older one
		n.memory = k.Memory
	}
}

// keepable says why a part of a GPU cannot be promised beside others.
func keepable(percent uint32, d placement.Device) error {
	var sum uint32
	others := slices.DeleteFunc(slices.Clone(d.Tenants), func(t placement.Tenant) bool { return t.Core == 0 })
	for _, t := range others {
		sum += t.Core
	}
	if sum+percent <= 100 {
		return nil
	}
	slices.SortFunc(others, func(a, b placement.Tenant) int {
		return cmp.Or(cmp.Compare(b.Core, a.Core), cmp.Compare(a.Name, b.Name))
	})
	var who []string
	for _, t := range others[:min(len(others), maxHolders)] {
		who = append(who, fmt.Sprintf("%d %% to %s", t.Core, t.Name))
	}
	if more := len(others) - len(who); more > 0 {
		who = append(who, fmt.Sprintf("the rest to %d more", more))
	}
	return fmt.Errorf("%d %% of %s cannot be promised: %d %% are already, %s; at most %d %% are left",
		percent, d.Name, sum, strings.Join(who, ", "), 100-min(sum, 100))
}

// uses says whether a container has a GPU.
func (c Container) uses(uuid string) bool {
	if c.GPUs == "" {
		return true
	}
	for u := range strings.SplitSeq(c.GPUs, ",") {
		if u == uuid {
			return true
		}
	}
	return false
}

// sameAs says whether the two are one container of a pod, started twice.
func (c Container) sameAs(o Container) bool {
	return c.Name == o.Name && c.Pod == o.Pod && c.Namespace == o.Namespace && c.PodUID == o.PodUID
}

func (c Container) String() string { return c.Namespace + "/" + c.Pod + "/" + c.Name }
