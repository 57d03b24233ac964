// SPDX-License-Identifier: Apache-2.0

// Package node has the tables of what the daemon knows: GPUs, connections, the processes that use
// GPUs, and the names of containers. The parts of the daemon share it, and each has state of its own
// beside it.
//
// What it guarantees:
//
//   - The loop alone touches it. No call waits for a client: frames are sent without blocking, and a
//     client that does not read is disconnected.
//   - A process has one Client from its first REGISTER to its proven death, whatever its connections
//     do.
//   - What tenants can cause as often as they like is limited, in the log and in the events.
//   - What is recorded of an earlier process holds until the kernel says that the process has ended.
package node

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/time/rate"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/history"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/wire"
)

const (
	// MaxClients is the number of processes on one node.
	MaxClients = 4096
	// MaxConnections is the number of connections and of processes on one node,
	// together: a process may connect anew before its old connection has ended.
	MaxConnections = 2 * MaxClients
	// MaxNamed is how many tenants an error names, where more are concerned.
	MaxNamed = 8
	// RefusalPause is the least time between two events of one tenant that say that its
	// memory limit refused memory, and between two that say that a GPU of its is not known.
	RefusalPause = 10 * time.Second
	// ClientsPerWork is how many clients a pass looks at, or tells of a change, for the cost of a
	// frame.
	ClientsPerWork = 16
	// TenantLogRate and tenantLogBurst bound the lines that tenants can cause;
	// more are written for debugging only.
	TenantLogRate  = 5 // per second
	TenantLogBurst = 50
	// MaxOutbox is how many decisions of a GPU's may wait for that. A client that adds to
	// more is disconnected.
	MaxOutbox = 1024
	// RecordPause is how long a change may go unrecorded of which somebody tells again.
	RecordPause = 200 * time.Millisecond
	// RecordRetry is the pause after another record could not be written, for which nothing
	// waits.
	RecordRetry = 2 * time.Second
)

// Config is what the parts of the daemon know of its options.
type Config struct {
	RunDir  string
	Log     *logrus.Entry
	Quantum time.Duration
	Mode    sched.Mode
	// Flags are the names of the settings (api.TurnLengthSetting and so on) that the command
	// line says; the others are the program's defaults. It is for display.
	Flags []string
	// SwapMemory is how much host memory, on this node, may hold what clients
	// have away from GPUs, bytes; 0: nothing is swapped.
	SwapMemory uint64
	// SwapAuto has that be as much as the host can spare, half of it, whenever more is needed.
	SwapAuto bool
	// SwapReady is how much of that is made before clients need it, bytes.
	SwapReady uint64
	// SwapHeadroom is what is left free of each GPU's memory for what the driver
	// needs for processes, bytes, or DefaultHeadroom.
	SwapHeadroom int64
	// SwapShare is the percentage of the time that moving memory may take; 0: turns are
	// as long as Quantum.
	SwapShare int
	// SuspendAfter is after which idle time a process is suspended, from
	// sched.MinSuspendAfter to sched.MaxSuspendAfter; 0: never.
	SuspendAfter time.Duration
	// GPUMemory makes GPUs look as if they had no more memory, bytes; 0: they have
	// what they have.
	GPUMemory uint64
	// DefaultMemoryLimit is the memory limit, on each GPU, of tenants that have none of
	// their own, bytes; 0: none.
	DefaultMemoryLimit uint64
	// SuspendDir is a directory for files with the memory of processes that are suspended with
	// their contexts, where host memory is short; "": there are none.
	SuspendDir string
	// Checkpoint takes processes off their GPUs that are suspended, and puts them back,
	// or on others. nil: their contexts stay, and none moves.
	Checkpoint Checkpointer
	// Sample asks the driver who uses GPUs, for metrics and to find processes that
	// are no clients. nil: nobody is asked. Release closes what that keeps open of the driver.
	Sample  metrics.Sampler
	Release func(ctx context.Context)
	// Warden is the socket of nvshare-warden, by which processes without a shim are held, and so are
	// fenced ones; "": they are only reported.
	Warden string
	// HoldAll has the processes of all tenants be held that have no shim, not only of those to which
	// nvshare gave something.
	HoldAll bool
}

// Checkpointer has the driver take a process off its GPUs, and put it back; see package
// checkpoint.
type Checkpointer interface {
	Off(ctx context.Context, pid int) (checkpoint.Times, error)
	On(ctx context.Context, pid int, pairs []checkpoint.Pair) (checkpoint.Times, error)
	// Expect says that so many operations may come at any time.
	Expect(operations int)
}

