// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
)

// Who has memory on a GPU where memory is swapped is recorded, so that after a restart
// nobody is given room that those have who are not back yet: the driver would have none.
// A moment late is early enough: at worst a client that had just come is missing, and
// the driver does say so.

const (
	membersVersion = 1
	// maxMembers of a GPU are believed.
	maxMembers = maxClients
)

// members is the file.
type members struct {
	Version int                      `json:"version"`
	BootID  string                   `json:"boot_id"`
	GPUs    map[string][]memberState `json:"gpus"` // by UUID
}

type memberState struct {
	PID       int32  `json:"pid"`
	StartTime uint64 `json:"starttime"` // clock ticks since boot
	Bytes     uint64 `json:"bytes"`     // promised
	Arena     uint64 `json:"arena,omitempty"`
	Filed     uint64 `json:"filed,omitempty"` // of that, what is in a file
	Movable   bool   `json:"movable,omitempty"`
	Away      bool   `json:"away,omitempty"` // it has left with its context
}

func membersPath(runDir string) string { return filepath.Join(runDir, "members.json") }

// gpuMember is one of a GPU that is found.
type gpuMember struct {
	uuid string
	memberState
}

// readMembers reads what an earlier scheduler has written.
func readMembers(o *Config, bootID string) (map[string][]memberState, error) {
	m, err := state.ReadRecord[members](membersPath(o.RunDir), membersVersion)
	if errors.Is(err, state.ErrNewer) {
		return nil, err
	}
	if err != nil {
		o.Log.WithError(err).Warn("who has memory on GPUs is not known until all are back: some may be told to wait by the driver")
	}
	if m.BootID != bootID {
		return nil, nil
	}
	return m.GPUs, nil
}

// heldBefore is how much host memory processes that live, as far as is known, were given by
// earlier schedulers.
func heldBefore(before map[string][]memberState, find func(peer.Process) (*peer.Peer, error)) (sum uint64) {
	for _, list := range before {
		for _, was := range list[:min(len(list), maxMembers)] {
			p, err := find(peer.Process{PID: was.PID, Start: was.StartTime})
			if peer.Ended(err) {
				continue
			}
			if err == nil {
				p.Close()
			}
			sum += was.Arena - min(was.Filed, was.Arena)
		}
	}
	return sum
}

// awaitMembers has a GPU wait for those that were here before and live.
func (mem *memory) awaitMembers(g *gpu) {
	list := mem.before[g.UUID]
	delete(mem.before, g.UUID)
	if mem.swaps[g] == nil {
		return
	}
	for _, was := range list[:min(len(list), maxMembers)] {
		mem.onceKnown(gpuMember{g.UUID, was}, fmt.Sprintf("process %d lives, which had memory on GPU %d,", was.PID, g.Index), func() error { return mem.awaitMember(g, was) })
	}
}

func (mem *memory) awaitMember(g *gpu, was memberState) error {
	cl, err := mem.clientOf(peer.Process{PID: was.PID, Start: was.StartTime})
	if cl == nil {
		return err
	}
	if cl.conn == nil { // a holder is known already, but not what its shim can do
		cl.canMove = was.Movable
	}
	if mem.memberOf(g, cl.id) != nil {
		return nil
	}
	m := mem.addMember(g, cl)
	m.arena.Had(min(was.Arena, g.MemoryBytes+arena.MaxSegment)) // before the core says what it needs: or it would be made again
	mem.step(g, sched.RestoreMemory{Client: cl.id, Tenant: cl.Account, Gang: mem.shareOf(g, cl.Account).Crew(), CanMove: cl.canMove, Bytes: was.Bytes, Suspended: was.Away})
	if was.Away {
		mem.contexts.wasAway(cl)
	}
	promised, _ := g.core.ClientMemory(cl.id)
	m.arena.Had(min(was.Arena, promised.Promised+arena.MaxSegment))
	mem.contexts.foundFiled(m)
	mem.log.Infof("GPU %d: process %d had up to %d MiB on it before the restart; they are not given to others until it is back, ends, or does not come for %v", g.Index, cl.PID, promised.Promised>>20, sched.DefaultStallAfter)
	return nil
}

// noteMembers plans to write the file.
func (mem *memory) noteMembers() {
	if !mem.members.Planned() {
		mem.members.Set(now().Add(recordPause))
	}
}

func (mem *memory) recordMembers() {
	mem.members.Stop()
	file := members{Version: membersVersion, BootID: mem.bootID, GPUs: map[string][]memberState{}}
	for _, g := range mem.order {
		if mem.swaps[g] == nil {
			continue
		}
		for _, had := range g.core.MemorySnapshot().Clients {
			if m := mem.swaps[g].members[had.Client]; m != nil && had.Promised != 0 {
				file.GPUs[g.UUID] = append(file.GPUs[g.UUID], memberState{m.client.PID, m.client.Start, had.Promised, m.arena.Given(), m.arena.Filed(), m.client.canMove, mem.contexts.isAway(m.client)})
			}
		}
	}
	for uuid, list := range mem.before { // GPUs that are not found yet
		file.GPUs[uuid] = list
	}
	for _, was := range unsureOf[gpuMember](mem.node) {
		file.GPUs[was.uuid] = append(file.GPUs[was.uuid], was.memberState)
	}
	err := state.WriteRecord(membersPath(mem.opts.RunDir), file)
	if err != nil {
		if !mem.unrecorded {
			mem.log.WithError(fmt.Errorf("record who has memory on GPUs: %w", err)).Warnf("after a restart it is not known before all are back; trying again every %v", recordRetry)
		}
		mem.members.Set(now().Add(recordRetry))
	}
	mem.unrecorded = err != nil
}
