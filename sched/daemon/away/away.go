// SPDX-License-Identifier: Apache-2.0

package away

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/node"
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
	BusyTries    = 3
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

// Away has the processes that are off their GPUs with their contexts, or on their way.
type Away struct {
	*node.Node
	*memory.Memory
	absences map[*node.Client]*absence
	Files    files
	// These are the constants, except in tests.
	PrepareLimit, BusyPause, RestPause, LeaveWait time.Duration
}

// New makes itself known to package memory.
func New(mem *memory.Memory) *Away {
	aw := &Away{Node: mem.Node, Memory: mem, absences: map[*node.Client]*absence{},
		PrepareLimit: prepareLimit, BusyPause: busyPause, RestPause: restPause, LeaveWait: leaveWait}
	mem.Contexts = aw
	return aw
}

// Of returns where a client is.
func (aw *Away) Of(cl *node.Client) *absence {
	a := aw.absences[cl]
	if a == nil {
		a = &absence{}
		if aw.Clients[cl.ID] == cl { // else it has ended
			aw.absences[cl] = a
		}
	}
	return a
}

// IsAway, WasAway, MemoryLeaves and IsFiled are for package memory.
func (aw *Away) IsAway(cl *node.Client) bool { return aw.Of(cl).step != present }

func (aw *Away) WasAway(cl *node.Client) {
	if a := aw.Of(cl); a.step == present { // or about to leave, or to return: to restore it does no harm
		a.step = absent
	}
}

func (aw *Away) MemoryLeaves(cl *node.Client) {
	aw.ExpectCheckpoints(1) // while its memory leaves
	aw.ConsiderLeaving(cl)  // it may have nothing on the GPU but its context
}

func (aw *Away) IsFiled(cl *node.Client) bool {
	f := aw.Of(cl).File
	return f != nil && f.step == filed
}

// Lost is for a client whose connection is lost: it says itself how far it got.
func (aw *Away) Lost(cl *node.Client) {
	if aw.Of(cl).step == preparing {
		aw.awayStep(cl, present)
	}
}

