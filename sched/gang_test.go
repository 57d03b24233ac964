// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/gang"
	"github.com/nvshare/nvshare/sched/residency"
	"pgregory.net/rapid"
)

// node is cores that share gangs, and what their clients have.
type node struct {
	node  *Node
	cores []*GPU
	now   base.Time
	log   func(format string, args ...any)
	fail  func(format string, args ...any)
	said  []string // actions of the latest step, on all GPUs, but Persist, Notice and Released

	has    []map[base.ClientID]base.Epoch // live, by GPU
	gangOf []map[base.ClientID]string
	beside []map[base.ClientID]bool // has it beside others

	cfg       Config
	persisted []Persist // by GPU
}

func newNode(gpus int, cfg Config) *node {
	n := &node{log: func(string, ...any) {}, cfg: cfg, persisted: make([]Persist, gpus)}
	n.start()
	for range gpus {
		n.has = append(n.has, map[base.ClientID]base.Epoch{})
		n.gangOf = append(n.gangOf, map[base.ClientID]string{})
		n.beside = append(n.beside, map[base.ClientID]bool{})
	}
	return n
}

// start makes the cores, of which the first know nothing of an earlier run.
func (n *node) start() {
	n.node, n.cores = NewNode(), nil
	for i, p := range n.persisted {
		cfg := n.cfg
		cfg.Node, cfg.GPU, cfg.LastEpoch = n.node, strconv.Itoa(i), p.Epoch
		n.cores = append(n.cores, New(cfg))
	}
}

// restart begins anew with what was persisted, as the caller of a core does.
func (n *node) restart(tenant func(base.ClientID) (name string, share Share)) {
	n.log("%v restart", time.Duration(n.now))
	n.start()
	for i, p := range slices.Clone(n.persisted) {
		if p.Unrecorded {
			n.step(i, RestoreUnknown{p.Epoch})
		}
		for _, h := range p.Holders {
			if h.Client != 0 {
				name, share := tenant(h.Client)
				n.step(i, Restore{Client: h.Client, Epoch: h.Epoch, Shared: h.Shared, Tenant: name, Gang: share.Gang, Overlap: share.Overlap})
			}
		}
	}
}

// step gives an event to a GPU's core, and lets the gangs go on.
func (n *node) step(gpu int, ev base.Event) {
	n.said = nil
	for todo := n.one(gpu, ev); len(todo) > 0; todo = todo[1:] {
		i, _ := strconv.Atoi(todo[0])
		todo = append(todo, n.one(i, GangMoved{})...)
	}
	if err := n.node.Check(); err != nil {
		n.fail("%v", err)
	}
}

// one returns the GPUs that are to be stepped next.
func (n *node) one(gpu int, ev base.Event) (todo []string) {
	c, has := n.cores[gpu], n.has[gpu]
	acts := c.Step(n.now, ev)
	if err := c.Check(); err != nil {
		defer n.fail("GPU %d: %v", gpu, err)
	}
	n.log("%v GPU %d %v -> %v", time.Duration(n.now), gpu, base.Text(ev), acts)
	switch ev := ev.(type) {
	case Release:
		if has[ev.Client] == ev.Epoch {
			delete(has, ev.Client)
		}
	case Gone:
		delete(has, ev.Client)
	case Attach:
		n.gangOf[gpu][ev.Client] = ev.Share.Group()
		if has[ev.Client] != ev.Held {
			delete(has, ev.Client)
		}
	}
	grant := func(id base.ClientID, epoch base.Epoch, exclusive bool) {
		for other := range has {
			if exclusive && other != id && !n.beside[gpu][other] && (n.gangOf[gpu][id] == "" || n.gangOf[gpu][other] != n.gangOf[gpu][id]) {
				n.fail("GPU %d: client %d is granted while these hold: %v", gpu, id, has)
			}
		}
		has[id], n.beside[gpu][id] = epoch, !exclusive
	}
	for _, a := range acts {
		switch a := a.(type) {
		case Persist:
			n.persisted[gpu] = a
		case Grant:
			grant(a.Client, a.Epoch, !a.Concurrent)
		case StepOne:
			grant(a.Client, a.Epoch, true)
		case Adopt:
			n.beside[gpu][a.Client] = n.beside[gpu][a.Client] || c.clients[a.Client].grant.kind == latencyGrant
		case Fence:
			delete(has, a.Client)
		case StepGPU:
			todo = append(todo, a.GPU)
		}
		switch a.(type) {
		case Persist, Notice, Released, ModeChosen, StepGPU:
		default:
			n.said = append(n.said, fmt.Sprintf("%d: %v", gpu, base.Text(a)))
		}
	}
	return todo
}

