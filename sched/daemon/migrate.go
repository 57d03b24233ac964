// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/placement"
)

// A tenant moves to another GPU in phases:
//
//	wakes → prepares → departs → carried → arrives
//	                      ▲                   │ processes have begun on the old GPU meanwhile
//	                      └───────────────────┘
//
// Its connections are cut at the last one, and each process attaches to the GPU that the driver
// says it is on. So that ATTACH alone decides to which GPU a process belongs, whatever has failed
// before it. A tenant that was suspended with its context is suspended again where it arrives.

const (
	// departLimit bounds wakes, and departs: the end of a turn, a drain, and moving the memory.
	departLimit = 60 * time.Second
	// maxLegs is how often processes follow that begin while others are on their way.
	maxLegs = 4
	// arriveLimit bounds arrives: shims attach again within a second.
	arriveLimit = 30 * time.Second
	// bringBackPause lies between two tries to have a process run again.
	bringBackPause = time.Second
)

type phase uint8

const (
	wakes    phase = iota // processes that were suspended come back with their contexts
	prepares              // a copier makes both GPUs ready while the tenant works
	departs               // nothing is granted; the memory is copied (copier.go), or goes to arenas
	carried               // a goroutine has each process checkpointed, and restored with the GPUs exchanged
	arrives               // each process attaches to the GPU that it is on
)

// migration is a tenant on its way to another GPU.
type migration struct {
	account  string
	from, to *gpu
	phase    phase
	asleep   bool               // it was suspended with its context
	clients  []*client          // those that live
	count    int                // processes that began
	bytes    uint64             // that they have reserved
	legs     int                // how often processes have set out: others may have begun meanwhile
	began    time.Time          // when its processes were stopped
	copier   *checkpoint.Copier // nil: there is none
	took     checkpoint.Times   // the parts of it so far
	limit    *timer.Timer
	late     bool  // the phase has lasted too long
	err      error // why it stays, or is incomplete
	done     func(*migration)
}

// mayTake bounds the phase from now on.
func (m *migration) mayTake(limit time.Duration) {
	m.late = false
	m.limit.Set(now().Add(limit))
}

// migrate begins to move a tenant; done is called once, in the loop.
func (d *Daemon) migrate(req *api.MigrateRequest, done func(*migration)) error {
	account, err := d.findTenant(req.Container, req.Uid)
	if err != nil {
		return err
	}
	from, clients, err := d.movable(account)
	if err != nil {
		return err
	}
	to, err := d.destination(account, from, req.Gpu)
	if err != nil {
		return err
	}
	m := &migration{account: account, from: from, to: to, clients: clients, count: len(clients), began: time.Now(), done: done}
	for _, mover := range from.core.Movers(account) {
		m.bytes += mover.Bytes
	}
	m.limit = d.timers.New(func() { m.late = true })
	m.mayTake(d.departLimit)
	d.migrations[account] = m
	d.expectCheckpoints(0)
	d.log.Infof("GPU %d: %s moves to GPU %d", from.Index, d.nameOf(account), to.Index)
	for _, cl := range clients {
		if cl.away.step != present {
			m.asleep = true
			d.wake(cl, nil)
		}
	}
	return nil
}

func (d *Daemon) advanceWaking(m *migration) {
	away := slices.IndexFunc(m.clients, func(cl *client) bool { return cl.away.step != present })
	switch {
	case away < 0:
		d.prepareCopier(m)
	case m.late:
		m.err = fmt.Errorf("process %d has not come back to GPU %d with its context within %v", m.clients[away].PID, m.from.Index, d.departLimit)
		d.endMigration(m)
	}
}

// depart has the tenant leave its GPU.
func (d *Daemon) depart(m *migration) {
	m.phase = departs
	m.legs++
	if m.legs == 1 {
		m.began = time.Now()
	}
	m.mayTake(d.departLimit)
	waiting := m.from.core.Snapshot(now()).Queue
	for _, cl := range m.clients {
		if att := cl.attached[m.from]; att != nil {
			d.keepOff(att, slices.Contains(waiting, cl.id))
			d.step(m.from, sched.Withdraw{Client: cl.id})
		}
	}
	d.step(m.from, sched.Suspend{Tenant: m.account})
}