// ForgetClient forgets a client, and does what waited for it.
func (aw *Away) ForgetClient(cl *node.Client) {
	aw.Of(cl).next.Stop()
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

// Describe fills in where the context of a client is.
func (aw *Away) Describe(cl *node.Client, c *api.Client) {
	a := aw.Of(cl)
	c.Context, c.RestoreNs = contextStates[a.step], int64(a.took)
	if a.why != nil {
		c.ContextProblem = a.why.Error()
	}
}

// absence says where a client is that may leave with its context.
type absence struct {
	step   awayStep
	next   *timer.Timer  // the end of the present step; the next try
	tries  int           // of the present step
	why    error         // it keeps its context, or cannot come back; nil: no attempt has failed
	wanted bool          // it is to come back
	then   []func()      // what is to be done once it is present
	since  time.Time     // of the present step
	queued time.Time     // since when it waits for its turn to leave; zero: it does not
	took   time.Duration // its latest return
	Again  bool          // it was suspended before it moved here, and is to be again
	File   *file         // with its memory; nil: that is in host memory
	// unfiled is until when its memory is not written to a file: the latest try has failed.
	unfiled time.Time
	stays   string // why
}

// ConsiderLeaving has a client leave with its context, if all its memory has left.
func (aw *Away) ConsiderLeaving(cl *node.Client) {
	a := aw.Of(cl)
	switch {
	case a.queued.IsZero() && a.next.Planned(): // it is considered later
	case !aw.canLeave(cl):
		aw.leaveQueue(cl)
	case !aw.othersMove(cl):
		aw.prepare(cl)
	case a.queued.IsZero():
		a.queued = time.Now()
		aw.planAway(cl, aw.LeaveWait, func() {
			if aw.canLeave(cl) {
				aw.prepare(cl)
			}
		})
	}
}

// canLeave tells whether a client can leave with its context now. It notes what keeps one
// for good.
func (aw *Away) canLeave(cl *node.Client) bool {
	a := aw.Of(cl)
	if aw.Leaving[cl.Account] != nil { // it leaves in another way
		return false
	}
	if aw.Opts.Checkpoint == nil || a.step != present || a.why != nil || cl.Conn == nil || len(cl.Attached) == 0 {
		return false
	}
	for g := range cl.Attached {
		if !g.Core.Left(cl.ID) {
			return false
		}
		if why := node.ForeignOn(g, []*node.Client{cl}); why != nil {
			aw.keepsContext(cl, why)
			return false
		}
		if has, _ := g.Core.ClientMemory(cl.ID); has.Fixed > maxFixed {
			aw.keepsContext(cl, fmt.Errorf("%d MiB of its memory cannot be moved", has.Fixed>>20))
			return false
		}
	}
	if !cl.Conn.Says(wire.RegisterSuspend) {
		aw.keepsContext(cl, errors.New("its shim is too old, or calls of the driver bypass it"))
		return false
	}
	return true
}

// prepare asks a client to keep out of the driver.
func (aw *Away) prepare(cl *node.Client) {
	aw.awayStep(cl, preparing)
	aw.planAway(cl, aw.PrepareLimit, func() { aw.notNow(cl, errors.New("its shim does not answer")) })
	aw.Send(cl.Conn, &wire.Frame{Type: wire.TypeSuspend, Code: wire.SuspendPrepare}, nil)
}

// othersMove tells whether another process leaves or comes back. The driver does such things
// one after the other, more or less: a return of 0.4 s takes 0.8 s beside a checkpoint (on an
// H200). Nobody waits for the process that leaves, so it is the one to wait.
func (aw *Away) othersMove(cl *node.Client) bool {
	for _, other := range aw.Clients {
		if s := aw.Of(other).step; other != cl && s != present && s != absent && aw.Of(other).File == nil { // else the driver is not asked yet
			return true
		}
	}
	return false
}

// nextLeaves has the process leave that has waited longest for its turn.
func (aw *Away) nextLeaves() {
	for {
		var first *node.Client
		for _, cl := range aw.Clients {
			if at := aw.Of(cl).queued; !at.IsZero() && (first == nil || at.Before(aw.Of(first).queued)) {
				first = cl
			}
		}
		if first == nil || aw.othersMove(first) {
			return
		}
		aw.ConsiderLeaving(first) // which ends its wait
	}
}

// leaveQueue ends a client's wait for its turn to leave.
func (aw *Away) leaveQueue(cl *node.Client) {
	if a := aw.Of(cl); !a.queued.IsZero() {
		a.queued = time.Time{}
		a.next.Stop()
	}
}

func (aw *Away) awayStep(cl *node.Client, step awayStep) {
	a := aw.Of(cl)
	if step != a.step {
		a.step, a.since = step, time.Now()
	}
	a.next.Stop()
	a.queued = time.Time{}
	if step == present || step == absent {
		defer aw.nextLeaves()
	}
	if step != preparing {
		aw.NoteMembers()
	}
	aw.ExpectCheckpoints(0)
}

// ExpectCheckpoints has the checkpointer be ready for the processes that are off the GPU or
// on their way, and for so many more.
func (aw *Away) ExpectCheckpoints(more int) {
	if aw.Opts.Checkpoint == nil {
		return
	}
	for _, cl := range aw.Clients {
		if aw.Of(cl).step != present {
			more++
		}
	}
	aw.Opts.Checkpoint.Expect(more + len(aw.Leaving))
}

// planAway has something done later, unless the client takes another step before.
func (aw *Away) planAway(cl *node.Client, after time.Duration, do func()) {
	aw.Of(cl).next.Stop()
	aw.Of(cl).next = aw.Timers.New(func() {
		if aw.Clients[cl.ID] == cl {
			do()
		}
	})
	aw.Of(cl).next.Set(loop.Now().Add(after))
}

// keepsContext notes why a client stays on the GPU, until it has had another grant.
func (aw *Away) keepsContext(cl *node.Client, why error) {
	aw.Of(cl).why = why
	aw.say(cl, logrus.WarnLevel, "keeps its context on the GPU: "+why.Error())
}

// say tells of a client, in the log and in the events.
func (aw *Away) say(cl *node.Client, level logrus.Level, text string) {
	aw.Tell(cl.Subject(), level, text)
	aw.NoteAway(cl, text)
}

// Suspended handles SUSPENDED.
func (aw *Away) Suspended(c *node.Conn, f *wire.Frame) {
	cl := c.Client
	if cl.Conn != c {
		return // it attaches first
	}
	a := aw.Of(cl)
	switch f.Code {
	case wire.SuspendedReady:
		switch a.step {
		case preparing:
			aw.leave(cl)
		case present: // the order is taken back
			aw.Send(c, &wire.Frame{Type: wire.TypeSuspend, Code: wire.SuspendOver}, nil)
		}
	case wire.SuspendedBusy:
		if a.step == preparing {
			aw.notNow(cl, errors.New("its threads keep calling the driver"))
		}
	case wire.SuspendedWake:
		aw.Wake(cl, nil)
	}
}

// notNow is for a client that was asked to keep out of the driver, and does not: it is asked
// again later, and not for ever.
func (aw *Away) notNow(cl *node.Client, why error) {
	a := aw.Of(cl)
	aw.awayStep(cl, present)
	aw.isPresent(cl)
	if a.tries++; a.tries < BusyTries {
		aw.planAway(cl, aw.BusyPause, func() { aw.ConsiderLeaving(cl) })
	} else if a.why == nil {
		aw.keepsContext(cl, why)
	}
}

func (aw *Away) leave(cl *node.Client) {
	aw.awayStep(cl, leaving)
	pid, off := int(cl.PID), aw.Opts.Checkpoint
	aw.Reach(node.BeforeCheckpoint)
	go func() { // a scheduler that ends does not end what it has begun
		took, err := off.Off(context.Background(), pid)
		aw.Do(func() { aw.hasLeft(cl, took, err) })
	}()
}

func (aw *Away) hasLeft(cl *node.Client, took checkpoint.Times, err error) {
	a := aw.Of(cl)
	if aw.Clients[cl.ID] != cl || a.step != leaving {
		return
	}
	aw.Reach(node.AfterCheckpoint)
	if err == nil {
		text := fmt.Sprintf("left the GPU with its context, in %v (%v)", time.Since(a.since).Round(time.Millisecond), took)
		aw.awayStep(cl, absent)
		a.tries = 0
		aw.say(cl, logrus.InfoLevel, text)
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

// Wake has a client come back with its context, and then does what is to be done under the
// GPU again; at once if it is there. then may be nil.
func (aw *Away) Wake(cl *node.Client, then func()) {
	a := aw.Of(cl)
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

func (aw *Away) comeBack(cl *node.Client) {
	aw.awayStep(cl, returning)
	if !aw.inMemory(cl) {
		return
	}
	pid, on := int(cl.PID), aw.Opts.Checkpoint
	aw.Reach(node.BeforeReturn)
	go func() {
		var took checkpoint.Times
		err := error(checkpoint.ErrNone)
		if on != nil {
			took, err = on.On(context.Background(), pid, nil)
		}
		aw.Do(func() { aw.isBack(cl, took, err) })
	}()
}

func (aw *Away) isBack(cl *node.Client, took checkpoint.Times, err error) {
	a := aw.Of(cl)
	if aw.Clients[cl.ID] != cl || a.step != returning {
		return
	}
	aw.Reach(node.AfterReturn)
	var e *checkpoint.Error
	if err != nil && !(errors.As(err, &e) && e.State == checkpoint.Failed) {
		aw.notBack(cl, logrus.WarnLevel, "cannot come back to the GPU yet: ", err)
		return
	}
	a.took = time.Since(a.since)
	aw.awayStep(cl, present)
	if a.why = err; err != nil {
		aw.say(cl, logrus.ErrorLevel, "cannot come back to the GPU, its CUDA calls fail: end it: "+err.Error())
	} else {
		aw.say(cl, logrus.InfoLevel, fmt.Sprintf("came back to the GPU with its context, in %v (%v)", a.took.Round(time.Millisecond), took))
		aw.planAway(cl, aw.RestPause, func() { aw.ConsiderLeaving(cl) })
	}
	aw.isPresent(cl)
}

// notBack is for a client that has not come back: it is tried again if it is still to.
func (aw *Away) notBack(cl *node.Client, level logrus.Level, text string, why error) {
	a := aw.Of(cl)
	if a.why == nil || a.why.Error() != why.Error() {
		aw.say(cl, level, text+why.Error())
	}
	a.why = why
	if a.step == returning {
		aw.planAway(cl, min(minRetry<<min(a.tries, 10), maxRetry), func() { aw.comeBack(cl) })
		a.tries++
	}
}

// isPresent tells a client that its calls may go on, and does what waited for it.
func (aw *Away) isPresent(cl *node.Client) {
	if cl.Conn != nil && cl.Conn.Says(wire.RegisterSuspend) {
		aw.Send(cl.Conn, &wire.Frame{Type: wire.TypeSuspend, Code: wire.SuspendOver}, nil)
	}
	aw.goOn(cl)
}

// goOn does what waited for a client to be present.
func (aw *Away) goOn(cl *node.Client) {
	a := aw.Of(cl)
	a.wanted = false
	then := a.then
	a.then = nil
	for _, f := range then {
		f()
	}
}

// AwayRegistered brings what is known of a client into line with what it says itself,
// when it uses GPUs over another connection.
func (aw *Away) AwayRegistered(cl *node.Client) {
	a := aw.Of(cl)
	if cl.Conn.Says(wire.RegisterAway) {
		aw.filedRegistered(cl)
	} else {
		aw.dropFile(cl)
	}
	switch out := cl.Conn.Says(wire.RegisterAway); {
	case out && (a.step == present || a.step == preparing): // left under an earlier scheduler, or is about to
		aw.awayStep(cl, absent)
	case out && a.step == absent && a.wanted:
		aw.comeBack(cl)
	case !out && a.step != present && a.step != preparing: // another program of the same process, or it is back
		aw.awayStep(cl, present)
		aw.goOn(cl)
	}
}

// AtWork is for a client that is granted: what kept it from leaving may be over.
func (aw *Away) AtWork(cl *node.Client) {
	a := aw.Of(cl)
	a.why, a.tries, a.Again = nil, 0, false
	a.queued = time.Time{}
	if a.step == present {
		a.next.Stop()
	}
}
