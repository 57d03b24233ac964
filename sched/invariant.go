// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"

	"github.com/nvshare/nvshare/sched/account"
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
	for _, check := range []func() error{
		c.checkNext, c.checkGangs, func() error { return c.checkTenants(waiting) }, c.checkMemory, c.checkDeadline,
	} {
		if err := check(); err != nil {
			return err
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
	}
	return nil
}

// checkNext checks that nobody waits who is to be granted, and who is recorded as the next one.
func (c *GPU) checkNext() error {
	switch {
	case c.effective != Exclusive && c.effective != Concurrent, c.mode != Auto && c.mode != c.effective && !(c.mode == Concurrent && c.mem.Overfull()):
		return fmt.Errorf("%v is in effect, set is %v", c.effective, c.mode)
	case c.effective == Concurrent && c.inTurn() != nil:
		return fmt.Errorf("%d clients wait in concurrent mode", c.waiting)
	case c.urgent.top() != nil && c.holdOff == 0:
		return fmt.Errorf("tenant %s is urgent and waits", c.urgent.top().displayName())
	case c.joiner() != nil:
		return fmt.Errorf("tenant %s waits while its cohort has the GPU", c.joiner().displayName())
	case c.free() && (c.ready.top() != nil || c.nextAway() != nil && !c.spared()):
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
	return nil
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
	for i, t := range c.byKey {
		if t.processes != processes[t] {
			return fmt.Errorf("%d processes of tenant %s share the GPU, counted %d", processes[t], t.displayName(), t.processes)
		}
		if c.tenants[t.key] != t || i > 0 && c.byKey[i-1].key.compare(t.key) >= 0 {
			return fmt.Errorf("tenant %s is not in its place of the order", t.displayName())
		}
	}
	switch {
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
		return fmt.Errorf("has been sent %v, and should have %v", cl.told, c.expected(cl))
	}
	return nil
}

// checkTenants checks each tenant, and the sums of all.
func (c *GPU) checkTenants(waiting int) error {
	if err := c.checkCounts(); err != nil {
		return err
	}
	queued, cohort, pool, all := 0, int64(0), pooled{}, sums{}
	fresh, due := c.dues(), c.duesNow()
	for key, t := range c.tenants {
		if err := c.checkTenant(key, t); err != nil {
			return fmt.Errorf("tenant %s: %w", t.displayName(), err)
		}
		queued += t.queue.n
		all.add(t.sums(), +1)
		if t.active && !t.apart {
			cohort += fresh.Of(t.claim())
		}
		pool.tenants, pool.requests, pool.promised = pool.tenants+t.pooled.tenants, pool.requests+t.pooled.requests, pool.promised+t.pooled.promised
	}
	switch {
	case queued != waiting:
		return fmt.Errorf("%d clients wait, queues hold %d", waiting, queued)
	case all != c.sums:
		return fmt.Errorf("of tenants there are %+v, counted %+v", all, c.sums)
	case c.cohort.on && cohort != due.cohort:
		return fmt.Errorf("the cohort is due %d of %d, counted %d", cohort, account.One, due.cohort)
	case pool != c.pool.pooled:
		return fmt.Errorf("latency tenants have %+v, counted %+v", pool, c.pool.pooled)
	case !fresh.Same(&due.Dues):
		return fmt.Errorf("the dues are %+v, counted %+v", fresh, due.Dues)
	}
	return nil
}

// checkCounts checks what tenants count of their clients and grants.
func (c *GPU) checkCounts() error {
	type counts struct{ clients, open, beside, closing, fenced, batch int }
	has := map[*tenant]counts{}
	for _, cl := range c.clients {
		n := has[cl.tenant]
		n.clients++
		switch g := cl.grant; {
		case g == nil, g.off:
		case g.state == fenced:
			n.fenced++
		case g.closes():
			n.closing++
		case g.state == granted && g.kind == besideGrant:
			n.beside++
		case g.state == granted && !g.move.on:
			n.open++
		}
		if g := cl.grant; g != nil && g.kind == turnGrant && g.state != fenced {
			n.batch++
		}
		has[cl.tenant] = n
	}
	for _, t := range c.tenants {
		if counted := (counts{t.clients, t.open, t.beside, t.closing, t.fenced, t.batch}); counted != has[t] {
			return fmt.Errorf("tenant %s: counted %+v, there are %+v", t.displayName(), counted, has[t])
		}
	}
	return nil
}

func (c *GPU) checkTenant(key tenantKey, t *tenant) error {
	var in *tenantHeap
	if t.inHeap() {
		in = c.heap(t.place)
	}
	switch {
	case t.key != key:
		return fmt.Errorf("is recorded as %v", key)
	case t.clients == 0 && !t.remembered:
		return fmt.Errorf("has no clients")
	case (t.queue.n > 0 || t.proxy()) != (t.place != nowhere):
		return fmt.Errorf("%d wait, in place %d", t.queue.n, t.place)
	case in != nil && (t.pos >= len(in.items) || in.items[t.pos] != t):
		return fmt.Errorf("is not where it says")
	case in != nil && t.pos > 0 && in.less(t, in.items[(t.pos-1)/2]):
		return fmt.Errorf("is behind one that comes later")
	case t.place == spent && (!t.Demoted() || c.effective != Exclusive || c.unwanted()):
		return fmt.Errorf("waits, out of patience: %t, in %v mode, %d tenants want turns", t.Demoted(), c.effective, c.active)
	case t.active != (t.takesTurn() || t.place == parked || t.batch > 0 || t.open > 0 && c.effective == Concurrent):
		return fmt.Errorf("is active: %t, in place %d with %d grants", t.active, t.place, t.batch)
	case (t.metered >= 0) != t.spends():
		return fmt.Errorf("is metered: %t", t.metered >= 0)
	case t.sums() != t.summed:
		return fmt.Errorf("adds %+v, counted %+v", t.sums(), t.summed)
	case t.pools() != t.pooled:
		return fmt.Errorf("counts as %+v for latency tenants, counted %+v", t.pools(), t.pooled)
	case !t.apart && t.share.exclusive():
		return fmt.Errorf("is of the cohort: %v", t.share)
	}
	return c.checkList("its queue", &t.queue)
}

// checkDeadline checks that nothing is left that was due, and that there is a deadline for
// what will be due.
func (c *GPU) checkDeadline() error {
	t, ok := c.Deadline()
	need := c.closing.n > 0 || c.holdOff != 0 || c.throttled.top() != nil ||
		c.effective == Exclusive && c.open.n > 0 && c.upNext() != nil && c.open.head.grant.state != paused ||
		len(c.moves) > 0 && c.isWaitedFor()
	switch {
	case need && !ok:
		return fmt.Errorf("a deadline is needed, and not set")
	case ok && t <= c.now:
		return fmt.Errorf("deadline %d is not after the latest step at %d", t, c.now)
	}
	return nil
}

// checkMemory checks that turns and memory know the same of each client.
func (c *GPU) checkMemory() error {
	if err := c.mem.Check(); err != nil {
		return err
	}
	for id, cl := range c.clients {
		if err := c.mem.CheckClient(id, cl.grant != nil, cl.away, cl.stranded); err != nil {
			return err
		}
	}
	return nil
}
