// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// A copier is a program that copies memory of a tenant that moves from GPU to GPU, before the
// tenant's processes are checkpointed, which keep only descriptors of the copies. So the memory need
// not go through the host, which takes four times as long for 60 GiB (H100). What it cannot copy goes
// to the arenas. A process that is not restored on the other GPU says so (MOVED, elsewhere): a copier
// brings the memory back.

const (
	MaxCopied = 8 // processes of a tenant; others go through the host
	// BringPause is after how long a process may be given another copier that brings memory back.
	BringPause    = time.Second // twice as long after each one
	maxBringPause = 16 * time.Second
)

// prepareCopier has a copier make both GPUs ready, and then has the tenant depart.
func (mv *Moves) prepareCopier(m *Move) {
	m.Phase = prepares
	why := ""
	for _, cl := range m.clients {
		if cl.Conn == nil || !cl.Conn.Copies {
			why = fmt.Sprintf("the shim of process %d is too old for that", cl.PID)
		}
	}
	if len(m.clients) > MaxCopied {
		why = fmt.Sprintf("they are %d processes, and %d at most are copied", len(m.clients), MaxCopied)
	}
	ours, theirs, err := sockets(len(m.clients))
	if err != nil {
		why = err.Error()
	}
	if why != "" {
		CloseAll(append(ours, theirs...))
		mv.Log.Infof("GPU %d: memory of %s goes through the host: %s", m.From.Index, mv.NameOf(m.account), why)
		mv.depart(m)
		return
	}
	clients := slices.Clone(m.clients) // those of them that end meanwhile leave m.clients
	copies := checkpoint.Copies{From: m.From.UUID, To: m.To.UUID, Bytes: 2 * m.From.MemoryBytes}
	mv.Go(func() {
		copier, err := mv.Opts.Checkpoint.Copy(context.Background(), copies, theirs) // has a limit of its own
		if !mv.Do(func() { mv.copierReady(m, clients, ours, copier, err) }) && copier != nil {
			copier.End()
		}
	})
}

// copierReady hands the copier out, if there is one, and has the tenant depart.
func (mv *Moves) copierReady(m *Move, clients []*node.Client, ours []*os.File, copier *checkpoint.Copier, err error) {
	defer CloseAll(ours)
	mv.KnowCopier(copier)
	if mv.Migrations[m.account] != m || m.Phase != prepares {
		if copier != nil {
			copier.End()
		}
		return
	}
	if err != nil {
		mv.Log.Infof("GPU %d: memory of %s goes through the host: %v", m.From.Index, mv.NameOf(m.account), err)
	} else {
		m.copier = copier
		for i, cl := range clients {
			if mv.sendCopier(cl, m.From, m.To, ours[i]) {
				mv.SetCopied(cl, m.From, true)
				mv.bringing(cl).pause = 0
			}
		}
	}
	mv.depart(m)
}

// KnowCopier has a copier be no stranger on its GPUs until it ends; nil: there is none.
func (mv *Moves) KnowCopier(c *checkpoint.Copier) {
	if c == nil {
		return
	}
	mv.Copiers[c.PID] = true
	mv.Go(func() {
		select {
		case <-c.Ended:
			mv.Do(func() { delete(mv.Copiers, c.PID) })
		case <-mv.Ended():
		}
	})
}

// sendCopier gives a process on a GPU a copier to another one, or to this one.
func (mv *Moves) sendCopier(cl *node.Client, on, to *node.GPU, socket *os.File) bool {
	att := cl.Attached[on]
	uuid, err := wire.ParseUUID(to.UUID)
	if att == nil || !att.Answered || mv.MemberOf(on, cl.ID) == nil || err != nil || cl.Conn == nil || cl.Conn.Channels[att.Channel] != att {
		return false
	}
	mv.Send(cl.Conn, &wire.Frame{Type: wire.TypeCopier, Channel: att.Channel, Copier: wire.Copier{GPU: uuid, Flags: wire.CopierCreates}}, unix.UnixRights(int(socket.Fd())))
	return true
}

