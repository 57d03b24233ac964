// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
)

// Processes on their way: the driver takes each off its GPU, and restores it with both GPUs exchanged.

// bringBackPause lies between two tries to have a process run again.
const bringBackPause = time.Second

// carry has a goroutine move the processes. A scheduler that ends waits for none of these: the
// driver may take a minute, and the next one knows from the record who is off.
func (mv *Moves) carry(m *Move) {
	m.Phase, m.carried = Carried, true
	m.limit.Stop()
	m.noteTime("memory out")
	var all []peer.Process
	for _, cl := range m.clients {
		mv.From[cl] = m.From
		all = append(all, cl.Process)
	}
	if m.err = mv.RecordCarried(); m.err != nil { // a restart would not know of them
		mv.cutLoose(m)
		return
	}
	there, back := mv.exchange(m.From, m.To), mv.exchange(m.To, m.From)
	go func() {
		took, err := mv.carryAll(all, there, back)
		mv.Do(func() {
			m.err, m.took = err, m.took.Add(took...)
			mv.cutLoose(m)
		})
	}()
}

// cutLoose has processes attach to the GPU that they are on.
func (mv *Moves) cutLoose(m *Move) {
	m.Phase = Arrives
	m.mayTake(arriveLimit)
	for _, cl := range m.clients {
		if c := cl.Conn; c != nil {
			mv.ShutDown(c)
			mv.lose(c)
		}
	}
}

// exchange says where each GPU of the node goes if two of them are exchanged.
func (mv *Moves) exchange(a, b *node.GPU) (pairs []checkpoint.Pair) {
	for _, g := range mv.Order {
		to := g
		switch g {
		case a:
			to = b
		case b:
			to = a
		}
		pairs = append(pairs, checkpoint.Pair{Old: g.UUID, New: to.UUID})
	}
	return pairs
}

// carryAll moves processes one after the other. If one cannot move, those that have go back. A
// process that cannot come back is tried again after the return: the others need not wait.
func (mv *Moves) carryAll(all []peer.Process, there, back []checkpoint.Pair) (took checkpoint.Times, err error) {
	for i, p := range all {
		one, err := mv.carryOne(p, there)
		if took = took.Add(one...); err == nil {
			continue
		}
		if errors.Is(err, loop.ErrEnding) {
			return took, err
		}
		for _, moved := range all[:i] {
			if _, err := mv.carryOne(moved, back); err != nil {
				mv.bringBack(moved)
			}
		}
		mv.bringBack(p)
		return took, err
	}
	return took, nil
}

func (mv *Moves) carryOne(p peer.Process, pairs []checkpoint.Pair) (checkpoint.Times, error) {
	ctx := context.Background() // an operation has a limit of its own
	took, err := mv.OnProcess(p, func(pid int) (checkpoint.Times, error) { return mv.Opts.Checkpoint.Off(ctx, pid) })
	if err != nil {
		return took, err
	}
	on, err := mv.OnProcess(p, func(pid int) (checkpoint.Times, error) { return mv.Opts.Checkpoint.On(ctx, pid, pairs) })
	return took.Add(on...), err
}

