// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
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

// away has the processes that are off their GPUs with their contexts, or on their way.
type away struct {
	*node
	*memory
	absences map[*client]*absence
	files    files
	// These are the constants, except in tests.
	prepareLimit, busyPause, restPause, leaveWait time.Duration
}

func newAway(mem *memory) *away {
	aw := &away{node: mem.node, memory: mem, absences: map[*client]*absence{},
		prepareLimit: prepareLimit, busyPause: busyPause, restPause: restPause, leaveWait: leaveWait}
	mem.contexts = aw
	return aw
}

// of returns where a client is.
func (aw *away) of(cl *client) *absence {
	a := aw.absences[cl]
	if a == nil {
		a = &absence{}
		if aw.clients[cl.id] == cl { // else it has ended
			aw.absences[cl] = a
		}
	}
	return a
}

// isAway, wasAway, memoryLeaves and isFiled are for package memory.
func (aw *away) isAway(cl *client) bool { return aw.of(cl).step != present }

func (aw *away) wasAway(cl *client) {
	if a := aw.of(cl); a.step == present { // or about to leave, or to return: to restore it does no harm
		a.step = absent
	}
}

func (aw *away) memoryLeaves(cl *client) {
	aw.expectCheckpoints(1) // while its memory leaves
	aw.considerLeaving(cl)  // it may have nothing on the GPU but its context
}

func (aw *away) isFiled(cl *client) bool {
	f := aw.of(cl).file
	return f != nil && f.step == filed
}

// lost is for a client whose connection is lost: it says itself how far it got.
func (aw *away) lost(cl *client) {
	if aw.of(cl).step == preparing {
		aw.awayStep(cl, present)
	}
}

// ended forgets a client, and does what waited for it.
func (aw *away) ended(cl *client) {
	aw.of(cl).next.Stop()
	aw.dropFile(cl)
	aw.goOn(cl) // an order of resume waits for the other processes only
	delete(aw.absences, cl)
	aw.nextLeaves()
	aw.hostIsFree()
}

var contextStates = map[awayStep]api.ContextState{
	present:   api.ContextState_CONTEXT_STATE_PRESENT,
	preparing: api.ContextState_CONTEXT_STATE_LEAVING,
	leaving:   api.ContextState_CONTEXT_STATE_LEAVING,
	absent:    api.ContextState_CONTEXT_STATE_AWAY,
	returning: api.ContextState_CONTEXT_STATE_RETURNING,
}

// describe fills in where the context of a client is.
func (aw *away) describe(cl *client, c *api.Client) {
	a := aw.of(cl)
	c.Context, c.RestoreNs = contextStates[a.step], int64(a.took)
	if a.why != nil {
		c.ContextProblem = a.why.Error()
	}
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
	file   *file             // with its memory; nil: that is in host memory
	// unfiled is until when its memory is not written to a file: the latest try has failed.
	unfiled time.Time
	stays   string // why
}

// considerLeaving has a client leave with its context, if all its memory has left.
func (aw *away) considerLeaving(cl *client) {
	a := aw.of(cl)
	switch {
	case a.queued.IsZero() && a.next.Planned(): // it is considered later
	case !aw.canLeave(cl):
		aw.leaveQueue(cl)
	case !aw.othersMove(cl):
		aw.prepare(cl)
	case a.queued.IsZero():
		a.queued = time.Now()
		aw.planAway(cl, aw.leaveWait, func() {
			if aw.canLeave(cl) {
				aw.prepare(cl)
			}
		})
	}
}

// canLeave tells whether a client can leave with its context now. It notes what keeps one
// for good.
func (aw *away) canLeave(cl *client) bool {
	a := aw.of(cl)
	if aw.leaving[cl.Account] != nil { // it leaves in another way
		return false
	}
	if aw.opts.Checkpoint == nil || a.step != present || a.why != nil || cl.conn == nil || len(cl.attached) == 0 {
		return false
	}
	for g := range cl.attached {
		if !g.core.Left(cl.id) {
			return false
		}
		if why := foreignOn(g, []*client{cl}); why != nil {
			aw.keepsContext(cl, why)
			return false
		}
		if has, _ := g.core.ClientMemory(cl.id); has.Fixed > maxFixed {
			aw.keepsContext(cl, fmt.Errorf("%d MiB of its memory cannot be moved", has.Fixed>>20))
			return false
		}
	}
	if !cl.conn.suspends {
		aw.keepsContext(cl, errors.New("its shim is too old, or calls of the driver bypass it"))
		return false
	}
	return true
}

// prepare asks a client to keep out of the driver.
func (aw *away) prepare(cl *client) {
	aw.awayStep(cl, preparing)
	aw.planAway(cl, aw.prepareLimit, func() { aw.notNow(cl, errors.New("its shim does not answer")) })
	aw.send(cl.conn, &wire.Frame{Type: wire.TypeSuspend, Code: wire.SuspendPrepare}, nil)
}