// endCopier ends the copier of a tenant that has departed, or stays.
func (m *Move) endCopier() {
	if m.copier != nil {
		m.copier.End()
		m.copier = nil
	}
}

// wantArenas has processes that need arenas get them again. Until a move has ended they have
// copies on a GPU instead.
func (mv *Moves) wantArenas(m *Move) {
	for _, cl := range m.clients {
		for _, g := range []*node.GPU{m.From, m.To} {
			mv.SetCopied(cl, g, false)
		}
	}
}

// bringing is a copier that brings a client's memory back.
type bringing struct {
	on     bool // it began a moment ago
	pause  time.Duration
	copier *checkpoint.Copier // the latest; nil: there was none
}

// bringing returns that of a client.
func (mv *Moves) bringing(cl *node.Client) *bringing {
	b := mv.bringers[cl]
	if b == nil {
		b = &bringing{}
		mv.bringers[cl] = b
	}
	return b
}

// runs says whether there may be a copier.
func (b *bringing) runs() bool {
	if b.on || b.copier == nil {
		return b.on
	}
	select {
	case <-b.copier.Ended:
		return false
	default:
		return true
	}
}

// noteCopied takes note of what a process says of its copier: without arena, the copier
// could not copy all; elsewhere, its memory was copied and the process did not get away.
func (mv *Moves) noteCopied(att *node.Attachment, noArena, elsewhere bool) {
	g, cl := att.GPU, att.Client
	if noArena || elsewhere {
		mv.SetCopied(cl, g, false)
	}
	b := mv.bringing(cl)
	if !elsewhere || b.on || mv.Opts.Checkpoint == nil {
		return
	}
	others := 0
	for other := range mv.ByAccount[cl.Account] {
		if other != cl && mv.bringing(other).runs() {
			others++
		}
	}
	if others >= MaxCopied {
		return // no more have memory there, unless they lie
	}
	// What a process says costs the GPUs one copier at most, and fewer and fewer starts of one.
	b.on, b.pause = true, min(max(BringPause, 2*b.pause), maxBringPause)
	if b.copier != nil {
		b.copier.End()
		b.copier = nil
	}
	mv.Log.Infof("GPU %d: memory of process %d is on another GPU, and is brought back", g.Index, cl.PID)
	again := mv.Timers.New(func() { b.on = false })
	ours, theirs, err := sockets(1)
	if err != nil {
		mv.Log.WithError(err).Errorf("GPU %d: memory of process %d cannot be brought back", g.Index, cl.PID)
		again.Set(loop.Now().Add(b.pause))
		return
	}
	copies := checkpoint.Copies{To: g.UUID, Bytes: 2 * g.MemoryBytes}
	mv.Go(func() {
		copier, err := mv.Opts.Checkpoint.Copy(context.Background(), copies, theirs)
		done := mv.Do(func() {
			defer CloseAll(ours)
			mv.KnowCopier(copier)
			again.Set(loop.Now().Add(b.pause))
			switch {
			case err != nil:
				mv.Log.WithError(err).Errorf("GPU %d: memory of process %d cannot be brought back; trying again in %v", g.Index, cl.PID, b.pause)
			case mv.Clients[cl.ID] != cl || !mv.sendCopier(cl, g, g, ours[0]):
				copier.End()
			default: // it ends when the process closes its end
				b.copier = copier
			}
		})
		if !done && err == nil {
			copier.End()
		}
	})
}

// sockets returns pairs of connected sockets: our ends, to be given to processes, and the copier's.
func sockets(n int) (ours, theirs []*os.File, err error) {
	for range n {
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			CloseAll(append(ours, theirs...))
			return nil, nil, fmt.Errorf("make sockets for a copier: %w", err)
		}
		ours, theirs = append(ours, os.NewFile(uintptr(pair[0]), "process")), append(theirs, os.NewFile(uintptr(pair[1]), "copier"))
	}
	return ours, theirs, nil
}

// CloseAll closes files.
func CloseAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