// OnProcess operates on a process. One that has ended is left alone, because its PID may be
// another's, and is no error. A scheduler that ends begins nothing.
func (mv *Moves) OnProcess(p peer.Process, operate func(pid int) (checkpoint.Times, error)) (checkpoint.Times, error) {
	if mv.Life.Err() != nil {
		return nil, loop.ErrEnding
	}
	lives, err := mv.Peers.Find(p)
	if peer.Ended(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer lives.Close()
	return operate(int(p.PID))
}

// bringBack has a process run again, on the GPU where it can. It goes on after the return for
// as long as the process lives: nothing else could be done for it.
func (mv *Moves) bringBack(p peer.Process) {
	if mv.tryBack(p) != nil {
		go mv.keepTrying(p)
	}
}

// keepTrying returns when a process runs again, or the scheduler ends.
func (mv *Moves) keepTrying(p peer.Process) {
	told := false
	for {
		err := mv.tryBack(p)
		if err == nil || errors.Is(err, loop.ErrEnding) {
			return
		}
		if !told {
			mv.Log.WithError(err).Errorf("process %d is off its GPU and cannot come back; trying again every %v", p.PID, bringBackPause)
			told = true
		}
		select {
		case <-mv.Ended(): // the next scheduler goes on, see RestoreCarried
			return
		case <-time.After(bringBackPause):
		}
	}
}

// tryBack returns why a process does not run. No error: it runs, it has ended, or the driver
// has given it up, and its calls return errors.
func (mv *Moves) tryBack(p peer.Process) error {
	_, err := mv.OnProcess(p, func(pid int) (checkpoint.Times, error) {
		return mv.Opts.Checkpoint.On(context.Background(), pid, nil)
	})
	if err == nil {
		return nil
	}
	if mv.HasEnded(p) {
		return nil
	}
	if e := (*checkpoint.Error)(nil); errors.As(err, &e) && e.State == checkpoint.Failed {
		mv.Log.WithError(err).Errorf("process %d is off its GPU, and the driver cannot restore it: end it", p.PID)
		return nil
	}
	return err
}

// Arrive brings the books into line with the GPU to which a process attaches that may have
// moved. It returns whether it has.
func (mv *Moves) Arrive(cl *node.Client, g *node.GPU) bool {
	from := mv.From[cl]
	if from == nil {
		return false
	}
	delete(mv.From, cl)
	delete(mv.strayed, cl)
	m := mv.Migrations[cl.Account]
	if from != g {
		delete(cl.Attached, from)
		delete(from.Restored, cl.ID)
	}
	if m == nil { // else the record holds until the move has ended
		mv.recordOrSay()
		mv.follow(cl, g)
	}
	if from == g {
		return false
	}
	mv.HasMoved(cl.Container, from, g)
	if m != nil {
		m.moved = true
		mv.Of(cl).Again = m.asleep
	}
	has := mv.TakeMember(cl, from)
	mv.Step(from, sched.Gone{Client: cl.ID})
	mv.PutMember(has, from, g)
	return true
}

// follow has a process that comes after its move has ended go where the rest of its tenant is.
func (mv *Moves) follow(cl *node.Client, g *node.GPU) {
	for _, rest := range mv.Order {
		if rest != g && mv.Opts.Checkpoint != nil && len(mv.on(rest, cl.Account)) > 0 {
			mv.goOn(cl, g, rest)
			mv.Migrations[cl.Account].moved = true
			return
		}
	}
}

// Which processes a move is about is recorded before the first of them goes, until the move has ended:
// a scheduler that starts has them run again. They attach to the GPU that they are on, and those that
// are on the old GPU follow the others.

const carriedVersion = 1

type carriedFile struct {
	Version   int              `json:"version"`
	BootID    string           `json:"boot_id"`
	Processes []CarriedProcess `json:"processes"`
}

// CarriedProcess is a process of a tenant that moves.
type CarriedProcess struct {
	peer.Process
	From string `json:"from"`         // UUID
	To   string `json:"to,omitempty"` // "": nowhere any more, and it may still be off
}

func (mv *Moves) carriedPath() string { return filepath.Join(mv.Opts.RunDir, "migrating.json") }

// RecordCarried writes the file.
func (mv *Moves) RecordCarried() error {
	file := carriedFile{Version: carriedVersion, BootID: mv.BootID, Processes: []CarriedProcess{}}
	for _, cl := range mv.Clients {
		was, strayed := mv.strayed[cl]
		switch m := mv.Migrations[cl.Account]; {
		case m != nil && m.carried && (mv.From[cl] != nil || cl.Attached[m.From] != nil || cl.Attached[m.To] != nil):
			was = CarriedProcess{cl.Process, m.From.UUID, m.To.UUID}
		case mv.From[cl] != nil && !strayed:
			was = CarriedProcess{Process: cl.Process, From: mv.From[cl].UUID}
		case !strayed:
			continue
		}
		file.Processes = append(file.Processes, was)
	}
	file.Processes = append(file.Processes, node.UnsureOf[CarriedProcess](mv.Node)...)
	if err := state.WriteRecord(mv.carriedPath(), file); err != nil {
		return fmt.Errorf("record which processes move: %w", err)
	}
	return nil
}

func (mv *Moves) recordOrSay() {
	if err := mv.RecordCarried(); err != nil {
		mv.Log.Error(err)
	}
}

// RestoreCarried goes on with what an earlier scheduler has begun.
func (mv *Moves) RestoreCarried() error {
	file, _, err := state.Restore[carriedFile](mv.Log, mv.carriedPath(), carriedVersion,
		"which processes were on their way to another GPU is not known: processes that hang need nvshare-checkpoint on PID")
	if err != nil || file.BootID != mv.BootID {
		return err
	}
	for _, was := range file.Processes {
		mv.OnceKnown(was, fmt.Sprintf("process %d lives, which was on its way to another GPU,", was.PID), func() error { return mv.RestoreCarriedOne(was) })
	}
	return nil
}

// RestoreCarriedOne has a process run again, if it lives.
func (mv *Moves) RestoreCarriedOne(was CarriedProcess) error {
	cl, err := mv.ClientOf(was.Process)
	if cl == nil || len(cl.Attached) > 0 { // it has come back since it could not be found
		return err
	}
	mv.strayed[cl] = was
	mv.FindStrayed()
	mv.Log.Warnf("process %d was on its way to another GPU when the earlier scheduler ended; it is made to run again", was.PID)
	if mv.Opts.Checkpoint == nil {
		return nil
	}
	mv.returning[cl] = true
	go func() {
		mv.keepTrying(was.Process)
		mv.Do(func() {
			delete(mv.returning, cl)
			if m := mv.Migrations[cl.Account]; m != nil && m.Phase == Arrives {
				m.mayTake(arriveLimit)
			}
		})
	}()
	return nil
}

// FindStrayed notes which processes may have left a GPU, once that is found, and has their tenants' moves
// go on where both GPUs are.
func (mv *Moves) FindStrayed() {
	for cl, was := range mv.strayed {
		from, to := mv.FindGPU(was.From), mv.FindGPU(was.To)
		if from == nil {
			continue
		}
		mv.From[cl] = from
		switch {
		case was.To == "" || mv.Opts.Checkpoint == nil:
			delete(mv.strayed, cl)
		case to != nil:
			delete(mv.strayed, cl)
			mv.goOn(cl, from, to)
		}
	}
}

// goOn has a process take part in a move that has begun before.
func (mv *Moves) goOn(cl *node.Client, from, to *node.GPU) {
	m := mv.Migrations[cl.Account]
	if m == nil {
		m = mv.newMove(cl.Account, from, to, func(*Move) {})
		m.Phase, m.carried, m.legs = Arrives, true, 1
		m.mayTake(checkpoint.DefaultLimit + arriveLimit) // an earlier nvshare-checkpoint may be at work
	}
	m.clients, m.count = append(m.clients, cl), m.count+1
}
