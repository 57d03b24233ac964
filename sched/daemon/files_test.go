// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/store"
	"github.com/nvshare/nvshare/sched/segments"
	"github.com/nvshare/nvshare/sched/wire"
)

// shelf has the segments of processes, by PID: the test holds them, not the processes.
type shelf struct {
	mu  sync.Mutex
	fds map[int][]int
}

func (s *shelf) put(l *leaver) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fds[l.proc.cmd.Process.Pid] = append([]int(nil), l.fds...)
}

func (s *shelf) open(pid int) (all []segments.Segment, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, fd := range s.fds[pid] {
		again, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		var st unix.Stat_t
		if err == nil {
			err = unix.Fstat(again, &st)
		}
		if err != nil {
			return nil, err
		}
		all = append(all, segments.Segment{File: os.NewFile(uintptr(again), "segment"), Inode: st.Ino, Size: uint64(st.Size), Present: uint64(st.Blocks) * 512})
	}
	return all, nil
}

const filerBytes = 64 * mib

// filer is a leaver where there is host memory for little more than its memory.
type filer struct {
	*leaver
	shelf *shelf
	dir   string // of the files
	run   string
	sum   uint32 // of its memory
	tune  func(*Options)
}

// fileDir is a directory on a disk.
func fileDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Open(dir, "test"); err != nil {
		t.Skip(err) // no rights, or the temporary directory is in memory
	}
	return dir
}

// small has the directory of files be on a disk of so many bytes.
func small(disk uint64) func(*Daemon) {
	return func(d *Daemon) {
		dir := d.Opts.SuspendDir
		d.away.Files.Dir.Statfs = func(_ string, to *unix.Statfs_t) error {
			files, err := filepath.Glob(filepath.Join(dir, "*"))
			*to = unix.Statfs_t{Bsize: 1, Bavail: disk}
			for _, f := range files {
				if info, err := os.Stat(f); err == nil {
					to.Bavail -= min(to.Bavail, uint64(info.Size()))
				}
			}
			return err
		}
	}
}

func newFiler(t *testing.T, change func(*Options), more ...func(*Daemon)) *filer {
	t.Helper()
	x := &filer{shelf: &shelf{fds: map[int][]int{}}, dir: fileDir(t), run: t.TempDir()}
	f := &fakeDriver{make(chan string, 16), make(chan error)}
	x.tune = func(o *Options) {
		swapping(o)
		o.SwapMemory, o.Checkpoint, o.SuspendDir = 80*mib, f, x.dir
		if change != nil {
			change(o)
		}
	}
	s := start(t, x.run, x.tune, append([]func(*Daemon){x.opens}, more...)...)
	x.leaver = newLeaverWith(t, s, f, gpuA, filerBytes)
	return x
}

// opens has files be opened on the shelf, and be on a disk with room, however full this machine's is.
func (x *filer) opens(d *Daemon) {
	d.away.Files.Open = x.shelf.open
	if d.away.Files.Dir != nil {
		small(1 << 30)(d)
	}
}

// suspended is leaver's, with memory that has content.
func (x *filer) suspended() {
	x.t.Helper()
	if _, err := suspendSelf(x.t, x.s); err != nil {
		x.t.Fatal(err)
	}
	x.movesOut()
	x.wantSuspend(wire.SuspendPrepare)
}

// movesOut has its memory leave for its segments, which get a content.
func (x *filer) movesOut() {
	x.t.Helper()
	x.release(x.want(wire.TypeRevoke).Epoch)
	x.awaitLess(x.s, 1)
	x.s.await("host memory", func(*api.StatusResponse) bool { return x.status(x.s).ArenaBytes >= filerBytes })
	x.reserve(filerBytes) // is answered after the segments were sent
	x.sum = 0
	for _, fd := range x.fds {
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			x.t.Fatal(err)
		}
		part := make([]byte, st.Size)
		rand.NewChaCha8([32]byte{1}).Read(part[:len(part)/2])
		x.sum = crc32.Update(x.sum, crc32.IEEETable, part)
		if _, err := unix.Pwrite(fd, part, 0); err != nil {
			x.t.Fatal(err)
		}
	}
	x.shelf.put(x.leaver)
	x.has.Arena = filerBytes
	x.out()
}

func (x *filer) left() {
	x.t.Helper()
	x.suspended()
	x.leaves()
}

