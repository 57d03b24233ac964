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

func (d *Daemon) carriedPath() string { return filepath.Join(d.opts.RunDir, "migrating.json") }

func (d *Daemon) recordCarried() error {
	file := carriedFile{Version: carriedVersion, BootID: d.bootID, Processes: []carriedProcess{}}
	for _, cl := range d.clients {
		switch from, strayed := d.strayed[cl]; {
		case cl.from != nil:
			file.Processes = append(file.Processes, carriedProcess{cl.Process, cl.from.UUID})
		case strayed:
			file.Processes = append(file.Processes, carriedProcess{cl.Process, from})
		}
	}
	file.Processes = append(file.Processes, unsureOf[carriedProcess](d)...)
	if err := state.WriteRecord(d.carriedPath(), file); err != nil {
		return fmt.Errorf("record which processes move: %w", err)
	}
	return nil
}

// restoreCarried has processes run again that an earlier scheduler has taken off their GPUs.
func (d *Daemon) restoreCarried() error {
	file, err := state.ReadRecord[carriedFile](d.carriedPath(), carriedVersion)
	if errors.Is(err, state.ErrNewer) {
		return err
	}
	if err != nil {
		d.log.WithError(err).Error("which processes were on their way to another GPU is not known: processes that hang need nvshare-checkpoint on PID")
	}
	if file.BootID != d.bootID {
		return nil
	}
	for _, was := range file.Processes {
		d.onceKnown(was, fmt.Sprintf("process %d lives, which was on its way to another GPU,", was.PID), func() error { return d.restoreCarriedOne(was) })
	}
	return nil
}

func (d *Daemon) restoreCarriedOne(was carriedProcess) error {
	cl, err := d.clientOf(was.Process)
	if cl == nil || len(cl.attached) > 0 { // it has come back since it could not be found
		return err
	}
	d.strayed[cl] = was.From
	for _, g := range d.order {
		d.findStrayed(g)
	}
	d.log.Warnf("process %d was on its way to another GPU when the earlier scheduler ended; it is made to run again", was.PID)
	if d.opts.Checkpoint != nil {
		d.wg.Go(func() { d.bringBack(was.Process) })
	}
	return nil
}

// findStrayed notes of a GPU that is found which processes may have left it.
func (d *Daemon) findStrayed(g *gpu) {
	for cl, uuid := range d.strayed {
		if uuid == g.UUID {
			cl.from = g
			delete(d.strayed, cl)
		}
	}
}
