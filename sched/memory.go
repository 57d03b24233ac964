// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

// What turns and the memory of a GPU have to do with each other.

// forMemory is what memory sees of the turns.
type forMemory struct{ c *GPU }

func (f forMemory) Known(id base.ClientID) bool { return f.c.clients[id] != nil }

func (f forMemory) Connected(id base.ClientID) bool {
	cl := f.c.clients[id]
	return cl != nil && cl.connected
}

func (f forMemory) Later(a, b base.ClientID) bool { return f.c.later(a, b) }

func (f forMemory) SetAway(id base.ClientID, away bool) {
	if cl := f.c.clients[id]; cl != nil && cl.tenant != nil && cl.away != away { // without a tenant it attaches just now
		f.c.setAway(cl, away)
	}
}

func (f forMemory) SetStranded(id base.ClientID, on bool) { f.c.setStranded(f.c.clients[id], on) }

func (f forMemory) Ready(id base.ClientID, epoch base.Epoch, copied uint64, known bool) {
	f.c.isReady(f.c.clients[id], epoch, copied, known)
}

func (f forMemory) MovesOn(id base.ClientID, epoch base.Epoch, piece bool) {
	f.c.movesOn(f.c.clients[id], epoch, piece)
}

func (f forMemory) MovedOut() {
	for _, g := range f.c.moves {
		g.move.at = f.c.now
	}
}

func (f forMemory) MayBeRoom() { f.c.thereMayBeRoom() }

// attachMemory takes in the memory of a client that attaches.
func (c *GPU) attachMemory(cl *client, ev Attach) {
	cl.away = c.mem.Attach(residency.Client{
		ID: cl.id, Tenant: ev.Tenant, Gang: ev.Share.Group(), CanMove: ev.CanMove, Again: ev.Again, Granted: cl.grant != nil,
	})
}

// restoreMemory takes in the memory of a client that was here before a restart.
func (c *GPU) restoreMemory(ev residency.RestoreMemory) {
	cl := c.clients[ev.Client]
	c.mem.Restore(ev, cl != nil && cl.grant != nil)
}

// strandedMemory lets those go on that have a place again, or are to try.
func strandedMemory() policy {
	return policy{
		due:    func(c *GPU) (base.Time, bool) { return c.mem.Due() },
		revoke: func(c *GPU) { c.mem.PlaceStranded() },
	}
}

// suspend has a tenant leave the GPU.
func (c *GPU) suspend(tenant string) {
	for _, id := range c.mem.Clients(tenant) {
		if cl := c.clients[id]; c.mem.Suspend(id) && cl != nil && cl.grant.holds() && cl.tenant.slot == nil {
			c.revoke(cl.grant, Suspending)
		}
	}
}

// resumeTenant has a tenant's memory come back: a client that has memory away, or may have, waits for
// a grant as if it had asked for one. A client without a connection comes back with its own request.
func (c *GPU) resumeTenant(tenant string) {
	for _, id := range c.mem.Clients(tenant) {
		if cl := c.clients[id]; c.mem.Resume(id) && cl != nil && cl.connected && cl.tenant.slot == nil && !cl.grant.holds() {
			c.request(cl)
		}
	}
}

// Unused says whether the GPU has no client, and nobody has memory on it.
func (c *GPU) Unused() bool { return len(c.clients) == 0 && c.mem.Unused() }

// AsksHost says whether what an event does may depend on how much host memory there
// is: then Arenas.Observe comes before its Step.
func (c *GPU) AsksHost(ev base.Event) bool {
	switch ev.(type) {
	case Attach, SetShare:
		return c.Unplaced()
	}
	return c.View.AsksHost(ev)
}

// Left says whether a client is suspended, nothing that can be moved is left of its memory
// on the GPU, and it does not wait to come back.
func (c *GPU) Left(id base.ClientID) bool {
	cl := c.clients[id]
	return cl != nil && c.mem.HasLeft(id) && cl.grant == nil && cl.in == nil && !cl.later
}

// Departed says whether no client of a tenant has a grant, waits for one, or has memory on
// the GPU that can be moved.
func (c *GPU) Departed(tenant string) bool {
	for _, id := range c.mem.Clients(tenant) {
		if cl := c.clients[id]; cl != nil && (cl.grant != nil || cl.in != nil) {
			return false
		}
	}
	return c.mem.Departed(tenant)
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
