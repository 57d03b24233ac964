// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/wire"
)

// A process that is suspended leaves its GPUs with its context too, once its memory has:
//
//	present → preparing → leaving → absent → returning → present
//
// While it prepares, its shim sees to it that no thread is in the driver or comes there.
// The driver then checkpoints it (package checkpoint). Whatever wants the process to use
// the GPU again, its own first call or an order, has it restored first (wake). The core
// knows nothing of this: a process that is not present asks for no grant.
//
// A process that cannot leave keeps its context, and the status says why. One that cannot
// come back is tried again and again: its calls wait. If the driver says that it has
// failed for good, its calls go on to the driver, which refuses them.

type awayStep uint8

const (
	present   awayStep = iota
	preparing          // SUSPEND (prepare) was sent
	leaving            // the driver checkpoints it
	absent             // nothing of it is on a GPU
	returning          // the driver restores it
)

const (
	prepareLimit = 5 * time.Second // for the shim's answer, which comes within 1 s
	busyPause    = 5 * time.Second // after which a process that was in the driver, or did not answer, is asked again
	busyTries    = 3
	// restPause is how long a process stays that came back for a call and was granted
	// nothing. A program that only asks now and then would else be off and on, half a
	// second each, at every question.
	restPause = time.Minute
	// leaveWait is how long a process waits at most until others have left or come back.
	leaveWait = 10 * time.Second
	minRetry  = 100 * time.Millisecond // between tries to bring a process back
	maxRetry  = 10 * time.Second
	// maxFixed is how much memory that cannot be moved the driver may have to move.
	maxFixed = 8 << 30
)

// Checkpointer has the driver take a process off its GPUs, and put it back; see package
// checkpoint.
type Checkpointer interface {
	Off(ctx context.Context, pid int) (checkpoint.Times, error)
	On(ctx context.Context, pid int, pairs []checkpoint.Pair) (checkpoint.Times, error)
	// Expect says that so many operations may come at any time.
	Expect(operations int)
	// Copy starts a program that copies memory of processes to a GPU.
	Copy(ctx context.Context, c checkpoint.Copies, sockets []*os.File) (*checkpoint.Copier, error)
}

// checkCheckpoint finds out once whether processes can leave with their contexts.
func (d *Daemon) checkCheckpoint(ctx context.Context) {
	if d.opts.Checkpoint == nil || d.opts.CheckpointCheck == nil || d.opts.SwapMemory == 0 {
		return
	}
	d.wg.Go(func() {
		if err := d.opts.CheckpointCheck(ctx); err != nil && ctx.Err() == nil {
			d.do(func() { d.checkpointErr = err })
		}
	})
}

// checkpointProblem is what the status says; "": none.
func (d *Daemon) checkpointProblem() string {
	switch {
	case d.opts.SwapMemory == 0:
		return ""
	case d.opts.Checkpoint == nil:
		return checkpoint.ErrNone.Error()
	case d.checkpointErr != nil:
		return d.checkpointErr.Error()
	}
	return ""
}

// absence says where a client is that may leave with its context.
type absence struct {
	step   awayStep
	next   *timer.Timer      // the end of the present step; the next try
	tries  int               // of the present step
	why    error             // it keeps its context, or cannot come back; nil: no attempt has failed
	wanted bool              // it is to come back
	then   []func()          // what is to be done once it is present
	pairs  []checkpoint.Pair // where it comes back to; nil: the GPUs that it left
	since  time.Time         // of the present step
	queued time.Time         // since when it waits for its turn to leave; zero: it does not
	took   time.Duration     // its latest return
	again  bool              // it was suspended before it moved here, and is to be again
	// unfiled is until when its memory is not written to a file: the latest try has failed.
	unfiled time.Time
	stays   string // why
}

// considerLeaving has a client leave with its context, if all its memory has left.
func (d *Daemon) considerLeaving(cl *client) {
	a := &cl.away
	switch {
	case a.queued.IsZero() && a.next.Planned(): // it is considered later
	case !d.canLeave(cl):
		d.leaveQueue(cl)
	case !d.othersMove(cl):
		d.prepare(cl)
	case a.queued.IsZero():
		a.queued = time.Now()
		d.planAway(cl, d.leaveWait, func() {
			if d.canLeave(cl) {
				d.prepare(cl)
			}
		})
	}
}

