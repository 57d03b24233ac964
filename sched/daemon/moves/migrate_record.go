// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
)

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
