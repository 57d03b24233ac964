// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/away"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/placement"
	"github.com/nvshare/nvshare/sched/residency"
)

// A tenant moves to another GPU in phases:
//
//	wakes → departs → carried → arrives
//	           ▲                   │ processes have begun on the old GPU meanwhile
//	           └───────────────────┘
//
// Its connections are cut at the last one, and each process attaches to the GPU that the driver
// says it is on. So that ATTACH alone decides to which GPU a process belongs, whatever has failed
// before it. A tenant that was suspended with its context is suspended again where it arrives.

const (
	// departLimit bounds Wakes, and Departs: the end of a turn, a drain, and moving the memory.
	departLimit = 60 * time.Second
	// maxLegs is how often processes follow that begin while others are on their way.
	maxLegs = 4
	// arriveLimit bounds Arrives: shims attach again within a second.
	arriveLimit = 30 * time.Second
)

type phase uint8

const (
	Wakes   phase = iota // processes that were suspended come back with their contexts
	Departs              // nothing is granted; the memory goes to arenas
	Carried              // a goroutine has each process checkpointed, and restored with the GPUs exchanged
	Arrives              // each process attaches to the GPU that it is on
)

// Moves has the tenants that are on their way from GPU to GPU, and says where tenants can go.
type Moves struct {
	*node.Node
	*tenants.Book
	*memory.Memory
	*away.Away
	Migrations  map[string]*Move                // by account
	From        map[*node.Client]*node.GPU      // clients may have left this GPU for another one: the next ATTACH says
	strayed     map[*node.Client]CarriedProcess // the same by UUID, of GPUs not found yet
	returning   map[*node.Client]bool           // an earlier scheduler took them off, and this one has them run again
	DepartLimit time.Duration
	lose        func(*node.Conn) // notes that a client's connection is lost
}

// New returns the moves of nobody. lose notes that a client's connection is lost.
func New(aw *away.Away, lose func(*node.Conn)) *Moves {
	return &Moves{Node: aw.Node, Book: aw.Book, Memory: aw.Memory, Away: aw, lose: lose, DepartLimit: departLimit,
		Migrations: map[string]*Move{}, From: map[*node.Client]*node.GPU{}, strayed: map[*node.Client]CarriedProcess{}, returning: map[*node.Client]bool{}}
}

// ForgetClient forgets a client.
func (mv *Moves) ForgetClient(cl *node.Client) {
	delete(mv.From, cl)
	delete(mv.strayed, cl)
	delete(mv.returning, cl)
}

// JoinMove takes in a process that attaches to the GPU which its tenant leaves, and says whether it
// may still want that GPU.
func (mv *Moves) JoinMove(att *node.Attachment, want bool) bool {
	m := mv.Migrations[att.Client.Account]
	if m == nil || m.From != att.GPU || m.Phase > Departs {
		return want
	}
	if m.Phase == Departs {
		mv.keepOff(att, want)
		want = false
	}
	if !slices.Contains(m.clients, att.Client) {
		m.clients, m.count = append(m.clients, att.Client), m.count+1
	}
	return want
}

// Move is a tenant on its way to another GPU.
type Move struct {
	account  string
	From, To *node.GPU
	Phase    phase
	asleep   bool             // it was suspended with its context
	clients  []*node.Client   // those that live
	count    int              // processes that began
	bytes    uint64           // that they have reserved
	legs     int              // how often processes have set out
	carried  bool             // the driver was asked to move one
	moved    bool             // it has moved one
	home     *node.GPU        // where it began
	undone   error            // why it goes back; nil: it does not
	began    time.Time        // when its processes were stopped
	took     checkpoint.Times // the parts of it so far
	limit    *timer.Timer
	late     bool  // the phase has lasted too long
	err      error // why it stays, or is incomplete
	done     func(*Move)
}

// mayTake bounds the phase from now on.
func (m *Move) mayTake(limit time.Duration) {
	m.late = false
	m.limit.Set(loop.Now().Add(limit))
}

// Migrate begins to move a tenant; done is called once, in the loop.
func (mv *Moves) Migrate(req *api.MigrateRequest, done func(*Move)) error {
	account, err := mv.FindTenant(req.Container, req.Uid)
	if err != nil {
		return err
	}
	from, clients, err := mv.Movable(account)
	if err != nil {
		return err
	}
	to, err := mv.Destination(account, from, req.Gpu)
	if err != nil {
		return err
	}
	m := mv.newMove(account, from, to, done)
	m.clients, m.count = clients, len(clients)
	for _, mover := range from.Core.Movers(account) {
		m.bytes += mover.Bytes
	}
	m.mayTake(mv.DepartLimit)
	mv.Log.Infof("GPU %d: %s moves to GPU %d", from.Index, mv.NameOf(account), to.Index)
	for _, cl := range clients {
		if mv.IsAway(cl) {
			m.asleep = true
			mv.Wake(cl, nil)
		}
	}
	return nil
}

