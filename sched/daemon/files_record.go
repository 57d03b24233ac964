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

func (d *Daemon) filesPath() string { return filepath.Join(d.opts.RunDir, "files.json") }

// recordFiles writes the record. gone are files that are not needed, and not removed yet.
func (d *Daemon) recordFiles(gone ...*file) error {
	r := filesRecord{Version: filesVersion, BootID: d.bootID, Files: []fileRecord{}}
	if f := d.files.writing; f != nil && f.client.file != f {
		gone = append(gone, f)
	}
	for _, cl := range d.clients {
		if f := cl.file; f != nil {
			r.Files = append(r.Files, fileRecord{cl.Process, f.path, f.step != writing, f.parts})
		}
	}
	for _, f := range gone {
		r.Files = append(r.Files, fileRecord{Process: f.client.Process, Path: f.path})
	}
	r.Files = append(r.Files, unsureOf[fileRecord](d)...)
	if err := state.WriteRecord(d.filesPath(), r); err != nil {
		return fmt.Errorf("record which memory is in files: %w", err)
	}
	return nil
}

// restoreFiled finds the processes of which an earlier scheduler has memory in files, and
// removes the files of nobody.
func (d *Daemon) restoreFiled() error {
	r, err := state.ReadRecord[filesRecord](d.filesPath(), filesVersion)
	if errors.Is(err, state.ErrNewer) {
		return err
	}
	if err != nil {
		d.log.WithError(err).Error("which processes have memory in files is not known: those are not restored, their calls wait, end them")
	}
	known := map[string]bool{}
	for _, was := range r.Files {
		known[was.Path] = true
		if r.BootID == d.bootID && was.Saved {
			d.onceKnown(was, fmt.Sprintf("process %d lives, whose memory is in %s,", was.PID, was.Path), func() error { return d.restoreFile(was) })
		} else {
			d.removeRecorded(was)
		}
	}
	if d.files.dir == nil {
		return nil
	}
	lives := func(was peer.Process) bool { return !d.hasEnded(was) }
	nobodys, somebodys, err := d.files.dir.Others(known, lives)
	for _, path := range nobodys {
		if err := os.Remove(path); err == nil {
			d.log.Infof("removed %s: it has memory of a process that has ended", path)
		}
	}
	for _, path := range somebodys {
		d.log.Warnf("%s stays: it has memory of a process that lives, and of which nothing is recorded; another scheduler may have written it", path)
	}
	if err != nil {
		d.log.WithError(err).Warn("files of processes that have ended may be left")
	}
	return nil
}

// removeRecorded removes a file of an earlier scheduler that nobody needs.
func (d *Daemon) removeRecorded(was fileRecord) {
	if err := os.Remove(was.Path); err != nil && !os.IsNotExist(err) {
		d.log.WithError(err).Error("a file with memory of a process that has ended stays: remove it")
	}
}

// restoreFile finds the process to which a file belongs, or removes the file if the process has
// ended.
func (d *Daemon) restoreFile(was fileRecord) error {
	cl, err := d.clientOf(was.Process)
	if err != nil {
		return err
	}
	if cl == nil || cl.conn != nil && !cl.conn.isAway { // it is back, or another program, since it could not be found
		d.removeRecorded(was)
		return nil
	}
	cl.file = &file{client: cl, path: was.Path, parts: was.Parts, step: filed, bytes: store.Bytes(was.Parts), began: time.Now(), stop: make(chan struct{}), earlier: true}
	if cl.away.step == present {
		cl.away.step, cl.away.since = absent, time.Now()
	}
	d.log.Infof("process %d is off the GPU, and %d MiB of its memory are in %s", cl.PID, cl.file.bytes>>20, was.Path)
	for _, m := range d.arenasOf(cl) {
		d.foundFiled(m)
	}
	if cl.conn != nil {
		d.filedRegistered(cl)
	}
	return nil
}

// foundFiled is for a client that is found on a GPU, with memory that an earlier scheduler has
// put into a file: it may have recorded the file, and not yet the memory.
func (d *Daemon) foundFiled(m *clientMemory) {
	f := m.client.file
	if f == nil || !f.earlier {
		return
	}
	given := uint64(0)
	for _, m := range d.arenasOf(m.client) {
		given += m.arena.Given()
	}
	if given < f.bytes {
		m.arena.Had(m.arena.Given() + f.bytes - given)
	}
	m.arena.SetFiled(true)
}

// filedRegistered is for a client that says of itself that it is off the GPU: pages that an
// earlier scheduler has not given back, or was reading back when it ended, go now.
func (d *Daemon) filedRegistered(cl *client) {
	if f := cl.file; f != nil && f.earlier && f.step == filed {
		f.step = emptying
		d.empty(f)
	}
}
