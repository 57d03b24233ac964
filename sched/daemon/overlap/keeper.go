// SPDX-License-Identifier: Apache-2.0

package overlap

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
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
	timer := time.After(d)
	select {
	case <-k.m.closed:
		return false
	case <-timer:
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
		_, changed := k.state()
		select {
		case <-dead:
		case <-changed:
		case <-time.After(wait):
		case <-k.m.closed:
			return false
		}
	}
}

// lookForServer notes which server the daemon has. It returns the server.
func (k *keeper) lookForServer(daemon *peer.Peer, before peer.Process) peer.Process {
	server := k.serverOf(daemon.PID)
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

// Start is what a process that a Manager has started does: it records itself, becomes the
// members' user and runs the daemon. The arguments are those that the Manager gives. It
// returns only an error.
func Start(args []string) error {
	if len(args) < 4 {
		return errors.New("needs a directory, a user, whether /dev/shm is the group's, and a program")
	}
	dir, program := args[0], args[3:]
	uid, err := strconv.ParseUint(args[1], 10, 31)
	if err != nil {
		return fmt.Errorf("user %.64q: %w", args[1], err)
	}
	if args[2] == "true" {
		if err := ownShared(filepath.Join(dir, api.OverlapShared)); err != nil {
			return err
		}
	}
	peers, err := peer.NewFinder()
	if err != nil {
		return err
	}
	self, err := peers.Look(int32(os.Getpid()))
	if err != nil {
		return err
	}
	if err := writeProcess(filepath.Join(dir, recordName), self.Process); err != nil {
		return err
	}
	if int(uid) != os.Geteuid() {
		if err := become(int(uid)); err != nil {
			return fmt.Errorf("become user %d: %w (overlap groups need a scheduler that runs as root, or as the members' user)", uid, err)
		}
	}
	unix.Umask(0o077)
	return fmt.Errorf("run %s: %w", program[0], unix.Exec(program[0], program, os.Environ()))
}

// ownShared makes a directory the /dev/shm of this process, which has a mount namespace of
// its own.
func ownShared(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount(dir, "/dev/shm", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s on /dev/shm: %w", dir, err)
	}
	return nil
}

// nogroup is the group of what runs as the members' user. MPS goes by users; a group with the
// user's number may be another one's, docker's for example. The members' own groups differ, and
// are not known before they run.
const nogroup = 65534

// become changes the user of all threads.
func become(uid int) error {
	if err := syscall.Setgroups(nil); err != nil {
		return err
	}
	if err := syscall.Setresgid(nogroup, nogroup, nogroup); err != nil {
		return err
	}
	return syscall.Setresuid(uid, uid, uid)
}