// Node has the tables of what the daemon knows of the node, and what its parts do with them.
type Node struct {
	*loop.Loop // the only goroutine that touches the tables and the cores
	Opts       Config
	Log        *logrus.Entry
	BootID     string
	Desk       *admission.Desk
	Peers      *peer.Finder
	Find       func(peer.Process) (*peer.Peer, error) // of peers, except in tests

	nextID    base.ClientID
	Clients   map[base.ClientID]*Client
	ByProc    map[peer.Process]*Client
	Held      map[base.ClientID]*peer.Peer    // clients of the cores that are processes which nvshare-warden holds
	ByAccount map[string]map[*Client]struct{} // by peer.Peer.Account
	Gpus      map[wire.UUID]*GPU
	Order     []*GPU                    // by index
	Cores     *sched.Node               // of all GPUs
	Names     map[string]*api.Container // by id; what the plugin told us; never changed, only replaced
	Broken    []*Conn                   // to be treated as lost after the current event
	Leaving   map[string]*GPU           // accounts on their way to another GPU, and to which

	// Step gives an event to a GPU's core, and carries out what the core decides.
	Step func(g *GPU, ev base.Event)
	// Bury removes a client whose process is dead.
	Bury func(*Client)

	History      *history.Log
	Traffic      metrics.Traffic
	TenantLog    *rate.Limiter
	unloggedTold uint64
	Told         map[string]time.Time // see MayTell
	ExtraWork    uint64               // of clients, beside that of the cores, in units of about a frame that does little
	Malformed    uint64

	unsure    []unsure
	again     *timer.Timer    // restore what is unsure
	Failpoint func(Failpoint) // tests
}

// New returns the tables of a node of which nothing is known.
func New(opts Config, bootID string, peers *peer.Finder) *Node {
	n := &Node{
		Loop: loop.New(), Opts: opts, Log: opts.Log, BootID: bootID, Peers: peers, Find: peers.Find,
		Desk:      admission.New(MaxConnections, opts.SwapMemory),
		Clients:   map[base.ClientID]*Client{},
		ByProc:    map[peer.Process]*Client{},
		Held:      map[base.ClientID]*peer.Peer{},
		ByAccount: map[string]map[*Client]struct{}{},
		Gpus:      map[wire.UUID]*GPU{},
		Cores:     sched.NewNode(),
		Names:     map[string]*api.Container{},
		Leaving:   map[string]*GPU{},
		Told:      map[string]time.Time{},
		TenantLog: rate.NewLimiter(TenantLogRate, TenantLogBurst),
	}
	n.Cores.Arenas.Bound(opts.SwapMemory, arena.HostReserve)
	n.again = n.Timers.New(n.restoreAgain)
	return n
}

// RunEngine is the engine of programs that nvsharectl run describes.
const RunEngine = "nvsharectl run"

// TenantOf is what the API says for an account.
func (n *Node) TenantOf(account string) (c *api.Container, uid uint32) {
	if id, ok := strings.CutPrefix(account, peer.ContainerAccount); ok {
		if names := n.Names[id]; names != nil {
			return names, 0
		}
		return &api.Container{Id: id}, 0
	}
	number, _ := strconv.ParseUint(strings.TrimPrefix(account, peer.UserAccount), 10, 32)
	return &api.Container{}, uint32(number)
}

// NameOf names a tenant for people.
func (n *Node) NameOf(account string) string { return api.Tenant(n.TenantOf(account)) }

// ContainerOf is what the API says for a process's container.
func (n *Node) ContainerOf(p *peer.Peer) *api.Container {
	if names := n.Names[p.Container]; names != nil {
		return names
	}
	return &api.Container{Id: p.Container, PodUid: p.PodUID}
}

// FirstProblems returns the first of many; more is a format that says how many there are beyond these.
func FirstProblems(all []string, more string) []string {
	if n := len(all) - MaxNamed; n > 0 {
		return append(all[:MaxNamed], fmt.Sprintf(more, n))
	}
	return all
}