// keepOff has a client of a tenant that moves not be granted; wants: it asks for the GPU.
func (d *Daemon) keepOff(att *attachment, wants bool) {
	att.moves, att.wants = true, wants
	if att.client.slotOn(att.gpu) == att {
		att.client.page.Stand(att.channel, false)
	}
}

func (d *Daemon) nameOf(account string) string { return api.Tenant(d.tenantOf(account)) }

// movable returns the GPU that a tenant uses, and its processes, or why it cannot move.
func (d *Daemon) movable(account string) (from *gpu, clients []*client, err error) {
	var t placement.Tenant
	t, clients = d.mover(account)
	if len(t.Uses) == 1 {
		from = d.findGPU(t.Uses[0].UUID)
		d.observeHost()
		t.Stays = from.core.DepartFits(account)
	}
	if why := d.placementNode().May(t); why != nil {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "%s cannot move to another GPU: %v", d.nameOf(account), why)
	}
	return from, clients, nil
}

// mover describes a tenant that is to move, but for whether its memory can leave, and returns
// its processes on GPUs.
func (d *Daemon) mover(account string) (t placement.Tenant, clients []*client) {
	t = d.placementTenant(account)
	if m := d.migrations[account]; m != nil {
		to := m.to.placement()
		t.Moves = &to
	}
	all := d.clientsOf(account)
	for _, g := range d.order {
		uses := false
		for _, cl := range all {
			if g.restored[cl.id] || g.memberOf(cl.id) != nil && cl.attached[g] == nil || cl.from != nil {
				t.Absent = append(t.Absent, cl.PID)
			}
			if att := cl.attached[g]; att != nil && !att.held {
				uses = true
				clients = append(clients, cl)
				t.Processes = append(t.Processes, placement.Process{PID: cl.PID, Evades: cl.reg.Bypassed > 0, Severed: cl.conn == nil, Fixed: att.foreign()})
			}
		}
		if uses {
			t.Uses = append(t.Uses, g.placement())
		}
	}
	if len(t.Uses) == 0 {
		return t, nil
	}
	terms := d.shares.Tenants[account].on(t.Uses[0].UUID)
	t.Gang = terms.Gang
	if terms.Overlap != "" {
		t.Overlap = api.OverlapFor(terms.Overlap)
	}
	if t.Kind != placement.User && !terms.Migratable {
		c, _ := d.tenantOf(account)
		t.Fixed = madeToMove(c)
	}
	return t, clients
}

// clientsOf returns the processes of a tenant in the order in which they came.
func (d *Daemon) clientsOf(account string) []*client {
	return slices.SortedFunc(maps.Keys(d.byAccount[account]), func(a, b *client) int { return cmp.Compare(a.id, b.id) })
}

// madeToMove says how somebody makes a container of this kind so that it can move.
func madeToMove(c *api.Container) string {
	if c.Engine == runEngine {
		return "start it with nvsharectl run --migratable true"
	}
	return "create it with the annotation " + api.MigratableAnnotation + "=true"
}

// destination returns the GPU to which a tenant can move: the one with this name, or for ""
// the best one.
func (d *Daemon) destination(account string, from *gpu, name string) (*gpu, error) {
	want := ""
	if name != "" {
		g := d.findGPU(name)
		if g == nil {
			return nil, noSuchGPU(name)
		}
		want = g.UUID
	}
	t := d.placementTenant(account)
	t.Uses = []placement.GPU{from.placement()}
	movers := from.core.Movers(account)
	var places []placement.Place
	for _, g := range d.order {
		p, others := d.placementOn(g, account, d.shares.Tenants[account]), d.moversTo(g)
		if p.NoRoom = g.core.ArriveFits(account, movers, others); p.NoRoom == nil {
			p.Owed = g.core.MemorySnapshot().Promised
			for _, m := range others {
				p.Owed += m.Bytes
			}
		}
		places = append(places, p)
	}
	to, why := placement.Destination(t, places, want)
	if why != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot move from GPU %d: %v", d.nameOf(account), from.Index, why)
	}
	return d.findGPU(to), nil
}

