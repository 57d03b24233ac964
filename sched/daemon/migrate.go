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

// moves has the tenants that are on their way from GPU to GPU, and says where tenants can go.
type moves struct {
	*node
	*tenants
	*memory
	*away
	migrations  map[string]*migration // by account
	from        map[*client]*gpu      // clients may have left this GPU for another one: the next ATTACH says
	strayed     map[*client]string    // the same by UUID, of GPUs not found yet
	bringers    map[*client]*bringing
	copiers     map[int]bool // PIDs of copiers that run
	departLimit time.Duration
	lose        func(*conn) // notes that a client's connection is lost
}

func newMoves(aw *away, lose func(*conn)) *moves {
	mv := &moves{node: aw.node, tenants: aw.tenants, memory: aw.memory, away: aw, lose: lose, departLimit: departLimit,
		migrations: map[string]*migration{}, from: map[*client]*gpu{}, strayed: map[*client]string{},
		bringers: map[*client]*bringing{}, copiers: map[int]bool{}}
	mv.memory.copied = mv.noteCopied
	return mv
}

// ended forgets a client.
func (mv *moves) ended(cl *client) {
	if b := mv.bringers[cl]; b != nil && b.copier != nil { // a child, or another process, may have its end of the socket
		b.copier.End()
	}
	delete(mv.bringers, cl)
	delete(mv.from, cl)
	delete(mv.strayed, cl)
}

// joinMove takes in a process that attaches to the GPU which its tenant leaves, and says whether it
// may still want that GPU.
func (mv *moves) joinMove(att *attachment, want bool) bool {
	m := mv.migrations[att.client.Account]
	if m == nil || m.from != att.gpu || m.phase > departs {
		return want
	}
	if m.phase == departs {
		mv.keepOff(att, want)
		want = false
	}
	if !slices.Contains(m.clients, att.client) {
		m.clients, m.count = append(m.clients, att.client), m.count+1
	}
	return want
}

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
func (mv *moves) migrate(req *api.MigrateRequest, done func(*migration)) error {
	account, err := mv.findTenant(req.Container, req.Uid)
	if err != nil {
		return err
	}
	from, clients, err := mv.movable(account)
	if err != nil {
		return err
	}
	to, err := mv.destination(account, from, req.Gpu)
	if err != nil {
		return err
	}
	m := &migration{account: account, from: from, to: to, clients: clients, count: len(clients), began: time.Now(), done: done}
	for _, mover := range from.core.Movers(account) {
		m.bytes += mover.Bytes
	}
	m.limit = mv.timers.New(func() { m.late = true })
	m.mayTake(mv.departLimit)
	mv.migrations[account], mv.leaving[account] = m, to
	mv.expectCheckpoints(0)
	mv.log.Infof("GPU %d: %s moves to GPU %d", from.Index, mv.nameOf(account), to.Index)
	for _, cl := range clients {
		if mv.of(cl).step != present {
			m.asleep = true
			mv.wake(cl, nil)
		}
	}
	return nil
}

func (mv *moves) advanceWaking(m *migration) {
	away := slices.IndexFunc(m.clients, func(cl *client) bool { return mv.of(cl).step != present })
	switch {
	case away < 0:
		mv.prepareCopier(m)
	case m.late:
		m.err = fmt.Errorf("process %d has not come back to GPU %d with its context within %v", m.clients[away].PID, m.from.Index, mv.departLimit)
		mv.endMigration(m)
	}
}

// depart has the tenant leave its GPU.
func (mv *moves) depart(m *migration) {
	m.phase = departs
	m.legs++
	if m.legs == 1 {
		m.began = time.Now()
	}
	m.mayTake(mv.departLimit)
	waiting := m.from.core.Snapshot(now()).Queue
	for _, cl := range m.clients {
		if att := cl.attached[m.from]; att != nil {
			mv.keepOff(att, slices.Contains(waiting, cl.id))
			mv.step(m.from, sched.Withdraw{Client: cl.id})
		}
	}
	mv.step(m.from, sched.Suspend{Tenant: m.account})
}

// keepOff has a client of a tenant that moves not be granted; wants: it asks for the GPU.
func (mv *moves) keepOff(att *attachment, wants bool) {
	att.moves, att.wants = true, wants
	if att.client.slotOn(att.gpu) == att {
		att.client.page.Stand(att.channel, false)
	}
}

