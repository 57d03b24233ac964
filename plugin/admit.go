// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin/placement"
)

// refusal is why a container is not admitted.
type refusal struct {
	annotation string // its name, if it asks for too much; "": the one that asks for GPUs
	error
}

func (r refusal) Unwrap() error { return r.error }

var errNoState = errors.New("the scheduler has not reported yet how much memory the GPUs have and which of them work: try again")

// unknownMIG is why nobody gets a MIG device that the scheduler does not know: its tenants would have
// neither turns nor limits.
const unknownMIG = "the scheduler does not know this MIG device: only NVML tells it (overlays/nvml, Helm: nvml.enabled)"

// admit enters a container that does not exist yet, and decides which GPUs it has
// if count of them are to be chosen. All decisions are made here, so that no two
// contradict each other. It refuses, and enters nothing, if no GPU can be chosen; or, where somebody
// else chose the GPUs, if their requests would exceed 100 %, or a label forbids a neighbour. gpus are
// what this node can give. The lock is held.
//
// A container whose GPUs are not known counts on each of them, and is nobody's
// neighbour. Memory is promised by limits, and is a reason to refuse only where the
// plugin chooses: who names a GPU may want to share its memory.
func (cs *Containers) admit(c Container, count int, gpus []cdi.GPU) (Container, error) {
	if len(c.Claims) > 0 { // what there is was counted when the claim was allocated
		cs.enter(c)
		return c, nil
	}
	devices := cs.devices(gpus, c)
	if count > 0 {
		if cs.mustAwaitState() {
			return c, refusal{error: errNoState}
		}
		core, memory := c.promised()
		chosen, err := placement.Choose(devices, placement.Request{Count: count, Core: core, Memory: memory, Labels: c.Labels, Had: cs.had(c)})
		if err != nil {
			cs.log.Infof("%s is refused on GPUs that have %s", c, placement.Who(devices))
			return c, refusal{error: err}
		}
		c.GPUs = chosen
	} else if err := c.acceptable(devices, cs.had(c)); err != nil {
		cs.log.Infof("%s is refused on GPUs that have %s", c, placement.Who(devices))
		return c, err
	}
	c.Reach = reach(c, gpus)
	cs.enter(c)
	return c, nil
}

// reach returns the GPUs among which a container may move: that
// which it has, and those of the same model. None: it stays where it is.
func reach(c Container, gpus []cdi.GPU) (uuids []string) {
	at := slices.IndexFunc(gpus, func(g cdi.GPU) bool { return len(c.GPUs) == 1 && g.UUID == c.GPUs[0] && len(g.Instances) == 0 })
	if !c.Terms.Migratable || at < 0 {
		return nil
	}
	for _, g := range gpus {
		if g.Name == gpus[at].Name && g.MemoryBytes == gpus[at].MemoryBytes && len(g.Instances) == 0 {
			uuids = append(uuids, g.UUID)
		}
	}
	if len(uuids) == 1 {
		return nil
	}
	return uuids
}

// enter makes a new container known. The lock is held.
func (cs *Containers) enter(c Container) {
	// The runtime may report the end of a container that is started again later
	// than the new start. Until then its promises would count twice.
	again := func(_ string, o Container) bool { return o.sameAs(c) }
	maps.DeleteFunc(cs.want, again)
	maps.DeleteFunc(cs.ended, again)
	cs.want[c.ID] = c
	cs.poke()
}

// acceptable returns why a container cannot have the GPUs that somebody chose. It had
// some of them before it is started again.
func (c Container) acceptable(devices []placement.Device, had []string) error {
	for _, d := range devices {
		if !c.uses(d.UUID) {
			continue
		}
		if d.Closed != "" && len(c.GPUs) > 0 && !slices.Contains(had, d.UUID) {
			err := fmt.Errorf("%s: %s", d.Name, d.Closed)
			if d.Closed != unknownMIG {
				err = fmt.Errorf("%w; nvsharectl undrain admits containers again", err)
			}
			return refusal{error: err}
		}
		if c.Terms.CoreRequest != 0 {
			if err := d.Keep(c.Terms.CoreRequest); err != nil {
				return refusal{CoreRequestAnnotation, err}
			}
		}
		if why := d.Neighbours(c.Labels); len(why) > 0 && len(c.GPUs) > 0 {
			return refusal{error: errors.New(d.Name + ": " + strings.Join(why, ", "))}
		}
	}
	return nil
}