// canLeave tells whether a client can leave with its context now. It notes what keeps one
// for good.
func (d *Daemon) canLeave(cl *client) bool {
	a := &cl.away
	if d.migrations[cl.Account] != nil { // it leaves in another way
		return false
	}
	if d.opts.Checkpoint == nil || a.step != present || a.why != nil || cl.conn == nil || len(cl.attached) == 0 {
		return false
	}
	for g := range cl.attached {
		if !g.core.Left(cl.id) {
			return false
		}
		if why := foreignOn(g, []*client{cl}); why != nil {
			d.keepsContext(cl, why)
			return false
		}
		if has, _ := g.core.ClientMemory(cl.id); has.Fixed > maxFixed {
			d.keepsContext(cl, fmt.Errorf("%d MiB of its memory cannot be moved", has.Fixed>>20))
			return false
		}
	}
	if !cl.conn.suspends {
		d.keepsContext(cl, errors.New("its shim is too old, or calls of the driver bypass it"))
		return false
	}
	return true
}

// prepare asks a client to keep out of the driver.
func (d *Daemon) prepare(cl *client) {
	d.awayStep(cl, preparing)
	d.planAway(cl, d.prepareLimit, func() { d.notNow(cl, errors.New("its shim does not answer")) })
	d.send(cl.conn, &wire.Frame{Type: wire.TypeSuspend, Code: wire.SuspendPrepare}, nil)
}

// othersMove tells whether another process leaves or comes back. The driver does such things
// one after the other, more or less: a return of 0.4 s takes 0.8 s beside a checkpoint (on an
// H200). Nobody waits for the process that leaves, so it is the one to wait.
func (d *Daemon) othersMove(cl *client) bool {
	for _, other := range d.clients {
		if s := other.away.step; other != cl && s != present && s != absent && other.file == nil { // else the driver is not asked yet
			return true
		}
	}
	return false
}

// nextLeaves has the process leave that has waited longest for its turn.
func (d *Daemon) nextLeaves() {
	for {
		var first *client
		for _, cl := range d.clients {
			if at := cl.away.queued; !at.IsZero() && (first == nil || at.Before(first.away.queued)) {
				first = cl
			}
		}
		if first == nil || d.othersMove(first) {
			return
		}
		d.considerLeaving(first) // which ends its wait
	}
}

// leaveQueue ends a client's wait for its turn to leave.
func (d *Daemon) leaveQueue(cl *client) {
	if a := &cl.away; !a.queued.IsZero() {
		a.queued = time.Time{}
		a.next.Stop()
	}
}

func (d *Daemon) awayStep(cl *client, step awayStep) {
	a := &cl.away
	if step != a.step {
		a.step, a.since = step, time.Now()
	}
	a.next.Stop()
	a.queued = time.Time{}
	if step == present || step == absent {
		defer d.nextLeaves()
	}
	if step != preparing {
		d.noteMembers()
	}
	d.expectCheckpoints(0)
}

// expectCheckpoints has the checkpointer be ready for the processes that are off the GPU or
// on their way, and for so many more.
func (d *Daemon) expectCheckpoints(more int) {
	if d.opts.Checkpoint == nil {
		return
	}
	for _, cl := range d.clients {
		if cl.away.step != present {
			more++
		}
	}
	d.opts.Checkpoint.Expect(more + len(d.migrations))
}

// planAway has something done later, unless the client takes another step before.
func (d *Daemon) planAway(cl *client, after time.Duration, do func()) {
	cl.away.next.Stop()
	cl.away.next = d.timers.New(func() {
		if d.clients[cl.id] == cl {
			do()
		}
	})
	cl.away.next.Set(now().Add(after))
}

