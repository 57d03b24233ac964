// SPDX-License-Identifier: Apache-2.0

package away

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/store"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/wire"
)

// Suspend answers the control call.
func (aw *Away) Suspend(req *api.SuspendRequest) (*api.SuspendResponse, error) {
	fits := func(g *node.GPU, account string) (uint64, bool, error) {
		bytes, why := g.Core.SuspendFits(account)
		return bytes, aw.Opts.Checkpoint != nil, why
	}
	return aw.move(req, "suspended", fits, func(account string, gpus []*node.GPU) {
		for _, g := range gpus {
			aw.Step(g, sched.Suspend{Tenant: account})
		}
	})
}

// Resume answers the control call.
func (aw *Away) Resume(req *api.SuspendRequest) (*api.SuspendResponse, error) {
	fits := func(g *node.GPU, account string) (uint64, bool, error) {
		bytes, why := g.Core.ResumeFits(account)
		away := len(aw.awayOf(account, g)) > 0
		if errors.Is(why, residency.ErrNothingAway) && away {
			why = nil
		}
		return bytes, away, why
	}
	return aw.move(req, "resumed", fits, func(account string, gpus []*node.GPU) {
		// Processes that have left with their context are restored first.
		waits := 1
		goOn := func() {
			if waits--; waits > 0 {
				return
			}
			for _, g := range gpus {
				aw.Step(g, sched.ResumeTenant{Tenant: account})
			}
		}
		for _, cl := range aw.awayOf(account, nil) {
			waits++
			aw.Wake(cl, goOn)
		}
		goOn()
	})
}

// move has a tenant's memory leave all GPUs that it can leave, or come back to them. If
// there is no such GPU, it returns why. fits says how many bytes move, and whether
// contexts do.
func (aw *Away) move(req *api.SuspendRequest, done string, fits func(g *node.GPU, account string) (bytes uint64, contexts bool, why error), order func(account string, gpus []*node.GPU)) (*api.SuspendResponse, error) {
	account, err := aw.FindTenant(req.Container, req.Uid)
	if err != nil {
		return nil, err
	}
	if to := aw.Leaving[account]; to != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot be %s: it is on its way to GPU %d", aw.NameOf(account), done, to.Index)
	}
	_, gpus, err := aw.NamedGPUs(req.Gpu)
	if err != nil {
		return nil, err
	}
	resp := &api.SuspendResponse{}
	resp.Container, resp.Uid = aw.TenantOf(account)
	who := api.Tenant(resp.Container, resp.Uid)
	var able []*node.GPU
	var none error
	aw.ObserveHost()
	for _, g := range gpus {
		bytes, contexts, why := fits(g, account)
		if why == nil {
			able = append(able, g)
			resp.Gpus = append(resp.Gpus, &api.Suspended{Uuid: g.UUID, Index: uint32(g.Index), Bytes: bytes, Context: contexts})
			continue
		}
		err := status.Errorf(codes.FailedPrecondition, "GPU %d: %s cannot be %s: %v", g.Index, who, done, why)
		if !errors.Is(why, residency.ErrNothingMoves) && !errors.Is(why, residency.ErrNothingAway) {
			return nil, err
		}
		if none == nil || aw.OnGPU(g, account) { // of the others there is nothing to say
			none = err
		}
	}
	if len(gpus) == 0 {
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot be %s: the scheduler knows no GPU yet (see nvsharectl status)", who, done)
	}
	if len(able) == 0 {
		return nil, none
	}
	order(account, able)
	return resp, nil
}

// SleepAgain suspends a client's tenant that has moved here and was suspended before, once the
// client has said what memory it has.
func (aw *Away) SleepAgain(cl *node.Client, g *node.GPU) {
	if aw.Of(cl).Again {
		aw.Of(cl).Again = false
		aw.Step(g, sched.Suspend{Tenant: cl.Account})
	}
}

// awayOf returns the clients of an account that are not present, on a GPU or (nil) on any.
func (aw *Away) awayOf(account string, on *node.GPU) (all []*node.Client) {
	for cl := range aw.ByAccount[account] {
		if aw.Of(cl).step != present && (on == nil || cl.Attached[on] != nil) {
			all = append(all, cl)
		}
	}
	return all
}

// Which files have memory of processes is recorded: before a file is made, before pages are
// given back that it has, and after they are there again. So the record says of each file
// whether it is needed. A scheduler reads it that is started without --suspend-dir, too.

const filesVersion = 1

type filesRecord struct {
	Version int          `json:"version"`
	BootID  string       `json:"boot_id"`
	Files   []FileRecord `json:"files"`
}

// FileRecord is a file with memory of a process.
type FileRecord struct {
	peer.Process
	Path  string       `json:"path"`
	Saved bool         `json:"saved"` // it has what may not be in memory
	Parts []store.Part `json:"parts,omitempty"`
}

func (aw *Away) filesPath() string { return filepath.Join(aw.Opts.RunDir, "files.json") }