// DescribeSome names the first of many.
func DescribeSome(who []string) string {
	text := strings.Join(who[:min(len(who), MaxNamed)], ", ")
	if more := len(who) - MaxNamed; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// What an earlier scheduler has recorded of a process holds if that lives. Where the kernel
// cannot say so, as where descriptors are short, it stays recorded until that is known.

// unsure is what is recorded of a process of which nobody can say whether it lives.
type unsure struct {
	record  any
	restore func() error
}

// OnceKnown has what is recorded of a process restored. restore fails as long as nobody can say
// whether the process lives.
func (n *Node) OnceKnown(record any, what string, restore func() error) {
	if err := restore(); err != nil {
		n.Log.WithError(err).Warnf("whether %s is not known; trying again every %v", what, RecordRetry)
		n.unsure = append(n.unsure, unsure{record, restore})
		n.again.Set(loop.Now().Add(RecordRetry))
	}
}

func (n *Node) restoreAgain() {
	// Of a copy: what is restored may have the records written, which lists n.unsure.
	n.unsure = slices.DeleteFunc(slices.Clone(n.unsure), func(u unsure) bool { return u.restore() == nil })
	if len(n.unsure) > 0 {
		n.again.Set(loop.Now().Add(RecordRetry))
	}
}

// UnsureOf returns the records of one kind that are still to be restored.
func UnsureOf[R any](n *Node) (all []R) {
	for _, u := range n.unsure {
		if r, ok := u.record.(R); ok {
			all = append(all, r)
		}
	}
	return all
}

// Subject is whom a line of log is about.
type Subject struct {
	*peer.Peer
	id base.ClientID // 0: a process that is no client yet
}

// Subject is whom lines about a client name.
func (cl *Client) Subject() Subject { return Subject{cl.Peer, cl.ID} }

// Subject is the same for a connection, which may have no client yet.
func (c *Conn) Subject() Subject {
	if c.Client != nil {
		return c.Client.Subject()
	}
	return Subject{Peer: c.Peer}
}

// LogOf returns the log with fields that name a subject.
func (n *Node) LogOf(s Subject) *logrus.Entry {
	fields := logrus.Fields{"pid": s.PID, "command": s.Command}
	if s.Container != "" {
		fields["container"] = s.Container
	}
	if s.id != 0 {
		fields["client"] = s.id
	}
	return n.Log.WithFields(fields)
}

// Tell writes a line that a tenant causes. A tenant can cause as many as it
// likes, so those above a limit are written for debugging only.
func (n *Node) Tell(s Subject, level logrus.Level, text string) {
	n.TellOf(n.LogOf(s), level, text)
}

// TellOf is Tell with other fields.
func (n *Node) TellOf(to *logrus.Entry, level logrus.Level, text string) {
	switch {
	case level >= logrus.DebugLevel:
	case !n.TenantLog.Allow():
		n.Traffic.UnloggedLines++
		level = logrus.DebugLevel
	case n.Traffic.UnloggedLines > n.unloggedTold:
		n.Log.WithField("lines", n.Traffic.UnloggedLines-n.unloggedTold).Warn("clients caused more lines than these: they are written with NVSHARE_DEBUG=1 only")
		n.unloggedTold = n.Traffic.UnloggedLines
	}
	to.Log(level, text)
}

// Turn notes an event that a client causes. g may be nil.
func (n *Node) Turn(t time.Time, g *GPU, id base.ClientID, e *history.Event) {
	n.History.AddTurn(n.EventOf(t, g, id, e))
}

// EventOf fills in when, where and who.
func (n *Node) EventOf(t time.Time, g *GPU, id base.ClientID, e *history.Event) *history.Event {
	e.At, e.Client = t.UnixNano(), id
	if g != nil {
		e.UUID, e.Index = g.UUID, g.Index
	}
	if cl := n.Clients[id]; cl != nil {
		e.Peer = cl.Peer
		if names := n.Names[cl.Container]; names != nil && cl.Container != "" {
			cl.named = names
		}
		e.Names = cl.named
	} else if p := n.Held[id]; p != nil {
		e.Peer, e.Names = p, n.Names[p.Container]
	}
	return e
}

// NoteClient notes that a process came or went. n is what the kind says.
func (n *Node) NoteClient(cl *Client, kind api.EventType, count uint32) {
	n.Turn(time.Now(), nil, cl.ID, &history.Event{Kind: kind, N: count})
}

// NoteChange notes an event that no client causes. g may be nil.
func (n *Node) NoteChange(g *GPU, e *history.Event) {
	n.History.AddChange(n.EventOf(time.Now(), g, 0, e))
}

// NoteSetting notes a setting that was changed: on one GPU, or (nil) for GPUs that
// are found later. account is the tenant whose setting it is, or "". caused: by a container that
// comes or goes, which may be often.
func (n *Node) NoteSetting(g *GPU, account string, caused bool, setting string, old, new any) {
	c := &history.Change{Setting: setting, Old: fmt.Sprint(old), New: fmt.Sprint(new)}
	if c.Old == c.New {
		return
	}
	if account != "" {
		c.Tenant, c.UID = n.TenantOf(account)
	}
	e := n.EventOf(time.Now(), g, 0, &history.Event{Kind: api.EventType_EVENT_TYPE_SET, Change: c})
	if caused {
		n.History.AddCaused(e)
	} else {
		n.History.AddChange(e)
	}
}

// MayTell says whether an event may be noted that a tenant causes as often as it likes: once in
// RefusalPause for each subject, also if its processes end meanwhile.
func (n *Node) MayTell(what string, t time.Time) bool {
	if told, ok := n.Told[what]; ok && t.Sub(told) < RefusalPause {
		return false
	}
	maps.DeleteFunc(n.Told, func(_ string, told time.Time) bool { return t.Sub(told) >= RefusalPause })
	n.Told[what] = t
	return true
}

// NoteAway notes an event of a client's on each of its GPUs.
func (n *Node) NoteAway(cl *Client, text string) {
	for g := range cl.Attached {
		n.Turn(time.Now(), g, cl.ID, &history.Event{Kind: api.EventType_EVENT_TYPE_CONTEXT, Text: text})
	}
}