// bury ends those that are fenced and would use up their limit for ever.
func (n *node) bury() {
	for i, c := range n.cores {
		for _, cl := range c.inOrder() {
			if g := cl.grant; g != nil && g.state == fenced && cl.tenant.limited() {
				n.step(i, Gone{cl.id})
			}
		}
	}
}

// deadline returns the GPU whose Tick is next; false if nothing is due anywhere.
func (n *node) deadline() (gpu int, at base.Time, ok bool) {
	due, any := false, false
	for i, c := range n.cores {
		_, has := c.due()
		due = due || has
		if t, has := c.Deadline(); has && (!any || t < at) {
			gpu, at, any = i, t, true
		}
	}
	return gpu, at, due
}

// TestAnyGangHistory drives three GPUs with arbitrary events, and checks safety
// after each and that nobody waits for ever.
func TestAnyGangHistory(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		modes, moves := rapid.Bool().Draw(t, "modes change"), rapid.Bool().Draw(t, "memory moves")
		n := newNode(3, Config{Quantum: 20 * time.Millisecond, Grace: 60 * time.Millisecond, SwapShare: rapid.SampledFrom([]int{0, 10, 50}).Draw(t, "share"),
			Memory: residency.Config{Swap: moves, Capacity: 100, StallAfter: 20 * time.Millisecond}})
		n.log, n.fail = t.Logf, t.Fatalf
		names := rapid.SampledFrom([]string{"", "", "a", "b"})
		shares := rapid.Custom(func(t *rapid.T) Share {
			s := Share{Gang: names.Draw(t, "gang")}
			if s.Gang == "b" && rapid.Bool().Draw(t, "overlaps") {
				s.Gang, s.Overlap = "", "c"
			}
			switch rapid.IntRange(0, 7).Draw(t, "kind") {
			case 0:
				s.Priority = Latency
			case 1:
				s.Limit = 30
			case 2:
				s.Request = 50
			}
			return s
		})
		tenants := map[string]Share{}
		tenant := func(id base.ClientID) string { return fmt.Sprintf("t%d", (id+1)/2) }
		for range rapid.IntRange(1, 150).Draw(t, "steps") {
			gpu := rapid.IntRange(0, 2).Draw(t, "gpu")
			if _, at, ok := n.deadline(); ok && rapid.IntRange(0, 3).Draw(t, "to the deadline") == 0 {
				n.now = max(n.now, at)
			} else {
				n.now = n.now.Add(time.Duration(rapid.Int64Range(0, int64(8*time.Millisecond)).Draw(t, "pause")))
			}
			for { // what is due comes first
				i, at, ok := n.deadline()
				if !ok || at > n.now {
					break
				}
				n.step(i, Tick{})
				n.bury()
			}
			id := base.ClientID(rapid.IntRange(1, 7).Draw(t, "client"))
			epoch := func() base.Epoch {
				return rapid.SampledFrom([]base.Epoch{0, n.has[gpu][id], n.has[gpu][id], n.has[gpu][id], 3}).Draw(t, "epoch")
			}
			var ev base.Event
			most := 21
			if moves {
				most = 27
			}
			switch rapid.IntRange(0, most).Draw(t, "kind") {
			case 0, 1, 2, 3:
				ev = Attach{Client: id, Tenant: tenant(id), Share: tenants[tenant(id)], CanMove: moves, Held: epoch(), Want: rapid.Bool().Draw(t, "want")}
			case 4, 5, 6, 7, 8:
				ev = Request{id}
			case 9, 10, 11, 12:
				ev = Release{id, epoch(), Reason(rapid.IntRange(1, 3).Draw(t, "reason")), rapid.Bool().Draw(t, "preempted"), 0}
			case 13, 14:
				ev = Lost{id}
			case 15:
				ev = Gone{id}
			case 16, 17:
				s := shares.Draw(t, "share")
				tenants[tenant(id)] = s
				for i := range n.cores {
					for c := range base.ClientID(8) {
						if tenant(c) == tenant(id) && n.cores[i].clients[c] != nil {
							n.gangOf[i][c] = s.Group()
						}
					}
					if len(n.has[i]) > 1 { // who was granted with others may not be of them any more
						for c := range n.has[i] {
							if tenant(c) == tenant(id) {
								delete(n.has[i], c)
							}
						}
					}
					n.step(i, SetShare{tenant(id), s})
				}
				continue
			case 18:
				n.restart(func(id base.ClientID) (string, Share) { return tenant(id), tenants[tenant(id)] })
				continue
			case 19:
				if modes {
					ev = SetMode{Mode(rapid.IntRange(0, 1).Draw(t, "mode"))}
					break
				}
				ev = Tick{}
			case 22, 23:
				total := rapid.Uint64Range(0, 80).Draw(t, "total")
				ev = residency.Reserve{Client: id, Total: total, Least: total}
			case 24, 25, 26, 27:
				here, away := rapid.Uint64Range(0, 80).Draw(t, "here"), rapid.SampledFrom([]uint64{0, 0, 20, 60}).Draw(t, "away")
				ev = residency.Moved{Client: id, Epoch: epoch(), Report: residency.Report{Resident: here, Fixed: min(here, rapid.Uint64Range(0, 5).Draw(t, "fixed")), Away: away}, Ready: away == 0}
			default:
				ev = Tick{}
			}
			if m, ok := ev.(SetMode); ok && m.M == Exclusive {
				clear(n.has[gpu]) // they overlap until they are drained
			}
			n.step(gpu, ev)
			n.bury()
		}

		// From here on nobody does anything.
		start := n.now
		for {
			gpu, at, ok := n.deadline()
			if !ok {
				break
			}
			if at > start.Add(5*time.Minute) {
				t.Fatalf("no end: %d", at)
			}
			n.now = max(n.now, at)
			n.step(gpu, Tick{})
			n.bury()
		}
		for i, c := range n.cores {
			s := c.Snapshot(n.now)
			if len(s.Queue) != 0 {
				t.Fatalf("GPU %d: these wait for ever: %v", i, s.Queue)
			}
			if c.kept != nil && c.kept.slot.Phase() != gang.Running {
				t.Fatalf("GPU %d is kept for %s for ever", i, c.kept.displayName())
			}
		}
	})
}