// keepsContext notes why a client stays on the GPU, until it has had another grant.
func (d *Daemon) keepsContext(cl *client, why error) {
	cl.away.why = why
	text := "keeps its context on the GPU: " + why.Error()
	d.tell(cl.subject(), logrus.WarnLevel, text)
	d.noteAway(cl, text)
}

// noteAway notes an event of a client's on each of its GPUs.
func (d *Daemon) noteAway(cl *client, text string) {
	for g := range cl.attached {
		d.turn(time.Now(), g, cl.id, &history.Event{Kind: api.EventType_EVENT_TYPE_CONTEXT, Text: text})
	}
}

// suspended handles SUSPENDED.
func (d *Daemon) suspended(c *conn, f *wire.Frame) {
	cl := c.client
	if cl.conn != c {
		return // it attaches first
	}
	a := &cl.away
	switch f.Code {
	case wire.SuspendedReady:
		switch a.step {
		case preparing:
			d.leave(cl)
		case present: // the order is taken back
			d.send(c, &wire.Frame{Type: wire.TypeSuspend, Code: wire.SuspendOver}, nil)
		}
	case wire.SuspendedBusy:
		if a.step == preparing {
			d.notNow(cl, errors.New("its threads keep calling the driver"))
		}
	case wire.SuspendedWake:
		d.wake(cl, nil)
	}
}

// notNow is for a client that was asked to keep out of the driver, and does not: it is asked
// again later, and not for ever.
func (d *Daemon) notNow(cl *client, why error) {
	a := &cl.away
	d.awayStep(cl, present)
	d.isPresent(cl)
	if a.tries++; a.tries < busyTries {
		d.planAway(cl, d.busyPause, func() { d.considerLeaving(cl) })
	} else if a.why == nil {
		d.keepsContext(cl, why)
	}
}

// leave has the driver checkpoint a client.
func (d *Daemon) leave(cl *client) {
	d.awayStep(cl, leaving)
	pid, off := int(cl.PID), d.opts.Checkpoint
	d.reach(beforeCheckpoint)
	go func() { // a scheduler that ends does not end what it has begun
		took, err := off.Off(context.Background(), pid)
		d.do(func() { d.hasLeft(cl, took, err) })
	}()
}

func (d *Daemon) hasLeft(cl *client, took checkpoint.Times, err error) {
	a := &cl.away
	if d.clients[cl.id] != cl || a.step != leaving {
		return
	}
	d.reach(afterCheckpoint)
	if err == nil {
		text := fmt.Sprintf("left the GPU with its context, in %v (%v)", time.Since(a.since).Round(time.Millisecond), took)
		d.awayStep(cl, absent)
		a.tries = 0
		d.logOf(cl.subject()).Info(text)
		d.noteAway(cl, text)
	} else {
		d.keepsContext(cl, err)
		var e *checkpoint.Error
		if errors.As(err, &e) && (e.State == checkpoint.Running || e.Step == "find" || e.Step == "init" || e.Step == "state") || errors.Is(err, checkpoint.ErrNone) {
			d.awayStep(cl, present) // nothing was done to it
			d.isPresent(cl)
			return
		}
		a.wanted = true // the driver has locked it at least
	}
	if a.wanted {
		d.comeBack(cl)
	}
	d.considerWriting()
}

// wake has a client come back with its context, and then does what is to be done under the
// GPU again; at once if it is there. then may be nil.
func (d *Daemon) wake(cl *client, then func()) {
	a := &cl.away
	if then != nil {
		a.then = append(a.then, then)
	}
	a.wanted = true
	switch a.step {
	case present, preparing:
		d.awayStep(cl, present)
		d.isPresent(cl)
	case absent:
		d.comeBack(cl)
	}
}

// comeBack has the driver restore a client.
func (d *Daemon) comeBack(cl *client) {
	d.awayStep(cl, returning)
	if !d.inMemory(cl) {
		return
	}
	pid, pairs, on := int(cl.PID), cl.away.pairs, d.opts.Checkpoint
	d.reach(beforeReturn)
	go func() {
		var took checkpoint.Times
		err := error(checkpoint.ErrNone)
		if on != nil {
			took, err = on.On(context.Background(), pid, pairs)
		}
		d.do(func() { d.isBack(cl, took, err) })
	}()
}

