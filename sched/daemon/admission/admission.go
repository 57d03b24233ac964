// SPDX-License-Identifier: Apache-2.0

// Package admission says who may connect to the scheduler, and how much of the
// scheduler's time each account may take. It does no I/O and reads no clock.
//
// What it guarantees, whatever accounts do:
//
//   - An account that has no connection gets one, as long as fewer accounts than there
//     are connections want any: the more an account has, the more must be left free for
//     it to get another.
//   - An account connects at a bounded rate, and so does a process, about which nothing
//     needs to be known but its number.
//   - What accounts ask of the scheduler's loop is counted by its cost. Together they may
//     cost a fixed amount in a second, of which each has an equal part, and some at once.
//   - An account whose processes have host memory made, and end, again and again, starts
//     processes at a rate that bounds what is made.
//   - At most TurnsAtOnce requests of an account are before the loop at a time: accounts
//     are served in turn.
package admission

import (
	"fmt"
	"maps"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

const (
	// MaxPerAccount limits the connections of an account, and so it does its processes.
	MaxPerAccount = 256
	// keptFree: an account may have as many connections, or processes, as a quarter of
	// what is free. So some is always free for those that have less.
	keptFree = 4

	// A process may connect connectRate times a second, and an account twice as often:
	// learning who a process is takes 0.1 ms. All the processes of an account may connect
	// at once, twice, because they do after a restart of the scheduler.
	connectRate  = 100
	connectBurst = 2 * MaxPerAccount
	// maxKnown is of how many processes, and of how many accounts without a connection, it
	// is known how often they connected and what they have cost.
	maxKnown = 4096

	// All accounts together may cost totalRate a second, in units of about 3 µs, but each
	// leastRate at least and greatestRate at most. A turn costs a client three frames, so
	// turns of 1 ms on 8 GPUs pass.
	totalRate    = 96_000
	greatestRate = 24_000
	leastRate    = 1_000
	// costBurst is what an account may cost at once.
	costBurst = 4_000

	// An account may have the host memory of the node made for its processes at once, and
	// then arenaRate bytes a second: making it takes 0.3 s of a processor for each GiB. A
	// process keeps what it got, so only processes that come and go need more.
	arenaRate = 1 << 30
	// arenaUnit is the unit in which host memory is counted, bytes.
	arenaUnit = 1 << 20

	// TurnsAtOnce is how many requests of an account may be before the loop.
	TurnsAtOnce = 2

	// recently is for how long a refusal is a problem.
	recently = time.Minute
)

// Desk knows the accounts that are connected. It may be used by several goroutines.
type Desk struct {
	mu          sync.Mutex
	max         int // connections and processes
	arena       int // host memory for what is moved off GPUs, arenaUnits
	connections int
	processes   int
	accounts    map[string]*Account
	active      int                     // accounts with a connection
	knocks      map[int32]*rate.Limiter // by process

	refused   uint64
	latest    time.Time // of the refusals
	recent    int       // refusals, none more than `recently` after the one before
	latestWhy string
}

// Account is a container, or a user outside containers, that connects.
type Account struct {
	desk        *Desk
	connections int
	connects    *rate.Limiter
	cost        *rate.Limiter
	arena       *rate.Limiter
	turn        chan struct{}
}

// New returns a desk for so many connections and processes together, on a node with so
// much host memory for what is moved off GPUs, bytes.
func New(most int, arena uint64) *Desk {
	return &Desk{max: most, arena: int(max(arena, arenaRate) / arenaUnit), accounts: map[string]*Account{}, knocks: map[int32]*rate.Limiter{}}
}

// SetProcesses says how many processes there are.
func (d *Desk) SetProcesses(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.processes = n
}

// Allows says whether somebody who has so many may have one more, where so many are free.
func Allows(has, free int) bool {
	return free > 0 && has < MaxPerAccount && (has == 0 || has < free/keptFree)
}

// Knock says why a process that connects is not looked at; nil: it is. The texts of this
// and of Connect have less than 48 bytes, because the client gets them.
func (d *Desk) Knock(process int32, now time.Time) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := d.knocks[process]
	if l == nil {
		if len(d.knocks) == maxKnown {
			clear(d.knocks) // who makes processes pays for them
		}
		l = rate.NewLimiter(connectRate, connectBurst)
		d.knocks[process] = l
	}
	if !l.AllowN(now, 1) {
		return d.refuse(now, fmt.Sprintf("a process connects above %d times a second", connectRate))
	}
	return nil
}

