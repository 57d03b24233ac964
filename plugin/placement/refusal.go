// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Refusal says why a container cannot be placed, with the figures.
type Refusal struct {
	Request Request
	GPUs    int // physical ones that there are
	Able    int // of these, such as could take it
	Unable  []Unable
}

// Unable is a device that cannot take a container.
type Unable struct {
	Device Device
	Why    []string
}

// Errors end in logs and events, and what is in them was named by others.
const (
	maxDevices = 16
	maxTenants = 8
	maxName    = 128
)

// Error names each device that cannot take the container, what is left of it,
// who has the rest, and what else is in the way.
func (r *Refusal) Error() string {
	var b strings.Builder
	switch {
	case r.GPUs == 0:
		return "this node has no GPU"
	case r.Request.Count < 1:
		return fmt.Sprintf("%d GPUs cannot be given", r.Request.Count)
	case r.Request.Count > r.GPUs:
		return fmt.Sprintf("%d different GPUs are asked for, and this node has %d", r.Request.Count, r.GPUs)
	}
	asked := parts(r.Request.Core, r.Request.Memory)
	switch {
	case r.Request.Count == 1 && asked == "":
		b.WriteString("no GPU can take it")
	case r.Request.Count == 1:
		b.WriteString("no GPU can give it " + asked)
	case asked == "":
		fmt.Fprintf(&b, "%d different GPUs are asked for; %d can take it", r.Request.Count, r.Able)
	default:
		fmt.Fprintf(&b, "%d different GPUs are asked for, with %s of each; %d can give that", r.Request.Count, asked, r.Able)
	}
	for _, u := range r.Unable[:min(len(r.Unable), maxDevices)] {
		b.WriteString("; " + u.Device.left())
		b.WriteString(": " + strings.Join(u.Why, ", "))
	}
	if more := len(r.Unable) - maxDevices; more > 0 {
		fmt.Fprintf(&b, "; %d more can't", more)
	}
	return b.String()
}

// Who names, for the node's log, the tenants of devices with what they were promised, those that
// errors do not name too.
func Who(devices []Device) string {
	var all []string
	for _, d := range devices[:min(len(devices), maxDevices)] {
		if len(d.Tenants) == 0 {
			continue
		}
		var who []string
		for _, t := range d.Tenants[:min(len(d.Tenants), maxTenants)] {
			who = append(who, strings.TrimSpace(short(t.Name)+" "+parts(t.Core, t.Memory)))
		}
		if more := len(d.Tenants) - len(who); more > 0 {
			who = append(who, fmt.Sprintf("%d more", more))
		}
		all = append(all, short(d.Name)+": "+strings.Join(who, ", "))
	}
	return strings.Join(all, "; ")
}

// others are tenants that errors do not name.
type others struct {
	n      int
	core   uint32 // of all of them together
	memory uint64
}

func (o others) String() string {
	if o.n == 1 {
		return "1 tenant outside the namespace"
	}
	return fmt.Sprintf("%d tenants outside the namespace", o.n)
}

// named returns the tenants that errors name, and the sum of the others.
func named(tenants []Tenant) (all []Tenant, others others) {
	for _, t := range tenants {
		if !t.Hidden {
			all = append(all, t)
			continue
		}
		others.n++
		others.core += t.Core
		others.memory += t.Memory
	}
	return all, others
}

// Keep returns why a part of a device's time cannot be promised beside the others; nil: it can.
func (d Device) Keep(core uint32) error {
	if core <= d.coreLeft() {
		return nil
	}
	return fmt.Errorf("%d %% cannot be promised: %s: %s", core, d.left(), d.shortOfTime())
}

// shortOfTime says that a device has too little time for somebody.
func (d Device) shortOfTime() string {
	if d.Kept > 0 {
		return "too little time within the bound of its namespace (--max-core-request of nvshare-plugin)"
	}
	return "too little time"
}

// left says what is left of a device, and who was promised the rest.
func (d Device) left() string {
	text := fmt.Sprintf("%s has %d %%", short(d.Name), d.coreLeft())
	if d.Memory != 0 {
		text += fmt.Sprintf(" and %s of %s", size(d.memoryLeft()), size(d.Memory))
	}
	text += " left"
	if have := d.promised(); have != "" {
		text += " (" + have + ")"
	}
	return text
}

// promised says who was promised how much of a device.
func (d Device) promised() string {
	tenants := slices.DeleteFunc(slices.Clone(d.Tenants), func(t Tenant) bool { return t.Core == 0 && t.Memory == 0 })
	tenants, others := named(tenants)
	slices.SortFunc(tenants, func(a, b Tenant) int {
		return cmp.Or(cmp.Compare(b.Core, a.Core), cmp.Compare(b.Memory, a.Memory), cmp.Compare(a.Name, b.Name))
	})
	var have []string
	for _, t := range tenants[:min(len(tenants), maxTenants)] {
		have = append(have, short(t.Name)+" has "+parts(t.Core, t.Memory))
	}
	if more := len(tenants) - len(have); more > 0 {
		have = append(have, fmt.Sprintf("%d more have the rest", more))
	}
	if others.n > 0 {
		verb := " have "
		if others.n == 1 {
			verb = " has "
		}
		have = append(have, others.String()+verb+parts(others.core, others.memory))
	}
	return strings.Join(have, ", ")
}

// parts are of the time and of the memory; what is zero is not named.
func parts(core uint32, memory uint64) string {
	var p []string
	if core != 0 {
		p = append(p, fmt.Sprintf("%d %%", core))
	}
	if memory != 0 {
		p = append(p, size(memory))
	}
	return strings.Join(p, " and ")
}

// size writes bytes in whole GiB or MiB, of which no more than there are.
func size(n uint64) string {
	mib := n >> 20
	if mib%1024 == 0 && mib != 0 {
		return strconv.FormatUint(mib/1024, 10) + "Gi"
	}
	return strconv.FormatUint(mib, 10) + "Mi"
}

func quote(label string) string { return strconv.Quote(short(label)) }

func short(name string) string {
	if len(name) <= maxName {
		return name
	}
	return name[:maxName] + "…"
}
