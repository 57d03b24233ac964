// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nvshare/nvshare/cdi"
)

// Keys of terms that only tests name.
const (
	WeightAnnotation     = "nvshare.com/gpu-weight"
	PriorityAnnotation   = "nvshare.com/gpu-priority"
	GangAnnotation       = "nvshare.com/gpu-gang"
	MemoryModeAnnotation = "nvshare.com/gpu-memory-mode"
)

// add enters a container without asking whether it can be.
func (cs *Containers) add(c Container) { cs.change(func() { cs.want[c.ID] = c }) }

// set makes these the containers that exist.
func (cs *Containers) set(all ...Container) { cs.change(func() { cs.replace(all, nil) }) }

// tryAdmit is admit with the lock taken.
func (cs *Containers) tryAdmit(c Container, gpus []cdi.GPU) error {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	_, err := cs.admit(c, 0, gpus)
	return err
}

// fakeScheduler keeps what it is told.
type fakeScheduler struct {
	hang   atomic.Bool   // calls wait for the end of their context
	dialed chan struct{} // one for each connection

	mu       sync.Mutex
	life     int // counts restarts: connections of an earlier life fail
	known    map[string]Container
	room     int // for how many descriptions there is room; 0: for all
	promises []Promise
	gpus     map[string]GPUState
	calls    int
	changed  chan struct{} // closed at the next change
}

func newScheduler() *fakeScheduler {
	return &fakeScheduler{known: map[string]Container{}, changed: make(chan struct{}), dialed: make(chan struct{}, 1000)}
}

func (s *fakeScheduler) restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.life++
	s.known = map[string]Container{}
}

func (s *fakeScheduler) get(id string) Container {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known[id]
}

// await returns when exactly these containers are known.
func (s *fakeScheduler) await(t *testing.T, ids ...string) {
	t.Helper()
	limit := time.After(patience)
	for {
		s.mu.Lock()
		known, changed := slices.Sorted(maps.Keys(s.known)), s.changed
		s.mu.Unlock()
		if slices.Equal(known, ids) {
			return
		}
		select {
		case <-changed:
		case <-limit:
			t.Fatalf("the scheduler knows %v, not %v", known, ids)
		}
	}
}

type fakeConn struct {
	*fakeScheduler
	life int
}

func (s *fakeScheduler) dial(context.Context) (Scheduler, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &fakeConn{s, s.life}, nil
}

func (c *fakeConn) call(ctx context.Context, f func()) error {
	select {
	case c.dialed <- struct{}{}:
	default:
	}
	if c.hang.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life != c.fakeScheduler.life {
		return errors.New("closed")
	}
	c.calls++
	f()
	close(c.changed)
	c.changed = make(chan struct{})
	return nil
}

func (c *fakeConn) Describe(ctx context.Context, ctr Container) error {
	full := false
	err := c.call(ctx, func() {
		_, known := c.known[ctr.ID]
		if full = c.room > 0 && len(c.known) >= c.room && !known; !full {
			c.known[ctr.ID] = ctr
		}
	})
	if full {
		err = fmt.Errorf("%w: %d are described", ErrFull, c.room)
	}
	return err
}
func (c *fakeConn) Forget(ctx context.Context, id string) error {
	return c.call(ctx, func() { delete(c.known, id) })
}
func (c *fakeConn) Report(context.Context, []string) error { return nil }

func (c *fakeConn) State(ctx context.Context) (k State, err error) {
	err = c.call(ctx, func() {
		k = State{IDs: slices.Collect(maps.Keys(c.known)), Promises: slices.Clone(c.promises), GPUs: maps.Clone(c.gpus)}
	})
	return k, err
}
func (c *fakeConn) Close() error { return nil }

func runContainers(t *testing.T, n *Containers, s *fakeScheduler) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		n.Run(ctx, s.dial)
		close(done)
	}()
	return func() {
		cancel()
		await(t, done, "the end of Containers.Run")
	}
}

func TestContainersAreToldOnce(t *testing.T) {
	n, s := NewContainers(quiet()), newScheduler()
	n.ping = patience // which asks for its state, too
	// What cancels out before the scheduler is there is not told at all.
	for range 1000 {
		n.add(Container{ID: "gone"})
		n.Remove("gone")
	}
	n.add(Container{ID: "a"})
	n.add(Container{ID: "a", Name: "x"})
	n.Remove("never known")
	defer runContainers(t, n, s)()
	s.await(t, "a")
	n.set(Container{ID: "a", Name: "x"}, Container{ID: "b"})
	s.await(t, "a", "b")
	n.set()
	s.await(t)
	s.mu.Lock()
	defer s.mu.Unlock()
	if want := 1 + 2 + 2; s.calls != want { // its state, two descriptions, two forgotten
		t.Errorf("%d calls, want %d", s.calls, want)
	}
}

func TestContainersOutliveAHungScheduler(t *testing.T) {
	n, s := NewContainers(quiet()), newScheduler()
	s.hang.Store(true)
	defer runContainers(t, n, s)()
	await(t, s.dialed, "the first call")
	n.add(Container{ID: "a"})
	s.hang.Store(false)
	s.await(t, "a")
}

// What ended while no plugin ran is forgotten, once the runtime has said what
// there is; not before, because until then the plugin knows nothing.
func TestContainersOfAnEarlierPlugin(t *testing.T) {
	n, s := NewContainers(quiet()), newScheduler()
	s.known = map[string]Container{"ended": {ID: "ended"}, "runs": {ID: "runs", Name: "old"}}
	defer runContainers(t, n, s)()
	n.add(Container{ID: "new"})
	s.await(t, "ended", "new", "runs")
	n.Remove("new")
	s.await(t, "ended", "runs")
	n.set(Container{ID: "runs", Name: "current"})
	s.await(t, "runs")
	n.add(Container{ID: "last"}) // after it, the name was told
	s.await(t, "last", "runs")
	if c := s.get("runs"); c.Name != "current" {
		t.Errorf("still described as %+v", c)
	}
}

// A container for whose description the scheduler has no room is described once there is some, whether
// another container of the plugin's has ended or somebody else's.
func TestDescribedOnceThereIsRoom(t *testing.T) {
	containers, s := NewContainers(quiet()), newScheduler()
	containers.ping = time.Millisecond
	s.room = 2
	s.known["other"] = Container{ID: "other"}
	containers.add(Container{ID: "a"})
	defer runContainers(t, containers, s)()
	s.await(t, "a", "other")
	containers.add(Container{ID: "b"})
	containers.End("a")
	s.await(t, "b", "other")
	containers.add(Container{ID: "c"})
	s.mu.Lock()
	delete(s.known, "other")
	s.mu.Unlock()
	s.await(t, "b", "c")
	containers.add(Container{ID: "d"})
	for id := range 3 { // changes of one that is described go on
		containers.add(Container{ID: "b", Name: fmt.Sprint(id)})
	}
	for end := time.Now().Add(patience); s.get("b").Name != "2"; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a change is not told")
		}
	}
	s.await(t, "b", "c")
}