// othersMove tells whether another process leaves or comes back. The driver does such things
// one after the other, more or less: a return of 0.4 s takes 0.8 s beside a checkpoint (on an
// H200). Nobody waits for the process that leaves, so it is the one to wait.
func (aw *away) othersMove(cl *client) bool {
	for _, other := range aw.clients {
		if s := aw.of(other).step; other != cl && s != present && s != absent && aw.of(other).file == nil { // else the driver is not asked yet
			return true
		}
	}
	return false
}

// nextLeaves has the process leave that has waited longest for its turn.
func (aw *away) nextLeaves() {
	for {
		var first *client
		for _, cl := range aw.clients {
			if at := aw.of(cl).queued; !at.IsZero() && (first == nil || at.Before(aw.of(first).queued)) {
				first = cl
			}
		}
		if first == nil || aw.othersMove(first) {
			return
		}
		aw.considerLeaving(first) // which ends its wait
	}
}

// leaveQueue ends a client's wait for its turn to leave.
func (aw *away) leaveQueue(cl *client) {
	if a := aw.of(cl); !a.queued.IsZero() {
		a.queued = time.Time{}
		a.next.Stop()
	}
}

func (aw *away) awayStep(cl *client, step awayStep) {
	a := aw.of(cl)
	if step != a.step {
		a.step, a.since = step, time.Now()
	}
	a.next.Stop()
	a.queued = time.Time{}
	if step == present || step == absent {
		defer aw.nextLeaves()
	}
	if step != preparing {
		aw.noteMembers()
	}
	aw.expectCheckpoints(0)
}

// expectCheckpoints has the checkpointer be ready for the processes that are off the GPU or
// on their way, and for so many more.
func (aw *away) expectCheckpoints(more int) {
	if aw.opts.Checkpoint == nil {
		return
	}
	for _, cl := range aw.clients {
		if aw.of(cl).step != present {
			more++
		}
	}
	aw.opts.Checkpoint.Expect(more + len(aw.leaving))
}

// planAway has something done later, unless the client takes another step before.
func (aw *away) planAway(cl *client, after time.Duration, do func()) {
	aw.of(cl).next.Stop()
	aw.of(cl).next = aw.timers.New(func() {
		if aw.clients[cl.id] == cl {
			do()
		}
	})
	aw.of(cl).next.Set(now().Add(after))
}

// keepsContext notes why a client stays on the GPU, until it has had another grant.
func (aw *away) keepsContext(cl *client, why error) {
	aw.of(cl).why = why
	text := "keeps its context on the GPU: " + why.Error()
	aw.tell(cl.subject(), logrus.WarnLevel, text)
	aw.noteAway(cl, text)
}

// suspended handles SUSPENDED.
func (aw *away) suspended(c *conn, f *wire.Frame) {
	cl := c.client
	if cl.conn != c {
		return // it attaches first
	}
	a := aw.of(cl)
	switch f.Code {
	case wire.SuspendedReady:
		switch a.step {
		case preparing:
			aw.leave(cl)
		case present: // the order is taken back
			aw.send(c, &wire.Frame{Type: wire.TypeSuspend, Code: wire.SuspendOver}, nil)
		}
	case wire.SuspendedBusy:
		if a.step == preparing {
			aw.notNow(cl, errors.New("its threads keep calling the driver"))
		}
	case wire.SuspendedWake:
		aw.wake(cl, nil)
	}
}

// notNow is for a client that was asked to keep out of the driver, and does not: it is asked
// again later, and not for ever.
func (aw *away) notNow(cl *client, why error) {
	a := aw.of(cl)
	aw.awayStep(cl, present)
	aw.isPresent(cl)
	if a.tries++; a.tries < busyTries {
		aw.planAway(cl, aw.busyPause, func() { aw.considerLeaving(cl) })
	} else if a.why == nil {
		aw.keepsContext(cl, why)
	}
}

// leave has the driver checkpoint a client.
func (aw *away) leave(cl *client) {
	aw.awayStep(cl, leaving)
	pid, off := int(cl.PID), aw.opts.Checkpoint
	aw.reach(beforeCheckpoint)
	go func() { // a scheduler that ends does not end what it has begun
		took, err := off.Off(context.Background(), pid)
		aw.Do(func() { aw.hasLeft(cl, took, err) })
	}()
}

func (aw *away) hasLeft(cl *client, took checkpoint.Times, err error) {
	a := aw.of(cl)
	if aw.clients[cl.id] != cl || a.step != leaving {
		return
	}
	aw.reach(afterCheckpoint)
	if err == nil {
		text := fmt.Sprintf("left the GPU with its context, in %v (%v)", time.Since(a.since).Round(time.Millisecond), took)
		aw.awayStep(cl, absent)
		a.tries = 0
		aw.logOf(cl.subject()).Info(text)
		aw.noteAway(cl, text)
	} else {
		aw.keepsContext(cl, err)
		var e *checkpoint.Error
		if errors.As(err, &e) && (e.State == checkpoint.Running || e.Step == "find" || e.Step == "init" || e.Step == "state") || errors.Is(err, checkpoint.ErrNone) {
			aw.awayStep(cl, present) // nothing was done to it
			aw.isPresent(cl)
			return
		}
		a.wanted = true // the driver has locked it at least
	}
	if a.wanted {
		aw.comeBack(cl)
	}
	aw.considerWriting()
}

