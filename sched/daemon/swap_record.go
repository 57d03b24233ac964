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
func readMembers(o *Options, bootID string) (map[string][]memberState, error) {
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
func (d *Daemon) awaitMembers(g *gpu) {
	list := d.before[g.UUID]
	delete(d.before, g.UUID)
	if g.swap == nil {
		return
	}
	for _, was := range list[:min(len(list), maxMembers)] {
		d.onceKnown(gpuMember{g.UUID, was}, fmt.Sprintf("process %d lives, which had memory on GPU %d,", was.PID, g.Index), func() error { return d.awaitMember(g, was) })
	}
}

func (d *Daemon) awaitMember(g *gpu, was memberState) error {
	cl, err := d.clientOf(peer.Process{PID: was.PID, Start: was.StartTime})
	if cl == nil {
		return err
	}
	if cl.conn == nil { // a holder is known already, but not what its shim can do
		cl.canMove = was.Movable
	}
	if g.memberOf(cl.id) != nil {
		return nil
	}
	m := d.addMember(g, cl)
	m.arena.Had(min(was.Arena, g.MemoryBytes+arena.MaxSegment)) // before the core says what it needs: or it would be made again
	d.step(g, sched.RestoreMemory{Client: cl.id, Tenant: cl.Account, Gang: d.shareOf(g, cl.Account).Group(), CanMove: cl.canMove, Bytes: was.Bytes, Suspended: was.Away})
	if was.Away && cl.away.step == present { // or about to leave, or to return: to restore it does no harm
		cl.away.step = absent
	}
	promised, _ := g.core.ClientMemory(cl.id)
	m.arena.Had(min(was.Arena, promised.Promised+arena.MaxSegment))
	d.foundFiled(m)
	d.log.Infof("GPU %d: process %d had up to %d MiB on it before the restart; they are not given to others until it is back, ends, or does not come for %v", g.Index, cl.PID, promised.Promised>>20, sched.DefaultStallAfter)
	return nil
}

// noteMembers plans to write the file.
func (d *Daemon) noteMembers() {
	if !d.members.Planned() {
		d.members.Set(now().Add(recordPause))
	}
}

func (d *Daemon) recordMembers() {
	d.members.Stop()
	file := members{Version: membersVersion, BootID: d.bootID, GPUs: map[string][]memberState{}}
	for _, g := range d.order {
		if g.swap == nil {
			continue
		}
		for _, had := range g.core.MemorySnapshot().Clients {
			if m := g.swap.members[had.Client]; m != nil && had.Promised != 0 {
				file.GPUs[g.UUID] = append(file.GPUs[g.UUID], memberState{m.client.PID, m.client.Start, had.Promised, m.arena.Given(), m.arena.Filed(), m.client.canMove, m.client.away.step != present})
			}
		}
	}
	for uuid, list := range d.before { // GPUs that are not found yet
		file.GPUs[uuid] = list
	}
	for _, was := range unsureOf[gpuMember](d) {
		file.GPUs[was.uuid] = append(file.GPUs[was.uuid], was.memberState)
	}
	err := state.WriteRecord(membersPath(d.opts.RunDir), file)
	if err != nil {
		if !d.unrecorded {
			d.log.WithError(fmt.Errorf("record who has memory on GPUs: %w", err)).Warnf("after a restart it is not known before all are back; trying again every %v", recordRetry)
		}
		d.members.Set(now().Add(recordRetry))
	}
	d.unrecorded = err != nil
}