// boundCore keeps from whoever asks what its namespace may not be promised.
func (cs *Containers) boundCore(d *placement.Device, namespace string) {
	others := uint32(0)
	for _, t := range d.Tenants {
		if t.Hidden {
			others += t.Core
		}
	}
	if beyond := 100 - min(cs.MostCore(namespace), 100); beyond > others {
		d.Kept = beyond - others
	}
}

// withState returns devices with what the scheduler knows of them.
func (cs *Containers) withState(gpus []cdi.GPU) []placement.Device {
	devices := devicesOf(gpus)
	for i := range devices {
		d := &devices[i]
		state := cs.gpus[d.UUID].WithParent(cs.gpus[d.GPU])
		d.Memory = cmp.Or(d.Memory, state.Memory) * cs.PromiseMemory / 100
		d.Closed, d.Dead = state.Closed(), state.Fault != ""
		if _, known := cs.gpus[d.UUID]; !known && d.UUID != d.GPU && len(cs.gpus) > 0 {
			d.Closed = cmp.Or(d.Closed, unknownMIG)
		}
	}
	return devices
}

// devices returns what can be given of this node's GPUs, each with the tenants that
// have it or are promised a part of it, without one container and what it was
// before it was started again. Errors name only the tenants of that one's namespace: whoever may
// create a pod may read them.
func (cs *Containers) devices(gpus []cdi.GPU, except Container) []placement.Device {
	devices := cs.withState(gpus)
	old := func(o Container) bool { return o.ID == except.ID || o.sameAs(except) }
	type part struct{ id, uuid string }
	said := map[part]Promise{} // by the scheduler
	for _, p := range cs.promises {
		at := slices.IndexFunc(devices, func(d placement.Device) bool { return d.UUID == p.UUID })
		o := cs.want[p.ID]
		ours := o.ID != ""
		if at < 0 || ours && old(o) || !ours && p.described { // a described one has ended
			continue
		}
		said[part{p.ID, p.UUID}] = p
		if d := &devices[at]; !slices.Contains(o.GPUs, p.UUID) {
			d.Tenants = append(d.Tenants, placement.Tenant{Name: p.Who, Core: p.Percent, Memory: p.Memory, Outside: true, Hidden: !ours || o.Namespace != except.Namespace})
		}
	}
	for id, o := range cs.want {
		if old(o) {
			continue
		}
		for i := range devices {
			d := &devices[i]
			p, told := said[part{id, d.UUID}]
			if !o.uses(d.UUID) || told && len(o.GPUs) == 0 { // that is among the promises already
				continue
			}
			d.Tenants = append(d.Tenants, placement.Tenant{
				Name: cmp.Or(p.Who, o.String()), Core: max(cmp.Or(p.Percent, o.Terms.CoreRequest), o.Limits.Cores), Memory: max(cmp.Or(p.Memory, o.Terms.MemoryLimit), o.Limits.bytes()),
				Labels: o.Labels, Outside: len(o.GPUs) == 0, Hidden: o.Namespace != except.Namespace,
			})
		}
	}
	cs.keepCounted(devices, except)
	for i, d := range devices {
		if except.Terms.CoreRequest != 0 && len(except.Claims) == 0 {
			cs.boundCore(&devices[i], except.Namespace)
		}
		// They come from maps, and messages name the first that is in the way.
		slices.SortFunc(d.Tenants, func(a, b placement.Tenant) int { return cmp.Compare(a.Name, b.Name) })
	}
	return devices
}

// had returns the GPUs that a container had before it is started again. It goes
// back to them if it can, because others of its pod may be there.
func (cs *Containers) had(c Container) []string {
	var last Container
	for _, all := range []map[string]Container{cs.ended, cs.want} { // what still is goes before what was
		var found Container
		for _, o := range all {
			if o.sameAs(c) && len(o.GPUs) > 0 && (found.ID == "" || o.ID < found.ID) {
				found = o
			}
		}
		if found.ID != "" {
			last = found
		}
	}
	return last.GPUs
}