// moversTo returns the processes that are on their way to a GPU.
func (d *Daemon) moversTo(g *gpu) map[sched.ClientID]sched.Mover {
	all := map[sched.ClientID]sched.Mover{}
	for account, m := range d.migrations {
		if m.to == g {
			maps.Copy(all, m.from.core.Movers(account))
		}
	}
	return all
}

// advanceMigrations has tenants that move go on, each as far as it can. It runs after each event.
func (d *Daemon) advanceMigrations() {
	for _, m := range d.migrations {
		for was := carried; m.phase != was; {
			was = m.phase
			d.advance(m)
		}
	}
}

func (d *Daemon) advance(m *migration) {
	m.clients = slices.DeleteFunc(m.clients, func(cl *client) bool { return d.clients[cl.id] != cl })
	switch {
	case m.phase == carried:
	case len(m.clients) == 0:
		d.endMigration(m)
	case m.phase == wakes:
		d.advanceWaking(m)
	case m.phase == departs:
		d.advanceDeparture(m)
	case m.phase == arrives:
		d.advanceArrival(m)
	}
}

func (d *Daemon) advanceDeparture(m *migration) {
	switch {
	case m.from.core.Departed(m.account):
		if m.err = cmp.Or(d.onOthers(m), foreignOn(m.from, m.clients)); m.err == nil {
			d.carry(m)
			return
		}
		d.stay(m)
	case m.late:
		m.err = fmt.Errorf("its work or its memory did not leave GPU %d within %v", m.from.Index, d.departLimit)
		d.stay(m)
	default:
		return
	}
	d.endMigration(m)
}

// stay lets a tenant on that was to depart.
func (d *Daemon) stay(m *migration) {
	for _, cl := range m.clients {
		if att := cl.attached[m.from]; att != nil {
			d.letOn(att)
		}
	}
}

// onOthers returns an error if a process of a tenant that departs has begun on another GPU.
func (d *Daemon) onOthers(m *migration) error {
	for _, g := range d.order {
		for _, cl := range m.clients {
			if att := cl.attached[g]; g != m.from && att != nil && !att.held {
				return fmt.Errorf("process %d has begun on GPU %d meanwhile, and only tenants of one GPU move", cl.PID, g.Index)
			}
		}
	}
	return nil
}

// letOn takes keepOff back.
func (d *Daemon) letOn(att *attachment) {
	wants := att.wants
	att.moves, att.wants = false, false
	if wants {
		d.step(att.gpu, sched.Request{Client: att.client.id})
	}
}

func (d *Daemon) advanceArrival(m *migration) {
	missing := slices.DeleteFunc(slices.Clone(m.clients), func(cl *client) bool { return cl.from == nil })
	if len(missing) > 0 && !m.late {
		return
	}
	stayed := 0
	for _, cl := range m.clients {
		if cl.attached[m.from] != nil {
			stayed++
		}
	}
	late := d.latecomers(m)
	switch {
	case len(missing) == 0 && stayed == 0 && len(late) > 0 && m.legs < maxLegs:
		m.err = nil
		m.clients, m.count = late, m.count+len(late)
		d.depart(m)
		return
	case len(missing) == 0 && stayed == 0:
		m.err = nil // whatever failed on the way
		if len(late) > 0 {
			m.err = fmt.Errorf("process %d has begun on GPU %d meanwhile: end it, or start the tenant anew", late[0].PID, m.from.Index)
		}
	case m.err != nil:
	case len(missing) > 0:
		m.err = fmt.Errorf("process %d has not attached again within %v", missing[0].PID, arriveLimit)
	case stayed > 0:
		m.err = fmt.Errorf("%d of its processes are still on GPU %d", stayed, m.from.Index)
	}
	d.endMigration(m)
}

// latecomers are processes of a tenant that began on the GPU which the others have left.
func (d *Daemon) latecomers(m *migration) (all []*client) {
	for cl := range d.byAccount[m.account] {
		if att := cl.attached[m.from]; att != nil && !att.held && !slices.Contains(m.clients, cl) {
			all = append(all, cl)
		}
	}
	slices.SortFunc(all, func(a, b *client) int { return cmp.Compare(a.id, b.id) })
	return all
}

