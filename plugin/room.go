// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/nvshare/nvshare/plugin/placement"
)

const (
	// moveLimit bounds a tenant's move: the scheduler ends one within two minutes.
	moveLimit = 3 * time.Minute
	// reservedFor is for how long room that was made is reserved for its container. The kubelet
	// creates a container again within a minute, as long as it fails.
	reservedFor = 3 * time.Minute
	// moveAgain is when a tenant that could not move may be asked to move again.
	moveAgain = 10 * time.Minute
	// maxMoves bounds how many containers move within movesWithin for pods of one namespace:
	// each of them pauses, mostly for seconds, and only one moves at a time on the node.
	maxMoves    = 6
	movesWithin = 10 * time.Minute
)

// Mover moves a container to another GPU of the node. It returns when the container is
// there, or why the container stayed where it was.
type Mover func(ctx context.Context, id, uuid string) error

// reservation is room on GPUs for a container that fits nowhere, made by the move of another one.
type reservation struct {
	waiter Container // its GPUs are those that it will be given
	move   placement.Move
	until  time.Time // when nobody keeps it any more; zero: the move is under way
	taken  bool      // nobody waits for it any more
}

// MakeRoom has containers moved by move where that lets the plugin admit one that fits
// nowhere. It must be called before the first container is admitted.
func (cs *Containers) MakeRoom(move Mover) { cs.move = move }

// makeRoom returns why a container is refused that fits nowhere. Where the move of another
// container would let it in, that move begins, and the room is reserved for it: the kubelet
// soon creates the container again. Here is the only place that knows what fits nowhere, and the answer to
// whoever waits has to name the move. One container moves at a time. The lock is held.
func (cs *Containers) makeRoom(c Container, devices []placement.Device, r placement.Request, refused error) error {
	if cs.move == nil {
		return refused
	}
	if held := cs.reservation(); held != nil {
		if held.until.IsZero() && held.waiter.sameAs(c) {
			return fmt.Errorf("%s moves to %s to make room: try again; until then: %w", held.move.Tenant.Public(), held.move.To.Name, refused)
		}
		return refused
	}
	stuck := ""
	for i := range devices {
		for k, t := range devices[i].Tenants {
			if f := cs.stuck[t.ID]; t.ID != "" && cs.now().Before(f.until) {
				devices[i].Tenants[k].Reach = nil
				if stuck = fmt.Sprintf("; %s could not move away", t.Public()); !t.Hidden {
					stuck += ": " + f.why
				}
			}
		}
	}
	m, ok := placement.MakeRoom(devices, r)
	if !ok {
		return fmt.Errorf("%w%s", refused, stuck)
	}
	if wait := cs.countMove(c.Namespace); wait > 0 {
		return fmt.Errorf("namespace %s has had %d containers moved within %v, which is the most: try again in %v; until then: %w",
			c.Namespace, maxMoves, movesWithin, wait.Round(time.Second), refused)
	}
	c.GPUs = m.Chosen
	cs.reserved = &reservation{waiter: c, move: m}
	go cs.carry(cs.reserved)
	return fmt.Errorf("%s moves from %s to %s to make room: try again; until then: %w", m.Tenant.Public(), m.From.Name, m.To.Name, refused)
}

// countMove counts a move for a pod of a namespace, unless there were too many: it returns how long
// the namespace has to wait, 0: not at all. The lock is held.
func (cs *Containers) countMove(namespace string) time.Duration {
	for of, times := range cs.moved {
		times = slices.DeleteFunc(times, func(t time.Time) bool { return cs.now().Sub(t) >= movesWithin })
		if cs.moved[of] = times; len(times) == 0 {
			delete(cs.moved, of)
		}
	}
	if times := cs.moved[namespace]; len(times) >= maxMoves {
		return times[0].Add(movesWithin).Sub(cs.now())
	}
	cs.moved[namespace] = append(cs.moved[namespace], cs.now())
	return 0
}

// reservation returns that which is being made or holds; nil: there is none. The lock is held.
func (cs *Containers) reservation() *reservation {
	if r := cs.reserved; r != nil && !r.until.IsZero() && !cs.now().Before(r.until) {
		cs.log.Warnf("%s did not take the room on %s that %s made", r.waiter, r.move.From.Name, r.move.Tenant.Name)
		cs.reserved = nil
	}
	return cs.reserved
}

// failure is why a container could not move, and until when that counts.
type failure struct {
	why   string
	until time.Time
}

// carry moves the tenant. It takes as long as the scheduler does.
func (cs *Containers) carry(r *reservation) {
	m := r.move
	cs.log.Infof("%s moves from %s to %s: %s fits nowhere else", m.Tenant.Name, m.From.Name, m.To.Name, r.waiter)
	ctx, cancel := context.WithTimeout(context.Background(), moveLimit)
	defer cancel()
	err := cs.move(ctx, m.Tenant.ID, m.To.UUID)
	cs.change(func() {
		if err != nil {
			cs.log.Warnf("%s did not move from %s to %s, so that there is no room for %s: %v", m.Tenant.Name, m.From.Name, m.To.Name, r.waiter, err)
			for id, f := range cs.stuck {
				if !cs.now().Before(f.until) {
					delete(cs.stuck, id)
				}
			}
			cs.stuck[m.Tenant.ID] = failure{err.Error(), cs.now().Add(moveAgain)}
			cs.reserved = nil
			return
		}
		if c, ok := cs.want[m.Tenant.ID]; ok && slices.Equal(c.GPUs, []string{m.From.UUID}) {
			c.GPUs = []string{m.To.UUID}
			cs.want[c.ID] = c
		}
		if r.until = cs.now().Add(reservedFor); r.taken {
			cs.reserved = nil
		}
		cs.log.Infof("%s has moved from %s to %s: %s fits now", m.Tenant.Name, m.From.Name, m.To.Name, r.waiter)
	})
}

// addReserved adds to devices what is reserved for a move and for the container that waits for
// it, so that nobody else is given it. The lock is held.
func (cs *Containers) addReserved(devices []placement.Device, except Container) {
	r := cs.reservation()
	if r == nil {
		return
	}
	for i := range devices {
		d := &devices[i]
		there := func(t placement.Tenant) bool { return t.ID == r.move.Tenant.ID }
		if d.UUID == r.move.To.UUID && r.until.IsZero() && !slices.ContainsFunc(d.Tenants, there) {
			t := r.move.Tenant
			t.Hidden = cs.want[t.ID].Namespace != except.Namespace // whoever asked then
			d.Tenants = append(d.Tenants, t)
		}
		if c := r.waiter; !r.taken && c.uses(d.UUID) && !c.sameAs(except) {
			d.Tenants = append(d.Tenants, placement.Tenant{
				Name: c.String() + ", which waits", Core: c.Terms.CoreRequest, Memory: c.Terms.MemoryLimit, Labels: c.Labels, Hidden: c.Namespace != except.Namespace})
		}
	}
}

// release ends the reservation of a container that is admitted or gone. The lock is held.
func (cs *Containers) release(is func(Container) bool) {
	if r := cs.reserved; r != nil && is(r.waiter) {
		r.taken = true
		if !r.until.IsZero() {
			cs.reserved = nil
		}
	}
}
