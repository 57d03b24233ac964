// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
)

// Which processes are off their GPUs is recorded before they go: a scheduler that starts
// has them run again. They then attach to the GPU that they are on.

const carriedVersion = 1

type carriedFile struct {
	Version   int              `json:"version"`
	BootID    string           `json:"boot_id"`
	Processes []carriedProcess `json:"processes"`
}

type carriedProcess struct {
	peer.Process
	From string `json:"from"` // UUID
}

func (mv *moves) carriedPath() string { return filepath.Join(mv.opts.RunDir, "migrating.json") }

func (mv *moves) recordCarried() error {
	file := carriedFile{Version: carriedVersion, BootID: mv.bootID, Processes: []carriedProcess{}}
	for _, cl := range mv.clients {
		switch from, strayed := mv.strayed[cl]; {
		case mv.from[cl] != nil:
			file.Processes = append(file.Processes, carriedProcess{cl.Process, mv.from[cl].UUID})
		case strayed:
			file.Processes = append(file.Processes, carriedProcess{cl.Process, from})
		}
	}
	file.Processes = append(file.Processes, unsureOf[carriedProcess](mv.node)...)
	if err := state.WriteRecord(mv.carriedPath(), file); err != nil {
		return fmt.Errorf("record which processes move: %w", err)
	}
	return nil
}

// restoreCarried has processes run again that an earlier scheduler has taken off their GPUs.
func (mv *moves) restoreCarried() error {
	file, err := state.ReadRecord[carriedFile](mv.carriedPath(), carriedVersion)
	if errors.Is(err, state.ErrNewer) {
		return err
	}
	if err != nil {
		mv.log.WithError(err).Error("which processes were on their way to another GPU is not known: processes that hang need nvshare-checkpoint on PID")
	}
	if file.BootID != mv.bootID {
		return nil
	}
	for _, was := range file.Processes {
		mv.onceKnown(was, fmt.Sprintf("process %d lives, which was on its way to another GPU,", was.PID), func() error { return mv.restoreCarriedOne(was) })
	}
	return nil
}

func (mv *moves) restoreCarriedOne(was carriedProcess) error {
	cl, err := mv.clientOf(was.Process)
	if cl == nil || len(cl.attached) > 0 { // it has come back since it could not be found
		return err
	}
	mv.strayed[cl] = was.From
	for _, g := range mv.order {
		mv.findStrayed(g)
	}
	mv.log.Warnf("process %d was on its way to another GPU when the earlier scheduler ended; it is made to run again", was.PID)
	if mv.opts.Checkpoint != nil {
		mv.Go(func() { mv.bringBack(was.Process) })
	}
	return nil
}

// findStrayed notes of a GPU that is found which processes may have left it.
func (mv *moves) findStrayed(g *gpu) {
	for cl, uuid := range mv.strayed {
		if uuid == g.UUID {
			mv.from[cl] = g
			delete(mv.strayed, cl)
		}
	}
}