func (d *Daemon) endMigration(m *migration) {
	m.limit.Stop()
	m.endCopier()
	d.wantArenas(m)
	delete(d.migrations, m.account)
	d.expectCheckpoints(0)
	if m.err == nil && len(m.clients) == 0 {
		m.err = fmt.Errorf("it has ended")
	}
	took := time.Since(m.began)
	m.noteTime("attached")
	e := &history.Event{Kind: api.EventType_EVENT_TYPE_MIGRATE, Bytes: m.bytes, Took: took}
	if m.err != nil {
		e.Text = fmt.Sprintf("not moved to GPU %d: %v", m.to.Index, m.err)
		d.log.Warnf("GPU %d: %s: %s", m.from.Index, d.nameOf(m.account), e.Text)
	} else {
		m.to.arrived++
		e.Text = fmt.Sprintf("moved from GPU %d (%v)", m.from.Index, m.took)
		d.log.Infof("GPU %d: %s has moved here from GPU %d in %v (%v)", m.to.Index, d.nameOf(m.account), m.from.Index, took.Round(time.Millisecond), m.took)
	}
	on, id := m.to, sched.ClientID(0)
	if m.err != nil {
		on = m.from
	}
	if len(m.clients) > 0 {
		id = m.clients[0].id
	}
	d.history.AddChange(d.eventOf(time.Now(), on, id, e))
	m.done(m)
}

// noteTime notes a part that has ended now: all that no earlier part has taken.
func (m *migration) noteTime(name string) {
	m.took = m.took.Add(checkpoint.Part{Name: name, Took: time.Since(m.began) - m.took.Sum()})
}

func (m *migration) response(d *Daemon) *api.MigrateResponse {
	r := &api.MigrateResponse{FromUuid: m.from.UUID, FromIndex: uint32(m.from.Index), ToUuid: m.to.UUID, ToIndex: uint32(m.to.Index),
		Processes: uint32(m.count), Bytes: m.bytes, TookNs: int64(time.Since(m.began))}
	c, uid := d.tenantOf(m.account)
	r.Container, r.Uid = proto.Clone(c).(*api.Container), uid
	return r
}

func (m *migration) failure(d *Daemon) error {
	if m.err == nil {
		return nil
	}
	return status.Errorf(codes.FailedPrecondition, "%s has not moved to GPU %d: %v", d.nameOf(m.account), m.to.Index, m.err)
}

// carry has a goroutine move the processes.
func (d *Daemon) carry(m *migration) {
	m.phase = carried
	m.limit.Stop()
	if m.copier != nil {
		m.noteTime("copy")
	} else {
		m.noteTime("memory out")
	}
	m.endCopier()
	var all []peer.Process
	for _, cl := range m.clients {
		cl.from = m.from
		all = append(all, cl.Process)
	}
	if m.err = d.recordCarried(); m.err != nil { // a restart would not know of them
		d.cutLoose(m)
		return
	}
	there, back := d.exchange(m.from, m.to), d.exchange(m.to, m.from)
	d.wg.Go(func() {
		took, err := d.carryAll(all, there, back)
		d.do(func() {
			m.err, m.took = err, m.took.Add(took...)
			d.cutLoose(m)
		})
	})
}

// exchange says where each GPU of the node goes if two of them are exchanged.
func (d *Daemon) exchange(a, b *gpu) (pairs []checkpoint.Pair) {
	for _, g := range d.order {
		to := g
		switch g {
		case a:
			to = b
		case b:
			to = a
		}
		pairs = append(pairs, checkpoint.Pair{Old: g.UUID, New: to.UUID})
	}
	return pairs
}