func (d *Daemon) isBack(cl *client, took checkpoint.Times, err error) {
	a := &cl.away
	if d.clients[cl.id] != cl || a.step != returning {
		return
	}
	d.reach(afterReturn)
	var e *checkpoint.Error
	if err != nil && !(errors.As(err, &e) && e.State == checkpoint.Failed) {
		d.notBack(cl, logrus.WarnLevel, "cannot come back to the GPU yet: ", err)
		return
	}
	a.took = time.Since(a.since)
	text := fmt.Sprintf("came back to the GPU with its context, in %v (%v)", a.took.Round(time.Millisecond), took)
	if err != nil {
		text = "cannot come back to the GPU, its CUDA calls fail: end it: " + err.Error()
		d.tell(cl.subject(), logrus.ErrorLevel, text)
	}
	d.awayStep(cl, present)
	if a.why = err; err == nil {
		d.logOf(cl.subject()).Info(text)
	}
	d.noteAway(cl, text)
	if err == nil {
		d.planAway(cl, d.restPause, func() { d.considerLeaving(cl) })
	}
	d.isPresent(cl)
}

// notBack is for a client that has not come back: it is tried again if it is still to.
func (d *Daemon) notBack(cl *client, level logrus.Level, text string, why error) {
	a := &cl.away
	if a.why == nil || a.why.Error() != why.Error() {
		d.tell(cl.subject(), level, text+why.Error())
		d.noteAway(cl, text+why.Error())
	}
	a.why = why
	if a.step == returning {
		d.planAway(cl, min(minRetry<<min(a.tries, 10), maxRetry), func() { d.comeBack(cl) })
		a.tries++
	}
}

// isPresent tells a client that its calls may go on, and does what waited for it.
func (d *Daemon) isPresent(cl *client) {
	if cl.conn != nil && cl.conn.suspends {
		d.send(cl.conn, &wire.Frame{Type: wire.TypeSuspend, Code: wire.SuspendOver}, nil)
	}
	d.goOn(cl)
}

// goOn does what waited for a client to be present.
func (d *Daemon) goOn(cl *client) {
	a := &cl.away
	a.wanted, a.pairs = false, nil
	then := a.then
	a.then = nil
	for _, f := range then {
		f()
	}
}

// awayRegistered brings what is known of a client into line with what it says itself,
// when it uses GPUs over another connection.
func (d *Daemon) awayRegistered(cl *client) {
	a := &cl.away
	if cl.conn.isAway {
		d.filedRegistered(cl)
	} else {
		d.dropFile(cl)
	}
	switch out := cl.conn.isAway; {
	case out && (a.step == present || a.step == preparing): // left under an earlier scheduler, or is about to
		d.awayStep(cl, absent)
	case out && a.step == absent && a.wanted:
		d.comeBack(cl)
	case !out && a.step != present && a.step != preparing: // another program of the same process, or it is back
		d.awayStep(cl, present)
		d.goOn(cl)
	}
}

// atWork is for a client that is granted: what kept it from leaving may be over.
func (cl *client) atWork() {
	a := &cl.away
	a.why, a.tries, a.again = nil, 0, false
	a.queued = time.Time{}
	if a.step == present {
		a.next.Stop()
	}
}

// sleepAgain suspends a client's tenant that has moved here and was suspended before, once the
// client has said what memory it has.
func (d *Daemon) sleepAgain(cl *client, g *gpu) {
	if cl.away.again {
		cl.away.again = false
		d.step(g, sched.Suspend{Tenant: cl.Account})
	}
}

// awayOf returns the clients of an account that are not present, on a GPU or (nil) on any.
func (d *Daemon) awayOf(account string, on *gpu) (all []*client) {
	for cl := range d.byAccount[account] {
		if cl.away.step != present && (on == nil || cl.attached[on] != nil) {
			all = append(all, cl)
		}
	}
	return all
}
