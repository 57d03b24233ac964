// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/store"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/segments"
)

// Where host memory is short, what processes have there that are off their GPUs with their
// contexts goes on to files (--suspend-dir):
//
//	in memory → writing → emptying → filed → reading → in memory
//
// Its segments stay mapped in the process; their pages go, once the file is recorded
// (files_record.go). A process that is to come back has its pages back first. Until then it
// is not restored, whatever fails: nvshare-checkpoint refuses to restore a process of which
// pages are missing, too. One process is written at a time, the one first that has been away
// longest. One that is woken meanwhile does not wait for that.

type fileStep uint8

const (
	writing  fileStep = iota // all is in memory
	emptying                 // the file is complete and recorded, pages go
	filed                    // pages are in the file
	reading
)

const (
	// readyPart is the part of --swap-memory that files keep free for clients to come, as
	// long as there is anything to write: a quarter.
	readyPart = 4
	// filePause is the pause after something could not be written. Where there was no room, a
	// file that goes ends it.
	filePause = time.Minute
	// refusedLately is for how long room is made for what was refused because host memory was short.
	refusedLately = time.Minute
	// hostLook is the pause between two looks at whether host memory is short.
	hostLook = 2 * time.Second
	// hostWait is the pause between two looks at whether there is host memory for a process
	// that is to come back, beside those when some has become free.
	hostWait = time.Second
)

var errGivenUp = errors.New("it is not wanted any more")

// file has what a client has in host memory, or is about to.
type file struct {
	client  *client
	path    string
	parts   []store.Part // once it is written
	step    fileStep
	bytes   uint64
	began   time.Time     // of the step
	stop    chan struct{} // closed: nobody wants what is under way
	waits   bool          // for host memory
	earlier bool          // an earlier scheduler wrote it, and may not have given all pages back
}

// files is what the daemon has of them.
type files struct {
	dir     *store.Dir // nil: nothing is written
	open    func(pid int) ([]segments.Segment, error)
	step    func()        // tests: before each piece that is copied
	pause   time.Duration // filePause, except in tests
	writing *file         // nil: nothing is written now
	retry   *timer.Timer  // until then nothing is
	look    *timer.Timer
	number  uint64    // of the latest file
	err     error     // why the latest could not be written
	full    time.Time // when it was told last that there is no room for files
	wanted  uint64    // what Arenas.Left has to be so that nobody would have been refused
	until   time.Time // for wanted
}

// openFiles prepares what --suspend-dir says.
func (aw *away) openFiles() error {
	t := &aw.files
	t.open, t.pause = segments.Open, filePause
	t.retry, t.look = aw.timers.New(aw.writeAgain), aw.timers.New(aw.considerWriting)
	if aw.opts.SuspendDir == "" {
		return nil
	}
	switch {
	case aw.opts.SwapMemory == 0:
		return errors.New("--suspend-dir keeps what was in host memory before: give --swap-memory as well")
	case aw.opts.Checkpoint == nil:
		return errors.New("--suspend-dir is for processes that leave their GPUs with their contexts, and that needs nvshare-checkpoint: install it beside nvshare-scheduler, or see --checkpoint")
	}
	var err error
	if t.dir, err = store.Open(aw.opts.SuspendDir, aw.bootID, aw.opts.SuspendDirSize); err != nil {
		return fmt.Errorf("--suspend-dir: %w", err)
	}
	return nil
}

// wanted has what copies memory of a file end when nobody wants it.
func (aw *away) wanted(f *file) func() error {
	return func() error {
		if aw.files.step != nil {
			aw.files.step()
		}
		select {
		case <-f.stop:
			return errGivenUp
		case <-aw.Ended():
			return errGivenUp
		default:
			return nil
		}
	}
}

// arenasOf is what a client has on each GPU.
func (aw *away) arenasOf(cl *client) (all []*clientMemory) {
	for _, g := range aw.order {
		if m := aw.memberOf(g, cl.id); m != nil {
			all = append(all, m)
		}
	}
	return all
}

// setFiled has the pool count a client's host memory, or not.
func (aw *away) setFiled(cl *client, on bool) {
	for _, m := range aw.arenasOf(cl) {
		m.arena.SetFiled(on)
	}
}

// ---- to the file ----

