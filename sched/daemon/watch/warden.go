// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/held"
	"github.com/nvshare/nvshare/sched/warden/order"
)

// A process without a shim has no gate that could be shut. Where nvshare-warden runs and its
// tenant has a core limit, the process keeps that all the same: the warden takes its channels
// off the GPU and puts them on, as package held says. Whose tenant has no limit is let alone.

const (
	// holdPause is the time between two looks for such processes, while a tenant has a limit.
	holdPause = 500 * time.Millisecond
	// retryPause is the time between two looks at a process that cannot be held.
	retryPause = 5 * time.Second
	// dialPause is the time between two tries to reach the warden.
	dialPause = time.Second
	// orderTimeout bounds the answer to an order: a driver can hang.
	orderTimeout = 5 * time.Second
	// renewAfter is after which time off the order is given again.
	renewAfter = order.Lease / 4
	// recent is the time over which it is said what they get.
	recent = 5 * time.Second
	// A process that has had cheatPart more of the GPU than its limit, at cheatLooks in a row,
	// puts its channels on by itself.
	cheatPart  = 0.2
	cheatLooks = 4
)

// holder is the loop's side of the warden.
type holder struct {
	path     string
	client   *order.Client // nil: there is none
	err      error         // why
	blind    error         // why it is not known who uses GPUs
	Holdings map[holdingKey]*holding
	next     *timer.Timer
	looking  bool
	// One packet is under way at a time; the orders that come meanwhile go with the next one.
	waiting []job
	sent    bool
}

// job is orders, and what to do with the results.
type job struct {
	orders []order.Order
	then   func([]order.Result)
}

type holdingKey struct{ uuid, account string }

// holding is the processes of one tenant on one GPU that the warden holds.
type holding struct {
	w         *Watch
	gpu       *node.GPU
	account   string
	limit     int
	held      *held.Account
	step      *timer.Timer
	processes map[peer.Process]*heldProcess
	on        bool // as ordered
	changing  bool // an order is under way
	shims     time.Duration
	// What they got: since when, up to when, and how long.
	since, counted base.Time
	had            time.Duration
	part           float64 // over the time before since; -1: not known
}

type heldProcess struct {
	ready bool  // it can be switched
	err   error // why it is not held
	tried base.Time
	looks int // that saw it above its limit, in a row
	part  float64
}

func (w *Watch) openHolder() {
	if w.Opts.Warden == "" {
		return
	}
	w.Holder = &holder{path: w.Opts.Warden, err: errors.New("it was not asked yet"), Holdings: map[holdingKey]*holding{}}
	w.Holder.next = w.Timers.New(w.lookForHeld)
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
			if !w.Do(func() { w.wardenFound(client, err) }) && client != nil {
				client.Close()
			}
		})
		return
	}
	if w.Opts.Sample == nil || !w.anyLimit() {
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
		} else if h.client != nil {
			w.takeHeld(ofOneGPU(found, samples))
			w.noteCheats(samples)
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

func (w *Watch) wardenFound(client *order.Client, err error) {
	h := w.Holder
	h.looking = false
	if err != nil {
		if h.err == nil || h.err.Error() != err.Error() {
			w.Log.WithError(err).Debug("nvshare-warden")
		}
		h.err = err
		h.next.Set(loop.Now().Add(dialPause))
		return
	}
	h.client, h.err = client, nil
	w.Log.Info("nvshare-warden is connected: core limits hold for processes without a shim")
	h.next.Set(loop.Now())
}

// wardenLost forgets all: the warden puts all on at the end of the connection.
func (w *Watch) wardenLost(err error) {
	h := w.Holder
	if h.client == nil {
		return
	}
	h.client.Close()
	h.client, h.err, h.waiting = nil, err, nil
	for _, x := range h.Holdings {
		x.step.Stop()
	}
	clear(h.Holdings)
	w.Log.WithError(err).Warn("nvshare-warden is lost: processes without a shim are not held")
	h.next.Set(loop.Now().Add(dialPause))
}

// Close gives the warden up, which puts all on.
func (w *Watch) Close() {
	if w.Holder != nil && w.Holder.client != nil {
		w.Holder.client.Close()
	}
}

// order has the warden carry out orders; then runs in the loop, unless the warden is lost.
func (h *holder) order(w *Watch, orders []order.Order, then func([]order.Result)) {
	if h.client != nil && len(orders) > 0 {
		h.waiting = append(h.waiting, job{orders, then})
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
			all = append(all, j.orders...)
		}
		results, err := client.Do(orderTimeout, all...)
		w.Do(func() {
			h.sent = false
			switch {
			case h.client != client: // another one by now
			case err != nil:
				w.wardenLost(err)
			default:
				for _, j := range jobs {
					j.then(results[:len(j.orders)])
					results = results[len(j.orders):]
				}
			}
			h.send(w)
		})
	})
}