func (mv *Moves) newMove(account string, from, to *node.GPU, done func(*Move)) *Move {
	m := &Move{account: account, From: from, To: to, home: from, began: time.Now(), done: done}
	m.limit = mv.Timers.New(func() { m.late = true })
	mv.Migrations[account], mv.Leaving[account] = m, to
	mv.ExpectCheckpoints(0)
	return m
}

func (mv *Moves) advanceWaking(m *Move) {
	away := slices.IndexFunc(m.clients, func(cl *node.Client) bool { return mv.IsAway(cl) })
	switch {
	case away < 0:
		mv.depart(m)
	case m.late:
		m.err = fmt.Errorf("process %d has not come back to GPU %d with its context within %v", m.clients[away].PID, m.From.Index, mv.DepartLimit)
		mv.endMigration(m)
	}
}

// depart has the tenant leave its GPU.
func (mv *Moves) depart(m *Move) {
	m.Phase = Departs
	m.legs++
	if m.legs == 1 {
		m.began = time.Now()
	} else {
		mv.Log.Infof("GPU %d: %d processes of %s go to GPU %d, where the others are", m.From.Index, len(m.clients), mv.NameOf(m.account), m.To.Index)
	}
	m.mayTake(mv.DepartLimit)
	mv.Leaving[m.account] = m.To
	waiting := m.From.Core.Snapshot(loop.Now()).Queue
	for _, cl := range m.clients {
		if att := cl.Attached[m.From]; att != nil {
			mv.keepOff(att, slices.Contains(waiting, cl.ID))
			mv.Step(m.From, sched.Withdraw{Client: cl.ID})
		}
	}
	mv.Step(m.From, sched.Suspend{Tenant: m.account})
}

// keepOff has a client of a tenant that moves not be granted; wants: it asks for the GPU.
func (mv *Moves) keepOff(att *node.Attachment, wants bool) {
	att.Moves, att.Wants = true, wants
	if att.Client.SlotOn(att.GPU) == att {
		att.Client.Page.Stand(att.Channel, false)
	}
}

// Movable returns the GPU that a tenant uses, and its processes, or why it cannot move.
func (mv *Moves) Movable(account string) (from *node.GPU, clients []*node.Client, err error) {
	var t placement.Tenant
	t, clients = mv.mover(account)
	if len(t.Uses) == 1 {
		from = mv.FindGPU(t.Uses[0].UUID)
		mv.ObserveHost()
		t.Stays = from.Core.DepartFits(account)
	}
	if why := mv.placementNode().May(t); why != nil {
		return nil, nil, status.Errorf(codes.FailedPrecondition, "%s cannot move to another GPU: %v", mv.NameOf(account), why)
	}
	return from, clients, nil
}

// mover describes a tenant that is to move, but for whether its memory can leave, and returns
// its processes on GPUs.
func (mv *Moves) mover(account string) (t placement.Tenant, clients []*node.Client) {
	t = mv.PlacementTenant(account)
	if m := mv.Migrations[account]; m != nil {
		to := placed(m.To)
		t.Moves = &to
	}
	all := mv.ClientsOf(account)
	for _, g := range mv.Order {
		uses := false
		for _, cl := range all {
			if g.Restored[cl.ID] || mv.MemberOf(g, cl.ID) != nil && cl.Attached[g] == nil || mv.From[cl] != nil {
				t.Absent = append(t.Absent, cl.PID)
			}
			if att := cl.Attached[g]; att != nil && !att.Held {
				uses = true
				clients = append(clients, cl)
				t.Processes = append(t.Processes, placement.Process{PID: cl.PID, Evades: cl.Reg.Bypassed > 0, Severed: cl.Conn == nil, Fixed: att.Foreign()})
			}
		}
		if uses {
			t.Uses = append(t.Uses, placed(g))
		}
	}
	if len(t.Uses) == 0 {
		return t, nil
	}
	terms := mv.Shares.Tenants[account].On(t.Uses[0].UUID)
	t.Gang = terms.Gang
	if terms.Overlap != "" {
		t.Overlap = api.OverlapFor(terms.Overlap)
	}
	if t.Kind != placement.User && !terms.Migratable {
		c, _ := mv.TenantOf(account)
		t.Fixed = madeToMove(c)
	}
	return t, clients
}