// movable returns the GPU that a tenant uses, and its processes, or why it cannot move.
func (mv *moves) movable(account string) (from *gpu, clients []*client, err error) {
	var t placement.Tenant
	t, clients = mv.mover(account)
	if len(t.Uses) == 1 {
		from = mv.findGPU(t.Uses[0].UUID)
		mv.observeHost()
		t.Stays = from.core.DepartFits(account)
	}
	if why := mv.placementNode().May(t); why != nil {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "%s cannot move to another GPU: %v", mv.nameOf(account), why)
	}
	return from, clients, nil
}

// mover describes a tenant that is to move, but for whether its memory can leave, and returns
// its processes on GPUs.
func (mv *moves) mover(account string) (t placement.Tenant, clients []*client) {
	t = mv.placementTenant(account)
	if m := mv.migrations[account]; m != nil {
		to := placed(m.to)
		t.Moves = &to
	}
	all := mv.clientsOf(account)
	for _, g := range mv.order {
		uses := false
		for _, cl := range all {
			if g.restored[cl.id] || mv.memberOf(g, cl.id) != nil && cl.attached[g] == nil || mv.from[cl] != nil {
				t.Absent = append(t.Absent, cl.PID)
			}
			if att := cl.attached[g]; att != nil && !att.held {
				uses = true
				clients = append(clients, cl)
				t.Processes = append(t.Processes, placement.Process{PID: cl.PID, Evades: cl.reg.Bypassed > 0, Severed: cl.conn == nil, Fixed: att.foreign()})
			}
		}
		if uses {
			t.Uses = append(t.Uses, placed(g))
		}
	}
	if len(t.Uses) == 0 {
		return t, nil
	}
	terms := mv.shares.Tenants[account].on(t.Uses[0].UUID)
	t.Gang = terms.Gang
	if terms.Overlap != "" {
		t.Overlap = api.OverlapFor(terms.Overlap)
	}
	if t.Kind != placement.User && !terms.Migratable {
		c, _ := mv.tenantOf(account)
		t.Fixed = madeToMove(c)
	}
	return t, clients
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
func (mv *moves) destination(account string, from *gpu, name string) (*gpu, error) {
	want := ""
	if name != "" {
		g := mv.findGPU(name)
		if g == nil {
			return nil, noSuchGPU(name)
		}
		want = g.UUID
	}
	t := mv.placementTenant(account)
	t.Uses = []placement.GPU{placed(from)}
	movers := from.core.Movers(account)
	var places []placement.Place
	for _, g := range mv.order {
		p, others := mv.placementOn(g, account, mv.shares.Tenants[account]), mv.moversTo(g)
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
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot move from GPU %d: %v", mv.nameOf(account), from.Index, why)
	}
	return mv.findGPU(to), nil
}

// moversTo returns the processes that are on their way to a GPU.
func (mv *moves) moversTo(g *gpu) map[sched.ClientID]sched.Mover {
	all := map[sched.ClientID]sched.Mover{}
	for account, m := range mv.migrations {
		if m.to == g {
			maps.Copy(all, m.from.core.Movers(account))
		}
	}
	return all
}

// advanceMigrations has tenants that move go on, each as far as it can. It runs after each event.
func (mv *moves) advanceMigrations() {
	for _, m := range mv.migrations {
		for was := carried; m.phase != was; {
			was = m.phase
			mv.advance(m)
		}
	}
}

func (mv *moves) advance(m *migration) {
	m.clients = slices.DeleteFunc(m.clients, func(cl *client) bool { return mv.clients[cl.id] != cl })
	switch {
	case m.phase == carried:
	case len(m.clients) == 0:
		mv.endMigration(m)
	case m.phase == wakes:
		mv.advanceWaking(m)
	case m.phase == departs:
		mv.advanceDeparture(m)
	case m.phase == arrives:
		mv.advanceArrival(m)
	}
}

func (mv *moves) advanceDeparture(m *migration) {
	switch {
	case m.from.core.Departed(m.account):
		if m.err = cmp.Or(mv.onOthers(m), foreignOn(m.from, m.clients)); m.err == nil {
			mv.carry(m)
			return
		}
		mv.stay(m)
	case m.late:
		m.err = fmt.Errorf("its work or its memory did not leave GPU %d within %v", m.from.Index, mv.departLimit)
		mv.stay(m)
	default:
		return
	}
	mv.endMigration(m)
}

// stay lets a tenant on that was to depart.
func (mv *moves) stay(m *migration) {
	for _, cl := range m.clients {
		if att := cl.attached[m.from]; att != nil {
			mv.letOn(att)
		}
	}
}

// onOthers returns an error if a process of a tenant that departs has begun on another GPU.
func (mv *moves) onOthers(m *migration) error {
	for _, g := range mv.order {
		for _, cl := range m.clients {
			if att := cl.attached[g]; g != m.from && att != nil && !att.held {
				return fmt.Errorf("process %d has begun on GPU %d meanwhile, and only tenants of one GPU move", cl.PID, g.Index)
			}
		}
	}
	return nil
}

// letOn takes keepOff back.
func (mv *moves) letOn(att *attachment) {
	wants := att.wants
	att.moves, att.wants = false, false
	if wants {
		mv.step(att.gpu, sched.Request{Client: att.client.id})
	}
}

func (mv *moves) advanceArrival(m *migration) {
	missing := slices.DeleteFunc(slices.Clone(m.clients), func(cl *client) bool { return mv.from[cl] == nil })
	if len(missing) > 0 && !m.late {
		return
	}
	stayed := 0
	for _, cl := range m.clients {
		if cl.attached[m.from] != nil {
			stayed++
		}
	}
	late := mv.latecomers(m)
	switch {
	case len(missing) == 0 && stayed == 0 && len(late) > 0 && m.legs < maxLegs:
		m.err = nil
		m.clients, m.count = late, m.count+len(late)
		mv.depart(m)
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
	mv.endMigration(m)
}

// latecomers are processes of a tenant that began on the GPU which the others have left.
func (mv *moves) latecomers(m *migration) (all []*client) {
	for cl := range mv.byAccount[m.account] {
		if att := cl.attached[m.from]; att != nil && !att.held && !slices.Contains(m.clients, cl) {
			all = append(all, cl)
		}
	}
	slices.SortFunc(all, func(a, b *client) int { return cmp.Compare(a.id, b.id) })
	return all
}

func (mv *moves) endMigration(m *migration) {
	m.limit.Stop()
	m.endCopier()
	mv.wantArenas(m)
	delete(mv.migrations, m.account)
	delete(mv.leaving, m.account)
	mv.expectCheckpoints(0)
	if m.err == nil && len(m.clients) == 0 {
		m.err = fmt.Errorf("it has ended")
	}
	took := time.Since(m.began)
	m.noteTime("attached")
	e := &history.Event{Kind: api.EventType_EVENT_TYPE_MIGRATE, Bytes: m.bytes, Took: took}
	if m.err != nil {
		e.Text = fmt.Sprintf("not moved to GPU %d: %v", m.to.Index, m.err)
		mv.log.Warnf("GPU %d: %s: %s", m.from.Index, mv.nameOf(m.account), e.Text)
	} else {
		m.to.arrived++
		e.Text = fmt.Sprintf("moved from GPU %d (%v)", m.from.Index, m.took)
		mv.log.Infof("GPU %d: %s has moved here from GPU %d in %v (%v)", m.to.Index, mv.nameOf(m.account), m.from.Index, took.Round(time.Millisecond), m.took)
	}
	on, id := m.to, sched.ClientID(0)
	if m.err != nil {
		on = m.from
	}
	if len(m.clients) > 0 {
		id = m.clients[0].id
	}
	mv.history.AddChange(mv.eventOf(time.Now(), on, id, e))
	m.done(m)
}

// noteTime notes a part that has ended now: all that no earlier part has taken.
func (m *migration) noteTime(name string) {
	m.took = m.took.Add(checkpoint.Part{Name: name, Took: time.Since(m.began) - m.took.Sum()})
}

func (m *migration) response(mv *moves) *api.MigrateResponse {
	r := &api.MigrateResponse{FromUuid: m.from.UUID, FromIndex: uint32(m.from.Index), ToUuid: m.to.UUID, ToIndex: uint32(m.to.Index),
		Processes: uint32(m.count), Bytes: m.bytes, TookNs: int64(time.Since(m.began))}
	c, uid := mv.tenantOf(m.account)
	r.Container, r.Uid = proto.Clone(c).(*api.Container), uid
	return r
}

func (m *migration) failure(mv *moves) error {
	if m.err == nil {
		return nil
	}
	return status.Errorf(codes.FailedPrecondition, "%s has not moved to GPU %d: %v", mv.nameOf(m.account), m.to.Index, m.err)
}

// carry has a goroutine move the processes.
func (mv *moves) carry(m *migration) {
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
		mv.from[cl] = m.from
		all = append(all, cl.Process)
	}
	if m.err = mv.recordCarried(); m.err != nil { // a restart would not know of them
		mv.cutLoose(m)
		return
	}
	there, back := mv.exchange(m.from, m.to), mv.exchange(m.to, m.from)
	mv.Go(func() {
		took, err := mv.carryAll(all, there, back)
		mv.Do(func() {
			m.err, m.took = err, m.took.Add(took...)
			mv.cutLoose(m)
		})
	})
}

// exchange says where each GPU of the node goes if two of them are exchanged.
func (mv *moves) exchange(a, b *gpu) (pairs []checkpoint.Pair) {
	for _, g := range mv.order {
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
func (mv *moves) carryAll(all []peer.Process, there, back []checkpoint.Pair) (took checkpoint.Times, err error) {
	for i, p := range all {
		one, err := mv.carryOne(p, there)
		if took = took.Add(one...); err == nil {
			continue
		}
		for _, moved := range all[:i] {
			if _, err := mv.carryOne(moved, back); err != nil {
				mv.bringBack(moved)
			}
		}
		mv.bringBack(p)
		return took, err
	}
	return took, nil
}

func (mv *moves) carryOne(p peer.Process, pairs []checkpoint.Pair) (checkpoint.Times, error) {
	ctx := context.Background() // an operation has a limit of its own
	took, err := mv.onProcess(p, func(pid int) (checkpoint.Times, error) { return mv.opts.Checkpoint.Off(ctx, pid) })
	if err != nil {
		return took, err
	}
	on, err := mv.onProcess(p, func(pid int) (checkpoint.Times, error) { return mv.opts.Checkpoint.On(ctx, pid, pairs) })
	return took.Add(on...), err
}

// onProcess operates on a process. One that has ended is left alone, because its PID may be
// another's, and is no error.
func (mv *moves) onProcess(p peer.Process, operate func(pid int) (checkpoint.Times, error)) (checkpoint.Times, error) {
	lives, err := mv.peers.Find(p)
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
func (mv *moves) bringBack(p peer.Process) {
	err := mv.tryBack(p)
	if err == nil {
		return
	}
	mv.log.WithError(err).Errorf("process %d is off its GPU and cannot come back; trying again every %v", p.PID, bringBackPause)
	mv.Go(func() {
		for err != nil {
			select {
			case <-mv.Ended(): // the next scheduler goes on, see restoreCarried
				return
			case <-time.After(bringBackPause):
			}
			err = mv.tryBack(p)
		}
	})
}

// tryBack returns why a process does not run. No error: it runs, it has ended, or the driver
// has given it up, and its calls return errors.
func (mv *moves) tryBack(p peer.Process) error {
	_, err := mv.onProcess(p, func(pid int) (checkpoint.Times, error) {
		return mv.opts.Checkpoint.On(context.Background(), pid, nil)
	})
	if err == nil {
		return nil
	}
	if mv.hasEnded(p) {
		return nil
	}
	if e := (*checkpoint.Error)(nil); errors.As(err, &e) && e.State == checkpoint.Failed {
		mv.log.WithError(err).Errorf("process %d is off its GPU, and the driver cannot restore it: end it", p.PID)
		return nil
	}
	return err
}

// cutLoose has processes attach to the GPU that they are on.
func (mv *moves) cutLoose(m *migration) {
	m.phase = arrives
	m.mayTake(arriveLimit)
	for _, cl := range m.clients {
		if c := cl.conn; c != nil {
			mv.shutDown(c)
			mv.lose(c)
		}
	}
}

// arrived records that fewer processes are off their GPUs.
func (mv *moves) arrived() {
	if err := mv.recordCarried(); err != nil {
		mv.log.Error(err)
	}
}

// arrive brings the books into line with the GPU to which a process attaches that may have
// moved. It returns whether it has.
func (mv *moves) arrive(cl *client, g *gpu) bool {
	from := mv.from[cl]
	if from == nil {
		return false
	}
	delete(mv.from, cl)
	mv.arrived()
	if from == g {
		return false
	}
	delete(cl.attached, from)
	delete(from.restored, cl.id)
	mv.hasMoved(cl.Container, from, g)
	if m := mv.migrations[cl.Account]; m != nil {
		mv.of(cl).again = m.asleep
	}
	has := mv.takeMember(cl, from)
	mv.step(from, sched.Gone{Client: cl.id})
	mv.putMember(has, from, g)
	return true
}
