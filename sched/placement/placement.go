// SPDX-License-Identifier: Apache-2.0

// Package placement decides on which GPU of a node a tenant is: where a new container begins, whether
// a tenant may move to another GPU, and to which. It is pure: the caller carries the answer out, and
// counts it before it asks the next question.
//
// A tenant never goes to a GPU of whose time more than 100 % would then be promised, that is drained or
// does no work, or that its processes cannot open. One that moves goes only where there is a place for its
// memory, and to the same model. Each refusal names its reason. A new container begins on the GPU with
// the fewest tenants; one that moves goes where the least memory is promised.
package placement

import (
	"fmt"
	"slices"
	"strings"
)

// Node is what tenants of all GPUs have in common.
type Node struct {
	Unable error // why no process can move; nil: processes can
	GPUs   []GPU // by index
}

// GPU is a GPU of the node.
type GPU struct {
	UUID        string
	Index       int
	Model       string
	MemoryBytes uint64
	Drained     bool   // it admits no new tenants
	Fault       string // what has ended all work on it; "": nothing
}

func (g GPU) mig() bool { return strings.HasPrefix(g.UUID, "MIG-") }

// Kind says what can open GPUs in what way.
type Kind uint8

const (
	User      Kind = iota // a user's processes, which can open all GPUs
	Container             // it can open those that it was given
	Program               // of nvsharectl run: those that were named, or else all
)

// Tenant is somebody who begins, or is to move.
type Tenant struct {
	Kind  Kind
	Given []string // UUIDs of the GPUs that it was given
	Reach []string // UUIDs of others that it can open too

	// What follows matters to a tenant that is to move.

	Uses      []GPU     // by its processes
	Processes []Process // those on Uses
	Absent    []int32   // PIDs of processes that have not come back since the scheduler's start
	Moves     *GPU      // it is on its way to this one; nil: to none
	Overlap   string    // its overlap group, for people; "": none
	Gang      string    // "": none
	Fixed     string    // how it would have been made so that it can move; "": it was, or need not be
	Stays     error     // why its memory cannot leave; nil: it can
}

// Process is a process of a tenant on a GPU.
type Process struct {
	PID     int32
	Evades  bool   // it can bypass the shim
	Severed bool   // it has lost its connection to the scheduler
	Fixed   string // why its memory cannot be moved; "": it can
}

// Place is a GPU as a tenant finds it.
type Place struct {
	GPU
	Request  uint32 // percent of its time that the tenant is promised there
	Promised uint32 // percent of its time that others are promised
	Tenants  int    // that use it, or will
	Reserved uint64 // bytes of its memory that tenants have reserved
	Owed     uint64 // bytes of its memory that are promised, what is away included
	NoRoom   error  // why it has no place for what the tenant has reserved; nil: it has
}

// May returns an error that says why a tenant may not move to another GPU; nil: it may.
func (n Node) May(t Tenant) error {
	switch {
	case n.Unable != nil:
		return n.Unable
	case t.Moves != nil:
		return fmt.Errorf("it is on its way to GPU %d", t.Moves.Index)
	case len(t.Absent) > 0:
		return fmt.Errorf("process %d has not come back since the scheduler's start", t.Absent[0])
	case len(t.Uses) == 0:
		return fmt.Errorf("it uses no GPU")
	case len(t.Uses) > 1:
		var all []string
		for _, g := range t.Uses {
			all = append(all, fmt.Sprint(g.Index))
		}
		return fmt.Errorf("it uses GPUs %s, and only tenants of one GPU move", strings.Join(all, ", "))
	case t.Uses[0].mig():
		return fmt.Errorf("it uses a MIG device")
	}
	// The driver wants each GPU of the machine to be named; how it wants MIG devices was not tried.
	if i := slices.IndexFunc(n.GPUs, GPU.mig); i >= 0 {
		return fmt.Errorf("GPU %d of this node is a MIG device", n.GPUs[i].Index)
	}
	switch {
	case t.Overlap != "":
		return fmt.Errorf("it is in overlap group %s, which shares a process of MPS", t.Overlap)
	case t.Gang != "":
		return fmt.Errorf("it is in gang %s, which has the GPU as one", t.Gang)
	case t.Fixed != "":
		return fmt.Errorf("it was not created as migratable: %s", t.Fixed)
	}
	for _, p := range t.Processes {
		switch {
		case p.Evades:
			return fmt.Errorf("process %d can bypass the shim", p.PID)
		case p.Severed:
			return fmt.Errorf("process %d has lost its connection to the scheduler", p.PID)
		case p.Fixed != "":
			return fmt.Errorf("the memory of process %d cannot be moved: %s", p.PID, p.Fixed)
		}
	}
	return t.Stays
}