// madeToMove says how somebody makes a container of this kind so that it can move.
func madeToMove(c *api.Container) string {
	if c.Engine == node.RunEngine {
		return "start it with nvsharectl run --migratable true"
	}
	return "create it with the annotation " + api.MigratableAnnotation + "=true"
}

// Destination returns the GPU to which a tenant can move: the one with this name, or for ""
// the best one.
func (mv *Moves) Destination(account string, from *node.GPU, name string) (*node.GPU, error) {
	want := ""
	if name != "" {
		g := mv.FindGPU(name)
		if g == nil {
			return nil, node.NoSuchGPU(name)
		}
		want = g.UUID
	}
	t := mv.PlacementTenant(account)
	t.Uses = []placement.GPU{placed(from)}
	movers := from.Core.Movers(account)
	var places []placement.Place
	for _, g := range mv.Order {
		p, others := mv.placementOn(g, account, mv.Shares.Tenants[account]), mv.moversTo(g)
		if p.NoRoom = g.Core.ArriveFits(account, movers, others); p.NoRoom == nil {
			p.Owed = g.Core.MemorySnapshot().Promised
			for _, m := range others {
				p.Owed += m.Bytes
			}
		}
		places = append(places, p)
	}
	to, why := placement.Destination(t, places, want)
	if why != nil {
		return nil, status.Errorf(codes.FailedPrecondition, "%s cannot move from GPU %d: %v", mv.NameOf(account), from.Index, why)
	}
	return mv.FindGPU(to), nil
}

// moversTo returns the processes that are on their way to a GPU.
func (mv *Moves) moversTo(g *node.GPU) map[base.ClientID]residency.Mover {
	all := map[base.ClientID]residency.Mover{}
	for account, m := range mv.Migrations {
		if m.To == g {
			maps.Copy(all, m.From.Core.Movers(account))
		}
	}
	return all
}

// AdvanceMigrations has tenants that move go on, each as far as it can. It runs after each event.
func (mv *Moves) AdvanceMigrations() {
	for _, m := range mv.Migrations {
		for was := Carried; m.Phase != was; {
			was = m.Phase
			mv.advance(m)
		}
	}
}

func (mv *Moves) advance(m *Move) {
	m.clients = slices.DeleteFunc(m.clients, func(cl *node.Client) bool { return mv.Clients[cl.ID] != cl })
	switch {
	case m.Phase == Carried:
	case len(m.clients) == 0 && m.moved: // those that were to follow the others
		mv.settle(m)
	case len(m.clients) == 0:
		mv.endMigration(m)
	case m.Phase == Wakes:
		mv.advanceWaking(m)
	case m.Phase == Departs:
		mv.advanceDeparture(m)
	case m.Phase == Arrives:
		mv.advanceArrival(m)
	}
}

func (mv *Moves) advanceDeparture(m *Move) {
	switch {
	case m.From.Core.Departed(m.account):
		if m.err = cmp.Or(mv.onOthers(m), node.ForeignOn(m.From, m.clients)); m.err == nil {
			mv.carry(m)
			return
		}
	case m.late:
		m.err = fmt.Errorf("its work or its memory did not leave GPU %d within %v", m.From.Index, mv.DepartLimit)
	case m.From.Core.IsBack(m.account):
		mv.Step(m.From, sched.Suspend{Tenant: m.account})
		return
	default:
		return
	}
	mv.stay(m)
	mv.settle(m)
}

// stay lets a tenant on that was to depart.
func (mv *Moves) stay(m *Move) {
	for _, cl := range m.clients {
		att := cl.Attached[m.From]
		if att == nil {
			continue
		}
		wants := att.Wants
		att.Moves, att.Wants = false, false
		if wants {
			mv.Step(att.GPU, sched.Request{Client: cl.ID})
		}
	}
}

// onOthers returns an error if a process of a tenant that departs has begun on another GPU.
func (mv *Moves) onOthers(m *Move) error {
	for _, g := range mv.Order {
		for _, cl := range m.clients {
			if att := cl.Attached[g]; g != m.From && att != nil && !att.Held {
				return fmt.Errorf("process %d has begun on GPU %d meanwhile, and only tenants of one GPU move", cl.PID, g.Index)
			}
		}
	}
	return nil
}

