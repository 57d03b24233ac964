// SPDX-License-Identifier: Apache-2.0

// Package warden is the program nvshare-warden: it sets time slices of processes that have
// no shim, and takes their channels off the GPU, from outside. It decides nothing:
// the scheduler says what to do, over a socket (package order).
//
// What it guarantees: nobody's channels stay off for longer than order.Lease after the
// latest order to keep them off,
//
//   - when the scheduler ends: the warden puts all on at the end of the connection;
//   - when the scheduler hangs: the order runs out;
//   - when the warden ends, by whatever signal, or hangs: its guard, a process of its own
//     session, puts all on (guard.go);
//   - when both are killed: the next start does, with the file that was written before
//     (ledger.go). Until then channels stay off, because the driver keeps them so.
package warden

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/warden/order"
	"github.com/nvshare/nvshare/sched/warden/rm"
)

// Options configure a Warden.
type Options struct {
	Dir    string // for the socket and the ledger; made if it is not there
	UID    int    // whose process may connect: the scheduler's
	Driver rm.Driver
	// Guard is a command line that ends in RunGuard.
	Guard []string
	Log   *logrus.Entry
}

// tick is the pause between two looks at leases, and at processes that have ended.
const tick = 50 * time.Millisecond

// maxProcesses bounds what the scheduler can have us keep.
const maxProcesses = 4096

// Socket is the name of the socket in Options.Dir.
const Socket = api.WardenSocket

// Warden carries out orders. Make one with New, then call Run.
type Warden struct {
	Options
	ledger *ledger
	lock   *os.File
	listen *net.UnixListener
	guard  *guard

	answers atomic.Int64 // of the driver, so far

	mu        sync.Mutex
	processes map[int]*process
	turns     map[turn]int // orders of how many packets wait
	stuck     map[int]bool // whom an earlier warden left off, and nobody could put on yet
	ended     bool
}

// New waits for the guard of an earlier warden, puts on what that left off, and opens the
// socket.
func New(o Options) (*Warden, error) {
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return nil, err
	}
	l, err := newLedger(o.Dir)
	if err != nil {
		return nil, err
	}
	w := newWarden(o, l)
	if w.lock, err = takeLock(filepath.Join(o.Dir, "lock")); err != nil {
		return nil, err
	}
	n, left, err := free(o.Driver, l)
	if err != nil {
		o.Log.WithError(err).Error("processes whose channels an earlier warden took off may stand still")
	}
	if n > 0 {
		o.Log.Warnf("put the channels of %d processes on, which an earlier warden may have taken off", n)
	}
	if err := l.keep(left); err != nil {
		return nil, err
	}
	w.adopt(left)
	if w.guard, err = startGuard(o.Guard, w.lock, o.Log, w.guardEnded); err != nil {
		return nil, err
	}
	path := filepath.Join(o.Dir, Socket)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	old := unix.Umask(0o177)
	w.listen, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	unix.Umask(old)
	if err != nil {
		return nil, err
	}
	if err := os.Chown(path, o.UID, -1); err != nil {
		return nil, err
	}
	return w, nil
}

func newWarden(o Options, l *ledger) *Warden {
	w := &Warden{Options: o, ledger: l, processes: map[int]*process{}, turns: map[turn]int{}, stuck: map[int]bool{}}
	w.Driver = counted{o.Driver, &w.answers}
	return w
}

// adopt tries again to put on whom nobody could, until each goes on or has ended. Meanwhile there are no orders about them.
func (w *Warden) adopt(left []entry) {
	for _, e := range left {
		w.stuck[e.PID] = true
		go func() {
			for freeOne(w.Driver, e) != nil {
				time.Sleep(order.Lease)
			}
			w.mu.Lock()
			delete(w.stuck, e.PID)
			err := w.ledger.forget(e.PID)
			w.mu.Unlock()
			w.Log.Warnf("process %d, which an earlier warden had taken off, goes on or has ended", e.PID)
			if err != nil {
				w.Log.WithError(err).Warn("the ledger names more than are off")
			}
		}()
	}
}

// lockWait is how long the guard of an earlier warden may take to put all on, on a machine that does much else.
const lockWait = time.Minute

func takeLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(lockWait); ; time.Sleep(freePause) {
		if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			f.Close()
			return nil, fmt.Errorf("another warden or its guard has %s: %w", path, err)
		}
	}
}

// Run serves until stop is closed, then puts all on.
func (w *Warden) Run(stop <-chan struct{}) error {
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			sock, err := w.listen.AcceptUnix()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				w.Log.WithError(err).Warn("accept a connection")
				time.Sleep(tick)
				continue
			}
			wg.Go(func() { w.serve(sock, stop) })
		}
	})
	ticker := time.Tick(tick)
	for running := true; running; {
		select {
		case <-stop:
			running = false
		case <-ticker:
			w.sweep(time.Now())
		}
	}
	w.listen.Close()
	w.mu.Lock()
	w.ended = true
	w.mu.Unlock()
	wg.Wait()
	failed := w.freeAll()
	w.guard.end()
	return failed
}

// serve answers one connection at a time of the scheduler.
func (w *Warden) serve(sock *net.UnixConn, stop <-chan struct{}) {
	c := order.NewConn(sock)
	defer c.Close()
	pid, err := w.mayConnect(sock)
	if err != nil {
		w.Log.WithError(err).Warn("refused a connection")
		return
	}
	problem := Obstacle("/", pid)
	if problem != "" {
		w.Log.Errorf("nobody can be held: %s; %s", problem, api.WardenRemedy(problem))
	}
	w.Log.Info("the scheduler is connected")
	over := make(chan struct{})
	defer close(over)
	go func() {
		select {
		case <-stop:
			c.Close()
		case <-over:
		}
	}()
	for {
		var r order.Request
		err := c.Receive(&r)
		if err == nil {
			reply := w.carryOut(r)
			reply.Problem = problem
			err = c.Send(reply)
		}
		if err != nil {
			if !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.EOF) {
				w.Log.WithError(err).Warn("the scheduler's connection")
			}
			break
		}
	}
	w.Log.Info("the scheduler's connection has ended: all channels go on")
	if err := w.freeAll(); err != nil {
		w.Log.WithError(err).Error("put channels on")
	}
}

