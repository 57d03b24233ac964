// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/warden/order"
	"github.com/nvshare/nvshare/sched/warden/rm"
)

// answering is a driver to which each descriptor is its own, and whose controls answer do.
type answering struct {
	rm.Driver
	do func(c rm.Command, params []byte) uint32
}

func (d answering) Is(int) bool             { return true }
func (d answering) May(string, string) bool { return false } // so that no look finds a descriptor
func (d answering) File(int) rm.File        { return d }
func (d answering) Close() error            { return nil }
func (d answering) Control(_, _ uint32, c rm.Command, params []byte) (uint32, error) {
	return d.do(c, params), nil
}

const driverTimeout = 0x65 // NV_ERR_TIMEOUT

// objectsWith are those of a client of descriptor 0 with these channels.
func objectsWith(channels ...uint32) rm.Objects {
	return rm.Objects{Clients: []rm.Client{{Descriptor: 0, Handle: 1, Subdevices: []uint32{2}, Channels: channels}}}
}

func selfStart(t *testing.T) uint64 {
	t.Helper()
	start, err := startOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	return start
}

// leftBehind is the ledger that a warden leaves which has ended.
func leftBehind(t *testing.T, e entry) *ledger {
	t.Helper()
	mayCopy(t)
	l, err := newLedger(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	e.PID, e.Start = os.Getpid(), selfStart(t)
	if err := l.note(e); err != nil {
		t.Fatal(err)
	}
	return l
}

// Whom the guard cannot put on stays written down, and the next warden tries again until it can.
func TestGuardCannotPutOn(t *testing.T) {
	var answers atomic.Bool
	for name, of := range map[string]struct {
		entry  entry
		driver rm.Driver
		mended func(file string)
	}{
		"the driver refuses": {entry{Objects: objectsWith(3)}, answering{rm.OpenSimulated(), func(rm.Command, []byte) uint32 {
			if answers.Load() {
				return 0
			}
			return driverTimeout
		}}, func(string) { answers.Store(true) }},
		"the freezer cannot be written": {entry{Freezer: t.TempDir()}, rm.OpenSimulated(), func(file string) { _ = os.Remove(file) }},
	} {
		t.Run(name, func(t *testing.T) {
			l := leftBehind(t, of.entry)
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			w.Close() // the warden has ended
			if err := watch(r, l, of.driver, quiet()); err == nil {
				t.Error("the guard says nothing of it")
			}
			left, err := l.read()
			if err != nil || len(left) != 1 {
				t.Fatalf("the ledger has %d entries, %v", len(left), err)
			}
			next := newWarden(Options{Driver: of.driver, Log: quiet()}, l)
			next.guard = &guard{}
			next.adopt(left)
			if r := next.one(order.Order{Op: order.Off, PID: os.Getpid()}, time.Now()); r.Error == "" || l.empty() {
				t.Fatalf("the next warden has forgotten it: %+v", r)
			}
			of.mended(of.entry.Freezer)
			for end := time.Now().Add(patience); !l.empty(); time.Sleep(tick) {
				if time.Now().After(end) {
					t.Fatal("it is not tried again")
				}
			}
		})
	}
}

// A guard that is being started when the warden ends, ends too.
func TestEndWhileAGuardStarts(t *testing.T) {
	dir := t.TempDir()
	second, pids := filepath.Join(dir, "second"), filepath.Join(dir, "pids")
	lock, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	ready := filepath.Join(dir, "ready")
	script := "echo $$ >>" + pids + "; if [ -e " + second + " ]; then touch " + ready + "; while [ -e " + ready + " ]; do sleep 0.01; done; fi; touch " + second + "; echo ready; exec cat >/dev/null"
	g, err := startGuard([]string{"/bin/sh", "-c", script}, lock, quiet(), func() {})
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(pids)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	first, err := os.FindProcess(pid)
	if err != nil || first.Kill() != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(ready); err == nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("no second guard was started")
		}
	}
	ended := make(chan struct{})
	go func() { g.end(); close(ended) }()
	for over := false; !over; time.Sleep(time.Millisecond) {
		g.mu.Lock()
		over = g.over
		g.mu.Unlock()
	}
	if err := os.Remove(ready); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(patience):
		t.Error("the warden waits for the guard, and the guard for the warden")
	}
}

// One process that hangs keeps neither the others off nor the warden from its end.
func TestOneHangs(t *testing.T) {
	mayCopy(t)
	w := testWarden(t)
	synctest.Test(t, func(t *testing.T) {
		over := make(chan struct{})
		on := 0
		w.Driver = answering{rm.OpenSimulated(), func(_ rm.Command, params []byte) uint32 {
			if slices.Contains(params, 33) { // the channel of the one that hangs
				<-over
			} else {
				on++
			}
			return 0
		}}
		quick := sleeper(t)
		for pid, channel := range map[int]uint32{os.Getpid(): 33, quick.Process.Pid: 44} {
			p, err := w.process(pid, 0)
			if err != nil {
				t.Fatal(err)
			}
			p.objects, p.offs = objectsWith(channel), 1
		}
		err := w.freeAll()
		if !errors.Is(err, errLate) || on != 1 {
			t.Errorf("%v; %d orders to put the other on", err, on)
		}
		close(over)
	})
}