// wake has a client come back with its context, and then does what is to be done under the
// GPU again; at once if it is there. then may be nil.
func (aw *away) wake(cl *client, then func()) {
	a := aw.of(cl)
	if then != nil {
		a.then = append(a.then, then)
	}
	a.wanted = true
	switch a.step {
	case present, preparing:
		aw.awayStep(cl, present)
		aw.isPresent(cl)
	case absent:
		aw.comeBack(cl)
	}
}

// comeBack has the driver restore a client.
func (aw *away) comeBack(cl *client) {
	aw.awayStep(cl, returning)
	if !aw.inMemory(cl) {
		return
	}
	pid, pairs, on := int(cl.PID), aw.of(cl).pairs, aw.opts.Checkpoint
	aw.reach(beforeReturn)
	go func() {
		var took checkpoint.Times
		err := error(checkpoint.ErrNone)
		if on != nil {
			took, err = on.On(context.Background(), pid, pairs)
		}
		aw.Do(func() { aw.isBack(cl, took, err) })
	}()
}

func (aw *away) isBack(cl *client, took checkpoint.Times, err error) {
	a := aw.of(cl)
	if aw.clients[cl.id] != cl || a.step != returning {
		return
	}
	aw.reach(afterReturn)
	var e *checkpoint.Error
	if err != nil && !(errors.As(err, &e) && e.State == checkpoint.Failed) {
		aw.notBack(cl, logrus.WarnLevel, "cannot come back to the GPU yet: ", err)
		return
	}
	a.took = time.Since(a.since)
	text := fmt.Sprintf("came back to the GPU with its context, in %v (%v)", a.took.Round(time.Millisecond), took)
	if err != nil {
		text = "cannot come back to the GPU, its CUDA calls fail: end it: " + err.Error()
		aw.tell(cl.subject(), logrus.ErrorLevel, text)
	}
	aw.awayStep(cl, present)
	if a.why = err; err == nil {
		aw.logOf(cl.subject()).Info(text)
	}
	aw.noteAway(cl, text)
	if err == nil {
		aw.planAway(cl, aw.restPause, func() { aw.considerLeaving(cl) })
	}
	aw.isPresent(cl)
}

// notBack is for a client that has not come back: it is tried again if it is still to.
func (aw *away) notBack(cl *client, level logrus.Level, text string, why error) {
	a := aw.of(cl)
	if a.why == nil || a.why.Error() != why.Error() {
		aw.tell(cl.subject(), level, text+why.Error())
		aw.noteAway(cl, text+why.Error())
	}
	a.why = why
	if a.step == returning {
		aw.planAway(cl, min(minRetry<<min(a.tries, 10), maxRetry), func() { aw.comeBack(cl) })
		a.tries++
	}
}

// isPresent tells a client that its calls may go on, and does what waited for it.
func (aw *away) isPresent(cl *client) {
	if cl.conn != nil && cl.conn.suspends {
		aw.send(cl.conn, &wire.Frame{Type: wire.TypeSuspend, Code: wire.SuspendOver}, nil)
	}
	aw.goOn(cl)
}

// goOn does what waited for a client to be present.
func (aw *away) goOn(cl *client) {
	a := aw.of(cl)
	a.wanted, a.pairs = false, nil
	then := a.then
	a.then = nil
	for _, f := range then {
		f()
	}
}

// awayRegistered brings what is known of a client into line with what it says itself,
// when it uses GPUs over another connection.
func (aw *away) awayRegistered(cl *client) {
	a := aw.of(cl)
	if cl.conn.isAway {
		aw.filedRegistered(cl)
	} else {
		aw.dropFile(cl)
	}
	switch out := cl.conn.isAway; {
	case out && (a.step == present || a.step == preparing): // left under an earlier scheduler, or is about to
		aw.awayStep(cl, absent)
	case out && a.step == absent && a.wanted:
		aw.comeBack(cl)
	case !out && a.step != present && a.step != preparing: // another program of the same process, or it is back
		aw.awayStep(cl, present)
		aw.goOn(cl)
	}
}

// atWork is for a client that is granted: what kept it from leaving may be over.
func (aw *away) atWork(cl *client) {
	a := aw.of(cl)
	a.why, a.tries, a.again = nil, 0, false
	a.queued = time.Time{}
	if a.step == present {
		a.next.Stop()
	}
}

// sleepAgain suspends a client's tenant that has moved here and was suspended before, once the
// client has said what memory it has.
func (aw *away) sleepAgain(cl *client, g *gpu) {
	if aw.of(cl).again {
		aw.of(cl).again = false
		aw.step(g, sched.Suspend{Tenant: cl.Account})
	}
}

// awayOf returns the clients of an account that are not present, on a GPU or (nil) on any.
func (aw *away) awayOf(account string, on *gpu) (all []*client) {
	for cl := range aw.byAccount[account] {
		if aw.of(cl).step != present && (on == nil || cl.attached[on] != nil) {
			all = append(all, cl)
		}
	}
	return all
}