// mayConnect returns the pid of the scheduler; 0: it is in another PID namespace.
func (w *Warden) mayConnect(sock *net.UnixConn) (pid int, err error) {
	cred, err := api.PeerOf(sock)
	if err != nil {
		return 0, err
	}
	if int(cred.Uid) != w.UID {
		return 0, fmt.Errorf("user %d may not give orders: user %d may", cred.Uid, w.UID)
	}
	return int(cred.Pid), nil
}

// lookLate is beside the orders, which wait for it, so that the answer to the order does not.
func (w *Warden) lookLate(p *process) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.looking = false
	if err := p.lookLate(w.Driver, w.ledger, time.Now()); err != nil && !ended(p.pidfd) {
		w.Log.WithError(err).Warnf("process %d: look for new channels", p.pid)
	}
}

// locked returns a process with its lock held.
func (w *Warden) locked(pid int, start uint64) (*process, error) {
	for {
		p, err := w.process(pid, start)
		if err != nil {
			return nil, err
		}
		if p.mu.Lock(); p.pidfd != dropped {
			return p, nil
		}
		p.mu.Unlock()
	}
}

// process returns the one that is known, or makes it so.
func (w *Warden) process(pid int, start uint64) (*process, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.ended:
		return nil, errors.New("the warden ends")
	case w.stuck[pid]:
		return nil, errors.New("an earlier warden took its channels off, and they cannot be put on")
	}
	p := w.processes[pid]
	switch {
	case p == nil:
	case ended(p.pidfd): // whoever has the number now waits until sweep has dropped it
		return nil, errGone
	case start != 0 && p.start != start:
		return nil, errGone
	default:
		return p, nil
	}
	if len(w.processes) >= maxProcesses {
		return nil, fmt.Errorf("%d processes are known already", maxProcesses)
	}
	pidfd, err := openProcess(pid, start)
	if err != nil {
		return nil, err
	}
	if start == 0 {
		if start, err = startOf(pid); err != nil {
			unix.Close(pidfd)
			return nil, err
		}
	}
	p = &process{pid: pid, start: start, pidfd: pidfd, used: time.Now()}
	w.processes[pid] = p
	return p, nil
}

// drop wants p.mu held.
func (w *Warden) drop(p *process) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.processes, p.pid)
	unix.Close(p.pidfd)
	p.pidfd = dropped
}

// sweep puts on whose lease has run out, and forgets who has ended: not before its container goes on.
func (w *Warden) sweep(now time.Time) {
	var forget []int
	w.runOut(now)
	for _, p := range w.all() {
		if !p.mu.TryLock() { // an order is under way
			continue
		}
		gone := ended(p.pidfd)
		if p.noted && p.freezer == "" && (gone || p.offs == 0 && now.Sub(p.used) > forgetAfter) {
			p.noted = false
			forget = append(forget, p.pid)
		}
		if p.freezer == "" && (gone || p.offs == 0 && !p.noted && now.Sub(p.used) > keepFor) {
			w.drop(p)
		}
		p.mu.Unlock()
	}
	if err := w.ledger.forget(forget...); err != nil {
		w.Log.WithError(err).Warn("the ledger names more than are off")
	}
	w.guard.beat(!w.ledger.empty())
}

// runOut puts those on whose lease has run out, or whose container would stand still after their end. After a failure that
// is tried again, and said once. One that hangs is waited for once: then it keeps its lock.
func (w *Warden) runOut(now time.Time) {
	var out []*process
	for _, p := range w.all() {
		if p.mu.TryLock() {
			if (p.offs > 0 || p.freezer != "") && (now.After(p.until) || ended(p.pidfd)) {
				out = append(out, p)
			} else {
				p.mu.Unlock()
			}
		}
	}
	allAtOnce(order.Lease/2, out, func(p *process) error {
		defer p.mu.Unlock()
		if p.failed == "" && !ended(p.pidfd) {
			w.Log.Warnf("process %d: no order for %v: its channels go on", p.pid, order.Lease)
		}
		err := p.on(w.Driver, now, 0)
		if err != nil {
			p.until = now.Add(order.Lease)
			if p.failed != err.Error() {
				p.failed = err.Error()
				w.Log.WithError(err).Errorf("process %d: put channels on: tried again each %v", p.pid, order.Lease)
			}
		}
		return err
	})
}

func (w *Warden) all() []*process {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Collect(maps.Values(w.processes))
}

// freeAll puts all on that we took off. Who is late has an error, and is put on when its turn comes; if the warden ends
// before that, by the guard.
func (w *Warden) freeAll() error {
	all := w.all()
	failed := allAtOnce(hangsFor, all, func(p *process) error {
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.on(w.Driver, time.Now(), 0)
	})
	for i, err := range failed {
		if err != nil {
			failed[i] = fmt.Errorf("process %d: %w", all[i].pid, err)
		}
	}
	return errors.Join(failed...)
}

// guardEnded is called when the guard has ended, though it should not: until there is
// another one nobody may be off.
func (w *Warden) guardEnded() {
	w.mu.Lock()
	over := w.ended
	w.mu.Unlock()
	if over {
		return
	}
	if err := w.freeAll(); err != nil {
		w.Log.WithError(err).Error("put channels on")
	}
}