// carryAll moves processes one after the other. If one cannot move, those that have go back. A
// process that cannot come back is tried again after the return: the others need not wait.
func (d *Daemon) carryAll(all []peer.Process, there, back []checkpoint.Pair) (took checkpoint.Times, err error) {
	for i, p := range all {
		one, err := d.carryOne(p, there)
		if took = took.Add(one...); err == nil {
			continue
		}
		for _, moved := range all[:i] {
			if _, err := d.carryOne(moved, back); err != nil {
				d.bringBack(moved)
			}
		}
		d.bringBack(p)
		return took, err
	}
	return took, nil
}

func (d *Daemon) carryOne(p peer.Process, pairs []checkpoint.Pair) (checkpoint.Times, error) {
	ctx := context.Background() // an operation has a limit of its own
	took, err := d.onProcess(p, func(pid int) (checkpoint.Times, error) { return d.opts.Checkpoint.Off(ctx, pid) })
	if err != nil {
		return took, err
	}
	on, err := d.onProcess(p, func(pid int) (checkpoint.Times, error) { return d.opts.Checkpoint.On(ctx, pid, pairs) })
	return took.Add(on...), err
}

// onProcess operates on a process. One that has ended is left alone, because its PID may be
// another's, and is no error.
func (d *Daemon) onProcess(p peer.Process, operate func(pid int) (checkpoint.Times, error)) (checkpoint.Times, error) {
	lives, err := d.peers.Find(p)
	if peer.Ended(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer lives.Close()
	return operate(int(p.PID))
}

// bringBack has a process run again, on the GPU where it can. It goes on after the return for
// as long as the process lives: nothing else could be done for it.
func (d *Daemon) bringBack(p peer.Process) {
	err := d.tryBack(p)
	if err == nil {
		return
	}
	d.log.WithError(err).Errorf("process %d is off its GPU and cannot come back; trying again every %v", p.PID, bringBackPause)
	d.wg.Go(func() {
		for err != nil {
			select {
			case <-d.ended: // the next scheduler goes on, see restoreCarried
				return
			case <-time.After(bringBackPause):
			}
			err = d.tryBack(p)
		}
	})
}

// tryBack returns why a process does not run. No error: it runs, it has ended, or the driver
// has given it up, and its calls return errors.
func (d *Daemon) tryBack(p peer.Process) error {
	_, err := d.onProcess(p, func(pid int) (checkpoint.Times, error) {
		return d.opts.Checkpoint.On(context.Background(), pid, nil)
	})
	if err == nil {
		return nil
	}
	if d.hasEnded(p) {
		return nil
	}
	if e := (*checkpoint.Error)(nil); errors.As(err, &e) && e.State == checkpoint.Failed {
		d.log.WithError(err).Errorf("process %d is off its GPU, and the driver cannot restore it: end it", p.PID)
		return nil
	}
	return err
}

// cutLoose has processes attach to the GPU that they are on.
func (d *Daemon) cutLoose(m *migration) {
	m.phase = arrives
	m.mayTake(arriveLimit)
	for _, cl := range m.clients {
		if c := cl.conn; c != nil {
			d.shutDown(c)
			d.loseClient(c)
		}
	}
}

// arrived records that fewer processes are off their GPUs.
func (d *Daemon) arrived() {
	if err := d.recordCarried(); err != nil {
		d.log.Error(err)
	}
}

// arrive brings the books into line with the GPU to which a process attaches that may have
// moved. It returns whether it has.
func (d *Daemon) arrive(cl *client, g *gpu) bool {
	from := cl.from
	if from == nil {
		return false
	}
	cl.from = nil
	d.arrived()
	if from == g {
		return false
	}
	delete(cl.attached, from)
	delete(from.restored, cl.id)
	d.hasMoved(cl.Container, from, g)
	if m := d.migrations[cl.Account]; m != nil {
		cl.away.again = m.asleep
	}
	m := from.memberOf(cl.id)
	if m != nil {
		delete(from.swap.members, cl.id)
	}
	d.step(from, sched.Gone{Client: cl.id})
	if m == nil || g.swap == nil {
		return true
	}
	m.want, m.soon, m.copied = 0, 0, false
	g.swap.members[cl.id] = m
	m.arena.Move(g.swap.arenas, arenaOwner{d, g, m})
	from.swap.arenas.Prepare()
	d.noteMembers()
	return true
}
