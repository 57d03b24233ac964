// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/plugin/placement"
)

// Container is one container that uses GPUs, by the names that people know,
// and what its pod says of it. Equal values mean the same.
type Container struct {
	ID          string // the runtime's, as in the cgroup's name
	Name        string
	Namespace   string
	Pod         string
	PodUID      string
	MemoryLimit uint64 // bytes of each GPU; 0: none
	Share       Share
	Keep        Fields           // of the two above
	GPUs        string           // UUIDs of those that it has, separated by commas; empty: not known
	Labels      placement.Labels // of all namespaces: <namespace>/<label>
	Sandbox     string           // the pod's, by the runtime's ID
	Placed      bool             // the plugin chose the GPUs
}

// Describer is a connection to the scheduler. Its calls are given a context
// that ends after a while; any error ends its use.
type Describer interface {
	Describe(context.Context, Container) error
	Forget(ctx context.Context, id string) error
	// Known fails if the scheduler on the other side has ended.
	Known(context.Context) (Known, error)
	Close() error
}

// Known is what the scheduler knows.
type Known struct {
	IDs      []string          // of the containers that it has names for
	Promises []Promise         // who is promised a part of which GPU
	Memory   map[string]uint64 // bytes of GPUs, by UUID
}

// Names tells the scheduler the names and shares of containers. What handlers
// change is only memory; Run brings the scheduler into line, in its own time, and tells a
// restarted scheduler everything again. Once the runtime has said which
// containers there are, it also has the scheduler forget those that ended while
// no plugin ran.
//
// A scheduler that lags behind costs no queue: changes that cancel out, or
// repeat, are told once or not at all.
type Names struct {
	log  logrus.FieldLogger
	ping time.Duration // between looks whether the scheduler is still the same
	wake chan struct{} // holds a token when there may be something to tell

	mu       sync.Mutex
	want     map[string]Container // by ID
	complete bool                 // want holds all containers that exist
	ended    map[string]Container // that the runtime may start again: see Admit
	promises []Promise            // as the scheduler has said
	memory   map[string]uint64    // bytes of GPUs by UUID, as the scheduler has said
	percent  uint64               // of GPUs' memory, that may be promised
	follow   following
}

const (
	callLimit    = 2 * time.Second
	pingInterval = 5 * time.Second
)

// NewNames returns an empty set of names.
func NewNames(log logrus.FieldLogger) *Names {
	return &Names{log: log, ping: pingInterval, wake: make(chan struct{}, 1), want: map[string]Container{}, ended: map[string]Container{}, percent: 100}
}

// Add names a container.
func (n *Names) Add(c Container) { n.change(func() { n.want[c.ID], _ = n.follow.now(c) }) }

// Remove forgets a container; an unknown one is no error.
func (n *Names) Remove(id string) { n.change(func() { delete(n.want, id); delete(n.ended, id) }) }

// Replace forgets all containers but these, and those that have ended and are
// not removed yet.
func (n *Names) Replace(all []Container, ended ...Container) {
	n.change(func() {
		n.complete = true
		n.want, n.ended = byID(all), byID(ended)
		for id, c := range n.want {
			n.want[id], _ = n.follow.now(c)
		}
	})
}

func byID(all []Container) map[string]Container {
	m := make(map[string]Container, len(all))
	for _, c := range all {
		m[c.ID] = c
	}
	return m
}

func (n *Names) change(f func()) {
	n.mu.Lock()
	f()
	n.mu.Unlock()
	n.poke()
}

// poke has Run look what there is to tell.
func (n *Names) poke() {
	select {
	case n.wake <- struct{}{}:
	default: // a token is there already
	}
}

func (n *Names) snapshot() (want map[string]Container, complete bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return maps.Clone(n.want), n.complete
}

// Run tells the scheduler until ctx ends. dial connects to it.
func (n *Names) Run(ctx context.Context, dial func(context.Context) (Describer, error)) {
	wait := backoff{min: 50 * time.Millisecond, max: 2 * time.Second}
	for ctx.Err() == nil {
		err := n.serve(ctx, dial, wait.reset)
		if ctx.Err() == nil {
			n.log.Debugf("scheduler: %v; trying again", err)
		}
		wait.sleep(ctx)
	}
}

// serve uses one connection until it fails. worked is called whenever the
// scheduler has been brought into line.
func (n *Names) serve(ctx context.Context, dial func(context.Context) (Describer, error), worked func()) error {
	limited := func(f func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(ctx, callLimit)
		defer cancel()
		return f(ctx)
	}
	var d Describer
	err := limited(func(ctx context.Context) (err error) {
		d, err = dial(ctx)
		return err
	})
	if err != nil {
		return err
	}
	defer d.Close()
	told := map[string]Container{}
	err = limited(func(ctx context.Context) error {
		known, err := d.Known(ctx)
		n.learn(known)
		for _, id := range known.IDs {
			told[id] = Container{} // by an earlier plugin, or over an earlier connection
		}
		return err
	})
	if err != nil {
		return err
	}

	tick := time.NewTicker(n.ping)
	defer tick.Stop()
	for {
		want, complete := n.snapshot()
		// First, because the scheduler's room for names is limited.
		for id, c := range told {
			if _, ok := want[id]; ok || c == (Container{}) && !complete {
				continue
			}
			if err := limited(func(ctx context.Context) error { return d.Forget(ctx, id) }); err != nil {
				return err
			}
			delete(told, id)
		}
		for id, c := range want {
			if told[id] == c {
				continue
			}
			if err := limited(func(ctx context.Context) error { return d.Describe(ctx, c) }); err != nil {
				return err
			}
			told[id] = c
		}
		worked()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-n.wake:
		case <-tick.C:
			if err := limited(func(ctx context.Context) error {
				known, err := d.Known(ctx)
				if err == nil {
					n.learn(known)
				}
				return err
			}); err != nil {
				return err
			}
		}
	}
}
