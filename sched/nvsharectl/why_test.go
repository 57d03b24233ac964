// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// A minute of which nothing is unknown: the tenant runs, is kept away by its core
// limit, waits for one that drains long, waits while nobody has the GPU, and is idle.
func TestWhy(t *testing.T) {
	pod := func(name string) *api.Container {
		return &api.Container{Id: strings.Repeat(name[:1], 64), Namespace: "ml", Pod: name, Name: "main"}
	}
	mine, other := pod("a-train"), pod("b-serve")
	const gpu, second = "GPU-x", int64(time.Second)
	now := int64(1000) * second
	at := func(s float64) int64 { return now - 60*second + int64(s*float64(second)) }
	event := func(kind api.EventType, c *api.Container, s float64, change func(*api.Event)) *api.Event {
		e := &api.Event{Type: kind, Uuid: gpu, Container: c, Client: 1, TimeNs: at(s)}
		if change != nil {
			change(e)
		}
		return e
	}
	held := func(s float64, drained float64) func(*api.Event) {
		return func(e *api.Event) {
			e.HeldNs, e.DrainedNs = int64(s*float64(second)), int64(drained*float64(second))
		}
	}
	waited := func(s, limited float64) func(*api.Event) {
		return func(e *api.Event) {
			e.WaitedNs, e.LimitedNs = int64(s*float64(second)), int64(limited*float64(second))
		}
	}
	events := []*api.Event{
		{Type: api.EventType_EVENT_TYPE_START, TimeNs: at(-10)},
		event(api.EventType_EVENT_TYPE_RELEASE, mine, 10, held(20, 1)),   // running from -10 on: 10 s of the minute
		event(api.EventType_EVENT_TYPE_RELEASE, other, 30, held(20, 15)), // from 10 to 30, draining from 15 on
		event(api.EventType_EVENT_TYPE_GRANT, mine, 35, waited(25, 8)),   // from 10 on: 8 s limited, 12 s for the other, 5 s for nobody
		event(api.EventType_EVENT_TYPE_SWAP_IN, mine, 37, func(e *api.Event) { e.TookNs = 2 * second }),
		event(api.EventType_EVENT_TYPE_RELEASE, mine, 40, held(5, 0)),
	}
	g := &api.GPU{Uuid: gpu, QuantumNs: 100e6, Clients: []*api.Client{
		{Id: 1, Container: mine, State: api.ClientState_CLIENT_STATE_WAITING, SinceNs: 10 * second},           // from 50 on
		{Id: 2, Container: other, State: api.ClientState_CLIENT_STATE_FENCED, SinceNs: 10 * second, Epoch: 7}, // the same
	}, Tenants: []*api.TenantUse{{Container: mine, OutOfMemory: 3, Share: &api.Share{CoreLimit: 25}}, {Container: other}}}

	var tenant *tenant
	for _, x := range tenantsOf(g) {
		if x.Container.Id == mine.Id {
			tenant = x
		}
	}
	a := accountOf(g, tenant, events, now-60*second, now)
	for _, tc := range []struct {
		name      string
		got, want float64
	}{
		{"known", a.Known, 60}, {"running", a.Running, 15}, {"draining", a.Draining, 1}, {"moving", a.Moving, 2},
		{"waiting", a.Waiting, 27}, {"limited", a.Limited, 8}, {"idle", a.Idle, 10}, {"turns", float64(a.Turns), 2},
	} {
		if math.Abs(tc.got-tc.want) > 1e-6 {
			t.Errorf("%s: %v, want %v", tc.name, tc.got, tc.want)
		}
	}
	if len(a.For) != 1 || a.For[0].Tenant != "ml/b-serve/main" || a.For[0].Seconds != 22 || a.For[0].Draining != 12 || !a.For[0].Fenced {
		t.Errorf("waited for %+v", a.For)
	}
	var out bytes.Buffer
	a.print(streams{out: &out})
	golden(t, "why.txt", out.String())
}