// hostIsShort says whether memory is to be written to files.
func (aw *away) hostIsShort() bool {
	t := &aw.files
	aw.observeHost()
	lacked, left := aw.cores.Arenas.Lacked(), aw.cores.Arenas.Left()
	if time.Now().After(t.until) {
		t.wanted = 0
	}
	if lacked != 0 {
		t.wanted, t.until = max(t.wanted, left+lacked), time.Now().Add(refusedLately)
	}
	for _, cl := range aw.clients {
		if aw.of(cl).file != nil && aw.of(cl).file.waits {
			return true
		}
	}
	return left < max(aw.opts.SwapMemory/readyPart, t.wanted)
}

// considerWriting has the memory of the process written that has been away longest, if host
// memory is short.
func (aw *away) considerWriting() {
	t := &aw.files
	if t.dir == nil || t.writing != nil {
		return
	}
	var next *client
	for _, cl := range aw.clients {
		a := aw.of(cl)
		if a.step == absent && !a.wanted && aw.of(cl).file == nil && time.Now().After(a.unfiled) && (next == nil || a.since.Before(aw.of(next).since)) {
			next = cl
		}
	}
	short := aw.hostIsShort() // also to hear who was refused
	if next == nil {
		return
	}
	if t.retry.Planned() || !short {
		t.look.Set(now().Add(hostLook))
		return
	}
	aw.write(next)
}

// writeAgain is for a while after something could not be written. If nothing is to be written any
// more, that is no problem.
func (aw *away) writeAgain() {
	aw.considerWriting()
	if t := &aw.files; t.writing == nil && !t.retry.Planned() {
		t.err = nil
	}
}

// watchRefusals has files written where somebody was refused because host memory was short.
func (aw *away) watchRefusals() {
	if aw.files.dir != nil && aw.cores.Arenas.Refused() {
		aw.considerWriting()
	}
}

// write has a client's memory written to a file.
func (aw *away) write(cl *client) {
	t := &aw.files
	t.number++
	f := &file{client: cl, step: writing, path: t.dir.PathOf(cl.Process, t.number), began: time.Now(), stop: make(chan struct{})}
	settled := true
	for _, m := range aw.arenasOf(cl) {
		f.bytes += m.arena.Given()
		settled = settled && m.arena.Settled()
	}
	if f.bytes == 0 || !settled {
		aw.notFiled(cl, nil)
		return
	}
	if err := t.dir.Room(f.bytes, aw.filedBytes()); err != nil {
		aw.notFiled(cl, err)
		return
	}
	aw.of(cl).file, t.writing = f, f
	if err := aw.recordFiles(); err != nil {
		aw.of(cl).file, t.writing = nil, nil
		aw.notFiled(cl, err)
		return
	}
	aw.reach(beforeFile)
	aw.Go(func() {
		var parts []store.Part
		var err error
		arena.Nicely(func() { parts, err = aw.save(f) })
		aw.Do(func() { aw.isWritten(f, parts, err) })
	})
}

// save writes the file, beside the loop.
func (aw *away) save(f *file) ([]store.Part, error) {
	all, err := aw.files.open(int(f.client.PID))
	if err != nil {
		return nil, &unreachable{err}
	}
	defer segments.Close(all)
	sum := uint64(0) // the process may have mapped what others rely on, too: then more than it was given
	for _, s := range all {
		if sum += s.Size; s.Huge {
			return nil, &unreachable{errors.New("it is of reserved huge pages, which nobody else could use")}
		}
	}
	if sum != f.bytes || segments.Missing(all) != 0 {
		return nil, &unreachable{fmt.Errorf("the process has mapped %d MiB of the %d MiB that it was given, and %d MiB of that are empty", sum>>20, f.bytes>>20, segments.Missing(all)>>20)}
	}
	_ = os.Remove(f.path) // of an earlier time
	return store.Save(f.path, all, aw.wanted(f))
}

// unreachable says that the memory of one process cannot be written, whatever the disk.
type unreachable struct{ error }

func (e *unreachable) Unwrap() error { return e.error }

