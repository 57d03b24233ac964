// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/warden/order"
)

// A process without a shim has no gate that could be shut. Where nvshare-warden runs, it is the gate:
// holding.go. This file has the connection to the warden, and who is held.

const (
	// holdPause is the time between two looks for such processes, while there may be some.
	holdPause = 500 * time.Millisecond
	// retryPause is the time between two tries to hold a process that cannot be held.
	retryPause = 5 * time.Second
	// dialPause is the time between two tries to reach the warden.
	dialPause = time.Second
	// orderTimeout bounds the answer to an order. The warden waits for no driver that hangs: it hangs itself, or
	// the machine is so busy that it does not run. Its end ends the connection, at once.
	orderTimeout = 30 * time.Second
	// renewAfter is after which time off the order is given again.
	renewAfter = order.Lease / 4
)

// holder is the loop's side of the warden.
type holder struct {
	path     string
	client   *order.Client // nil: there is none
	opened   base.Time     // by the scheduler's start
	err      error         // why
	blind    error         // why it is not known who uses GPUs
	Holdings map[holdingKey]*holding
	next     *timer.Timer
	renew    *timer.Timer // of orders to be off
	looking  bool
	told     map[limitedOn]uint64   // the memory limits that the kernel was told
	noRegion map[*node.GPU]bool     // the kernel holds none there
	trials   map[*node.GPU]*trial   // of those on which a process was held
	over     map[tenantOn]base.Time // tenants above their memory limit, and since when
	shims    map[peer.Process]bool  // those of them that the warden does not kill
	due      []func()               // what follows from what the cores decided, after the event
	// One packet is under way at a time; the orders that come meanwhile go with the next one.
	waiting []job
	sent    bool
}

// job is an order, and what to do with the result.
type job struct {
	order order.Order
	then  func(order.Result)
}

type holdingKey struct {
	gpu     *node.GPU
	process peer.Process
}

func (w *Watch) openHolder() {
	if w.Opts.Warden == "" {
		return
	}
	w.Holder = &holder{path: w.Opts.Warden, opened: loop.Now(), err: errors.New("it was not asked yet"), Holdings: map[holdingKey]*holding{}, noRegion: map[*node.GPU]bool{}, trials: map[*node.GPU]*trial{}}
	w.Holder.next, w.Holder.renew = w.Timers.New(w.lookForHeld), w.Timers.New(w.renewOrders)
}

// WardenProblem says why processes without a shim are not held; "": they are.
func (w *Watch) WardenProblem() string {
	if w.Holder == nil {
		return "nvshare-scheduler runs without --warden"
	}
	if errors.Is(w.Holder.err, fs.ErrNotExist) {
		return "no nvshare-warden runs"
	}
	if w.Holder.err != nil {
		return fmt.Sprintf("nvshare-warden: %v", w.Holder.err)
	}
	if w.Opts.Sample == nil {
		return "the driver does not say which processes use GPUs"
	}
	if w.Holder.blind != nil {
		return fmt.Sprintf("the driver does not say which processes use GPUs: %v", w.Holder.blind)
	}
	return ""
}

// lookForHeld connects to the warden, then looks for processes to hold, beside the loop.
func (w *Watch) lookForHeld() {
	h := w.Holder
	if h.looking {
		return
	}
	h.looking = true
	if h.client == nil {
		w.Go(func() {
			client, err := order.Dial(h.path)
			if err != nil {
				w.Do(func() { w.wardenFound(nil, err) })
				return
			}
			taken := context.AfterFunc(w.Life, func() { client.Close() }) // Close does not know of it yet
			problem, err := client.Problem(orderTimeout)
			if err == nil && problem != "" {
				err = cannotHold(problem)
			}
			w.Do(func() {
				taken()
				w.wardenFound(client, err)
			})
		})
		return
	}
	client := h.client
	w.Go(func() { // where nobody is switched, nothing else shows that it has ended
		if _, err := client.Problem(orderTimeout); err != nil {
			w.Do(func() {
				if h.client == client {
					w.wardenLost(err)
				}
			})
		}
	})
	if w.Opts.Sample == nil || !w.anyToHold() {
		h.looking = false
		w.takeHeld(nil)
		h.next.Set(loop.Now().Add(holdPause))
		return
	}
	w.sample(func(samples []metrics.GPUSample, found map[string][]stranger, err error) {
		h.looking = false
		pause := holdPause
		h.blind = err
		if err != nil {
			pause = lookRest
			w.endTrials()
		} else if h.client != nil {
			w.tellKernel(found)
			w.killOverLimit(found)
			w.takeHeld(ofOneGPU(found, samples))
			w.noteUseOfHeld(samples)
		}
		h.next.Set(loop.Now().Add(pause))
	})
}