func (mv *Moves) advanceArrival(m *Move) {
	missing := slices.IndexFunc(m.clients, func(cl *node.Client) bool { return mv.From[cl] != nil || mv.returning[cl] })
	switch {
	case missing < 0:
		mv.settle(m)
	case m.late:
		m.err = cmp.Or(m.err, fmt.Errorf("process %d has not attached again within %v", m.clients[missing].PID, arriveLimit))
		mv.endMigration(m)
	}
}

// settle ends a move if the tenant is on one GPU. Else those that are behind follow the others: they have
// begun meanwhile, or an earlier scheduler has ended on the way. If that cannot be, the others go back.
func (mv *Moves) settle(m *Move) {
	behind := mv.on(m.From, m.account)
	switch {
	case len(behind) == 0:
		m.err = nil // whatever failed on the way
	case !m.moved:
		m.err = cmp.Or(m.err, fmt.Errorf("%d of its processes are still on GPU %d", len(behind), m.From.Index))
	case m.legs == maxLegs:
		m.err = cmp.Or(m.err, fmt.Errorf("process %d is still on GPU %d: end it, or restart the tenant", behind[0].PID, m.From.Index))
	case m.err != nil:
		m.undone, m.err = cmp.Or(m.undone, m.err), nil
		m.From, m.To = m.To, m.From
		m.clients = mv.on(m.From, m.account)
		mv.depart(m)
		return
	default:
		m.count += len(slices.DeleteFunc(slices.Clone(behind), func(cl *node.Client) bool { return slices.Contains(m.clients, cl) }))
		m.clients = behind
		mv.depart(m)
		return
	}
	mv.endMigration(m)
}

// on returns the processes of a tenant that use a GPU.
func (mv *Moves) on(g *node.GPU, account string) []*node.Client {
	return slices.DeleteFunc(mv.ClientsOf(account), func(cl *node.Client) bool {
		att := cl.Attached[g]
		return att == nil || att.Held
	})
}

func (mv *Moves) endMigration(m *Move) {
	m.limit.Stop()
	delete(mv.Migrations, m.account)
	delete(mv.Leaving, m.account)
	mv.ExpectCheckpoints(0)
	if m.carried {
		mv.recordOrSay()
	}
	if m.To == m.home {
		m.From, m.To, m.err = m.To, m.From, cmp.Or(m.err, m.undone)
	}
	there := slices.Concat(m.clients, mv.on(m.To, m.account))
	if m.err == nil && (len(there) == 0 || len(m.clients) == 0 && !m.moved) { // others may have begun there
		m.err = fmt.Errorf("it has ended")
	}
	took := time.Since(m.began)
	m.noteTime("attached")
	e := &history.Event{Kind: api.EventType_EVENT_TYPE_MIGRATE, Bytes: m.bytes, Took: took}
	if m.err != nil {
		e.Text = fmt.Sprintf("not moved to GPU %d: %v", m.To.Index, m.err)
		mv.Log.Warnf("GPU %d: %s: %s", m.From.Index, mv.NameOf(m.account), e.Text)
	} else {
		m.To.Arrived++
		e.Text = fmt.Sprintf("moved from GPU %d (%v)", m.From.Index, m.took)
		mv.Log.Infof("GPU %d: %s has moved here from GPU %d in %v (%v)", m.To.Index, mv.NameOf(m.account), m.From.Index, took.Round(time.Millisecond), m.took)
	}
	on, id := m.To, base.ClientID(0)
	if m.err != nil {
		on = m.From
	}
	if len(there) > 0 {
		id = there[0].ID
	}
	mv.History.AddChange(mv.EventOf(time.Now(), on, id, e))
	m.done(m)
}

// noteTime notes a part that has ended now: all that no earlier part has taken.
func (m *Move) noteTime(name string) {
	m.took = m.took.Add(checkpoint.Part{Name: name, Took: time.Since(m.began) - m.took.Sum()})
}

// Response is what Migrate answers.
func (m *Move) Response(mv *Moves) *api.MigrateResponse {
	r := &api.MigrateResponse{FromUuid: m.From.UUID, FromIndex: uint32(m.From.Index), ToUuid: m.To.UUID, ToIndex: uint32(m.To.Index),
		Processes: uint32(m.count), Bytes: m.bytes, TookNs: int64(time.Since(m.began))}
	c, uid := mv.TenantOf(m.account)
	r.Container, r.Uid = proto.Clone(c).(*api.Container), uid
	return r
}

// Failure says why a tenant has not moved; nil: it has.
func (m *Move) Failure(mv *Moves) error {
	if m.err == nil {
		return nil
	}
	return status.Errorf(codes.FailedPrecondition, "%s has not moved to GPU %d: %v", mv.NameOf(m.account), m.To.Index, m.err)
}