// isWritten has the pages given back, once the file is recorded.
func (aw *away) isWritten(f *file, parts []store.Part, err error) {
	t, cl := &aw.files, f.client
	if aw.of(cl).file != f { // it was woken, or has ended
		t.writing = nil
		aw.removeFile(f)
		aw.considerWriting()
		return
	}
	aw.reach(inFile)
	if err == nil {
		f.step, f.parts = emptying, parts
		if err = aw.recordFiles(); err != nil {
			f.step = writing
		}
	}
	if err != nil {
		aw.of(cl).file, t.writing = nil, nil
		aw.removeFile(f)
		aw.notFiled(cl, err)
		return
	}
	aw.reach(afterFile)
	aw.empty(f)
}

// notFiled notes that a client's memory stays where it is for now; nil: because it has none.
func (aw *away) notFiled(cl *client, err error) {
	t, full := &aw.files, errors.Is(err, store.ErrFull)
	if !full { // that is no fault of this client's memory
		aw.of(cl).unfiled = time.Now().Add(t.pause)
	}
	var e *unreachable
	switch {
	case err == nil:
	case errors.As(err, &e) && aw.of(cl).stays == err.Error():
	case errors.As(err, &e):
		aw.of(cl).stays = err.Error()
		aw.logOf(cl.subject()).WithError(err).Warn("its memory stays in host memory")
		aw.noteAway(cl, "its memory stays in host memory: "+err.Error())
	default: // for others, too
		next, told := fmt.Sprintf("in %v", t.pause), t.err != nil && t.err.Error() == err.Error()
		if full { // with room for almost all this comes and goes
			next += ", or when another file goes"
			if told = time.Since(t.full) < t.pause; !told {
				t.full = time.Now()
			}
		}
		if !told {
			text := fmt.Sprintf("its memory cannot be written to a file and stays in host memory; the next try is %s: %v", next, err)
			aw.tell(cl.subject(), logrus.WarnLevel, text)
			aw.noteAway(cl, text)
		}
		t.err = err
		t.retry.Set(now().Add(t.pause))
	}
	aw.considerWriting()
}

// empty gives back the pages that are in a file.
func (aw *away) empty(f *file) {
	pid := int(f.client.PID)
	aw.Go(func() {
		all, err := aw.files.open(pid)
		if err == nil {
			err = store.Empty(f.parts, all)
			segments.Close(all)
		}
		aw.Do(func() { aw.isEmpty(f, err) })
	})
}

func (aw *away) isEmpty(f *file, err error) {
	t, cl := &aw.files, f.client
	if t.writing == f {
		t.writing = nil
	}
	if aw.of(cl).file != f {
		aw.removeFile(f)
		aw.considerWriting()
		return
	}
	aw.reach(afterEmptied)
	if err != nil { // what is in the file holds, whatever is left of the pages
		aw.logOf(cl.subject()).WithError(err).Warn("not all of its host memory was given back")
	}
	f.step = filed
	if f.earlier {
		f.earlier = false
	} else {
		t.err = nil
		t.retry.Stop()
		text := fmt.Sprintf("its memory is in a file, %d MiB, written in %v", f.bytes>>20, time.Since(f.began).Round(time.Millisecond))
		aw.logOf(cl.subject()).Info(text)
		aw.noteAway(cl, text)
	}
	aw.setFiled(cl, true)
	aw.noteMembers()
	if aw.of(cl).step == returning {
		aw.comeBack(cl)
	}
	aw.hostIsFree()
}

// hostIsFree is for when host memory may have become free.
func (aw *away) hostIsFree() {
	aw.pool.Prepare()
	for cl := aw.nextToRead(); cl != nil; cl = aw.nextToRead() {
		aw.comeBack(cl)
		if aw.of(cl).file != nil && aw.of(cl).file.waits {
			break
		}
	}
	aw.considerWriting()
}

// nextToRead returns the client that has waited longest for host memory; nil: none waits.
func (aw *away) nextToRead() (first *client) {
	for _, cl := range aw.clients {
		if f := aw.of(cl).file; f != nil && f.waits && f.bytes <= aw.opts.SwapMemory && (first == nil || aw.of(cl).since.Before(aw.of(first).since)) {
			first = cl
		}
	}
	return first
}

// ---- from the file ----

// inMemory says whether all memory of a client that is to come back is in host memory. If it
// is not, it is on its way, and comeBack is called again.
func (aw *away) inMemory(cl *client) bool {
	f := aw.of(cl).file
	switch {
	case f == nil:
		return true
	case f.step == writing:
		close(f.stop)
		aw.of(cl).file = nil
		return true
	case f.step == filed:
		aw.readBack(f)
	}
	return false
}