// ofOneGPU drops the processes that use several GPUs: it is not known which channel is on which.
func ofOneGPU(found map[string][]stranger, samples []metrics.GPUSample) map[string][]stranger {
	times := map[uint32]int{}
	for _, s := range samples {
		for pid := range s.Processes {
			times[pid]++
		}
	}
	for uuid := range found {
		found[uuid] = slices.DeleteFunc(found[uuid], func(s stranger) bool { return times[uint32(s.peer.PID)] > 1 })
	}
	return found
}

// cannotHold is what a warden says that can hold nobody.
type cannotHold string

func (e cannotHold) Error() string { return "it can hold nobody: " + string(e) }

func (w *Watch) wardenFound(client *order.Client, err error) {
	h := w.Holder
	h.looking = false
	if err != nil {
		if client != nil {
			client.Close()
		}
		if h.err == nil || h.err.Error() != err.Error() {
			w.Log.WithError(err).Debug("nvshare-warden")
		}
		h.err = err
		pause := dialPause
		if errors.As(err, new(cannotHold)) {
			pause = lookRest
		}
		h.next.Set(loop.Now().Add(pause))
		return
	}
	h.client, h.err = client, nil
	for _, g := range w.Order {
		for _, c := range g.Core.Snapshot(loop.Now()).Clients {
			if cl := w.Clients[c.ID]; cl != nil && c.State == sched.StateFenced && w.HoldsFenced {
				w.Fence(g, cl)
			}
		}
	}
	w.Log.Info("nvshare-warden is connected: processes without a shim are held, and so are fenced ones")
	h.next.Set(loop.Now())
}

// wardenLost forgets all: the warden puts all on at the end of the connection.
func (w *Watch) wardenLost(err error) {
	h := w.Holder
	if h.client == nil {
		return
	}
	h.client.Close()
	h.client, h.err, h.waiting, h.told = nil, err, nil, nil
	clear(h.noRegion)
	w.Log.WithError(err).Warn("nvshare-warden is lost: processes without a shim are not held")
	for _, x := range h.inOrder() {
		x.end()
	}
	h.next.Set(loop.Now().Add(dialPause))
}

// Close gives the warden up, which puts all on.
func (w *Watch) Close() {
	if w.Holder != nil && w.Holder.client != nil {
		w.Holder.client.Close()
	}
}

// order has the warden carry out an order; then runs in the loop, unless the warden is lost.
func (h *holder) order(w *Watch, o order.Order, then func(order.Result)) {
	if h.client != nil {
		h.waiting = append(h.waiting, job{o, then})
		h.send(w)
	}
}

func (h *holder) send(w *Watch) {
	if h.sent || len(h.waiting) == 0 || h.client == nil {
		return
	}
	jobs, client := h.waiting, h.client
	h.waiting, h.sent = nil, true
	w.Go(func() {
		var all []order.Order
		for _, j := range jobs {
			all = append(all, j.order)
		}
		results, err := client.Do(orderTimeout, all...)
		w.Do(func() {
			h.sent = false
			switch {
			case h.client != client: // another one by now
			case err != nil:
				w.wardenLost(err)
			default:
				for i, j := range jobs {
					j.then(results[i])
				}
			}
			h.send(w)
		})
	})
}

