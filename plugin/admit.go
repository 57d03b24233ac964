// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin/placement"
)

// refusal is why a container is not admitted.
type refusal struct {
	annotation string // that asks for too much; "": the one that asks for GPUs
	error
}

func (r refusal) Unwrap() error { return r.error }

// Admit is Add for a container that does not exist yet, and decides which GPUs
// it has if count of them are to be chosen: one book for all who decide. It
// fails, and changes nothing, if no GPU can be chosen, or if those that somebody
// else has decided on would be promised to more than 100 % by the requests of
// all, or have neighbours that the labels forbid. gpus are what this node can give.
//
// A container whose GPUs are not known counts on each of them, and is nobody's
// neighbour. Memory is promised by limits, and only where the plugin chooses is
// that a reason to refuse: who names a GPU may want to share its memory.
func (n *Names) Admit(c Container, count int, gpus []cdi.GPU) (Container, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c, _ = n.follow.now(c)
	devices := n.devices(gpus, c)
	if count > 0 {
		chosen, err := placement.Choose(devices, placement.Request{
			Count: count, Core: c.Share.CoreRequest, Memory: c.MemoryLimit, Labels: c.Labels, Had: n.had(c),
		})
		if err != nil {
			return c, refusal{error: err}
		}
		c.GPUs = strings.Join(chosen, ",")
	} else if err := c.acceptable(devices); err != nil {
		return c, err
	}
	// Of one that is started again the runtime may report the end later. Until
	// then nobody else is to be refused for what it was promised twice.
	again := func(_ string, o Container) bool { return o.sameAs(c) }
	maps.DeleteFunc(n.want, again)
	maps.DeleteFunc(n.ended, again)
	n.want[c.ID] = c
	n.poke()
	return c, nil
}

// acceptable says why a container cannot have the GPUs that were decided on.
func (c Container) acceptable(devices []placement.Device) error {
	for _, d := range devices {
		if !c.uses(d.UUID) {
			continue
		}
		if c.Share.CoreRequest != 0 {
			if err := keepable(c.Share.CoreRequest, d); err != nil {
				return refusal{CoreRequestAnnotation, err}
			}
		}
		if why := d.Neighbours(c.Labels); len(why) > 0 && c.GPUs != "" {
			return refusal{error: errors.New(d.Name + ": " + strings.Join(why, ", "))}
		}
	}
	return nil
}

// PromiseMemory lets this many percent of each GPU's memory be promised, by
// memory limits, to containers whose GPUs the plugin chooses: 100 unless more
// than the memory of a GPU can be used, by swapping.
func (n *Names) PromiseMemory(percent uint32) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.percent = uint64(percent)
}

// devices returns what can be given of this node's GPUs, with those who have a
// part of it, or are promised one, except one container: of one that is started
// again, the runtime may report the end after the new one's begin.
func (n *Names) devices(gpus []cdi.GPU, except Container) []placement.Device {
	devices := devicesOf(gpus)
	at := make(map[string]*placement.Device, len(devices))
	for i := range devices {
		d := &devices[i]
		d.Memory = cmp.Or(d.Memory, n.memory[d.UUID]) * n.percent / 100
		at[d.UUID] = d
	}
	old := func(o Container) bool { return o.ID == except.ID || o.sameAs(except) }
	type part struct{ id, uuid string }
	said := map[part]Promise{} // by the scheduler, of our containers
	for _, p := range n.promises {
		d, o := at[p.UUID], n.want[p.ID]
		ours := o.ID != ""
		switch {
		case d == nil || ours && old(o) || !ours && p.described: // the latter has ended
		case ours && o.GPUs != "" && o.uses(p.UUID):
			said[part{p.ID, p.UUID}] = p
		default:
			said[part{p.ID, p.UUID}] = p
			d.Tenants = append(d.Tenants, placement.Tenant{Name: p.Who, Core: p.Percent, Memory: p.Memory, Outside: true})
		}
	}
	for id, o := range n.want {
		if old(o) {
			continue
		}
		name := o.String()
		add := func(d *placement.Device) {
			p, told := said[part{id, d.UUID}]
			if told && o.GPUs == "" {
				return // it is there already
			}
			d.Tenants = append(d.Tenants, placement.Tenant{
				Name: cmp.Or(p.Who, name), Core: cmp.Or(p.Percent, o.Share.CoreRequest), Memory: cmp.Or(p.Memory, o.MemoryLimit),
				Labels: o.Labels, Outside: o.GPUs == "",
			})
		}
		if o.GPUs == "" {
			for i := range devices {
				add(&devices[i])
			}
			continue
		}
		for uuid := range strings.SplitSeq(o.GPUs, ",") {
			if d := at[uuid]; d != nil {
				add(d)
			}
		}
	}
	for _, d := range devices {
		// As they come from maps, and messages name the first that is in the way.
		slices.SortFunc(d.Tenants, func(a, b placement.Tenant) int { return cmp.Compare(a.Name, b.Name) })
	}
	return devices
}

// had returns the GPUs of a container that is started again: best on the same,
// where others of its pod may be.
func (n *Names) had(c Container) []string {
	var last Container
	for _, all := range []map[string]Container{n.ended, n.want} { // what still is goes before what was
		var found Container
		for _, o := range all {
			if o.sameAs(c) && o.GPUs != "" && (found.ID == "" || o.ID < found.ID) {
				found = o
			}
		}
		if found.ID != "" {
			last = found
		}
	}
	return strings.FieldsFunc(last.GPUs, func(r rune) bool { return r == ',' })
}

// End frees what a container has whose processes have ended. Until it is
// removed it may be started again, under another ID.
func (n *Names) End(id string) {
	n.change(func() {
		c, ok := n.want[id]
		if !ok {
			return
		}
		delete(n.want, id)
		maps.DeleteFunc(n.ended, func(_ string, o Container) bool { return o.sameAs(c) })
		n.ended[id] = c
	})
}

// EndPod forgets all containers of a pod's sandbox: also those that the runtime
// failed to create, and said no more of.
func (n *Names) EndPod(sandbox string) {
	if sandbox == "" {
		return
	}
	n.change(func() {
		gone := func(_ string, c Container) bool { return c.Sandbox == sandbox }
		maps.DeleteFunc(n.want, gone)
		maps.DeleteFunc(n.ended, gone)
	})
}
