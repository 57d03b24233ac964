// SPDX-License-Identifier: Apache-2.0

package overlap

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// keeper keeps one group's daemon running for as long as the group is wanted.
type keeper struct {
	m *Manager

	mu      sync.Mutex
	g       Group // one that was found by its directory is known later
	wanted  bool
	now     status
	changed chan struct{} // closed at the next change
}

type status struct {
	running        bool
	daemon, server int // pids
	restarts       int
	err            error
}

func newKeeper(m *Manager, g Group) *keeper {
	return &keeper{m: m, g: g, changed: make(chan struct{})}
}

// set changes what the keeper knows, and wakes whoever waits for that.
func (k *keeper) set(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
	close(k.changed)
	k.changed = make(chan struct{})
}

func (k *keeper) group() Group {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.g
}

func (k *keeper) want(yes bool) {
	k.mu.Lock()
	same := k.wanted == yes
	k.mu.Unlock()
	if !same {
		k.set(func() { k.wanted = yes })
	}
}

func (k *keeper) isWanted() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.wanted
}

func (k *keeper) state() (status, <-chan struct{}) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.now, k.changed
}

func (k *keeper) tell(kind Kind, pid int, err error) {
	k.m.o.Changed(Change{k.group(), kind, pid, err})
}

// pauseOrChange waits until something has changed, or d has passed; false: the Manager is
// closed.
func (k *keeper) pauseOrChange(d time.Duration) bool {
	k.mu.Lock()
	changed := k.changed
	k.mu.Unlock()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-k.m.closed:
		return false
	case <-timer.C:
	case <-changed:
	}
	return true
}

// run starts the daemon, watches it, and ends it when nobody wants the group.
func (k *keeper) run() {
	pause := firstPause
	taken := k.takeOver()
	for {
		p, began := taken, time.Now()
		taken = nil
		var err error
		switch {
		case p != nil:
			k.tell(TakenOver, int(p.PID), nil)
		case k.isWanted():
			p, err = k.start()
		}
		if err != nil {
			k.set(func() { k.now.running, k.now.err = false, err })
			k.tell(Failed, 0, err)
		} else if p != nil {
			k.set(func() { k.now.running, k.now.daemon, k.now.err = true, int(p.PID), nil })
			k.tell(Runs, int(p.PID), nil)
			ended := k.watch(p)
			k.set(func() { k.now.running, k.now.daemon = false, 0 })
			p.Close()
			if !ended {
				return // the Manager is closed
			}
			if time.Since(began) > longestPause {
				pause = firstPause
			}
		}
		if !k.isWanted() {
			k.clean()
			if k.m.gone(k) {
				k.tell(Ended, 0, nil)
				return
			}
			continue
		}
		k.set(func() { k.now.restarts++ })
		for end := time.Now().Add(pause); k.isWanted() && time.Now().Before(end); {
			if !k.pauseOrChange(time.Until(end)) {
				return
			}
		}
		pause = min(2*pause, longestPause)
	}
}

// watch returns true when the daemon has ended, by itself or because nobody wants the group,
// and false when the Manager is closed.
func (k *keeper) watch(p *peer.Peer) bool {
	dead := make(chan struct{})
	over := make(chan struct{})
	defer close(over)
	k.m.wg.Go(func() {
		if p.AwaitDeath() == nil {
			close(dead)
		}
		<-over // the Peer is closed after that
	})
	var unwanted time.Time
	var server peer.Process
	for {
		select {
		case <-dead:
			if unwanted.IsZero() || k.isWanted() {
				k.tell(DaemonEnded, int(p.PID), errors.New("it ended by itself, or somebody killed it"))
			}
			return true
		default:
		}
		server = k.lookForServer(p, server)
		wait := k.m.times.look
		switch {
		case k.isWanted():
			unwanted = time.Time{}
		case unwanted.IsZero():
			unwanted = time.Now()
			wait = min(wait, k.m.times.linger)
		case time.Since(unwanted) >= k.m.times.linger:
			k.set(func() { k.now.running = false }) // who joins now waits for the next daemon
			k.end(p, dead)
			return true
		}
		timer := time.NewTimer(wait)
		_, changed := k.state()
		select {
		case <-dead:
		case <-changed:
		case <-timer.C:
		case <-k.m.closed:
			timer.Stop()
			return false
		}
		timer.Stop()
	}
}

// lookForServer notes which server the daemon has. It returns the server.
func (k *keeper) lookForServer(daemon *peer.Peer, before peer.Process) peer.Process {
	server := serverOf(int(daemon.PID))
	if server == before {
		return before
	}
	k.mu.Lock()
	k.now.server = int(server.PID)
	k.mu.Unlock()
	if before != (peer.Process{}) {
		k.tell(ServerEnded, int(before.PID), fmt.Errorf("a member's fault ends the server for all members, or somebody killed it"))
	}
	if server != (peer.Process{}) {
		k.tell(ServerStarts, int(server.PID), nil)
		k.noteServer(server)
	}
	return server
}