// filed waits until its memory is in a file and nowhere else.
func (x *filer) filed() {
	x.t.Helper()
	x.s.await("its memory is in a file", func(*api.StatusResponse) bool { return x.status(x.s).FileBytes == filerBytes })
	if n := x.present(); n != 0 {
		x.t.Errorf("%d MiB are still in host memory", n>>20)
	}
	if all := x.files(); len(all) != 1 {
		x.t.Fatalf("files: %v", all)
	} else if info, err := os.Stat(all[0]); err != nil || info.Mode().Perm() != 0o600 || info.Size() != filerBytes {
		x.t.Errorf("%v %v", info, err)
	}
}

func (x *filer) present() (sum uint64) {
	x.t.Helper()
	all, err := x.shelf.open(x.proc.cmd.Process.Pid)
	if err != nil {
		x.t.Fatal(err)
	}
	for _, s := range all {
		sum += s.Present
	}
	segments.Close(all)
	return sum
}

func (x *filer) files() []string {
	x.t.Helper()
	all, err := filepath.Glob(filepath.Join(x.dir, "*"))
	if err != nil {
		x.t.Fatal(err)
	}
	return all
}

// whole fails the test unless its memory is what it was.
func (x *filer) whole() {
	x.t.Helper()
	all, err := x.shelf.open(x.proc.cmd.Process.Pid)
	if err != nil {
		x.t.Fatal(err)
	}
	defer segments.Close(all)
	sum := uint32(0)
	part := make([]byte, x.bytes)
	for _, s := range all {
		n, err := s.ReadAt(part[:s.Size], 0)
		if err != nil {
			x.t.Fatal(err)
		}
		sum = crc32.Update(sum, crc32.IEEETable, part[:n])
	}
	if sum != x.sum {
		x.t.Error("its memory is not what it was")
	}
}

// isBack is woken, and finds all its memory when the driver restores it.
func (x *filer) isBack() {
	x.t.Helper()
	x.f.next(x.t, "on")
	x.whole()
	x.f.ends <- nil
	x.wantSuspend(wire.SuspendOver)
	x.s.await("no file is left", func(*api.StatusResponse) bool { return len(x.files()) == 0 && x.status(x.s).FileBytes == 0 })
}

func TestFileRoundTrip(t *testing.T) {
	x := newFiler(t, nil)
	x.left()
	x.filed()
	r := x.s.status()
	if w := r.Gpus[0].Swap; w.ArenaUsedBytes != 0 || w.ArenaFileBytes != filerBytes || x.status(x.s).ArenaBytes != 0 {
		t.Errorf("%v", w)
	}
	x.says(wire.SuspendedWake)
	x.isBack()
	if w := x.s.status().Gpus[0].Swap; w.ArenaUsedBytes != filerBytes || w.ArenaFileBytes != 0 {
		t.Errorf("%v", w)
	}
	x.works()
	x.left() // and again
	x.filed()
	if _, err := resumeSelf(t, x.s); err != nil {
		t.Fatal(err)
	}
	x.isBack()
}

// Where there is enough host memory, nothing is written, until somebody is refused for it.
func TestFileOnlyWhenShort(t *testing.T) {
	a := newFiler(t, func(o *Options) { o.SwapMemory = 100 * mib })
	a.left()
	newLeaverWith(t, a.s, a.f, gpuB, filerBytes)
	if n := a.status(a.s).FileBytes; n != 0 {
		t.Errorf("%d MiB are in a file", n>>20)
	}
	if _, err := suspendSelf(t, a.s); err == nil || !strings.Contains(err.Error(), "host memory") {
		t.Fatalf("%v", err)
	}
	a.filed()
	// Room is kept for a to come back.
	if _, err := suspendSelf(t, a.s); err == nil || !strings.Contains(err.Error(), "room for 64 MiB is kept") {
		t.Fatalf("%v", err)
	}
	a.says(wire.SuspendedWake)
	a.isBack()
}

// More is suspended than host memory holds.
func TestFilesHoldMore(t *testing.T) {
	a := newFiler(t, func(o *Options) { o.SwapMemory = 150 * mib })
	a.left()
	for i := range uint64(3) {
		x := &filer{leaver: newLeaverWith(t, a.s, a.f, gpuB, filerBytes), shelf: a.shelf, dir: a.dir, run: a.run}
		x.left()
		// Until then the next one would be refused.
		a.s.await("all are in files", func(r *api.StatusResponse) bool { return r.Gpus[0].Swap.ArenaFileBytes == (i+2)*filerBytes })
	}
	r := a.s.status()
	if w := r.Gpus[0].Swap; w.ArenaUsedBytes != 0 || a.status(a.s).FileBytes != filerBytes {
		t.Errorf("%v", w)
	}
}