// play runs a script on a node: lines of TIME GPU EVENT, and below each,
// indented, what is done about it on all GPUs.
func play(t *testing.T, gpus int, script string) {
	t.Helper()
	n := newNode(gpus, Config{Quantum: 100 * time.Millisecond, Grace: time.Second})
	n.fail = t.Fatalf
	var got strings.Builder
	for _, line := range strings.Split(strings.TrimSpace(script), "\n") {
		line = strings.TrimSpace(line)
		words := strings.Fields(line)
		at, err := time.ParseDuration(words[0])
		if err != nil {
			continue // what was expected
		}
		n.now = base.Time(at)
		gpu, _ := strconv.Atoi(words[1])
		var gang string
		i := slices.IndexFunc(words, func(w string) bool { return strings.HasPrefix(w, "gang=") })
		if i >= 0 {
			gang = words[i][5:]
			words = slices.Delete(words, i, i+1)
		}
		ev, err := parseEvent(words[2:])
		if err != nil {
			t.Fatal(err)
		}
		switch e := ev.(type) {
		case Attach:
			e.Share.Gang = gang
			e.Tenant = fmt.Sprintf("t%d", e.Client)
			ev = e
		case Restore:
			e.Gang = gang
			e.Tenant = fmt.Sprintf("t%d", e.Client)
			ev = e
		}
		n.step(gpu, ev)
		fmt.Fprintln(&got, "\t"+line)
		for _, s := range n.said {
			fmt.Fprintln(&got, "\t\t"+s)
		}
	}
	if want := strings.Trim(script, "\n\t") + "\n"; strings.TrimLeft(got.String(), "\t") != want {
		t.Errorf("%s\ngot:\n%s", firstDifference(strings.TrimLeft(got.String(), "\t"), want), got.String())
	}
}

