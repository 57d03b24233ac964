// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/nvshare/nvshare/cdi"
)

// Scheduler is a connection to the scheduler. Its calls get a context that ends
// after a while; after an error the connection is not used again.
type Scheduler interface {
	// Describe fails with ErrFull, and the connection goes on, if there is no room for one more.
	Describe(context.Context, Container) error
	Forget(ctx context.Context, id string) error
	// Report says what keeps the plugin from giving GPUs. It holds for a while.
	Report(ctx context.Context, problems []string) error
	// State fails if the scheduler on the other side has ended.
	State(context.Context) (State, error)
	Close() error
}

// ErrFull means that the scheduler knows as many containers as it can: no more is accepted. It has, once it has forgotten
// another one.
var ErrFull = errors.New("the scheduler knows as many containers as it can: no more is accepted")

// State is what the plugin asks the scheduler for.
type State struct {
	IDs      []string            // of the containers that are described
	On       map[string][]string // by container: its GPUs, where it may have moved
	Promises []Promise           // who is promised a part of which GPU
	GPUs     map[string]GPUState // by UUID
}

// GPUState is what the scheduler knows of a GPU.
type GPUState struct {
	Memory  uint64 // bytes; 0: not known
	Sharing string // SharedBy…; "": not known
	Swap    bool   // memory is swapped
	Room    uint64 // of the memory, what tenants may have together while it is swapped, bytes
	Host    uint64 // host memory that was set aside for what is swapped, of all GPUs together, bytes; 0: none, or what the host can spare
	Drained bool   // no new container may have the GPU
	Fault   string // what ended all work on the GPU; "": nothing
	Model   cdi.Model
}

// Closed says why no new container may have the GPU; "": it may.
func (s GPUState) Closed() string {
	switch {
	case s.Fault != "":
		return "it does no work: " + s.Fault
	case s.Drained:
		return "it is drained"
	}
	return ""
}

// WithParent adds to what is known of a MIG device what its GPU is closed for.
func (s GPUState) WithParent(gpu GPUState) GPUState {
	s.Drained, s.Fault = s.Drained || gpu.Drained, cmp.Or(s.Fault, gpu.Fault)
	return s
}

// How tenants share a GPU. A scheduler that chooses shares by slices where it can.
const (
	SharedByTurns   = "turns"
	SharedBySlices  = "slices"
	SharedByOverlap = "overlap" // all at the same time
)

// Promise is a part of a GPU that somebody was promised.
type Promise struct {
	ID      string // of the container; "": a user's processes outside containers
	Who     string // for people
	UUID    string // of the GPU
	Percent uint32 // of its time; 0: none
	Memory  uint64 // limit, bytes; 0: none

	described bool // by a plugin
}

const (
	// stateLimit bounds for how long a plugin that starts refuses to choose GPUs before the
	// scheduler has said how much memory they have, and which of them do work. The kubelet
	// creates a refused container again after some 10 s.
	stateLimit   = 10 * time.Second
	callLimit    = 2 * time.Second
	pingInterval = 5 * time.Second
)

// learn takes over the scheduler's promises: requests that were changed with
// nvsharectl, and those of others than the plugin's containers.
func (cs *Containers) learn(s State) {
	for i := range s.Promises {
		s.Promises[i].described = slices.Contains(s.IDs, s.Promises[i].ID)
	}
	if cs.takeOver(s) {
		cs.OnGPUs()
	}
	Signal(cs.changed)
}

// takeOver keeps a State, and returns whether GPUs have changed in it.
func (cs *Containers) takeOver(s State) bool {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.promises = s.Promises
	for id, gpus := range s.On {
		if c := cs.want[id]; len(c.Reach) > 0 && len(gpus) > 0 {
			c.GPUs = gpus
			cs.want[id] = c
		}
	}
	if len(s.GPUs) == 0 { // it has just been started
		return false
	}
	cs.noState = false
	for uuid, g := range s.GPUs {
		g.Memory = cmp.Or(g.Memory, cs.gpus[uuid].Memory) // else not known to it yet
		s.GPUs[uuid] = g
	}
	if maps.Equal(s.GPUs, cs.gpus) {
		return false
	}
	cs.gpus = s.GPUs
	return true
}

// poke wakes Run.
func (cs *Containers) poke() {
	Signal(cs.wake)
	Signal(cs.changed)
}

