// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
	"github.com/nvshare/nvshare/sched/placement"
)

// What package placement is told of the node, and what it answers.

// ChooseGPU has a new container that may begin on any GPU in its reach begin on the best of
// them. The programs of the container learn it by placeOf.
func (mv *Moves) ChooseGPU(c *api.Container) {
	if mv.GpuOf(c.Id) != "" {
		return // it is started again, or told again
	}
	account := peer.ContainerAccount + c.Id
	asks := mv.Shares.Tenants[account]
	asks.Pod = tenants.PodTerms(c)
	var places []placement.Place
	for _, g := range mv.Order {
		p := mv.placementOn(g, account, asks)
		p.Tenants, p.Reserved = mv.tenantsOn(g), reservedOn(g)
		places = append(places, p)
	}
	if best := placement.Begin(placement.Tenant{Kind: placement.Container, Reach: c.Reach}, places); best != "" {
		c.Gpus = []string{best}
	}
}

// placed is a GPU as package placement has it.
func placed(g *node.GPU) placement.GPU {
	return placement.GPU{UUID: g.UUID, Index: g.Index, Model: g.Name, MemoryBytes: g.MemoryBytes, Drained: g.Drained, Fault: g.Fault}
}

func (mv *Moves) placementNode() (n placement.Node) {
	if mv.Opts.Checkpoint == nil {
		n.Unable = checkpoint.ErrNone
	}
	for _, g := range mv.Order {
		n.GPUs = append(n.GPUs, placed(g))
	}
	return n
}

// PlacementTenant says which GPUs a tenant's processes can open.
func (mv *Moves) PlacementTenant(account string) placement.Tenant {
	id, container := strings.CutPrefix(account, peer.ContainerAccount)
	if !container {
		return placement.Tenant{Kind: placement.User}
	}
	c := mv.Names[id]
	t := placement.Tenant{Kind: placement.Container, Given: c.GetGpus(), Reach: c.GetReach()}
	if c.GetEngine() == node.RunEngine {
		t.Kind = placement.Program
	}
	return t
}

// placementOn is a GPU as a tenant with these shares finds it, but for who and what is there.
func (mv *Moves) placementOn(g *node.GPU, account string, asks tenants.TenantShares) placement.Place {
	return placement.Place{GPU: placed(g), Request: tenants.PromisedBy(asks.On(g.UUID)), Promised: mv.Promised(g.UUID, account).Sum()}
}

func reservedOn(g *node.GPU) (bytes uint64) {
	_, all := g.Core.Reservations()
	for _, s := range all {
		bytes += s.Total
	}
	return bytes
}

// tenantsOn counts the tenants that use a GPU, and the containers that will.
func (mv *Moves) tenantsOn(g *node.GPU) int {
	on := map[string]bool{}
	for account := range mv.ByAccount {
		if mv.OnGPU(g, account) {
			on[account] = true
		}
	}
	for id, c := range mv.Names {
		if slices.Contains(c.Gpus, g.UUID) {
			on[peer.ContainerAccount+id] = true
		}
	}
	return len(on)
}

// Which processes are off their GPUs is recorded before they go: a scheduler that starts
// has them run again. They then attach to the GPU that they are on.

const carriedVersion = 1

type carriedFile struct {
	Version   int              `json:"version"`
	BootID    string           `json:"boot_id"`
	Processes []CarriedProcess `json:"processes"`
}

// CarriedProcess is a process that is off its GPU, or about to be.
type CarriedProcess struct {
	peer.Process
	From string `json:"from"` // UUID
}

func (mv *Moves) carriedPath() string { return filepath.Join(mv.Opts.RunDir, "migrating.json") }

// RecordCarried writes the file.
func (mv *Moves) RecordCarried() error {
	file := carriedFile{Version: carriedVersion, BootID: mv.BootID, Processes: []CarriedProcess{}}
	for _, cl := range mv.Clients {
		switch from, strayed := mv.strayed[cl]; {
		case mv.From[cl] != nil:
			file.Processes = append(file.Processes, CarriedProcess{cl.Process, mv.From[cl].UUID})
		case strayed:
			file.Processes = append(file.Processes, CarriedProcess{cl.Process, from})
		}
	}
	file.Processes = append(file.Processes, node.UnsureOf[CarriedProcess](mv.Node)...)
	if err := state.WriteRecord(mv.carriedPath(), file); err != nil {
		return fmt.Errorf("record which processes move: %w", err)
	}
	return nil
}

// RestoreCarried has processes run again that an earlier scheduler has taken off their GPUs.
func (mv *Moves) RestoreCarried() error {
	file, err := state.ReadRecord[carriedFile](mv.carriedPath(), carriedVersion)
	if errors.Is(err, state.ErrNewer) {
		return err
	}
	if err != nil {
		mv.Log.WithError(err).Error("which processes were on their way to another GPU is not known: processes that hang need nvshare-checkpoint on PID")
	}
	if file.BootID != mv.BootID {
		return nil
	}
	for _, was := range file.Processes {
		mv.OnceKnown(was, fmt.Sprintf("process %d lives, which was on its way to another GPU,", was.PID), func() error { return mv.RestoreCarriedOne(was) })
	}
	return nil
}

// RestoreCarriedOne has a process run again, if it lives.
func (mv *Moves) RestoreCarriedOne(was CarriedProcess) error {
	cl, err := mv.ClientOf(was.Process)
	if cl == nil || len(cl.Attached) > 0 { // it has come back since it could not be found
		return err
	}
	mv.strayed[cl] = was.From
	for _, g := range mv.Order {
		mv.FindStrayed(g)
	}
	mv.Log.Warnf("process %d was on its way to another GPU when the earlier scheduler ended; it is made to run again", was.PID)
	if mv.Opts.Checkpoint != nil {
		mv.Go(func() { mv.bringBack(was.Process) })
	}
	return nil
}

// FindStrayed notes of a GPU that is found which processes may have left it.
func (mv *Moves) FindStrayed(g *node.GPU) {
	for cl, uuid := range mv.strayed {
		if uuid == g.UUID {
			mv.From[cl] = g
			delete(mv.strayed, cl)
		}
	}
}
