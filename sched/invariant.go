// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
)

// Check returns an error that names the first broken invariant, which is a
// bug in this package, or nil. It costs O(clients) and changes nothing.
func (c *GPU) Check() error {
	for _, l := range []struct {
		name string
		list *list
	}{{"open", &c.open}, {"latency", &c.latency}, {"beside", &c.beside}, {"closing", &c.closing}} {
		if err := c.checkList(l.name, l.list); err != nil {
			return err
		}
	}
	if err := c.checkTally(); err != nil {
		return err
	}
	connected, listed, waiting, closingBatch := 0, 0, 0, 0
	for id, cl := range c.clients {
		if cl.id != id {
			return fmt.Errorf("client %d is recorded as %d", cl.id, id)
		}
		if err := c.checkClient(cl); err != nil {
			return fmt.Errorf("client %d: %w", id, err)
		}
		if cl.connected {
			connected++
		}
		if cl.in == &cl.tenant.queue {
			waiting++
		} else if cl.in != nil {
			listed++
		}
		if cl.in == &c.closing && cl.grant.kind == turnGrant {
			closingBatch++
		}
	}
	switch {
	case connected != c.connected:
		return fmt.Errorf("%d clients are connected, counted %d", connected, c.connected)
	case listed != c.open.n+c.latency.n+c.beside.n+c.closing.n:
		return fmt.Errorf("%d clients are in a list, lists hold %d", listed, c.open.n+c.latency.n+c.beside.n+c.closing.n)
	case c.beside.n > 0 && !c.besideAllowed():
		return fmt.Errorf("%d clients run beside others, whose time slices are not short", c.beside.n)
	case closingBatch != c.closingBatch:
		return fmt.Errorf("%d batch grants are closing, counted %d", closingBatch, c.closingBatch)
	case c.effective != Exclusive && c.effective != Concurrent, c.mode != Auto && c.mode != c.effective && !(c.mode == Concurrent && c.mem.Overfull()):
		return fmt.Errorf("%v is in effect, set is %v", c.effective, c.mode)
	case c.effective == Concurrent && c.inTurn() != nil:
		return fmt.Errorf("%d clients wait in concurrent mode", c.waiting)
	case c.urgent.top() != nil && c.holdOff == 0:
		return fmt.Errorf("tenant %s is urgent and waits", c.urgent.top().displayName())
	case c.joiner() != nil:
		return fmt.Errorf("tenant %s waits while its cohort has the GPU", c.joiner().displayName())
	case c.free() && (c.ready.top() != nil || c.afar.top() != nil && !c.spared()):
		return fmt.Errorf("%d clients wait for a free GPU", c.waiting)
	case c.persisted != c.record():
		return fmt.Errorf("persisted %v, need %v", c.persisted, c.record())
	case c.next != nil && (!c.next.tenant.takesTurn() || c.next.in != &c.next.tenant.queue || c.nextEpoch > c.epoch):
		return fmt.Errorf("client %d is next under epoch %d and does not wait", c.next.id, c.nextEpoch)
	}
	for h := c.open.head; h != nil && c.effective == Exclusive; h = h.next {
		if (h.grant.state == paused) != (c.latency.n > 0) {
			return fmt.Errorf("client %d holds, beside %d latency grants: %+v", h.id, c.latency.n, *h.grant)
		}
	}
	if err := c.checkGangs(); err != nil {
		return err
	}
	if err := c.checkTenants(waiting); err != nil {
		return err
	}
	if err := c.checkMemory(); err != nil {
		return err
	}
	return c.checkDeadline()
}

// checkTally checks the sums of clients, and the orders of clients and tenants.
func (c *GPU) checkTally() error {
	var fresh tally
	processes := map[*tenant]int{}
	for i, cl := range c.order {
		fresh.add(c.tallyOf(cl), +1)
		processes[c.tallyOf(cl).tenant]++
		if c.clients[cl.id] != cl || i > 0 && c.order[i-1].id >= cl.id {
			return fmt.Errorf("client %d is not in its place of the order", cl.id)
		}
	}
	latency := 0
	for i, t := range c.byKey {
		if t.clients > 0 && t.share.Priority == Latency {
			latency++
		}
		if t.processes != processes[t] {
			return fmt.Errorf("%d processes of tenant %s share the GPU, counted %d", processes[t], t.displayName(), t.processes)
		}
		if c.tenants[t.key] != t || i > 0 && c.byKey[i-1].key.compare(t.key) >= 0 {
			return fmt.Errorf("tenant %s is not in its place of the order", t.displayName())
		}
	}
	switch {
	case latency != c.pool.tenants:
		return fmt.Errorf("%d latency tenants, counted %d", latency, c.pool.tenants)
	case fresh != c.tally:
		return fmt.Errorf("of clients that share the GPU there are %+v, counted %+v", fresh, c.tally)
	case len(c.order) != len(c.clients), len(c.byKey) != len(c.tenants):
		return fmt.Errorf("%d clients and %d tenants, in order are %d and %d", len(c.clients), len(c.tenants), len(c.order), len(c.byKey))
	}
	return nil
}