// Signal puts a token into a channel that holds one, unless it is there already.
func Signal(to chan struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

func (cs *Containers) snapshot() (want map[string]Container, complete bool) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	want = maps.Clone(cs.want)
	shared(want)
	return want, cs.complete
}

// Run keeps the scheduler in line until ctx ends. dial connects to it. A restarted
// scheduler is told everything again. Once the runtime has said which containers
// there are, the scheduler also forgets those that ended while no plugin ran.
//
// A scheduler that lags behind costs no queue: changes that cancel out, or repeat,
// are told once or not at all.
func (cs *Containers) Run(ctx context.Context, dial func(context.Context) (Scheduler, error)) {
	cs.mu.Lock()
	cs.stateDeadline = cs.now().Add(stateLimit)
	cs.mu.Unlock()
	wait := backoff{min: 50 * time.Millisecond, max: 2 * time.Second}
	for ctx.Err() == nil {
		err := cs.serve(ctx, dial, wait.reset)
		if ctx.Err() == nil {
			cs.log.Debugf("scheduler: %v; trying again", err)
		}
		wait.sleep(ctx)
	}
}

// link is a connection, and what was told over it.
type link struct {
	Scheduler
	callLimit time.Duration        // a call has to be answered
	told      map[string]Container // without an ID: described by an earlier plugin, or over an earlier connection
	full      map[string]Container // there was no room for these; not asked again before there may be
	reported  []string
	due       bool // the report, again
}

// serve uses one connection until it fails. It calls worked whenever the scheduler
// is in line.
func (cs *Containers) serve(ctx context.Context, dial func(context.Context) (Scheduler, error), worked func()) error {
	l := link{callLimit: cs.callLimit, told: map[string]Container{}, full: map[string]Container{}, due: true}
	err := l.callWithin(ctx, func(ctx context.Context) (err error) {
		l.Scheduler, err = dial(ctx)
		return err
	})
	if err != nil {
		return err
	}
	defer l.Close()
	state, err := l.state(ctx)
	if err != nil {
		return err
	}
	for _, id := range state.IDs {
		l.told[id] = Container{}
	}
	cs.learn(state)
	tick := time.Tick(cs.ping)
	for {
		want, complete := cs.snapshot()
		if err := l.tell(ctx, want, complete); err != nil {
			return err
		}
		if err := l.report(ctx, cs.Health.Problems()); err != nil {
			return err
		}
		worked()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-cs.wake:
		case <-tick:
			l.due = true
			clear(l.full)
			state, err := l.state(ctx)
			if err != nil {
				return err
			}
			cs.learn(state)
		}
	}
}

func (l *link) callWithin(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, l.callLimit)
	defer cancel()
	return call(ctx)
}

func (l *link) state(ctx context.Context) (state State, err error) {
	err = l.callWithin(ctx, func(ctx context.Context) (err error) {
		state, err = l.State(ctx)
		return err
	})
	return state, err
}

// tell describes containers that are new or have changed, and has the others forgotten. Those that an earlier
// plugin described may be there as long as the list is not complete.
func (l *link) tell(ctx context.Context, want map[string]Container, complete bool) error {
	// Forget first: the scheduler's room for descriptions is limited.
	for id, c := range l.told {
		if _, ok := want[id]; ok || c.ID == "" && !complete {
			continue
		}
		if err := l.callWithin(ctx, func(ctx context.Context) error { return l.Forget(ctx, id) }); err != nil {
			return err
		}
		delete(l.told, id)
		clear(l.full)
	}
	for id, c := range want {
		if was, refused := l.full[id]; c.equal(l.told[id]) || refused && c.equal(was) {
			continue
		}
		err := l.callWithin(ctx, func(ctx context.Context) error { return l.Describe(ctx, c) })
		if errors.Is(err, ErrFull) {
			l.full[id] = c
			continue
		}
		if err != nil {
			return err
		}
		l.told[id] = c
	}
	return nil
}

// report says what is wrong, if it has changed or is due.
func (l *link) report(ctx context.Context, problems []string) error {
	if !l.due && slices.Equal(problems, l.reported) {
		return nil
	}
	l.reported, l.due = problems, false
	return l.callWithin(ctx, func(ctx context.Context) error { return l.Report(ctx, problems) })
}