// A process that is woken while it is written does not wait for that.
func TestFileWokenWhileWritten(t *testing.T) {
	at, goOn := make(chan struct{}, 1), make(chan struct{})
	var stopped sync.Once
	x := newFiler(t, nil, func(d *Daemon) {
		d.away.Files.Step = func() {
			stopped.Do(func() { at <- struct{}{}; <-goOn })
		}
	})
	x.left()
	<-at
	x.says(wire.SuspendedWake)
	x.f.next(t, "on")
	close(goOn)
	x.f.ends <- nil
	x.wantSuspend(wire.SuspendOver)
	x.whole()
	x.s.await("the file is gone", func(*api.StatusResponse) bool { return len(x.files()) == 0 })
}

// A process whose file cannot be read stays off the GPU, and the status says why.
func TestFileDamaged(t *testing.T) {
	x := newFiler(t, nil)
	x.left()
	x.filed()
	path := x.files()[0]
	if err := os.Rename(path, path+".x"); err != nil {
		t.Fatal(err)
	}
	x.says(wire.SuspendedWake)
	x.s.await("why it does not come back", func(*api.StatusResponse) bool {
		c := x.status(x.s)
		return c.Context == api.ContextState_CONTEXT_STATE_RETURNING && strings.Contains(c.ContextProblem, path)
	})
	f, err := os.OpenFile(path+".x", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	first := make([]byte, 1)
	if _, err := f.ReadAt(first, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{^first[0]}, 0); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".x", path); err != nil {
		t.Fatal(err)
	}
	x.s.await("it is found to be damaged", func(*api.StatusResponse) bool {
		return strings.Contains(x.status(x.s).ContextProblem, "is damaged")
	})
	select {
	case op := <-x.f.ops:
		t.Fatalf("%s with a damaged file", op)
	default:
	}
	if _, err := f.WriteAt(first, 0); err != nil {
		t.Fatal(err)
	}
	x.isBack()
}