// limitOf returns the core limit of a tenant on a GPU, percent; 0: there is none to hold.
func (w *Watch) limitOf(g *node.GPU, account string) int {
	if limit := w.ShareOf(g, account).Limit; limit > 0 && limit < 100 {
		return limit
	}
	return 0
}

func (w *Watch) anyLimit() bool {
	for account := range w.Shares.Tenants {
		for _, g := range w.Order {
			if w.limitOf(g, account) != 0 {
				return true
			}
		}
	}
	return false
}

// takeHeld takes over which processes there are to hold, by GPU.
func (w *Watch) takeHeld(found map[string][]stranger) {
	h := w.Holder
	seen := map[holdingKey]map[peer.Process]bool{}
	for _, g := range w.Order {
		for _, s := range found[g.UUID] {
			limit := w.limitOf(g, s.peer.Account)
			if limit == 0 || w.ByProc[s.peer.Process] != nil {
				continue
			}
			key := holdingKey{g.UUID, s.peer.Account}
			if seen[key] == nil {
				seen[key] = map[peer.Process]bool{}
			}
			seen[key][s.peer.Process] = true
			x := h.Holdings[key]
			if x == nil {
				x = &holding{w: w, gpu: g, account: key.account, processes: map[peer.Process]*heldProcess{}, on: true, part: -1}
				x.step = w.Timers.New(x.advance)
				h.Holdings[key] = x
			}
			if x.limit != limit {
				x.begin(limit)
			}
			if one := x.processes[s.peer.Process]; one == nil || one.err != nil && loop.Now().Sub(one.tried) > retryPause {
				x.add(s.peer.Process)
			}
		}
	}
	for key, x := range h.Holdings {
		for p := range x.processes {
			if !seen[key][p] {
				x.release(p)
			}
		}
		if len(x.processes) == 0 {
			x.step.Stop()
			delete(h.Holdings, key)
		}
	}
}

// noteCheats compares what the driver says processes had with their limits.
func (w *Watch) noteCheats(samples []metrics.GPUSample) {
	for _, s := range samples {
		sum := 0.0
		for _, part := range s.Busy {
			sum += part
		}
		for key, x := range w.Holder.Holdings {
			if key.uuid != s.UUID || s.Busy == nil || sum > parts {
				continue
			}
			for p, one := range x.processes {
				one.part = s.Busy[uint32(p.PID)]
				if !one.ready || one.part < float64(x.limit)/100+cheatPart {
					one.looks = 0
				} else if one.looks++; one.looks == cheatLooks {
					w.Log.Warnf("GPU %d: process %d is not held: it puts its channels on by itself", x.gpu.Index, p.PID)
				}
			}
		}
	}
}

// begin has a limit from now on.
func (x *holding) begin(limit int) {
	t := loop.Now()
	x.limit, x.held = limit, held.New(limit, time.Duration(t))
	x.since, x.counted, x.had, x.part = t, t, 0, -1
	x.shims = x.heldByShims()
	if !x.changing {
		x.step.Set(t)
	}
}

// heldByShims is how long the tenant's clients have had grants.
func (x *holding) heldByShims() (sum time.Duration) {
	if len(x.w.ByAccount[x.account]) == 0 {
		return 0
	}
	for _, c := range x.gpu.Core.Snapshot(loop.Now()).Clients {
		if cl := x.w.Clients[c.ID]; cl != nil && cl.Account == x.account {
			sum += c.Held
		}
	}
	return sum
}

func (x *holding) order(p peer.Process, op order.Op) order.Order {
	return order.Order{Op: op, PID: int(p.PID), Start: p.Start, Again: op == order.Off}
}