// readBack has a client's memory read back, if there is host memory for it.
func (aw *away) readBack(f *file) {
	cl := f.client
	aw.observeHost()
	err := aw.cores.Arenas.Returns(f.bytes)
	if first := aw.nextToRead(); err == nil && f.bytes <= aw.opts.SwapMemory && first != nil && first != cl && aw.of(first).since.Before(aw.of(cl).since) {
		err = fmt.Errorf("it waits for %d MiB of host memory, and process %d does so for longer", f.bytes>>20, first.PID)
	}
	if err != nil && len(aw.arenasOf(cl)) != 0 {
		if !f.waits {
			text := "cannot come back to the GPU yet: " + err.Error()
			aw.tell(cl.subject(), logrus.WarnLevel, text)
			aw.noteAway(cl, text)
		}
		f.waits, aw.of(cl).why = true, err
		aw.planAway(cl, hostWait, func() { aw.comeBack(cl) })
		aw.considerWriting()
		return
	}
	f.waits, f.step, f.began = false, reading, time.Now()
	aw.setFiled(cl, false)
	aw.reach(beforeRead)
	pid := int(cl.PID)
	aw.Go(func() {
		all, err := aw.files.open(pid)
		if err == nil {
			err = store.Load(f.path, f.parts, all, aw.wanted(f))
			if err != nil && !errors.Is(err, errGivenUp) {
				_ = store.Empty(f.parts, all)
			}
			segments.Close(all)
		}
		aw.Do(func() { aw.isRead(f, err) })
	})
}

func (aw *away) isRead(f *file, err error) {
	cl := f.client
	a := aw.of(cl)
	if aw.of(cl).file != f {
		aw.removeFile(f)
		return
	}
	aw.reach(inRead)
	if err == nil {
		aw.of(cl).file = nil
		if err = aw.recordFiles(f); err != nil {
			aw.of(cl).file = f
		}
	}
	if err != nil {
		f.step = filed
		aw.setFiled(cl, true)
		aw.notBack(cl, logrus.ErrorLevel, "cannot come back to the GPU: its memory cannot be read back: ", err)
		return
	}
	aw.reach(afterRead)
	aw.removeFile(f)
	aw.noteMembers()
	a.why, a.tries = nil, 0
	text := fmt.Sprintf("its memory is back from its file, %d MiB, in %v", f.bytes>>20, time.Since(f.began).Round(time.Millisecond))
	aw.logOf(cl.subject()).Info(text)
	aw.noteAway(cl, text)
	if a.step == returning {
		aw.comeBack(cl)
	}
}

// ---- its end ----

// dropFile forgets the file of a client that has ended, or that is another program.
func (aw *away) dropFile(cl *client) {
	f := aw.of(cl).file
	if f == nil {
		return
	}
	aw.of(cl).file = nil
	close(f.stop)
	aw.removeFile(f) // again when what is under way has ended
}

// removeFile removes a file that nobody needs.
func (aw *away) removeFile(f *file) {
	if err := os.Remove(f.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		aw.log.WithError(err).Errorf("a file with the memory of process %d stays: remove it", f.client.PID)
	}
	if err := aw.recordFiles(); err != nil {
		aw.log.WithError(err).Warn("a file that is removed is still recorded")
	}
	if t := &aw.files; t.retry.Planned() && errors.Is(t.err, store.ErrFull) { // there may be room now
		t.retry.Set(now())
	}
}

// filedBytes is what files take.
func (aw *away) filedBytes() (sum uint64) {
	for _, cl := range aw.clients {
		if aw.of(cl).file != nil {
			sum += aw.of(cl).file.bytes
		}
	}
	return sum
}

// largestFiled is the most that one client has in its file and not in memory.
func (aw *away) largestFiled() (most uint64) {
	if aw.pool.Filed() == 0 {
		return 0
	}
	for _, cl := range aw.clients {
		if aw.of(cl).file != nil && (aw.of(cl).file.step == filed || aw.of(cl).file.step == emptying) {
			most = max(most, aw.of(cl).file.bytes)
		}
	}
	return most
}