// Of tenants with several processes each moment counts once: one that runs in two processes runs
// once, one of which a process runs does not wait, and who waits for two processes of another
// tenant waits once.
func TestWhyCountsTimeOnce(t *testing.T) {
	const second = int64(time.Second)
	mine, other := &api.Container{Id: "a", Name: "mine"}, &api.Container{Id: "b", Name: "other"}
	grant := func(c *api.Container, client uint64, at, waited, limited int64) *api.Event {
		return &api.Event{Type: api.EventType_EVENT_TYPE_GRANT, Uuid: "GPU-x", Container: c, Client: client,
			TimeNs: at * second, WaitedNs: waited * second, LimitedNs: limited * second}
	}
	release := func(c *api.Container, client uint64, at, held, drained int64) *api.Event {
		return &api.Event{Type: api.EventType_EVENT_TYPE_RELEASE, Uuid: "GPU-x", Container: c, Client: client,
			TimeNs: at * second, HeldNs: held * second, DrainedNs: drained * second}
	}
	g := &api.GPU{Uuid: "GPU-x", Clients: []*api.Client{{Id: 1, Container: mine}, {Id: 2, Container: mine}, {Id: 3, Container: other}, {Id: 4, Container: other}}}
	a := accountOf(g, tenantsOf(g)[0], []*api.Event{
		{Type: api.EventType_EVENT_TYPE_START, TimeNs: 1},
		release(other, 3, 10, 10, 4), release(other, 4, 11, 11, 4), // from 0 to 11, draining from 6 on
		grant(mine, 1, 12, 10, 4), // waits from 2 on, limited to 6
		grant(mine, 2, 14, 11, 2), // waits from 3 on, limited to 5
		release(mine, 1, 20, 8, 1), release(mine, 2, 20, 6, 2),
	}, 0, 20*second)
	for _, tc := range []struct {
		name      string
		got, want float64
	}{
		{"running", a.Running, 8}, {"draining", a.Draining, 2}, {"waiting", a.Waiting, 6}, {"limited", a.Limited, 4}, {"idle", a.Idle, 2}, {"turns", float64(a.Turns), 2},
	} {
		if math.Abs(tc.got-tc.want) > 1e-6 {
			t.Errorf("%s: %v, want %v", tc.name, tc.got, tc.want)
		}
	}
	if len(a.For) != 1 || a.For[0].Seconds != 5 || a.For[0].Draining != 5 {
		t.Errorf("waited for %+v", a.For)
	}
}

func TestWhyFindsTenants(t *testing.T) {
	f := &fake{status: sample(), events: func(req *api.EventsRequest) *api.EventsResponse { return &api.EventsResponse{Run: 1, Next: req.Since} }}
	dir := serve(t, f)
	for _, who := range []string{"ml/train-a/main", "train-a", "user 1000", "1000", "aaaa"} {
		if code, out, errs := ctl("why", who, "--run-dir", dir); code != exitOK || !strings.Contains(out, "on GPU 0") {
			t.Errorf("%s: exit %d, %q %q", who, code, out, errs)
		}
	}
	if code, _, errs := ctl("why", "ml/train-x/main", "--run-dir", dir); code != exitFailed || !strings.Contains(errs, "did you mean ml/train-a/main?") {
		t.Errorf("an unknown tenant: exit %d, %q", code, errs)
	}
	if code, out, _ := ctl("why", "train-b", "-o", "json", "--run-dir", dir); code != exitOK || !strings.Contains(out, `"waited_for"`) {
		t.Errorf("exit %d, %s", code, out)
	}
}

// Events that come as fast as they are asked for keep no command from its end.
func TestWhyBesideShortTurns(t *testing.T) {
	f := &fake{status: sample(), events: func(req *api.EventsRequest) *api.EventsResponse {
		e := &api.Event{Sequence: req.Since + 1, TimeNs: time.Now().UnixNano()}
		return &api.EventsResponse{Run: 1, Next: e.Sequence, Events: []*api.Event{e}}
	}}
	if code, _, errs := ctl("why", "train-a", "--run-dir", serve(t, f)); code != exitOK {
		t.Errorf("exit %d, %s", code, errs)
	}
}