// add looks at a process before it is switched for the first time.
func (x *holding) add(p peer.Process) {
	one := &heldProcess{tried: loop.Now()}
	if had := x.processes[p]; had != nil {
		one.err = had.err
	}
	x.processes[p] = one
	x.w.Holder.order(x.w, []order.Order{x.order(p, order.State)}, func(r []order.Result) {
		if x.processes[p] != one {
			return
		}
		was := one.err
		one.err = nil
		switch {
		case r[0].Error != "":
			one.err = errors.New(r[0].Error)
		case !slices.Equal(r[0].GPUs, []string{x.gpu.UUID}):
			one.err = fmt.Errorf("it uses other GPUs too, or part of one: %s", strings.Join(r[0].GPUs, ", "))
		case r[0].Channels == 0:
			one.err = errors.New("no channel was found")
		default:
			one.ready = true
		}
		if one.err != nil && was == nil {
			x.w.Log.Warnf("process %d is not held: %v", p.PID, one.err)
		}
		if one.ready && !x.on && !x.changing { // the others are off
			x.switchTo(false)
		}
	})
}

func (x *holding) release(p peer.Process) {
	delete(x.processes, p)
	x.w.Holder.order(x.w, []order.Order{x.order(p, order.On)}, func([]order.Result) {})
}

// advance does what the account says.
func (x *holding) advance() {
	if x.changing || len(x.processes) == 0 {
		return
	}
	t := loop.Now()
	shims := x.heldByShims()
	x.held.Charge(max(shims-x.shims, 0))
	x.shims = shims
	on, _ := x.held.Step(time.Duration(t))
	if on != x.on || !on { // to be taken off again renews the order
		x.switchTo(on)
		return
	}
	x.step.Set(x.nextStep())
}

// nextStep is when the account says something else, or the order is to be renewed.
func (x *holding) nextStep() base.Time {
	t := loop.Now()
	on, until := x.held.Step(time.Duration(t))
	at := base.Time(until)
	if !on && x.on || on && !x.on {
		at = t
	}
	if !on {
		at = min(at, t.Add(renewAfter))
	}
	return at
}

// switchTo takes all off, or puts them on.
func (x *holding) switchTo(on bool) {
	op := order.Off
	if on {
		op = order.On
	}
	var orders []order.Order
	var whose []*heldProcess
	for p, one := range x.processes {
		if one.ready {
			orders, whose = append(orders, x.order(p, op)), append(whose, one)
		}
	}
	x.count()
	x.changing = len(orders) > 0
	if !x.changing {
		x.on = on
		if !on {
			x.held.IsOff(time.Duration(loop.Now()))
		}
		x.step.Set(loop.Now().Add(renewAfter))
		return
	}
	if on {
		x.on = true
	}
	x.w.Holder.order(x.w, orders, func(results []order.Result) {
		x.changing = false
		for i, r := range results {
			if r.Error != "" && !r.Gone { // it is on; takeHeld tries again
				whose[i].ready, whose[i].err = false, errors.New(r.Error)
			}
		}
		x.count()
		if x.on = on; !on {
			x.held.IsOff(time.Duration(loop.Now()))
		}
		x.step.Set(x.nextStep())
	})
}

// count notes how long they were on.
func (x *holding) count() {
	t := loop.Now()
	if x.on {
		x.had += t.Sub(x.counted)
	}
	x.counted = t
	if span := t.Sub(x.since); span >= recent {
		x.part = float64(x.had) / float64(span)
		x.since, x.had = t, 0
	}
}

// describeHeld says how a process without a shim is held; "": it is not.
func (w *Watch) describeHeld(g *node.GPU, p *peer.Peer) string {
	if w.Holder == nil {
		return ""
	}
	x := w.Holder.Holdings[holdingKey{g.UUID, p.Account}]
	if x == nil {
		return ""
	}
	switch one := x.processes[p.Process]; {
	case one == nil || !one.ready && one.err == nil:
		return ""
	case one.err != nil:
		return fmt.Sprintf("not held to its core limit: %v", one.err)
	case one.looks >= cheatLooks:
		return fmt.Sprintf("not held to its core limit of %d %%: it puts its channels on by itself, and had %.0f %% of the GPU's time", x.limit, 100*one.part)
	case x.part < 0:
		return fmt.Sprintf("held from outside to its core limit of %d %%", x.limit)
	}
	return fmt.Sprintf("held from outside: its channels were on for %.1f %% of the time, its core limit is %d %%", 100*x.part, x.limit)
}
