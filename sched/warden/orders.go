// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/warden/order"
	"github.com/nvshare/nvshare/sched/warden/rm"
)

// counted is a driver whose answers are counted.
type counted struct {
	rm.Driver
	answers *atomic.Int64
}

func (d counted) File(fd int) rm.File { return countedFile{d.Driver.File(fd), d.answers} }

type countedFile struct {
	rm.File
	answers *atomic.Int64
}

func (f countedFile) Control(client, object uint32, c rm.Command, params []byte) (uint32, error) {
	status, err := f.File.Control(client, object, c, params)
	if err == nil {
		f.answers.Add(1)
	}
	return status, err
}

// tooLong is the answer to an order that may still be carried out.
const tooLong = "the driver or the process takes too long"

// A process keeps the others of a packet waiting until the driver has not answered for so many pauses (tick) in a
// row. Pauses are counted, not the time, and few of those that took twice as long: on a machine that does much else the
// warden and the process run seldom, and neither hangs. A process can make objects without end, so only so many answers count.
const (
	answerPauses = int(order.Lease / 2 / tick)
	latePauses   = 10 // of which one counts
	answersCount = 1000
	// maxTurns is how many packets may have orders that wait for a process that hangs.
	maxTurns = 16
)

// turn is what the orders of a packet about one process wait for, one after the other.
type turn struct {
	pid  int
	kill bool
}

// enter lets a packet's orders wait for their turn, unless too many do; leave is for when they have had it.
func (w *Warden) enter(of turn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.turns[of] >= maxTurns {
		return false
	}
	w.turns[of]++
	return true
}

func (w *Warden) leave(of turn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.turns[of]--; w.turns[of] == 0 {
		delete(w.turns, of)
	}
}

// carryOut does all orders of a packet at the same time; those about one process in turn, but for a kill, which waits for none.
func (w *Warden) carryOut(r order.Request) order.Reply {
	reply := order.Reply{ID: r.ID, Results: make([]order.Result, len(r.Orders))}
	if len(r.Orders) > order.MaxOrders {
		return order.Reply{ID: r.ID, Error: fmt.Sprintf("%d orders in a packet: at most %d", len(r.Orders), order.MaxOrders)}
	}
	type done struct {
		i int
		r order.Result
	}
	all, turns := make(chan done, len(r.Orders)), map[turn][]int{}
	for i, o := range r.Orders {
		reply.Results[i].Error = tooLong
		of := turn{o.PID, o.Op == order.Kill}
		turns[of] = append(turns[of], i)
	}
	missing := 0
	for of, inTurn := range turns {
		if !w.enter(of) {
			continue
		}
		missing += len(inTurn)
		go func() {
			defer w.leave(of)
			for _, i := range inTurn {
				began := time.Now()
				one := w.one(r.Orders[i], began)
				one.TookNs = time.Since(began).Nanoseconds()
				all <- done{i, one}
			}
		}()
	}
	before, since := w.answers.Load(), time.Now()
	pause := time.NewTimer(tick)
	defer pause.Stop()
	for left, seen := latePauses*answerPauses, int64(0); missing > 0 && left > 0; {
		select {
		case one := <-all:
			reply.Results[one.i] = one.r
			missing--
		case <-pause.C:
			now := time.Now()
			if left--; now.Sub(since) < 2*tick {
				left -= latePauses - 1
			}
			if n := min(w.answers.Load()-before, answersCount); n > seen {
				seen, left = n, latePauses*answerPauses
			}
			since = now
			pause.Reset(tick)
		}
	}
	return reply
}

func (w *Warden) one(o order.Order, now time.Time) (r order.Result) {
	if o.Op == order.Kill { // it waits for no order that hangs
		return failed(kill(o.PID, o.Start))
	}
	p, err := w.locked(o.PID, o.Start)
	if err != nil {
		return failed(err)
	}
	defer p.mu.Unlock()
	p.used = now
	switch o.Op {
	case order.State:
		if err = p.look(w.Driver, now, now.Sub(p.lookedAll) > lookAll); err == nil {
			r.SliceUs, err = p.objects.SliceOf(w.Driver, p.pidfd)
		}
	case order.Slice:
		if err = p.look(w.Driver, now, false); err == nil {
			err = p.objects.Slice(w.Driver, p.pidfd, o.Us)
		}
		r.SliceUs = o.Us
	case order.Off:
		if !w.guard.watches() {
			err = errors.New("there is no guard")
			break
		}
		if err = p.off(w.Driver, w.ledger, now, o.Again); err == nil && !p.looking {
			p.looking = true
			go w.lookLate(p)
		}
	case order.On:
		err = p.on(w.Driver, now, 0)
	case order.Freeze:
		if !w.guard.watches() {
			err = errors.New("there is no guard")
			break
		}
		err = p.freeze(w.Driver, w.ledger, now, o.Container)
	case order.Limit:
		err = limitMemory("/", o)
	default:
		err = fmt.Errorf("no such order: %.16q", o.Op)
	}
	if err != nil {
		r.Error = err.Error()
		r.Gone = errors.Is(err, errGone) || ended(p.pidfd)
	}
	r.GPUs, r.Clients, r.Off = p.objects.GPUs(), len(p.objects.Clients), p.offs > 0
	r.Groups, r.Channels = p.objects.Count()
	return r
}

func failed(err error) order.Result {
	if err == nil {
		return order.Result{}
	}
	return order.Result{Error: err.Error(), Gone: errors.Is(err, errGone)}
}

func kill(pid int, start uint64) error {
	pidfd, err := openProcess(pid, start)
	if err != nil {
		return err
	}
	defer unix.Close(pidfd)
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	switch {
	case ended(pidfd):
		return errGone
	case err != nil:
		return err
	case bytes.Contains(maps, []byte("/libnvshare.so")):
		return errors.New(order.HasShim)
	}
	return unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0)
}