// Destination returns the UUID of the GPU to which a tenant goes that may move: want, or for
// "" the best of all places. The error says why there is none; want has to be one of the
// places.
func Destination(t Tenant, places []Place, want string) (string, error) {
	from := t.Uses[0]
	var best *Place
	var whys []string
	for i, p := range places {
		if want != "" && p.UUID != want || want == "" && p.UUID == from.UUID {
			continue
		}
		if why := t.unfit(from, p); why != "" {
			whys = append(whys, why)
		} else if best == nil || p.Owed < best.Owed {
			best = &places[i]
		}
	}
	switch {
	case best != nil:
		return best.UUID, nil
	case len(whys) == 0:
		return "", fmt.Errorf("there is no other GPU")
	}
	return "", fmt.Errorf("%s", strings.Join(whys, "; "))
}

// Begin returns the UUID of the GPU on which a new container begins; "": on none of them.
func Begin(t Tenant, places []Place) string {
	var best *Place
	for i, p := range places {
		if !t.opens(p.GPU) || p.Drained || p.Fault != "" || p.overTime() {
			continue
		}
		if best == nil || p.Tenants < best.Tenants || p.Tenants == best.Tenants && p.Reserved < best.Reserved {
			best = &places[i]
		}
	}
	if best == nil {
		return ""
	}
	return best.UUID
}

// unfit says why a tenant cannot move to a place; "": it can.
func (t Tenant) unfit(from GPU, p Place) string {
	closed := ""
	switch {
	case p.UUID == from.UUID:
		return fmt.Sprintf("it uses GPU %d already", p.Index)
	case p.mig():
		closed = "is a MIG device"
	case p.Model != from.Model || p.MemoryBytes != from.MemoryBytes:
		closed = fmt.Sprintf("is another model (%s)", p.Model)
	case !t.opens(p.GPU) && t.Kind == Program:
		closed = "is none of those that nvsharectl run --gpu has named"
	case !t.opens(p.GPU):
		closed = "is none that its container can open: give the container nvshare.com/gpu=any, or all GPUs and CUDA_VISIBLE_DEVICES for the one that it uses"
	case p.Drained:
		closed = "is drained"
	case p.Fault != "":
		closed = "does no work: " + p.Fault
	case p.overTime():
		closed = fmt.Sprintf("has no place for it: it is promised %d %% of a GPU's time, and %d %% of this one are left", p.Request, 100-min(p.Promised, 100))
	case p.NoRoom != nil:
		closed = "has no place for it: " + p.NoRoom.Error()
	default:
		return ""
	}
	return fmt.Sprintf("GPU %d %s", p.Index, closed)
}

// overTime says whether a place has less time left than the tenant is promised there.
func (p Place) overTime() bool { return p.Request > 0 && p.Promised+p.Request > 100 }

func (t Tenant) opens(g GPU) bool {
	return t.Kind == User || t.Kind == Program && len(t.Given) == 0 ||
		slices.Contains(t.Given, g.UUID) || slices.Contains(t.Reach, g.UUID)
}