// On a full disk the memory stays where it is, a problem says so, and it is tried again.
func TestFileDiskFull(t *testing.T) {
	x := newFiler(t, nil, small(16*mib), func(d *Daemon) { d.away.Files.Pause = 10 * time.Millisecond })
	x.left()
	x.s.await("it is said", func(r *api.StatusResponse) bool {
		return len(r.Problems) == 1 && strings.Contains(r.Problems[0], "no room")
	})
	x.whole()
	other := fileDir(t)
	if err := x.s.Ask(t.Context(), func() {
		x.s.away.Files.Dir, _ = store.Open(other, "test")
		small(1 << 30)(x.s.Daemon)
	}); err != nil {
		t.Fatal(err)
	}
	x.dir = other
	x.filed()
	x.s.await("it is not said any more", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
	x.says(wire.SuspendedWake)
	x.isBack()
}

// Memory of which something is missing, as that of a process whose segments are still on their way, stays where it is
// and is tried again, also where nobody else is suspended.
func TestFileMissingAtFirst(t *testing.T) {
	var tried atomic.Int32
	x := newFiler(t, nil, func(d *Daemon) {
		open := d.away.Files.Open
		d.away.Files.Pause, d.away.Files.Open = 10*time.Millisecond, func(pid int) ([]segments.Segment, error) {
			all, err := open(pid)
			if tried.Add(1) == 1 && err == nil {
				segments.Close(all)
				all = nil
			}
			return all, err
		}
	})
	x.left()
	x.filed()
	x.says(wire.SuspendedWake)
	x.isBack()
}

// What could not be written is no problem any more when there is nothing to write.
func TestFileProblemEnds(t *testing.T) {
	for name, end := range map[string]func(x *filer){
		"the process ends": func(x *filer) { x.proc.kill() },
		"the process is back": func(x *filer) {
			x.says(wire.SuspendedWake)
			x.isBack()
			x.works()
		},
	} {
		t.Run(name, func(t *testing.T) {
			x := newFiler(t, nil, small(16*mib), func(d *Daemon) { d.away.Files.Pause = 100 * time.Millisecond })
			x.left()
			x.s.await("it is said", func(r *api.StatusResponse) bool { return len(r.Problems) == 1 })
			end(x)
			x.s.await("it is not said any more", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
		})
	}
}

// What was not written because there was no room is written once a file is gone: nobody waits for the pause.
func TestFileRoomComes(t *testing.T) {
	a := newFiler(t, func(o *Options) { o.SwapMemory = 150 * mib }, small(100*mib), func(d *Daemon) { d.away.Files.Pause = time.Hour })
	a.left()
	b := &filer{leaver: newLeaverWith(t, a.s, a.f, gpuB, filerBytes), shelf: a.shelf, dir: a.dir, run: a.run}
	b.left()
	a.s.await("there is room for one only", func(r *api.StatusResponse) bool {
		return r.Gpus[0].Swap.ArenaFileBytes == filerBytes && len(r.Problems) == 1 && strings.Contains(r.Problems[0], "no room")
	})
	a.says(wire.SuspendedWake)
	a.f.next(t, "on")
	a.f.ends <- nil
	a.wantSuspend(wire.SuspendOver)
	a.s.await("the other is written", func(r *api.StatusResponse) bool { return b.status(b.s).FileBytes == filerBytes && len(r.Problems) == 0 })
	// It is full again: the status says so, and the log does once in a pause.
	a.works()
	a.left()
	a.s.await("there is no room again", func(r *api.StatusResponse) bool { return len(r.Problems) == 1 })
	if n := strings.Count(fmt.Sprint(a.s.eventsOf(&api.EventsRequest{}).Events), "cannot be written to a file"); n != 1 {
		t.Errorf("it is said %d times that there is no room", n)
	}
}

// The file of a process that ends is removed, whatever is done with it.
func TestFileOwnerDies(t *testing.T) {
	for _, when := range []string{"writing", "filed", "reading"} {
		t.Run(when, func(t *testing.T) {
			var hold atomic.Bool
			hold.Store(when == "writing")
			at, goOn := make(chan struct{}), make(chan struct{})
			x := newFiler(t, nil, func(d *Daemon) {
				d.away.Files.Step = func() {
					if hold.CompareAndSwap(true, false) {
						at <- struct{}{}
						<-goOn
					}
				}
			})
			x.left()
			if when == "writing" {
				<-at
			} else {
				x.filed()
			}
			if when == "reading" {
				hold.Store(true)
				x.says(wire.SuspendedWake)
				<-at
			}
			x.proc.kill()
			x.s.await("it is forgotten", func(r *api.StatusResponse) bool { return len(r.Gpus[0].Clients) == 0 })
			close(goOn)
			x.s.await("no file is left", func(*api.StatusResponse) bool { return len(x.files()) == 0 })
			if w := x.s.status().Gpus[0].Swap; w.ArenaFileBytes != 0 || w.ArenaUsedBytes != 0 {
				t.Errorf("%v", w)
			}
		})
	}
}

// hostOf is a host that has so much free.
type hostOf struct {
	arena.Kernel
	free *atomic.Uint64
}

func (h hostOf) Free() (uint64, uint64, bool) { return h.free.Load(), 0, true }

// A process for which there is no host memory waits for it, and the status says so.
func TestFileWaitsForHostMemory(t *testing.T) {
	free := &atomic.Uint64{}
	free.Store(8 * gib)
	x := newFiler(t, nil, func(d *Daemon) { d.memory.Pool.Host = hostOf{arena.Kernel{}, free} })
	x.left()
	x.filed()
	free.Store(300 * mib)
	x.says(wire.SuspendedWake)
	x.s.await("why it does not come back", func(*api.StatusResponse) bool {
		c := x.status(x.s)
		return c.Context == api.ContextState_CONTEXT_STATE_RETURNING && strings.Contains(c.ContextProblem, "it waits for 64 MiB of host memory, and 300 MiB are left")
	})
	free.Store(8 * gib)
	x.isBack()
}

// again is the process with a new scheduler, after the earlier one was killed.
func (x *filer) again(s *scheduler) {
	x.t.Helper()
	x.s = s
	fds := x.fds
	n := &swapper{peerConn: x.proc.connect().register(wire.RegisterSwap | wire.RegisterSuspend | wire.RegisterReconnect | wire.RegisterAway), proc: x.proc, has: x.has, fds: fds}
	n.attach(0, gpuA, 0, 0)
	x.swapper.Close()
	x.swapper = n
	n.send(wire.Frame{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: filerBytes, Least: filerBytes, Serial: 1}})
	n.want(wire.TypeReserved)
	n.moved(0, 0)
}

// A scheduler that is killed at any moment loses nothing: the next one has the process come
// back with its memory, and leaves no file.
func TestFileSchedulerKilled(t *testing.T) {
	const midWrite, midRead node.Failpoint = "in the middle of writing", "in the middle of reading"
	for _, point := range []node.Failpoint{node.BeforeFile, midWrite, node.InFile, node.AfterFile, node.AfterEmptied, node.BeforeRead, midRead, node.InRead, node.AfterRead} {
		t.Run(string(point), func(t *testing.T) {
			killed := make(chan struct{})
			var armed atomic.Bool
			armed.Store(point != midRead)
			pieces := 0
			var d *Daemon
			x := &filer{shelf: &shelf{fds: map[int][]int{}}, dir: fileDir(t), run: t.TempDir()}
			f := &fakeDriver{make(chan string, 16), make(chan error)}
			x.tune = func(o *Options) {
				swapping(o)
				o.SwapMemory, o.Checkpoint, o.SuspendDir = 80*mib, f, x.dir
			}
			o := &ordeal{t: t, dir: x.run, reached: map[node.Failpoint]int{}}
			d = o.newDaemon(x.tune)
			x.opens(d)
			d.Failpoint = func(p node.Failpoint) {
				if p == point {
					close(killed)
					d.abandon()
				}
			}
			d.away.Files.Step = func() {
				if (point == midWrite || point == midRead) && armed.Load() {
					if pieces++; pieces == 30 {
						close(killed)
						d.Do(d.abandon)
					}
				}
			}
			done := make(chan struct{})
			go func() { defer close(done); _ = d.Run(context.Background()) }()
			s := &scheduler{Daemon: d, t: t, dir: x.run, stop: func() {}}
			x.leaver = newLeaverWith(t, s, f, gpuA, filerBytes)
			x.suspended()
			x.says(wire.SuspendedReady)
			f.next(t, "off")
			f.ends <- nil
			switch point {
			case node.BeforeRead, midRead, node.InRead, node.AfterRead:
				x.filed()
				armed.Store(true)
				x.says(wire.SuspendedWake)
			}
			select {
			case <-killed:
			case <-time.After(patience):
				t.Fatal("never reached")
			}
			<-done
			o.last.remains()

			next := start(t, x.run, x.tune, x.opens)
			x.again(next)
			x.s.await("it is away", func(*api.StatusResponse) bool {
				return x.status(x.s).Context == api.ContextState_CONTEXT_STATE_AWAY
			})
			x.says(wire.SuspendedWake)
			x.isBack()
		})
	}
}

// A scheduler without the flag has processes come back that an earlier one has in files.
func TestFileRestartWithoutTheFlag(t *testing.T) {
	x := newFiler(t, nil)
	x.left()
	x.filed()
	x.s.stop()
	x.again(start(t, x.run, func(o *Options) { x.tune(o); o.SuspendDir = "" }, x.opens))
	x.s.await("its memory is in a file", func(*api.StatusResponse) bool { return x.status(x.s).FileBytes == filerBytes })
	if w := x.s.status().Gpus[0].Swap; w.ArenaUsedBytes != 0 {
		t.Errorf("%v", w)
	}
	x.says(wire.SuspendedWake)
	x.isBack()
}

// Files of processes that have ended meanwhile go when a scheduler starts.
func TestFileOfNobody(t *testing.T) {
	x := newFiler(t, nil)
	x.left()
	x.filed()
	x.s.stop()
	x.proc.kill()
	start(t, x.run, x.tune, x.opens)
	if all := x.files(); len(all) != 0 {
		t.Errorf("%v is left", all)
	}
}

// A directory in which nothing can be kept ends the scheduler.
func TestFileDirRefused(t *testing.T) {
	for want, change := range map[string]func(*Options){
		"make it":            func(o *Options) { o.SuspendDir += "/none" },
		"--swap-memory":      func(o *Options) { o.SwapMemory = 0 },
		"nvshare-checkpoint": func(o *Options) { o.Checkpoint = nil },
	} {
		o := testOptions(t.TempDir())
		swapping(&o)
		o.Checkpoint, o.SuspendDir = &fakeDriver{}, fileDir(t)
		change(&o)
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), "--suspend-dir") || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