// TestGangScripts are examples. Each line is TIME GPU EVENT, with gang=NAME in an
// attach, and what follows on all GPUs.
func TestGangScripts(t *testing.T) {
	for name, s := range map[string]struct {
		gpus   int
		script string
	}{
		"one GPU: granted and revoked together": {1, `
	0ms 0 attach 1 gang=a
	1ms 0 attach 2 gang=a
	2ms 0 attach 3
	10ms 0 request 1
		0: grant 1 epoch=1 quantum=100ms
		0: grant 2 epoch=2 quantum=100ms
	20ms 0 request 3
	30ms 0 attach 4 want gang=a
		0: grant 4 epoch=3 quantum=100ms
	120ms 0 tick
		0: revoke 1 epoch=1 grace=1s waiters=1 why=quantum
		0: revoke 2 epoch=2 grace=1s waiters=1 why=quantum
		0: revoke 4 epoch=3 grace=1s waiters=1 why=quantum
	121ms 0 release 1 epoch=1 revoked
	121ms 0 release 2 epoch=2 revoked
	122ms 0 request 1
	122ms 0 release 4 epoch=3 revoked
		0: grant 3 epoch=4 quantum=100ms
	`},
		"one GPU: who has drained makes a call for who has not": {1, `
	0ms 0 attach 1 want gang=a
		0: grant 1 epoch=1 quantum=100ms
	0ms 0 attach 2 want gang=a
		0: grant 2 epoch=2 quantum=100ms
	1ms 0 attach 3 want
	101ms 0 tick
		0: revoke 1 epoch=1 grace=1s waiters=1 why=quantum
		0: revoke 2 epoch=2 grace=1s waiters=1 why=quantum
	102ms 0 release 1 epoch=1 revoked
	102ms 0 request 1
	106ms 0 tick
		0: step 1 epoch=3 grace=995ms
	107ms 0 release 1 epoch=3 revoked
	107ms 0 request 1
	108ms 0 tick
		0: step 1 epoch=4 grace=993ms
	109ms 0 release 1 epoch=4 revoked
	109ms 0 release 2 epoch=2 revoked
		0: grant 3 epoch=5 quantum=100ms
	`},
		"two GPUs: ranks with calls of 7 ms end their turn all the same": {2, `
	0ms 0 attach 1 want gang=a
		0: grant 1 epoch=1 quantum=100ms
	0ms 1 attach 2 want gang=a
		1: grant 2 epoch=1 quantum=100ms
	1ms 0 attach 3 want
	101ms 0 tick
		0: revoke 1 epoch=1 grace=1s waiters=1 why=quantum
		1: revoke 2 epoch=1 grace=1s waiters=0 why=gang
	102ms 0 release 1 epoch=1 revoked
	102ms 0 request 1
	106ms 0 tick
		0: step 1 epoch=2 grace=995ms
	107ms 1 release 2 epoch=1 revoked
	107ms 1 request 2
	111ms 1 tick
		1: step 2 epoch=2 grace=990ms
	113ms 0 release 1 epoch=2 revoked
	113ms 0 request 1
	116ms 0 tick
		0: step 1 epoch=3 grace=985ms
	118ms 1 release 2 epoch=2 revoked
	118ms 1 request 2
	121ms 1 tick
		1: step 2 epoch=3 grace=980ms
	123ms 0 release 1 epoch=3 revoked
	123ms 0 request 1
	127ms 0 tick
	128ms 1 release 2 epoch=3 revoked
		0: grant 3 epoch=4 quantum=100ms
	`},
		"two GPUs: a late drain is waited for 10 ms": {2, `
	0ms 0 attach 1 want gang=a
		0: grant 1 epoch=1 quantum=100ms
	0ms 1 attach 2 want gang=a
		1: grant 2 epoch=1 quantum=100ms
	1ms 0 attach 3 want
	101ms 0 tick
		0: revoke 1 epoch=1 grace=1s waiters=1 why=quantum
		1: revoke 2 epoch=1 grace=1s waiters=0 why=gang
	121ms 0 release 1 epoch=1 revoked
	121ms 0 request 1
	122ms 0 tick
		0: step 1 epoch=2 grace=979ms
	123ms 1 release 2 epoch=1 revoked
	123ms 1 request 2
	131ms 1 tick
	132ms 1 tick
		1: step 2 epoch=2 grace=969ms
	133ms 1 release 2 epoch=2 revoked
	133ms 0 release 1 epoch=2 revoked
		0: grant 3 epoch=3 quantum=100ms
	`},
		"two GPUs: its turn has to come on both": {2, `
	0ms 0 attach 1 want
		0: grant 1 epoch=1 quantum=100ms
	0ms 1 attach 2 want
		1: grant 2 epoch=1 quantum=100ms
	1ms 0 attach 3 gang=a
	1ms 1 attach 4 gang=a
	10ms 0 request 3
	60ms 1 release 2 epoch=1 idle
		1: close 2
	110ms 0 tick
		0: revoke 1 epoch=1 grace=1s waiters=0 why=gang
	112ms 0 release 1 epoch=1 revoked
		0: grant 3 epoch=2 quantum=100ms
		1: grant 4 epoch=2 quantum=100ms
	`},
		"two GPUs: over on one it is over on both, and both wait for the drains": {2, `
	0ms 0 attach 1 want gang=a
		0: grant 1 epoch=1 quantum=100ms
	0ms 1 attach 2 want gang=a
		1: grant 2 epoch=1 quantum=100ms
	1ms 1 attach 3 want
	1ms 0 attach 4
	101ms 1 tick
		1: revoke 2 epoch=1 grace=1s waiters=1 why=quantum
		0: revoke 1 epoch=1 grace=1s waiters=0 why=gang
	102ms 0 request 4
	103ms 1 release 2 epoch=1 revoked
	104ms 0 release 1 epoch=1 revoked
		0: grant 4 epoch=2 quantum=100ms
		1: grant 3 epoch=2 quantum=100ms
	`},
		"two GPUs: the rest goes on without who has died": {2, `
	0ms 0 attach 1 want gang=a
		0: grant 1 epoch=1 quantum=100ms
	0ms 1 attach 2 gang=a
	1ms 1 attach 3 want
		1: grant 3 epoch=1 quantum=100ms
	2ms 1 gone 2
	3ms 0 request 1
	4ms 0 attach 5 want
	150ms 0 tick
		0: revoke 1 epoch=1 grace=1s waiters=1 why=quantum
	`},
		"two GPUs: after a restart it goes on as members come back": {2, `
	0ms 0 restore 1 epoch=5 gang=a
	0ms 1 restore 2 epoch=7 gang=a
	1ms 0 attach 3 want
	2ms 1 attach 2 held=7 gang=a
		1: adopt 2 epoch=7
	3ms 0 attach 1 held=5 gang=a
		0: adopt 1 epoch=5
	4ms 1 attach 4 want gang=a
		1: grant 4 epoch=8 quantum=100ms
	100ms 0 tick
		0: revoke 1 epoch=5 grace=1s waiters=1 why=quantum
		1: revoke 2 epoch=7 grace=1s waiters=0 why=gang
		1: revoke 4 epoch=8 grace=1s waiters=0 why=gang
	`},
		"two GPUs: after a restart its turn ends, though not all are back": {2, `
	0ms 0 restore 1 epoch=5 gang=a
	0ms 1 restore 2 epoch=7 gang=a
	1ms 0 attach 3 want
	2ms 1 attach 2 held=7 gang=a
		1: adopt 2 epoch=7
	100ms 0 tick
		1: revoke 2 epoch=7 grace=1s waiters=0 why=gang
	101ms 0 attach 1 held=5 gang=a
	102ms 0 release 1 epoch=5 revoked
	103ms 1 release 2 epoch=7 revoked
		0: grant 3 epoch=6 quantum=100ms
	`},
		"two GPUs: after a restart another gang gets its turn": {2, `
	0ms 0 restore 1 epoch=5 gang=a
	1ms 0 attach 3 want gang=b
	1ms 1 attach 4 want gang=b
	2ms 0 attach 1 held=5 gang=a
		0: adopt 1 epoch=5
	100ms 0 tick
	1100ms 0 tick
		0: revoke 1 epoch=5 grace=1s waiters=0 why=gang
	1101ms 0 release 1 epoch=5 revoked
		0: grant 3 epoch=6 quantum=100ms
		1: grant 4 epoch=1 quantum=100ms
	`},
		"two GPUs: a gang that held beside others before a restart drains": {2, `
	0ms 0 restore 1 epoch=5 gang=a
	0ms 1 restore 2 epoch=7 gang=a
	0ms 1 restore 3 epoch=6
	1ms 0 attach 1 held=5 gang=a
	1ms 1 attach 2 held=7 gang=a
	1ms 1 attach 3 held=6
	2ms 0 release 1 epoch=5 revoked
	2ms 1 release 2 epoch=7 revoked
	2ms 1 release 3 epoch=6 revoked
	`},
		"two GPUs: the machine is suspended while a gang stops": {2, `
	0ms 0 attach 1 want gang=a
		0: grant 1 epoch=1 quantum=100ms
	0ms 1 attach 2 want gang=a
		1: grant 2 epoch=1 quantum=100ms
	1ms 1 attach 3 want
	101ms 1 tick
		1: revoke 2 epoch=1 grace=1s waiters=1 why=quantum
		0: revoke 1 epoch=1 grace=1s waiters=0 why=gang
	102ms 0 release 1 epoch=1 revoked
	102ms 0 request 1
	1h 1 tick
	1h10ms 1 tick
		0: step 1 epoch=2 grace=989ms
	1h12ms 0 release 1 epoch=2 revoked
	1h12ms 1 release 2 epoch=1 revoked
		1: grant 3 epoch=2 quantum=100ms
	`},
		"one GPU: who leaves its gang while it is lost drains": {1, `
	0ms 0 attach 1 want gang=a
		0: grant 1 epoch=1 quantum=100ms
	0ms 0 attach 2 gang=a
	1ms 0 lost 1
		0: close 1
	2ms 0 set tenant=t1
	3ms 0 attach 1 held=1
	4ms 0 attach 3 want
	5ms 0 release 1 epoch=1 revoked
		0: grant 3 epoch=2 quantum=100ms
	`},
		"two GPUs: after a restart the ranks of gangs may come back in turns": {2, `
	0ms 0 restore 9 epoch=5
	0ms 1 restore 9 epoch=5
	1ms 0 gone 9
	1ms 1 gone 9
	2ms 0 attach 1 want gang=a
	3ms 1 attach 4 want gang=b
	4ms 0 attach 3 want gang=b
	5ms 1 attach 2 want gang=a
	6ms 1 attach 5 want
		1: grant 5 epoch=6 quantum=100ms
	1100ms 0 tick
		1: revoke 5 epoch=6 grace=1s waiters=0 why=gang
	1102ms 1 release 5 epoch=6 revoked
		1: grant 2 epoch=7 quantum=100ms
		0: grant 1 epoch=6 quantum=100ms
	`},
		"two GPUs: two jobs start on them in turns": {2, `
	0ms 0 attach 1 want gang=a
		0: grant 1 epoch=1 quantum=100ms
	0ms 1 attach 2 want gang=b
		1: grant 2 epoch=1 quantum=100ms
	1ms 1 attach 3 want gang=a
	1ms 0 attach 4 want gang=b
		1: revoke 2 epoch=1 grace=1s waiters=0 why=gang
	2ms 1 release 2 epoch=1 revoked
		1: grant 3 epoch=2 quantum=100ms
	2ms 1 request 2
	100ms 0 tick
	102ms 1 tick
		1: revoke 3 epoch=2 grace=1s waiters=0 why=gang
		0: revoke 1 epoch=1 grace=1s waiters=0 why=gang
	104ms 0 release 1 epoch=1 revoked
	104ms 1 release 3 epoch=2 revoked
		0: grant 4 epoch=2 quantum=100ms
		1: grant 2 epoch=3 quantum=100ms
	`},
		"two GPUs: half of a gang had drained before a restart": {2, `
	0ms 0 restore 1 epoch=5 gang=a
	1ms 1 attach 3 want
		1: grant 3 epoch=1 quantum=100ms
	2ms 0 attach 1 held=5 gang=a
		0: adopt 1 epoch=5
	3ms 1 attach 2 want gang=a
		1: revoke 3 epoch=1 grace=1s waiters=0 why=gang
	4ms 1 release 3 epoch=1 revoked
		1: grant 2 epoch=2 quantum=100ms
	`},
	} {
		t.Run(name, func(t *testing.T) { play(t, s.gpus, s.script) })
	}
}