// Connect takes in a connection of an account, which ends with Disconnect, or says why
// not.
func (d *Desk) Connect(account string, now time.Time) (*Account, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	a := d.accounts[account]
	if a == nil {
		d.forget()
		a = &Account{
			desk:     d,
			connects: rate.NewLimiter(2*connectRate, 2*connectBurst),
			cost:     rate.NewLimiter(greatestRate, costBurst),
			arena:    rate.NewLimiter(arenaRate/arenaUnit, d.arena),
			turn:     make(chan struct{}, TurnsAtOnce),
		}
		d.accounts[account] = a
	}
	free := d.max - d.connections - d.processes
	switch {
	case a.connections >= MaxPerAccount:
		return nil, d.refuse(now, fmt.Sprintf("%d connections per container or user at most", MaxPerAccount))
	case free <= 0:
		return nil, d.refuse(now, fmt.Sprintf("%d connections on this node at most", d.max))
	case !Allows(a.connections, free):
		return nil, d.refuse(now, fmt.Sprintf("%d connections on this node: nearly full", d.max))
	case !a.connects.AllowN(now, 1):
		return nil, d.refuse(now, fmt.Sprintf("%d new connections a second at most", 2*connectRate))
	}
	if a.connections == 0 {
		d.active++
	}
	a.connections++
	d.connections++
	return a, nil
}

// forget makes room for one more account. The lock is held.
func (d *Desk) forget() {
	if len(d.accounts)-d.active < maxKnown {
		return
	}
	maps.DeleteFunc(d.accounts, func(_ string, a *Account) bool { return a.connections == 0 })
}

// refuse counts a refusal. The lock is held.
func (d *Desk) refuse(now time.Time, why string) error {
	if now.Sub(d.latest) > recently {
		d.recent = 0
	}
	d.refused++
	d.recent++
	d.latest, d.latestWhy = now, why
	return fmt.Errorf("%s", why)
}

// Refuse counts a refusal for a reason that only the caller knows.
func (d *Desk) Refuse(now time.Time, why string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	_ = d.refuse(now, why)
}

// Refused returns how many connections and processes were refused, and a problem if some
// were of late; "": none.
func (d *Desk) Refused(now time.Time) (all uint64, problem string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.recent > 0 && now.Sub(d.latest) <= recently {
		problem = fmt.Sprintf("processes were refused, %d recently, the last one because of a limit (%s): they try again, and may run without scheduling until then", d.recent, d.latestWhy)
	}
	return d.refused, problem
}

// Accounts is how many accounts have a connection.
func (d *Desk) Accounts() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.active
}

// Disconnect ends what Connect began.
func (a *Account) Disconnect() {
	a.desk.mu.Lock()
	defer a.desk.mu.Unlock()
	a.connections--
	a.desk.connections--
	if a.connections == 0 {
		a.desk.active--
	}
}

// part is what each account may cost in a second now.
func (a *Account) part() rate.Limit {
	a.desk.mu.Lock()
	defer a.desk.mu.Unlock()
	return rate.Limit(min(max(totalRate/max(a.desk.active, 1), leastRate), greatestRate))
}

// Charge counts what the account has cost, and says for how long the account's next
// request is to wait.
func (a *Account) Charge(cost int, now time.Time) time.Duration {
	if part := a.part(); part != a.cost.Limit() {
		a.cost.SetLimitAt(now, part)
	}
	var r *rate.Reservation
	for ; cost > 0; cost -= costBurst { // no more can be charged at a time
		r = a.cost.ReserveN(now, min(cost, costBurst))
	}
	if r == nil {
		return 0
	}
	return r.DelayFrom(now)
}

// AwaitArena says for how long a new process of the account is to wait, because too much
// host memory was made for those before.
func (a *Account) AwaitArena(now time.Time) time.Duration {
	return a.arena.ReserveN(now, 0).DelayFrom(now)
}

// ChargeArena counts host memory that was made for a process of the account.
func (a *Account) ChargeArena(bytes uint64, now time.Time) {
	for left := int(bytes / arenaUnit); left > 0; left -= a.desk.arena {
		a.arena.ReserveN(now, min(left, a.desk.arena))
	}
}

// Turn has room for one value for each request that may be before the loop: send one,
// have the request served, take one.
func (a *Account) Turn() chan struct{} { return a.turn }