// Orders about a process that hangs do not pile up.
func TestOrdersAboutOneThatHangs(t *testing.T) {
	mayCopy(t)
	w := testWarden(t)
	p, err := w.process(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	p.mu.Lock() // as an order has it that the driver does not answer
	before := runtime.NumGoroutine()
	var all sync.WaitGroup
	for range 10 * maxTurns {
		all.Go(func() {
			r := w.carryOut(order.Request{Orders: []order.Order{{Op: order.State, PID: p.pid}}})
			if r.Results[0].Error != tooLong {
				t.Errorf("answered %+v", r.Results[0])
			}
		})
	}
	all.Wait()
	if n := runtime.NumGoroutine() - before; n > 2*maxTurns {
		t.Errorf("%d goroutines wait", n)
	}
	p.mu.Unlock()
}

// What cannot be put on is tried again, and said once.
func TestFailureIsSaidOnce(t *testing.T) {
	mayCopy(t)
	w, tries := testWarden(t), 0
	log, said := logtest.NewNullLogger()
	w.Log = logrus.NewEntry(log)
	w.Driver = answering{rm.OpenSimulated(), func(rm.Command, []byte) uint32 { tries++; return driverTimeout }}
	p, err := w.process(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	p.objects, p.offs, p.until = objectsWith(3), 1, now.Add(-tick)
	for range 100 { // for five seconds
		w.sweep(now)
		now = now.Add(tick)
	}
	if n := len(said.AllEntries()); n != 2 || tries < 6 || tries > 20 {
		t.Errorf("%d lines for %d tries", n, tries)
	}
}

// A channel that came while the process was off is taken off, too, also where another order than that found it.
func TestChannelsThatAnotherOrderFound(t *testing.T) {
	mayCopy(t)
	w := testWarden(t)
	var off []uint32
	w.Driver = answering{rm.OpenSimulated(), func(c rm.Command, params []byte) uint32 {
		if c == w.Driver.ABI().Channels {
			for _, ch := range []uint32{100, 200} {
				if slices.Contains(splitWords(params), ch) {
					off = append(off, ch)
				}
			}
		}
		return 0
	}}
	p, err := w.process(os.Getpid(), 0)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	p.objects, p.looked, p.lookedAll = objectsWith(100), now, now
	if err := p.off(w.Driver, w.ledger, now, false); err != nil {
		t.Fatal(err)
	}
	p.objects = objectsWith(100, 200) // as an order looks that sets a slice
	if err := p.lookLate(w.Driver, w.ledger, now); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(off, []uint32{100, 200}) {
		t.Errorf("taken off: %d", off)
	}
}

func splitWords(params []byte) (words []uint32) {
	for ; len(params) >= 4; params = params[4:] {
		words = append(words, binary.LittleEndian.Uint32(params))
	}
	return words
}

// twoFiles is a driver of which this process has two open files, by inode; a client, with number 1, is of the first.
type twoFiles struct {
	rm.Driver
	mine, other uint64
	on          *int // how often its channels were put on
}

type oneFile struct {
	twoFiles
	inode uint64
	fd    int
}

func inodeOf(fd int) uint64 {
	var st unix.Stat_t
	_ = unix.Fstat(fd, &st)
	return st.Ino
}

func (d twoFiles) Is(fd int) bool          { n := inodeOf(fd); return n == d.mine || n == d.other }
func (d twoFiles) May(string, string) bool { return true }
func (d twoFiles) File(fd int) rm.File     { return oneFile{d, inodeOf(fd), fd} }

func (f oneFile) Close() error { return unix.Close(f.fd) }
func (f oneFile) Control(client, _ uint32, c rm.Command, _ []byte) (uint32, error) {
	switch {
	case f.inode != f.mine || client != 1:
		return f.ABI().BadClient, nil
	case c == f.ABI().Channels:
		*f.on++
	}
	return 0, nil
}

// Whose descriptor has another number than when it was taken off is put on as well; whose client has ended needs it not.
func TestPutOnByAnotherDescriptor(t *testing.T) {
	for name, of := range map[string]struct {
		moved, replaced bool
	}{
		"the same":                    {},
		"another number":              {moved: true},
		"another file has its number": {moved: true, replaced: true},
		"its client has ended":        {replaced: true},
	} {
		t.Run(name, func(t *testing.T) {
			open := func() *os.File {
				f, err := os.CreateTemp(t.TempDir(), "")
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { f.Close() })
				return f
			}
			mine, other := open(), open()
			on, e := 0, entry{Objects: objectsWith(3)}
			d := twoFiles{rm.OpenSimulated(), inodeOf(int(mine.Fd())), inodeOf(int(other.Fd())), &on}
			if e.Objects.Clients[0].Descriptor = int(mine.Fd()); of.moved {
				fd, err := unix.Dup(int(mine.Fd()))
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Close(fd)
			}
			switch {
			case of.replaced:
				if err := unix.Dup3(int(other.Fd()), int(mine.Fd()), unix.O_CLOEXEC); err != nil {
					t.Fatal(err)
				}
			case of.moved:
				mine.Close()
			}
			l := leftBehind(t, e)
			n, left, err := free(d, l)
			if n != 1 || len(left) != 0 || err != nil {
				t.Errorf("%d processes, %d are left: %v", n, len(left), err)
			}
			if ended := of.replaced && !of.moved; (on == 0) != ended {
				t.Errorf("put on %d times", on)
			}
		})
	}
}
