// SPDX-License-Identifier: Apache-2.0

package away

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/store"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/segments"
)

// Where host memory is short, what processes have there that are off their GPUs with their
// contexts goes on to files (--suspend-dir):
//
//	in memory → writing → emptying → filed → reading → in memory
//
// Its segments stay mapped in the process; their pages go, once the file is recorded. A process
// that is to come back has its pages back first: nvshare-checkpoint refuses to restore one without.
// One process is written at a time, the one first that has been away longest.

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
	client  *node.Client
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
	Dir     *store.Dir // nil: nothing is written
	Open    func(pid int) ([]segments.Segment, error)
	Step    func()        // tests: before each piece that is copied
	Pause   time.Duration // filePause, except in tests
	writing *file         // nil: nothing is written now
	retry   *timer.Timer  // until then nothing is
	look    *timer.Timer
	number  uint64    // of the latest file
	Err     error     // why the latest could not be written
	full    time.Time // when it was told last that there is no room for files
	wanted  uint64    // what Arenas.Left has to be so that nobody would have been refused
	until   time.Time // for wanted
}

// OpenFiles prepares what --suspend-dir says.
func (aw *Away) OpenFiles() error {
	t := &aw.Files
	t.Open, t.Pause = segments.Open, filePause
	t.retry, t.look = aw.Timers.New(aw.writeAgain), aw.Timers.New(aw.considerWriting)
	if aw.Opts.SuspendDir == "" {
		return nil
	}
	switch {
	case aw.Opts.SwapMemory == 0:
		return errors.New("--suspend-dir keeps what was in host memory before: give --swap-memory as well")
	case aw.Opts.Checkpoint == nil:
		return errors.New("--suspend-dir is for processes that leave their GPUs with their contexts, and that needs nvshare-checkpoint: install it beside nvshare-scheduler, or see --checkpoint")
	}
	var err error
	if t.Dir, err = store.Open(aw.Opts.SuspendDir, aw.BootID); err != nil {
		return fmt.Errorf("--suspend-dir: %w", err)
	}
	return nil
}