// RecordFiles writes the record. gone are files that are not needed, and not removed yet.
func (aw *Away) RecordFiles(gone ...*file) error {
	r := filesRecord{Version: filesVersion, BootID: aw.BootID, Files: []FileRecord{}}
	if f := aw.Files.writing; f != nil && aw.Of(f.client).File != f {
		gone = append(gone, f)
	}
	for _, cl := range aw.Clients {
		if f := aw.Of(cl).File; f != nil {
			r.Files = append(r.Files, FileRecord{cl.Process, f.path, f.step != writing, f.parts})
		}
	}
	for _, f := range gone {
		r.Files = append(r.Files, FileRecord{Process: f.client.Process, Path: f.path})
	}
	r.Files = append(r.Files, node.UnsureOf[FileRecord](aw.Node)...)
	if err := state.WriteRecord(aw.filesPath(), r); err != nil {
		return fmt.Errorf("record which memory is in files: %w", err)
	}
	return nil
}

// RestoreFiled finds the processes of which an earlier scheduler has memory in files, and
// removes the files of nobody.
func (aw *Away) RestoreFiled() error {
	r, _, err := state.Restore[filesRecord](aw.Log, aw.filesPath(), filesVersion,
		"which processes have memory in files is not known: those are not restored, their calls wait, end them")
	if err != nil {
		return err
	}
	known := map[string]bool{}
	for _, was := range r.Files {
		known[was.Path] = true
		if r.BootID == aw.BootID && was.Saved {
			aw.OnceKnown(was, fmt.Sprintf("process %d lives, whose memory is in %s,", was.PID, was.Path), func() error { return aw.RestoreFile(was) })
		} else {
			aw.removeRecorded(was)
		}
	}
	if aw.Files.Dir == nil {
		return nil
	}
	lives := func(was peer.Process) bool { return !aw.HasEnded(was) }
	nobodys, somebodys, err := aw.Files.Dir.Others(known, lives)
	for _, path := range nobodys {
		if err := os.Remove(path); err == nil {
			aw.Log.Infof("removed %s: it has memory of a process that has ended", path)
		}
	}
	for _, path := range somebodys {
		aw.Log.Warnf("%s stays: it has memory of a process that lives, and of which nothing is recorded; another scheduler may have written it", path)
	}
	if err != nil {
		aw.Log.WithError(err).Warn("files of processes that have ended may be left")
	}
	return nil
}

// removeRecorded removes a file of an earlier scheduler that nobody needs.
func (aw *Away) removeRecorded(was FileRecord) {
	if err := os.Remove(was.Path); err != nil && !os.IsNotExist(err) {
		aw.Log.WithError(err).Error("a file with memory of a process that has ended stays: remove it")
	}
}

// RestoreFile finds the process to which a file belongs, or removes the file if the process has
// ended.
func (aw *Away) RestoreFile(was FileRecord) error {
	cl, err := aw.ClientOf(was.Process)
	if err != nil {
		return err
	}
	if cl == nil || cl.Conn != nil && !cl.Conn.Says(wire.RegisterAway) { // it is back, or another program, since it could not be found
		aw.removeRecorded(was)
		return nil
	}
	aw.Of(cl).File = &file{client: cl, path: was.Path, parts: was.Parts, step: filed, bytes: store.Bytes(was.Parts), began: time.Now(), stop: make(chan struct{}), earlier: true}
	if aw.Of(cl).step == present {
		aw.Of(cl).step, aw.Of(cl).since = absent, time.Now()
	}
	aw.Log.Infof("process %d is off the GPU, and %d MiB of its memory are in %s", cl.PID, aw.Of(cl).File.bytes>>20, was.Path)
	for _, m := range aw.arenasOf(cl) {
		aw.FoundFiled(m)
	}
	if cl.Conn != nil {
		aw.filedRegistered(cl)
	}
	return nil
}

// FoundFiled is for a client that is found on a GPU, with memory that an earlier scheduler has
// put into a file: it may have recorded the file, and not yet the memory.
func (aw *Away) FoundFiled(m *memory.Member) {
	f := aw.Of(m.Client).File
	if f == nil || !f.earlier {
		return
	}
	given := uint64(0)
	for _, m := range aw.arenasOf(m.Client) {
		given += m.Arena.Given()
	}
	if given < f.bytes {
		m.Arena.Had(m.Arena.Given() + f.bytes - given)
	}
	m.Arena.SetFiled(true)
}

// filedRegistered is for a client that says of itself that it is off the GPU: pages that an
// earlier scheduler has not given back, or was reading back when it ended, go now.
func (aw *Away) filedRegistered(cl *node.Client) {
	if f := aw.Of(cl).File; f != nil && f.earlier && f.step == filed {
		f.step = emptying
		aw.empty(f)
	}
}

// unreachable says that the memory of one process cannot be written, whatever the disk.
type unreachable struct{ error }

func (e *unreachable) Unwrap() error { return e.error }