// A mistake on the command line is answered with what was meant, and where the help is.
func TestSuggestions(t *testing.T) {
	for args, want := range map[string]string{
		"stauts":                     "did you mean status?",
		"stat":                       "did you mean status?",
		"why":                        "give one tenant",
		"why user 1000":              "quote a name with a space",
		"events --tennant x":         "did you mean --tenant?",
		"set --container a":          "Run nvsharectl set --help",
		"set --user 1 --core-limt 5": "did you mean --core-limit?",
		"cdi nonsense":               "nvsharectl cdi --help",
		"drain 0":                    `drain takes no argument "0": name a GPU with --gpu`,
		"version now":                `version takes no argument "now"`,
		"events -n -2":               "--last: -2 is below -1",
	} {
		if code, _, errs := ctl(append(strings.Fields(args), "--run-dir", "/nonexistent")...); code != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("%s: exit %d, %q, want %q", args, code, errs, want)
		}
	}
	f := &fake{status: sample()}
	f.later = []*api.StatusResponse{twoSecondsLater()}
	if code, _, errs := ctl("top", "--once", "-d", "0.01", "--run-dir", serve(t, f)); code != exitOK {
		t.Errorf("-d takes seconds as -T does: exit %d, %q", code, errs)
	}
}

// The time before a tenant came is no time in which it wanted nothing.
func TestWhyBeginsWithTheTenant(t *testing.T) {
	const second = int64(time.Second)
	mine := &api.Container{Id: "a", Name: "mine"}
	g := &api.GPU{Uuid: "GPU-x", Clients: []*api.Client{{Id: 7, Container: mine, State: api.ClientState_CLIENT_STATE_IDLE}}}
	start := &api.Event{Type: api.EventType_EVENT_TYPE_START, TimeNs: 1}
	register := &api.Event{Type: api.EventType_EVENT_TYPE_REGISTER, Client: 7, Container: mine, TimeNs: 55 * second}
	turn := func(at int64) *api.Event {
		return &api.Event{Type: api.EventType_EVENT_TYPE_RELEASE, Uuid: "GPU-x", Client: 7, Container: mine, TimeNs: at, HeldNs: second}
	}
	for name, tc := range map[string]struct {
		events []*api.Event
		known  float64
	}{
		"came":                   {[]*api.Event{start, register, turn(57 * second)}, 5},
		"was here before":        {[]*api.Event{start, turn(50 * second), register, turn(57 * second)}, 50},
		"its register is gone":   {[]*api.Event{start, turn(57 * second)}, 50},
		"came before the window": {[]*api.Event{start, {Type: register.Type, Client: 7, Container: mine, TimeNs: second}}, 50},
	} {
		a := accountOf(g, tenantsOf(g)[0], tc.events, 10*second, 60*second)
		var out bytes.Buffer
		a.print(streams{out: &out})
		if came := strings.Contains(out.String(), "since it came:"); a.Known != tc.known || came != (tc.known == 5) {
			t.Errorf("%s: known %v, want %v\n%s", name, a.Known, tc.known, &out)
		}
	}
}

// why says of each process whether it is suspended, was, or could not leave the GPU.
func TestWhySaysWhoIsSuspended(t *testing.T) {
	away, returning := api.ContextState_CONTEXT_STATE_AWAY, api.ContextState_CONTEXT_STATE_RETURNING
	for want, c := range map[string]*api.Client{
		"": {Pid: 1},
		"process 1 is suspended: nothing of it is on the GPU until its next CUDA call":                     {Pid: 1, Suspended: true, Context: away, RestoreNs: 5},
		"process 1 is suspended: its memory has left the GPU, or is leaving; its context stays: no driver": {Pid: 1, Suspended: true, ContextProblem: "no driver"},
		"process 1 is coming back to the GPU: out of memory":                                               {Pid: 1, Context: returning, ContextProblem: "out of memory"},
		"process 1 was suspended: it took 200ms to bring its context back":                                 {Pid: 1, RestoreNs: 200e6},
		"process 1 cannot leave the GPU: OptiX uses it":                                                    {Pid: 1, FixedReason: "OptiX uses it"},
	} {
		g := &api.GPU{Uuid: "GPU-x", Clients: []*api.Client{c}}
		a := accountOf(g, tenantsOf(g)[0], nil, 0, 1)
		var out bytes.Buffer
		a.print(streams{out: &out})
		if got := strings.Join(a.Suspended, "\n"); got != want || !strings.Contains(out.String(), want) {
			t.Errorf("%q, want %q\n%s", got, want, &out)
		}
	}
}