// renewOrders has those stay off that are.
func (w *Watch) renewOrders() {
	for _, x := range w.Holder.inOrder() {
		if x.fenced != nil && x.err != nil && loop.Now().Sub(x.tried) > retryPause { // the others: takeHeld
			x.look()
		}
		x.endTest()
		x.drive()
	}
	if len(w.Holder.Holdings) > 0 {
		w.Holder.renew.Set(loop.Now().Add(renewAfter))
	}
}

// inOrder returns all, in the order in which they came.
func (h *holder) inOrder() []*holding {
	return slices.SortedFunc(maps.Values(h.Holdings), func(a, b *holding) int {
		return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.peer.PID, b.peer.PID), cmp.Compare(a.gpu.Index, b.gpu.Index))
	})
}

// holds says whether processes of a tenant are to be held on a GPU where they have no shim: those of tenants
// with terms of their own, and of containers to which nvshare gave the GPU. Gangs and overlap groups are not.
func (w *Watch) holds(g *node.GPU, account, container string) bool {
	share := w.ShareOf(g, account)
	given := w.Names[container] != nil && slices.Contains(w.Names[container].Gpus, g.UUID)
	return share.Group() == "" && (w.Opts.HoldAll || given || w.Shares.Tenants[account].On(g.UUID) != api.Terms{})
}

// anyToHold says whether there may be processes that are to be held.
func (w *Watch) anyToHold() bool {
	if w.Opts.HoldAll || len(w.Shares.Tenants) > 0 {
		return true
	}
	for _, c := range w.Names {
		if len(c.Gpus) > 0 {
			return true
		}
	}
	return false
}

// takeHeld takes over which processes there are to hold, by GPU.
func (w *Watch) takeHeld(found map[string][]stranger) {
	h := w.Holder
	seen := map[holdingKey]bool{}
	for _, g := range w.Order {
		for _, s := range found[g.UUID] {
			if w.ByProc[s.peer.Process] != nil || !w.holds(g, s.peer.Account, s.peer.Container) {
				continue
			}
			key := holdingKey{g, s.peer.Process}
			seen[key] = true
			x := h.Holdings[key]
			if x == nil {
				x = w.hold(g, s.peer)
				x.look()
			} else if x.err != nil && loop.Now().Sub(x.tried) > retryPause {
				x.look()
			}
			x.bytes = s.bytes
			x.tellMemory()
		}
	}
	for _, x := range h.inOrder() {
		if x.fenced == nil && !seen[holdingKey{x.gpu, x.peer.Process}] {
			x.end()
		}
	}
}

// Fence keeps a client off its GPU whose grant is fenced; false: there is no warden.
func (w *Watch) Fence(g *node.GPU, cl *node.Client) bool {
	if w.Holder == nil || w.Holder.client == nil {
		return false
	}
	if w.Holder.Holdings[holdingKey{g, cl.Process}] == nil {
		x := w.hold(g, cl.Peer)
		x.fenced = cl
		x.later(x.look)
	}
	return true
}

// later has something done after the event, in which a core may be about to decide more.
func (x *holding) later(do func()) {
	x.w.Holder.due = append(x.w.Holder.due, func() {
		if x.known() {
			do()
		}
	})
}

// Advance does what follows from what the cores decided. The loop calls it between two events.
func (w *Watch) Advance() {
	for w.Holder != nil && len(w.Holder.due) > 0 {
		do := w.Holder.due[0]
		w.Holder.due = w.Holder.due[1:]
		do()
	}
}

// Unfence ends that: the client has released its grant.
func (w *Watch) Unfence(g *node.GPU, cl *node.Client) {
	if w.Holder == nil {
		return
	}
	if x := w.Holder.Holdings[holdingKey{g, cl.Process}]; x != nil && x.fenced == cl {
		x.later(x.end)
	}
}