// wanted has what copies memory of a file end when nobody wants it.
func (aw *Away) wanted(f *file) func() error {
	return func() error {
		if aw.Files.Step != nil {
			aw.Files.Step()
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
func (aw *Away) arenasOf(cl *node.Client) (all []*memory.Member) {
	for _, g := range aw.Order {
		if m := aw.MemberOf(g, cl.ID); m != nil {
			all = append(all, m)
		}
	}
	return all
}

// setFiled has the pool count a client's host memory, or not.
func (aw *Away) setFiled(cl *node.Client, on bool) {
	for _, m := range aw.arenasOf(cl) {
		m.Arena.SetFiled(on)
	}
}

// hostIsShort says whether memory is to be written to files.
func (aw *Away) hostIsShort() bool {
	t := &aw.Files
	aw.ObserveHost()
	lacked, left := aw.Cores.Arenas.Lacked(), aw.Cores.Arenas.Left()
	if time.Now().After(t.until) {
		t.wanted = 0
	}
	if lacked != 0 {
		t.wanted, t.until = max(t.wanted, left+lacked), time.Now().Add(refusedLately)
	}
	for _, cl := range aw.Clients {
		if aw.Of(cl).File != nil && aw.Of(cl).File.waits {
			return true
		}
	}
	return left < max(aw.Opts.SwapMemory/readyPart, t.wanted)
}

// considerWriting has the memory of the process written that has been away longest, if host
// memory is short.
func (aw *Away) considerWriting() {
	t := &aw.Files
	if t.Dir == nil || t.writing != nil {
		return
	}
	var next *node.Client
	later := false // somebody's memory could not be written a moment ago
	for _, cl := range aw.Clients {
		a := aw.Of(cl)
		switch {
		case a.step != absent || a.wanted || a.File != nil:
		case time.Now().Before(a.unfiled):
			later = true
		case next == nil || a.since.Before(aw.Of(next).since):
			next = cl
		}
	}
	short := aw.hostIsShort() // also to hear who was refused
	switch {
	case next == nil && later:
		t.look.Set(loop.Now().Add(t.Pause))
	case next == nil:
	case t.retry.Planned() || !short:
		t.look.Set(loop.Now().Add(hostLook))
	default:
		aw.write(next)
	}
}

// writeAgain is for a while after something could not be written. If nothing is to be written any
// more, that is no problem.
func (aw *Away) writeAgain() {
	aw.considerWriting()
	if t := &aw.Files; t.writing == nil && !t.retry.Planned() {
		t.Err = nil
	}
}

// WatchRefusals has files written where somebody was refused because host memory was short.
func (aw *Away) WatchRefusals() {
	if aw.Files.Dir != nil && aw.Cores.Arenas.Refused() {
		aw.considerWriting()
	}
}

// write has a client's memory written to a file.
func (aw *Away) write(cl *node.Client) {
	t := &aw.Files
	t.number++
	f := &file{client: cl, step: writing, path: t.Dir.PathOf(cl.Process, t.number), began: time.Now(), stop: make(chan struct{})}
	settled := true
	for _, m := range aw.arenasOf(cl) {
		f.bytes += m.Arena.Given()
		settled = settled && m.Arena.Settled()
	}
	if f.bytes == 0 || !settled {
		aw.notFiled(cl, nil)
		return
	}
	if err := t.Dir.Room(f.bytes); err != nil {
		aw.notFiled(cl, err)
		return
	}
	aw.Of(cl).File, t.writing = f, f
	if err := aw.RecordFiles(); err != nil {
		aw.Of(cl).File, t.writing = nil, nil
		aw.notFiled(cl, err)
		return
	}
	aw.Reach(node.BeforeFile)
	aw.Go(func() {
		var parts []store.Part
		var err error
		arena.Nicely(func() { parts, err = aw.save(f) })
		aw.Do(func() { aw.isWritten(f, parts, err) })
	})
}

// save writes the file, beside the loop.
func (aw *Away) save(f *file) ([]store.Part, error) {
	all, err := aw.Files.Open(int(f.client.PID))
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

// isWritten has the pages given back, once the file is recorded.
func (aw *Away) isWritten(f *file, parts []store.Part, err error) {
	t, cl := &aw.Files, f.client
	if aw.Of(cl).File != f { // it was woken, or has ended
		t.writing = nil
		aw.removeFile(f)
		aw.considerWriting()
		return
	}
	aw.Reach(node.InFile)
	if err == nil {
		f.step, f.parts = emptying, parts
		if err = aw.RecordFiles(); err != nil {
			f.step = writing
		}
	}
	if err != nil {
		aw.Of(cl).File, t.writing = nil, nil
		aw.removeFile(f)
		aw.notFiled(cl, err)
		return
	}
	aw.Reach(node.AfterFile)
	aw.empty(f)
}

// notFiled notes that a client's memory stays where it is for now; nil: because it has none.
func (aw *Away) notFiled(cl *node.Client, err error) {
	t, full := &aw.Files, errors.Is(err, store.ErrFull)
	if !full { // that is no fault of this client's memory
		aw.Of(cl).unfiled = time.Now().Add(t.Pause)
	}
	var e *unreachable
	switch {
	case err == nil:
	case errors.As(err, &e):
		if aw.Of(cl).stays != err.Error() {
			aw.Of(cl).stays = err.Error()
			aw.say(cl, logrus.WarnLevel, "its memory stays in host memory: "+err.Error())
		}
	default: // for others, too
		next, told := fmt.Sprintf("in %v", t.Pause), t.Err != nil && t.Err.Error() == err.Error()
		if full { // with room for almost all this comes and goes
			next += ", or when another file goes"
			if told = time.Since(t.full) < t.Pause; !told {
				t.full = time.Now()
			}
		}
		if !told {
			aw.say(cl, logrus.WarnLevel, fmt.Sprintf("its memory cannot be written to a file and stays in host memory; the next try is %s: %v", next, err))
		}
		t.Err = err
		t.retry.Set(loop.Now().Add(t.Pause))
	}
	aw.considerWriting()
}

// empty gives back the pages that are in a file.
func (aw *Away) empty(f *file) {
	pid := int(f.client.PID)
	aw.Go(func() {
		all, err := aw.Files.Open(pid)
		if err == nil {
			err = store.Empty(f.parts, all)
			segments.Close(all)
		}
		aw.Do(func() { aw.isEmpty(f, err) })
	})
}

func (aw *Away) isEmpty(f *file, err error) {
	t, cl := &aw.Files, f.client
	if t.writing == f {
		t.writing = nil
	}
	if aw.Of(cl).File != f {
		aw.removeFile(f)
		aw.considerWriting()
		return
	}
	aw.Reach(node.AfterEmptied)
	if err != nil { // what is in the file holds, whatever is left of the pages
		aw.LogOf(cl.Subject()).WithError(err).Warn("not all of its host memory was given back")
	}
	f.step = filed
	if f.earlier {
		f.earlier = false
	} else {
		t.Err = nil
		t.retry.Stop()
		aw.say(cl, logrus.InfoLevel, fmt.Sprintf("its memory is in a file, %d MiB, written in %v", f.bytes>>20, time.Since(f.began).Round(time.Millisecond)))
	}
	aw.setFiled(cl, true)
	aw.NoteMembers()
	if aw.Of(cl).step == returning {
		aw.comeBack(cl)
	}
	aw.hostIsFree()
}

// hostIsFree is for when host memory may have become free.
func (aw *Away) hostIsFree() {
	aw.Pool.Prepare()
	for cl := aw.nextToRead(); cl != nil; cl = aw.nextToRead() {
		aw.comeBack(cl)
		if aw.Of(cl).File != nil && aw.Of(cl).File.waits {
			break
		}
	}
	aw.considerWriting()
}

// nextToRead returns the client that has waited longest for host memory; nil: none waits.
func (aw *Away) nextToRead() (first *node.Client) {
	for _, cl := range aw.Clients {
		if f := aw.Of(cl).File; f != nil && f.waits && f.bytes <= aw.Opts.SwapMemory && (first == nil || aw.Of(cl).since.Before(aw.Of(first).since)) {
			first = cl
		}
	}
	return first
}

// inMemory says whether all memory of a client that is to come back is in host memory. If it
// is not, it is on its way, and comeBack is called again.
func (aw *Away) inMemory(cl *node.Client) bool {
	f := aw.Of(cl).File
	switch {
	case f == nil:
		return true
	case f.step == writing:
		close(f.stop)
		aw.Of(cl).File = nil
		return true
	case f.step == filed:
		aw.readBack(f)
	}
	return false
}

// readBack has a client's memory read back, if there is host memory for it.
func (aw *Away) readBack(f *file) {
	cl := f.client
	aw.ObserveHost()
	err := aw.Cores.Arenas.Returns(f.bytes)
	if first := aw.nextToRead(); err == nil && f.bytes <= aw.Opts.SwapMemory && first != nil && first != cl && aw.Of(first).since.Before(aw.Of(cl).since) {
		err = fmt.Errorf("it waits for %d MiB of host memory, and process %d does so for longer", f.bytes>>20, first.PID)
	}
	if err != nil && len(aw.arenasOf(cl)) != 0 {
		if !f.waits {
			aw.say(cl, logrus.WarnLevel, "cannot come back to the GPU yet: "+err.Error())
		}
		f.waits, aw.Of(cl).why = true, err
		aw.planAway(cl, hostWait, func() { aw.comeBack(cl) })
		aw.considerWriting()
		return
	}
	f.waits, f.step, f.began = false, reading, time.Now()
	aw.setFiled(cl, false)
	aw.Reach(node.BeforeRead)
	pid := int(cl.PID)
	aw.Go(func() {
		all, err := aw.Files.Open(pid)
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

func (aw *Away) isRead(f *file, err error) {
	cl := f.client
	a := aw.Of(cl)
	if aw.Of(cl).File != f {
		aw.removeFile(f)
		return
	}
	aw.Reach(node.InRead)
	if err == nil {
		aw.Of(cl).File = nil
		if err = aw.RecordFiles(f); err != nil {
			aw.Of(cl).File = f
		}
	}
	if err != nil {
		f.step = filed
		aw.setFiled(cl, true)
		aw.notBack(cl, logrus.ErrorLevel, "cannot come back to the GPU: its memory cannot be read back: ", err)
		return
	}
	aw.Reach(node.AfterRead)
	aw.removeFile(f)
	aw.NoteMembers()
	a.why, a.tries = nil, 0
	aw.say(cl, logrus.InfoLevel, fmt.Sprintf("its memory is back from its file, %d MiB, in %v", f.bytes>>20, time.Since(f.began).Round(time.Millisecond)))
	if a.step == returning {
		aw.comeBack(cl)
	}
}

// dropFile forgets the file of a client that has ended, or that is another program.
func (aw *Away) dropFile(cl *node.Client) {
	f := aw.Of(cl).File
	if f == nil {
		return
	}
	aw.Of(cl).File = nil
	close(f.stop)
	aw.removeFile(f) // again when what is under way has ended
}

// removeFile removes a file that nobody needs.
func (aw *Away) removeFile(f *file) {
	if err := os.Remove(f.path); err != nil && !errors.Is(err, os.ErrNotExist) {
		aw.Log.WithError(err).Errorf("a file with the memory of process %d stays: remove it", f.client.PID)
	}
	if err := aw.RecordFiles(); err != nil {
		aw.Log.WithError(err).Warn("a file that is removed is still recorded")
	}
	if t := &aw.Files; t.retry.Planned() && errors.Is(t.Err, store.ErrFull) { // there may be room now
		t.retry.Set(loop.Now())
	}
}

// LargestFiled is the most that one client has in its file and not in memory.
func (aw *Away) LargestFiled() (most uint64) {
	if aw.Pool.Filed() == 0 {
		return 0
	}
	for _, cl := range aw.Clients {
		if aw.Of(cl).File != nil && (aw.Of(cl).File.step == filed || aw.Of(cl).File.step == emptying) {
			most = max(most, aw.Of(cl).File.bytes)
		}
	}
	return most
}