// why names the processes on the tenant's GPU that nobody arbitrates, beside those that it
// waits for, and none of other GPUs.
func TestWhyNamesUnmanagedProcesses(t *testing.T) {
	r := sample()
	r.Unmanaged = []*api.Unmanaged{{Uuid: r.Gpus[0].Uuid + "x", Pid: 8, Command: "elsewhere"}}
	f := &fake{status: r, events: func(req *api.EventsRequest) *api.EventsResponse { return &api.EventsResponse{Run: 1, Next: req.Since} }}
	dir := serve(t, f)
	const says = "without nvshare"
	if code, out, _ := ctl("why", "train-a", "--run-dir", dir); code != exitOK || strings.Contains(out, says) {
		t.Errorf("exit %d\n%s", code, out)
	}
	for pid := range uint32(maxBlamed + 2) {
		r.Unmanaged = append(r.Unmanaged, &api.Unmanaged{Uuid: r.Gpus[0].Uuid, Pid: 90 + pid, Uid: 1001, Command: "py\x1bthon"})
	}
	code, out, _ := ctl("why", "train-a", "--run-dir", dir)
	want := "\nAlso on the GPU, without nvshare, whoever's turn it is: user 1001 (pid 90, py?thon), user 1001 (pid 91, py?thon), " +
		"user 1001 (pid 92, py?thon), user 1001 (pid 93, py?thon), user 1001 (pid 94, py?thon), 2 more.\n"
	if code != exitOK || !strings.Contains(out, want) {
		t.Errorf("exit %d, want %q in\n%s", code, want, out)
	}
	if code, out, _ = ctl("why", "train-a", "-o", "json", "--run-dir", dir); code != exitOK || strings.Count(out, "user 1001 (pid 9") != maxBlamed+2 {
		t.Errorf("exit %d\n%s", code, out)
	}
}

// A group's own line says so while it has members, who have lines of their own.
func TestGroupsLine(t *testing.T) {
	name := "overlap default/0/small"
	g := &api.GPU{Tenants: []*api.TenantUse{{Container: &api.Container{Id: name, Name: name}, Clients: 2}}}
	if state, _, _ := tenantsOf(g)[0].state(); state != "group" {
		t.Errorf("with members: %s", state)
	}
	g.Tenants[0].Clients = 0
	if state, _, _ := tenantsOf(g)[0].state(); state != "gone" {
		t.Errorf("without: %s", state)
	}
}

// Outside Kubernetes two containers may have one name: they are two tenants, one of which waits
// for the other.
func TestWhyOfOneNameTwice(t *testing.T) {
	const second = int64(time.Second)
	a, b := &api.Container{Id: strings.Repeat("a", 64), Name: "job"}, &api.Container{Id: strings.Repeat("b", 64), Name: "job"}
	g := &api.GPU{Uuid: "GPU-x", Clients: []*api.Client{
		{Id: 1, Container: a, State: api.ClientState_CLIENT_STATE_WAITING, SinceNs: 10 * second},
		{Id: 2, Container: b, State: api.ClientState_CLIENT_STATE_HOLDING, SinceNs: 20 * second, Epoch: 7},
	}, Tenants: []*api.TenantUse{{Container: a}, {Container: b}}}
	for _, tenant := range tenantsOf(g) {
		got := accountOf(g, tenant, nil, 0, 60*second)
		if tenant.Container == a && (got.Running != 0 || got.Waiting != 10 || len(got.For) != 1 || got.For[0].Tenant != "job") ||
			tenant.Container == b && (got.Running != 20 || len(got.For) != 0) {
			t.Errorf("%.1s: %+v", tenant.Container.Id, got)
		}
	}
}