func (c *GPU) checkList(name string, l *list) error {
	n := 0
	var prev *client
	for cl := l.head; cl != nil; cl = cl.next {
		switch n++; {
		case n > l.n:
			return fmt.Errorf("%s is longer than its count of %d", name, l.n)
		case cl.in != l || cl.prev != prev:
			return fmt.Errorf("%s is not linked right at client %d", name, cl.id)
		case c.clients[cl.id] != cl:
			return fmt.Errorf("%s has client %d, which is unknown", name, cl.id)
		case l == &c.closing && prev != nil && prev.grant.graceFrom > cl.grant.graceFrom:
			return fmt.Errorf("client %d drains behind client %d, whose grace ends later", cl.id, prev.id)
		case l != &c.open && l != &c.latency && l != &c.beside && l != &c.closing && prev != nil && prev.seq >= cl.seq:
			return fmt.Errorf("client %d waits behind client %d, which came later", cl.id, prev.id)
		}
		prev = cl
	}
	if n != l.n || l.tail != prev {
		return fmt.Errorf("%s has %d clients, counted %d", name, n, l.n)
	}
	return nil
}

func (c *GPU) checkClient(cl *client) error {
	g := cl.grant
	switch {
	case cl.tenant == nil || c.tenants[cl.tenant.key] != cl.tenant:
		return fmt.Errorf("belongs to no known tenant")
	case cl.standing && (g != nil || cl.tenant.share.Priority != Latency || c.effective != Exclusive):
		return fmt.Errorf("may go ahead, with a grant: %t, %v, in %v mode", g != nil, cl.tenant.share.Priority, c.effective)
	case cl.later && (!cl.stranded || cl.in != nil || g != nil || !cl.connected), cl.stranded && cl.in == &cl.tenant.queue:
		return fmt.Errorf("is stranded: %t, waits for a place: %t, for its turn: %t", cl.stranded, cl.later, cl.in == &cl.tenant.queue)
	case g != nil:
		return c.checkGrant(cl, g)
	case cl.in != nil && cl.in != &cl.tenant.queue:
		return fmt.Errorf("is in a foreign list")
	case cl.want:
		return fmt.Errorf("wants its next grant, and has none")
	case !cl.connected:
		return fmt.Errorf("has neither a connection nor a grant")
	}
	return nil
}

func (c *GPU) checkGrant(cl *client, g *grant) error {
	switch {
	case g.client != cl:
		return fmt.Errorf("has the grant of client %d", g.client.id)
	case g.state == over || g.epoch == 0:
		return fmt.Errorf("has a grant that is over, or nameless: %+v", *g)
	case cl.in != c.listOf(g.state, g.kind):
		return fmt.Errorf("is not in the list of its grant: %+v", *g)
	case (g.holds() && !cl.connected) || (g.state == lost && cl.connected):
		return fmt.Errorf("holds or lost its connection, which is there: %t: %+v", cl.connected, *g)
	case g.state == paused && (g.kind != turnGrant || c.effective != Exclusive):
		return fmt.Errorf("is paused in %v mode: %+v", c.effective, *g)
	case g.kind == besideGrant && g.holds() && !c.mayBeBeside(cl.tenant):
		return fmt.Errorf("runs beside others and may not: %+v", *g)
	case g.move.on && (!g.holds() || g.kind != turnGrant) || g.move.on != slices.Contains(c.moves, g):
		return fmt.Errorf("moves memory: %+v", *g)
	case !g.revoked() && g.epoch > c.epoch:
		return fmt.Errorf("epoch %d is above the latest, %d", g.epoch, c.epoch)
	}
	if g.holds() && !c.wasTold(cl) {
		return fmt.Errorf("was told %v, and is to be told %v", cl.told, c.expected(cl))
	}
	return nil
}

