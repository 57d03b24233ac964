// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/store"
)

// Which files have memory of processes is recorded: before a file is made, before pages are
// given back that it has, and after they are there again. So the record says of each file
// whether it is needed. A scheduler reads it that is started without --suspend-dir, too.

const filesVersion = 1

type filesRecord struct {
	Version int          `json:"version"`
	BootID  string       `json:"boot_id"`
	Files   []fileRecord `json:"files"`
}

type fileRecord struct {
	peer.Process
	Path  string       `json:"path"`
	Saved bool         `json:"saved"` // it has what may not be in memory
	Parts []store.Part `json:"parts,omitempty"`
}

func (aw *away) filesPath() string { return filepath.Join(aw.opts.RunDir, "files.json") }

// recordFiles writes the record. gone are files that are not needed, and not removed yet.
func (aw *away) recordFiles(gone ...*file) error {
	r := filesRecord{Version: filesVersion, BootID: aw.bootID, Files: []fileRecord{}}
	if f := aw.files.writing; f != nil && aw.of(f.client).file != f {
		gone = append(gone, f)
	}
	for _, cl := range aw.clients {
		if f := aw.of(cl).file; f != nil {
			r.Files = append(r.Files, fileRecord{cl.Process, f.path, f.step != writing, f.parts})
		}
	}
	for _, f := range gone {
		r.Files = append(r.Files, fileRecord{Process: f.client.Process, Path: f.path})
	}
	r.Files = append(r.Files, unsureOf[fileRecord](aw.node)...)
	if err := state.WriteRecord(aw.filesPath(), r); err != nil {
		return fmt.Errorf("record which memory is in files: %w", err)
	}
	return nil
}

// restoreFiled finds the processes of which an earlier scheduler has memory in files, and
// removes the files of nobody.
func (aw *away) restoreFiled() error {
	r, err := state.ReadRecord[filesRecord](aw.filesPath(), filesVersion)
	if errors.Is(err, state.ErrNewer) {
		return err
	}
	if err != nil {
		aw.log.WithError(err).Error("which processes have memory in files is not known: those are not restored, their calls wait, end them")
	}
	known := map[string]bool{}
	for _, was := range r.Files {
		known[was.Path] = true
		if r.BootID == aw.bootID && was.Saved {
			aw.onceKnown(was, fmt.Sprintf("process %d lives, whose memory is in %s,", was.PID, was.Path), func() error { return aw.restoreFile(was) })
		} else {
			aw.removeRecorded(was)
		}
	}
	if aw.files.dir == nil {
		return nil
	}
	lives := func(was peer.Process) bool { return !aw.hasEnded(was) }
	nobodys, somebodys, err := aw.files.dir.Others(known, lives)
	for _, path := range nobodys {
		if err := os.Remove(path); err == nil {
			aw.log.Infof("removed %s: it has memory of a process that has ended", path)
		}
	}
	for _, path := range somebodys {
		aw.log.Warnf("%s stays: it has memory of a process that lives, and of which nothing is recorded; another scheduler may have written it", path)
	}
	if err != nil {
		aw.log.WithError(err).Warn("files of processes that have ended may be left")
	}
	return nil
}

// removeRecorded removes a file of an earlier scheduler that nobody needs.
func (aw *away) removeRecorded(was fileRecord) {
	if err := os.Remove(was.Path); err != nil && !os.IsNotExist(err) {
		aw.log.WithError(err).Error("a file with memory of a process that has ended stays: remove it")
	}
}

// restoreFile finds the process to which a file belongs, or removes the file if the process has
// ended.
func (aw *away) restoreFile(was fileRecord) error {
	cl, err := aw.clientOf(was.Process)
	if err != nil {
		return err
	}
	if cl == nil || cl.conn != nil && !cl.conn.isAway { // it is back, or another program, since it could not be found
		aw.removeRecorded(was)
		return nil
	}
	aw.of(cl).file = &file{client: cl, path: was.Path, parts: was.Parts, step: filed, bytes: store.Bytes(was.Parts), began: time.Now(), stop: make(chan struct{}), earlier: true}
	if aw.of(cl).step == present {
		aw.of(cl).step, aw.of(cl).since = absent, time.Now()
	}
	aw.log.Infof("process %d is off the GPU, and %d MiB of its memory are in %s", cl.PID, aw.of(cl).file.bytes>>20, was.Path)
	for _, m := range aw.arenasOf(cl) {
		aw.foundFiled(m)
	}
	if cl.conn != nil {
		aw.filedRegistered(cl)
	}
	return nil
}

// foundFiled is for a client that is found on a GPU, with memory that an earlier scheduler has
// put into a file: it may have recorded the file, and not yet the memory.
func (aw *away) foundFiled(m *clientMemory) {
	f := aw.of(m.client).file
	if f == nil || !f.earlier {
		return
	}
	given := uint64(0)
	for _, m := range aw.arenasOf(m.client) {
		given += m.arena.Given()
	}
	if given < f.bytes {
		m.arena.Had(m.arena.Given() + f.bytes - given)
	}
	m.arena.SetFiled(true)
}

// filedRegistered is for a client that says of itself that it is off the GPU: pages that an
// earlier scheduler has not given back, or was reading back when it ended, go now.
func (aw *away) filedRegistered(cl *client) {
	if f := aw.of(cl).file; f != nil && f.earlier && f.step == filed {
		f.step = emptying
		aw.empty(f)
	}
}
