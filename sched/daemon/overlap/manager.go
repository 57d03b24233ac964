// SPDX-License-Identifier: Apache-2.0

package overlap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// Patience bounds a start of a daemon, and each command to it.
const Patience = 10 * time.Second

// times are constants, except in tests.
type times struct {
	linger time.Duration // for which a group outlives its last member, which may be started again
	look   time.Duration // between two looks for a daemon's server
}

const (
	// The pause before a daemon is started again. It is the first one again once a daemon
	// has run for as long as the longest.
	firstPause, longestPause = 100 * time.Millisecond, time.Minute
)

// Group is one overlap group on one GPU.
type Group struct {
	Name string // with namespace and user
	GPU  string // UUID
	UID  uint32 // of its members
	// Own says that the members are in containers, and have a directory of the group as
	// their /dev/shm. Else they have the host's.
	Own bool
	Dir string // of its own; it tells groups apart
}

// Kind is what a Change says.
type Kind string

// The kinds of a Change.
const (
	Runs         Kind = "runs"          // its daemon answers
	Failed       Kind = "failed"        // its daemon does not start; it is tried again
	DaemonEnded  Kind = "daemon ended"  // and is started again
	ServerEnded  Kind = "server ended"  // members of it have lost the GPU; the daemon starts another one
	ServerStarts Kind = "server starts" //
	TakenOver    Kind = "taken over"    // from an earlier scheduler
	Ended        Kind = "ended"         // after its last member
)

// Change says what happened to a group.
type Change struct {
	Group Group
	Kind  Kind
	PID   int   // of the daemon or the server
	Err   error // why, if it failed
}

// Options say what daemons are, and who is told.
type Options struct {
	Dir     string                 // below which all groups have their directories
	Control func() (string, error) // path of nvidia-cuda-mps-control
	// Starter is the command that becomes Start in another process.
	Starter []string
	Env     []string     // of daemons, beside what a group needs
	Changed func(Change) // called from goroutines, in the order of each group
	Log     logrus.FieldLogger
}

// Manager keeps the wanted groups running.
type Manager struct {
	o     Options
	peers *peer.Finder
	times times

	mu      sync.Mutex
	keepers map[string]*keeper // by Group.Dir
	looked  bool               // for the groups of earlier schedulers
	closed  chan struct{}
	wg      sync.WaitGroup
}

// New returns a Manager of no group. The groups of an earlier scheduler are taken over, or
// ended, by the first Want.
func New(o Options, peers *peer.Finder) *Manager {
	return &Manager{o: o, peers: peers, times: times{linger: 5 * time.Second, look: time.Second}, keepers: map[string]*keeper{}, closed: make(chan struct{})}
}

// Want says which groups are to run: others end. It does not wait.
func (m *Manager) Want(groups []Group) {
	m.mu.Lock()
	defer m.mu.Unlock()
	wanted := map[string]bool{}
	for _, g := range groups {
		wanted[g.Dir] = true
		m.keep(g).want(true)
	}
	if !m.looked {
		m.looked = true
		m.findOthers(wanted)
	}
	for dir, k := range m.keepers {
		if !wanted[dir] {
			k.want(false)
		}
	}
}

// keep returns the keeper of a group. The lock is held.
func (m *Manager) keep(g Group) *keeper {
	k := m.keepers[g.Dir]
	if k == nil {
		k = newKeeper(m, g)
		m.keepers[g.Dir] = k
		m.wg.Go(k.run)
	} else if k.group().GPU == "" { // it was found by its directory
		k.set(func() { k.g = g })
	}
	return k
}

// findOthers has keepers for what earlier schedulers have left. The lock is held.
func (m *Manager) findOthers(wanted map[string]bool) {
	dirs, _ := filepath.Glob(filepath.Join(m.o.Dir, "*", recordName))
	for _, record := range dirs {
		if dir := filepath.Dir(record); !wanted[dir] && m.keepers[dir] == nil {
			m.keep(Group{Name: filepath.Base(dir), Dir: dir})
		}
	}
}

// Await returns nil when the group's daemon answers, or why it does not.
func (m *Manager) Await(ctx context.Context, dir string) error {
	m.mu.Lock()
	k := m.keepers[dir]
	m.mu.Unlock()
	if k == nil {
		return errors.New("nobody wants the group any more")
	}
	for {
		s, changed := k.state()
		switch {
		case s.running:
			return nil
		case s.err != nil:
			return fmt.Errorf("overlap group %s: %w", api.OverlapFor(k.group().Name), s.err)
		}
		select {
		case <-changed:
		case <-m.closed:
			return errors.New("the scheduler is ending")
		case <-ctx.Done():
			return fmt.Errorf("overlap group %s: its MPS daemon does not answer: %w", api.OverlapFor(k.group().Name), ctx.Err())
		}
	}
}

// State is how a group fares.
type State struct {
	Group   Group
	Running bool // its daemon answers
	Daemon  int  // pid; 0: none
	Server  int  // pid; 0: none, as before the first member's first call
	Err     error
}

// States returns those of all groups.
func (m *Manager) States() (all []State) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.keepers {
		s, _ := k.state()
		all = append(all, State{k.group(), s.running, s.daemon, s.server, s.err})
	}
	return all
}

// Close ends the Manager. The daemons go on.
func (m *Manager) Close() {
	close(m.closed)
	m.wg.Wait()
}

// gone forgets a keeper that has nothing left; false: the group is wanted again.
func (m *Manager) gone(k *keeper) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k.isWanted() {
		return false
	}
	delete(m.keepers, k.group().Dir)
	if len(m.keepers) == 0 {
		_ = os.Remove(m.o.Dir) // fails if somebody has made a group's directory meanwhile
	}
	return true
}
