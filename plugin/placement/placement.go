// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"slices"
)

// Labels say next to whom a container wants to be. They are compared as they
// are; "" is none.
type Labels struct {
	Affinity     string // goes to those with the same, or to an idle device
	AntiAffinity string // goes to nobody with the same
	Exclusion    string // goes only to those with the same, and they only to it
}

// Device is what a container can be given: a GPU, or a MIG device of one.
type Device struct {
	UUID    string
	GPU     string // UUID of the physical GPU that it is, or is a part of
	Name    string // for people
	Index   int    // the order of equals
	Memory  uint64 // bytes that can be promised; 0: not known, and then not counted
	Tenants []Tenant
	Closed  string // why no new container may have it; "": it may
	Dead    bool   // it does no work: nobody goes back to it either
	// Kept is what the bound of a namespace keeps from whoever asks, percent of the time, beyond what
	// the tenants have.
	Kept uint32
}

// Tenant is who has a device, and what it was promised of it.
type Tenant struct {
	Name   string // for people
	Core   uint32 // percent of the time
	Memory uint64 // bytes
	Labels
	// Outside has what it was promised kept free and is nobody's neighbour: a
	// user or container of another engine, which may use the device or not.
	Outside bool
	// Hidden has errors not name it: whoever asks may not know who has a device.
	Hidden bool
}

// Public is what errors call a tenant, which whoever may create a pod reads.
func (t Tenant) Public() string {
	if t.Hidden {
		return "a tenant outside the namespace"
	}
	return short(t.Name)
}

// Request is what a container asks for.
type Request struct {
	Count  int    // devices, each of another physical GPU; at least 1
	Core   uint32 // percent of the time of each; 0: whatever is left
	Memory uint64 // bytes of each; 0: not said
	Labels
	Had []string // UUIDs of devices that it had before it was started again
}

// Choose returns the UUIDs of the devices that a container is to have, in the
// order of their indices. The error is a *Refusal.
func Choose(devices []Device, r Request) ([]string, error) {
	var able []Device
	refusal := &Refusal{Request: r}
	for _, d := range devices {
		if why := d.unable(r); len(why) > 0 {
			refusal.Unable = append(refusal.Unable, Unable{d, why})
		} else {
			able = append(able, d)
		}
	}
	slices.SortFunc(able, func(a, b Device) int { return before(a, b, r) })
	var chosen []Device
	for _, d := range able {
		if len(chosen) < r.Count && !slices.ContainsFunc(chosen, func(c Device) bool { return c.GPU == d.GPU }) {
			chosen = append(chosen, d)
		}
	}
	if len(chosen) < r.Count || r.Count < 1 {
		refusal.GPUs, refusal.Able = physical(devices), physical(able)
		return nil, refusal
	}
	slices.SortFunc(chosen, inOrder)
	var uuids []string
	for _, d := range chosen {
		uuids = append(uuids, d.UUID)
	}
	return uuids, nil
}

// Hole returns the largest part of the time and the largest part of the memory that one device has left,
// which may be two devices.
func Hole(devices []Device) (core uint32, memory uint64) {
	for _, d := range devices {
		if len(d.unable(Request{})) == 0 {
			core, memory = max(core, d.coreLeft()), max(memory, d.memoryLeft())
		}
	}
	return core, memory
}

// Neighbours says why a container with these labels cannot be beside those who
// have a device: for devices that somebody else chose. Empty: it can.
func (d Device) Neighbours(l Labels) (why []string) {
	alike := false // somebody has the same affinity label
	idle := true
	for _, t := range d.Tenants {
		if t.Outside {
			continue
		}
		idle = false
		alike = alike || l.Affinity != "" && t.Affinity == l.Affinity
		switch {
		case t.Exclusion != l.Exclusion && t.Exclusion != "" && t.Hidden:
			why = append(why, "it is only for an exclusion label of another namespace")
		case t.Exclusion != l.Exclusion && t.Exclusion != "":
			why = append(why, "it is only for exclusion label "+quote(t.Exclusion)+", which "+t.Public()+" has")
		case t.Exclusion != l.Exclusion:
			why = append(why, t.Public()+" is there without exclusion label "+quote(l.Exclusion))
		case l.AntiAffinity != "" && t.AntiAffinity == l.AntiAffinity:
			why = append(why, t.Public()+" has the same anti-affinity label "+quote(l.AntiAffinity))
		default:
			continue
		}
		return why // one such neighbour is enough
	}
	if l.Affinity != "" && !idle && !alike {
		why = append(why, "it is in use, by nobody with affinity label "+quote(l.Affinity))
	}
	return why
}

// unable says why a device cannot take a container; empty: it can.
func (d Device) unable(r Request) (why []string) {
	if d.Closed != "" && (d.Dead || !slices.Contains(r.Had, d.UUID)) {
		why = append(why, d.Closed)
	}
	if r.Core > d.coreLeft() {
		why = append(why, d.shortOfTime())
	}
	if d.Memory != 0 && r.Memory > d.memoryLeft() {
		why = append(why, "too little memory")
	}
	return append(why, d.Neighbours(r.Labels)...)
}

// before compares two devices that can take a container: the better one is
// first.
func before(a, b Device, r Request) int {
	order := cmp.Or(
		first(slices.Contains(r.Had, a.UUID), slices.Contains(r.Had, b.UUID)),
		first(a.hasAffinity(r.Affinity), b.hasAffinity(r.Affinity)))
	if r.Core != 0 {
		return cmp.Or(order,
			first(a.neighbours() > 0, b.neighbours() > 0),
			cmp.Compare(a.coreLeft(), b.coreLeft()),
			cmp.Compare(a.memoryLeft(), b.memoryLeft()),
			inOrder(a, b))
	}
	return cmp.Or(order,
		cmp.Compare(b.coreLeft()*(a.sharers()+1), a.coreLeft()*(b.sharers()+1)),
		cmp.Compare(a.neighbours(), b.neighbours()),
		cmp.Compare(b.memoryLeft(), a.memoryLeft()),
		inOrder(a, b))
}

func inOrder(a, b Device) int {
	return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
}

// first has what is true come before what is not.
func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// coreLeft is the part of the time that is promised to nobody, percent.
func (d Device) coreLeft() uint32 {
	left := 100 - min(d.Kept, 100)
	for _, t := range d.Tenants {
		left -= min(t.Core, left)
	}
	return left
}

// memoryLeft is the part of the memory that is promised to nobody, bytes.
func (d Device) memoryLeft() uint64 {
	left := d.Memory
	for _, t := range d.Tenants {
		left -= min(t.Memory, left)
	}
	return left
}

// neighbours counts the containers that have a device.
func (d Device) neighbours() (n int) {
	for _, t := range d.Tenants {
		if !t.Outside {
			n++
		}
	}
	return n
}

// sharers counts the containers that live on what is promised to nobody.
func (d Device) sharers() (n uint32) {
	for _, t := range d.Tenants {
		if !t.Outside && t.Core == 0 {
			n++
		}
	}
	return n
}

func (d Device) hasAffinity(label string) bool {
	return label != "" && slices.ContainsFunc(d.Tenants, func(t Tenant) bool { return !t.Outside && t.Affinity == label })
}

// physical counts the physical GPUs of devices.
func physical(devices []Device) int {
	seen := map[string]bool{}
	for _, d := range devices {
		seen[d.GPU] = true
	}
	return len(seen)
}
