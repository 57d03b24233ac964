// SPDX-License-Identifier: Apache-2.0

package sched

import "fmt"

// Check returns an error that names the first broken invariant, which is a
// bug in this package, or nil. It costs O(clients) and changes nothing.
func (c *Core) Check() error {
	for _, l := range []struct {
		name string
		list *list
	}{{"queue", &c.queue}, {"open", &c.open}, {"closing", &c.closing}} {
		if err := c.checkList(l.name, l.list); err != nil {
			return err
		}
	}
	connected, listed, concurrent, adoptable := 0, 0, 0, 0
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
		if cl.in != nil {
			listed++
		}
		if cl.concurrent {
			concurrent++
		}
		if cl.epoch != 0 && !cl.revoked && !cl.fenced {
			adoptable++
		}
	}
	switch {
	case connected != c.connected:
		return fmt.Errorf("%d clients are connected, counted %d", connected, c.connected)
	case listed != c.queue.n+c.open.n+c.closing.n:
		return fmt.Errorf("%d clients are in a list, lists hold %d", listed, c.queue.n+c.open.n+c.closing.n)
	case concurrent != c.concurrent:
		return fmt.Errorf("%d concurrent grants live, counted %d", concurrent, c.concurrent)
	case c.mode == Exclusive && adoptable > 1:
		return fmt.Errorf("two holders: %d grants are neither revoked nor fenced", adoptable)
	case c.mode == Exclusive && c.open.n > 0 && c.concurrent > 0:
		return fmt.Errorf("client %d holds exclusively while %d concurrent grants drain", c.open.head.id, c.concurrent)
	case c.mode == Concurrent && c.queue.n > 0:
		return fmt.Errorf("%d clients wait in concurrent mode", c.queue.n)
	case c.queue.n > 0 && c.free():
		return fmt.Errorf("%d clients wait for a free GPU", c.queue.n)
	case c.persisted != c.record():
		return fmt.Errorf("persisted %v, need %v", c.persisted, c.record())
	}
	if h := c.holder; h != nil && (c.clients[h.id] != h || h.concurrent || h.in != &c.open && h.in != &c.closing) {
		return fmt.Errorf("client %d counts as the holder and is not", h.id)
	}
	return c.checkDeadline()
}

func (c *Core) checkList(name string, l *list) error {
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
		case l == &c.closing && prev != nil && prev.base > cl.base:
			return fmt.Errorf("client %d drains behind client %d, whose grace ends later", cl.id, prev.id)
		case l == &c.queue && prev != nil && prev.waitingSince > cl.waitingSince:
			return fmt.Errorf("client %d waits behind client %d, which came later", cl.id, prev.id)
		}
		prev = cl
	}
	if n != l.n || l.tail != prev {
		return fmt.Errorf("%s has %d clients, counted %d", name, n, l.n)
	}
	return nil
}

func (c *Core) checkClient(cl *client) error {
	live := cl.in == &c.open || cl.in == &c.closing
	switch {
	case cl.in != nil && cl.in != &c.queue && !live:
		return fmt.Errorf("is in a foreign list")
	case cl.epoch == 0 && (live || cl.fenced || cl.revoked || cl.want || cl.concurrent):
		return fmt.Errorf("has no grant, but the marks of one: %+v", *cl)
	case cl.epoch != 0 && live == cl.fenced:
		return fmt.Errorf("epoch %d is live: %t, fenced: %t", cl.epoch, live, cl.fenced)
	case cl.epoch != 0 && cl.in == &c.queue:
		return fmt.Errorf("waits and has epoch %d", cl.epoch)
	case cl.in == &c.queue && !cl.connected:
		return fmt.Errorf("waits without a connection")
	case cl.in == &c.open && (!cl.connected || cl.revoked):
		return fmt.Errorf("holds epoch %d, connected: %t, revoked: %t", cl.epoch, cl.connected, cl.revoked)
	case cl.epoch == 0 && !cl.connected:
		return fmt.Errorf("has neither a connection nor a grant")
	case cl.concurrent && cl.fenced:
		return fmt.Errorf("fenced, but counted as live")
	case !cl.revoked && cl.epoch > c.epoch:
		return fmt.Errorf("epoch %d is above the latest, %d", cl.epoch, c.epoch)
	}
	if cl.in == &c.open {
		waiters, present := 0, c.connected-1
		if c.mode == Exclusive {
			waiters = c.queue.n
		} else {
			present = min(present, 1) // only whether it is zero
		}
		if t := cl.told; t.Waiters != waiters || c.mode == Exclusive && t.Present != present || (t.Present > 0) != (present > 0) {
			return fmt.Errorf("was told %v, there are %d waiting and %d present", t, waiters, present)
		}
	}
	return nil
}

// checkDeadline checks that nothing due was left, and that what will be due
// has a deadline.
func (c *Core) checkDeadline() error {
	t, ok := c.Deadline()
	need := c.closing.n > 0 || c.holdOff != 0 || c.mode == Exclusive && c.open.n > 0 && c.queue.n > 0
	switch {
	case ok != need:
		return fmt.Errorf("deadline set: %t, needed: %t", ok, need)
	case ok && t <= c.now:
		return fmt.Errorf("deadline %d is not after the latest step at %d", t, c.now)
	}
	return nil
}