func (c *GPU) checkTenants(waiting int) error {
	type sums struct{ clients, open, beside, closing, fenced, batch int }
	has := map[*tenant]*sums{}
	for _, cl := range c.clients {
		s := has[cl.tenant]
		if s == nil {
			s = &sums{}
			has[cl.tenant] = s
		}
		s.clients++
		g := cl.grant
		if g == nil {
			continue
		}
		switch {
		case g.state == fenced:
			s.fenced++
		case g.closes():
			s.closing++
		case g.state == granted && g.kind == besideGrant:
			s.beside++
		case g.state == granted && !g.move.on:
			s.open++
		}
		if g.kind == turnGrant && g.state != fenced {
			s.batch++
		}
	}
	queued, eligible, active, latency, requests, weights, exact, limited := 0, 0, 0, 0, 0, 0, 0, 0
	cohort, pool := int64(0), pooled{}
	fresh, due := c.dues(), c.duesNow()
	for key, t := range c.tenants {
		s := has[t]
		if s == nil {
			s = &sums{}
		}
		var in *tenantHeap
		if t.inHeap() {
			in = c.heap(t.place)
		}
		switch {
		case t.key != key:
			return fmt.Errorf("tenant %v is recorded as %v", t.key, key)
		case *s != (sums{t.clients, t.open, t.beside, t.closing, t.fenced, t.batch}):
			return fmt.Errorf("tenant %s: counted %+v, there are %+v", t.displayName(), sums{t.clients, t.open, t.beside, t.closing, t.fenced, t.batch}, *s)
		case t.clients == 0 && !t.ghost:
			return fmt.Errorf("tenant %s has no clients", t.displayName())
		case (t.queue.n > 0 || t.proxy()) != (t.place != nowhere):
			return fmt.Errorf("tenant %s: %d wait, in place %d", t.displayName(), t.queue.n, t.place)
		case in != nil && (t.pos >= len(in.items) || in.items[t.pos] != t):
			return fmt.Errorf("tenant %s is not where it says", t.displayName())
		case in != nil && t.pos > 0 && in.less(t, in.items[(t.pos-1)/2]):
			return fmt.Errorf("tenant %s is behind one that comes later", t.displayName())
		case t.place == spent && (!t.Demoted() || c.effective != Exclusive || c.unwanted()):
			return fmt.Errorf("latency tenant %s waits: out of patience: %t, in %v mode, %d tenants want turns", t.displayName(), t.Demoted(), c.effective, c.active)
		case t.active != (t.takesTurn() || t.place == aside || t.batch > 0 || t.open > 0 && c.effective == Concurrent):
			return fmt.Errorf("tenant %s is active: %t, in place %d with %d grants", t.displayName(), t.active, t.place, t.batch)
		case (t.metered >= 0) != t.spends():
			return fmt.Errorf("tenant %s is metered: %t", t.displayName(), t.metered >= 0)
		}
		if err := c.checkList("the queue of "+t.displayName(), &t.queue); err != nil {
			return err
		}
		queued += t.queue.n
		if t.takesTurn() || t.place == urgent || t.place == spent {
			eligible += max(t.queue.n, 1)
		}
		if t.active {
			active++
			requests += t.share.Request
			weights += t.share.Weight
			if t.limited() {
				limited++
			}
			if t.share.Priority == Latency {
				latency++
			}
			if !t.apart {
				cohort += fresh.of(t)
			}
		}
		if now := t.pools(); now != t.pooled {
			return fmt.Errorf("tenant %s counts as %+v for latency tenants, counted %+v", t.displayName(), now, t.pooled)
		}
		pool.tenants, pool.requests, pool.promised = pool.tenants+t.pooled.tenants, pool.requests+t.pooled.requests, pool.promised+t.pooled.promised
		if t.clients > 0 && (t.limited() || t.share.Request > 0) {
			exact++
		}
		if !t.apart && t.share.exclusive() {
			return fmt.Errorf("tenant %s is of the cohort: %v", t.displayName(), t.share)
		}
	}
	switch {
	case queued != waiting:
		return fmt.Errorf("%d clients wait, queues hold %d", waiting, queued)
	case eligible != c.waiting:
		return fmt.Errorf("%d clients may be granted, counted %d", eligible, c.waiting)
	case c.cohort.on && cohort != due.cohort:
		return fmt.Errorf("the cohort is due %d of %d, counted %d", cohort, one, due.cohort)
	case pool != c.pool.pooled:
		return fmt.Errorf("latency tenants have %+v, counted %+v", pool, c.pool.pooled)
	case latency != c.activeLatency:
		return fmt.Errorf("%d active tenants have priority latency, counted %d", latency, c.activeLatency)
	case limited != c.limited:
		return fmt.Errorf("%d active tenants have a limit, counted %d", limited, c.limited)
	case fresh.rest != due.rest || fresh.weights != due.weights:
		return fmt.Errorf("weights of %d share %d of the GPU, counted %d and %d", fresh.weights, fresh.rest, due.weights, due.rest)
	case active != c.active || requests != c.requests || weights != c.weights || exact != c.exact:
		return fmt.Errorf("%d tenants are active with %d %% and weight %d, %d exact; counted %d, %d, %d, %d",
			active, requests, weights, exact, c.active, c.requests, c.weights, c.exact)
	}
	return nil
}

// checkDeadline checks that nothing is left that was due, and that there is a deadline for
// what will be due.
func (c *GPU) checkDeadline() error {
	t, ok := c.Deadline()
	need := c.closing.n > 0 || c.holdOff != 0 || c.throttled.top() != nil ||
		c.effective == Exclusive && c.open.n > 0 && c.upNext() != nil && c.open.head.grant.state != paused ||
		len(c.moves) > 0 && c.waiting > 0
	switch {
	case need && !ok:
		return fmt.Errorf("a deadline is needed, and not set")
	case ok && t <= c.now:
		return fmt.Errorf("deadline %d is not after the latest step at %d", t, c.now)
	}
	return nil
}
