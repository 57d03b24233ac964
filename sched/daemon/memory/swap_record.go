// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"fmt"
	"maps"
	"path/filepath"

	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/residency"
)

// Who has memory on a GPU where memory is swapped is recorded, so that after a restart
// nobody is given room that those have who are not back yet: the driver would have none.
// A moment late is early enough: at worst a client that had just come is missing, and
// the driver does say so.

const (
	MembersVersion = 1
	// maxMembers of a GPU are believed.
	maxMembers = node.MaxClients
)

// Members is the file.
type Members struct {
	Version int                      `json:"version"`
	BootID  string                   `json:"boot_id"`
	GPUs    map[string][]MemberState `json:"gpus"` // by UUID
}

// MemberState is what is recorded of a process.
type MemberState struct {
	PID       int32  `json:"pid"`
	StartTime uint64 `json:"starttime"` // clock ticks since boot
	Bytes     uint64 `json:"bytes"`     // promised
	Arena     uint64 `json:"arena,omitempty"`
	Filed     uint64 `json:"filed,omitempty"` // of that, what is in a file
	Movable   bool   `json:"movable,omitempty"`
	Away      bool   `json:"away,omitempty"` // it has left with its context
}

// MembersPath is where the file is.
func MembersPath(runDir string) string { return filepath.Join(runDir, "members.json") }

// gpuMember is one of a GPU that is found.
type gpuMember struct {
	uuid string
	MemberState
}

// ReadMembers reads what an earlier scheduler has written.
func ReadMembers(o *node.Config, bootID string) (map[string][]MemberState, error) {
	m, _, err := state.Restore[Members](o.Log, MembersPath(o.RunDir), MembersVersion,
		"which processes have memory on GPUs is not known until all are connected again: until then the driver may make some wait")
	if err != nil || m.BootID != bootID {
		return nil, err
	}
	return m.GPUs, nil
}

// AwaitMembers has a GPU wait for those that were here before and live.
func (mem *Memory) AwaitMembers(g *node.GPU) {
	list := mem.Before[g.UUID]
	delete(mem.Before, g.UUID)
	if mem.Swaps[g] == nil {
		return
	}
	for _, was := range list[:min(len(list), maxMembers)] {
		mem.OnceKnown(gpuMember{g.UUID, was}, fmt.Sprintf("process %d lives, which had memory on GPU %d,", was.PID, g.Index), func() error { return mem.awaitMember(g, was) })
	}
}

func (mem *Memory) awaitMember(g *node.GPU, was MemberState) error {
	cl, err := mem.ClientOf(peer.Process{PID: was.PID, Start: was.StartTime})
	if cl == nil {
		return err
	}
	if cl.Conn == nil { // a holder is known already, but not what its shim can do
		cl.CanMove = was.Movable
	}
	if mem.MemberOf(g, cl.ID) != nil {
		return nil
	}
	m := mem.AddMember(g, cl)
	m.Arena.Had(min(was.Arena, g.MemoryBytes+arena.MaxSegment)) // before the core says what it needs: or it would be made again
	mem.Step(g, residency.RestoreMemory{Client: cl.ID, Tenant: cl.Account, Gang: mem.ShareOf(g, cl.Account).Group(), CanMove: cl.CanMove, Bytes: was.Bytes, Suspended: was.Away})
	if was.Away {
		mem.Contexts.WasAway(cl)
	}
	promised, _ := g.Core.ClientMemory(cl.ID)
	m.Arena.Had(min(was.Arena, promised.Promised+arena.MaxSegment))
	mem.Contexts.FoundFiled(m)
	mem.Log.Infof("GPU %d: process %d had up to %d MiB on it before the restart; they are not given to others until it is back, ends, or does not come for %v", g.Index, cl.PID, promised.Promised>>20, residency.DefaultStallAfter)
	return nil
}

// NoteMembers plans to write the file.
func (mem *Memory) NoteMembers() {
	mem.Members.KeepLater(node.RecordPause)
}

// membersFile is what the file is to say.
func (mem *Memory) membersFile() any {
	file := Members{Version: MembersVersion, BootID: mem.BootID, GPUs: map[string][]MemberState{}}
	for _, g := range mem.Order {
		if mem.Swaps[g] == nil {
			continue
		}
		for _, had := range g.Core.MemorySnapshot().Clients {
			if m := mem.Swaps[g].members[had.Client]; m != nil && had.Promised != 0 {
				file.GPUs[g.UUID] = append(file.GPUs[g.UUID], MemberState{m.Client.PID, m.Client.Start, had.Promised, m.Arena.Given(), m.Arena.Filed(), m.Client.CanMove, mem.Contexts.IsAway(m.Client)})
			}
		}
	}
	maps.Copy(file.GPUs, mem.Before) // of GPUs that are not found yet
	for _, was := range node.UnsureOf[gpuMember](mem.Node) {
		file.GPUs[was.uuid] = append(file.GPUs[was.uuid], was.MemberState)
	}
	return file
}
