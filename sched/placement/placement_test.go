// SPDX-License-Identifier: Apache-2.0

package placement

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

const gib = 1 << 30

// gpus are n GPUs g0, g1, ... of one model.
func gpus(n int) (all []GPU) {
	for i := range n {
		all = append(all, GPU{UUID: fmt.Sprint("g", i), Index: i, Model: "H200", MemoryBytes: 16 * gib})
	}
	return all
}

func TestMay(t *testing.T) {
	g := gpus(2)
	mig := GPU{UUID: "MIG-1", Index: 1, Model: "H200"}
	mover := Tenant{Kind: Container, Uses: g[:1], Processes: []Process{{PID: 7}, {PID: 8}}}
	for name, c := range map[string]struct {
		node   func(*Node)
		tenant func(*Tenant)
		want   string // "": it may
	}{
		"it may":               {},
		"no checkpoint":        {node: func(n *Node) { n.Unable = errors.New("the driver is too old") }, want: "the driver is too old"},
		"on its way":           {tenant: func(t *Tenant) { t.Moves = &g[1] }, want: "it is on its way to GPU 1"},
		"absent":               {tenant: func(t *Tenant) { t.Absent = []int32{9, 10} }, want: "process 9 has not come back since the scheduler's start"},
		"absent and on no GPU": {tenant: func(t *Tenant) { t.Absent, t.Uses = []int32{9}, nil }, want: "process 9 has not come back since the scheduler's start"},
		"no GPU":               {tenant: func(t *Tenant) { t.Uses = nil }, want: "it uses no GPU"},
		"two GPUs":             {tenant: func(t *Tenant) { t.Uses = g }, want: "it uses GPUs 0, 1, and only tenants of one GPU move"},
		"a MIG device":         {tenant: func(t *Tenant) { t.Uses = []GPU{mig} }, want: "it uses a MIG device"},
		"beside a MIG device":  {node: func(n *Node) { n.GPUs = []GPU{g[0], mig} }, want: "GPU 1 of this node is a MIG device"},
		"overlap":              {tenant: func(t *Tenant) { t.Overlap = "ml/o" }, want: "it is in overlap group ml/o, which shares a process of MPS"},
		"gang":                 {tenant: func(t *Tenant) { t.Gang = "ml/g" }, want: "it is in gang ml/g, which has the GPU as one"},
		"not made for it":      {tenant: func(t *Tenant) { t.Fixed = "annotate it" }, want: "it was not created as migratable: annotate it"},
		"past the shim":        {tenant: func(t *Tenant) { t.Processes = []Process{{PID: 7}, {PID: 8, Evades: true}} }, want: "process 8 can bypass the shim"},
		"severed":              {tenant: func(t *Tenant) { t.Processes = []Process{{PID: 7, Severed: true}} }, want: "process 7 has lost its connection to the scheduler"},
		"fixed":                {tenant: func(t *Tenant) { t.Processes = []Process{{PID: 7}, {PID: 8, Fixed: "OptiX uses it"}} }, want: "the memory of process 8 cannot be moved: OptiX uses it"},
		"its memory stays":     {tenant: func(t *Tenant) { t.Stays = errors.New("it is mapped elsewhere") }, want: "it is mapped elsewhere"},
	} {
		t.Run(name, func(t *testing.T) {
			n, one := Node{GPUs: g}, mover
			if c.node != nil {
				c.node(&n)
			}
			if c.tenant != nil {
				c.tenant(&one)
			}
			got := ""
			if err := n.May(one); err != nil {
				got = err.Error()
			}
			if got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestDestination(t *testing.T) {
	places := func(change func(p []Place)) (all []Place) {
		for i, g := range gpus(3) {
			all = append(all, Place{GPU: g, Owed: uint64(3-i) * gib})
		}
		if change != nil {
			change(all)
		}
		return all
	}
	container := Tenant{Kind: Container, Given: []string{"g0"}, Reach: []string{"g0", "g1", "g2"}}
	const closed = "give the container nvshare.com/gpu=any, or all GPUs and CUDA_VISIBLE_DEVICES for the one that it uses"
	for name, c := range map[string]struct {
		tenant Tenant
		places []Place
		want   string // the GPU that was named
		to     string // or the error
	}{
		"least promised":      {container, places(nil), "", "g2"},
		"the first of equals": {container, places(func(p []Place) { p[1].Owed = p[2].Owed }), "", "g1"},
		"the one named":       {container, places(nil), "g1", "g1"},
		"where it is":         {container, places(nil), "g0", "it uses GPU 0 already"},
		"there is one only":   {container, places(nil)[:1], "", "there is no other GPU"},
		"drained":             {container, places(func(p []Place) { p[2].Drained = true }), "", "g1"},
		"drained, named":      {container, places(func(p []Place) { p[2].Drained = true }), "g2", "GPU 2 is drained"},
		"each says why": {container, places(func(p []Place) { p[1].Fault = "Xid 79"; p[2].NoRoom = errors.New("600 MiB are missing") }), "",
			"GPU 1 does no work: Xid 79; GPU 2 has no place for it: 600 MiB are missing"},
		"its time is promised": {container, places(func(p []Place) { p[1].Promised, p[1].Request = 60, 50 }), "g1",
			"GPU 1 has no place for it: it is promised 50 % of a GPU's time, and 40 % of this one are left"},
		"who is promised no time": {container, places(func(p []Place) { p[1].Promised = 120 }), "g1", "g1"},
		"another model":           {container, places(func(p []Place) { p[1].Model = "H100" }), "g1", "GPU 1 is another model (H100)"},
		"another size":            {container, places(func(p []Place) { p[1].MemoryBytes = gib }), "g1", "GPU 1 is another model (H200)"},
		"a MIG device":            {container, places(func(p []Place) { p[1].UUID = "MIG-1" }), "MIG-1", "GPU 1 is a MIG device"},
		"out of reach":            {Tenant{Kind: Container, Given: []string{"g0"}}, places(nil), "g1", "GPU 1 is none that its container can open: " + closed},
		"a container of no GPU":   {Tenant{Kind: Container}, places(nil), "g1", "GPU 1 is none that its container can open: " + closed},
		"a program":               {Tenant{Kind: Program}, places(nil), "g1", "g1"},
		"a program of one":        {Tenant{Kind: Program, Given: []string{"g0"}}, places(nil), "g1", "GPU 1 is none of those that nvsharectl run --gpu has named"},
		"a user opens everything": {Tenant{Kind: User}, places(nil), "", "g2"},
	} {
		t.Run(name, func(t *testing.T) {
			c.tenant.Uses = gpus(1)
			got, err := Destination(c.tenant, c.places, c.want)
			if err != nil {
				got = err.Error()
			}
			if got != c.to {
				t.Errorf("got %q, want %q", got, c.to)
			}
		})
	}
}

func TestBegin(t *testing.T) {
	places := func(change func(p []Place)) (all []Place) {
		for i, g := range gpus(3) {
			all = append(all, Place{GPU: g, Tenants: 1, Reserved: gib, Request: 40, Promised: uint32(20 * i)})
		}
		change(all)
		return all
	}
	any := []string{"g0", "g1", "g2"}
	for name, c := range map[string]struct {
		reach  []string
		places []Place
		want   string // "": on none
	}{
		"the first of equals":       {any, places(func([]Place) {}), "g0"},
		"fewest tenants":            {any, places(func(p []Place) { p[1].Tenants, p[1].Reserved = 0, 9*gib }), "g1"},
		"then least memory":         {any, places(func(p []Place) { p[2].Reserved = 0 }), "g2"},
		"out of reach":              {[]string{"g1"}, places(func([]Place) {}), "g1"},
		"drained":                   {any, places(func(p []Place) { p[0].Drained = true }), "g1"},
		"broken":                    {any, places(func(p []Place) { p[0].Fault = "Xid 79" }), "g1"},
		"its time is promised":      {any, places(func(p []Place) { p[0].Promised = 61 }), "g1"},
		"all that is left":          {any, places(func(p []Place) { p[0].Promised = 60 }), "g0"},
		"who asks for nothing fits": {any, places(func(p []Place) { p[0].Promised, p[0].Request = 100, 0 }), "g0"},
		"nowhere":                   {any, places(func(p []Place) { p[0].Promised, p[1].Drained, p[2].Fault = 61, true, "Xid 79" }), ""},
	} {
		t.Run(name, func(t *testing.T) {
			if got := Begin(Tenant{Kind: Container, Reach: c.reach}, c.places); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

// one is a tenant of the model's node.
type one struct {
	Tenant
	on      string // UUID
	percent uint32
	bytes   uint64
}

// Tenants begin, move and end on a node. None moves that may not; whoever goes somewhere can
// open that GPU, which is well and not drained, and less of it was promised than of any other
// that would do. No GPU is ever overcommitted. Where there is no answer, no GPU would do.
func TestNode(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		all := gpus(rapid.IntRange(1, 5).Draw(t, "GPUs"))
		for i := range all {
			if rapid.IntRange(0, 3).Draw(t, "other model") == 0 {
				all[i].Model = "H100"
			}
		}
		uuids := func(label string) (some []string) {
			for _, g := range all {
				if rapid.IntRange(0, 3).Draw(t, label) > 0 {
					some = append(some, g.UUID)
				}
			}
			return some
		}
		tenants := map[string]*one{}
		promised := func(uuid string, except *one) (percent uint32, bytes uint64, n int) {
			for _, o := range tenants {
				if o != except && o.on == uuid {
					percent, bytes, n = percent+o.percent, bytes+o.bytes, n+1
				}
			}
			return percent, bytes, n
		}
		places := func(o *one) (ps []Place) {
			for _, g := range all {
				p := Place{GPU: g, Request: o.percent}
				p.Promised, p.Owed, p.Tenants = promised(g.UUID, o)
				if p.Reserved = p.Owed; p.Owed+o.bytes > g.MemoryBytes {
					p.NoRoom = fmt.Errorf("%d bytes are too many", o.bytes)
				}
				ps = append(ps, p)
			}
			return ps
		}
		for step := range rapid.IntRange(1, 30).Draw(t, "steps") {
			for i := range all {
				if rapid.IntRange(0, 15).Draw(t, "changes") == 0 {
					all[i].Drained = !all[i].Drained
				}
				if rapid.IntRange(0, 30).Draw(t, "breaks") == 0 {
					all[i].Fault = "Xid 79"
				}
			}
			names := make([]string, 0, len(tenants))
			for name := range tenants {
				names = append(names, name)
			}
			slices.Sort(names)
			if len(names) > 0 && rapid.IntRange(0, 4).Draw(t, "ends") == 0 {
				delete(tenants, rapid.SampledFrom(names).Draw(t, "tenant"))
				continue
			}
			if len(names) == 0 || rapid.Bool().Draw(t, "begins") {
				o := &one{percent: rapid.SampledFrom([]uint32{0, 10, 30, 50, 100}).Draw(t, "percent"), bytes: uint64(rapid.IntRange(0, 12).Draw(t, "GiB")) * gib}
				o.Kind, o.Reach = Container, uuids("reaches")
				ps := places(o)
				var able []Place
				for _, p := range ps {
					if slices.Contains(o.Reach, p.UUID) && !p.Drained && p.Fault == "" && (o.percent == 0 || p.Promised+o.percent <= 100) {
						able = append(able, p)
					}
				}
				o.on = Begin(o.Tenant, ps)
				chosen := slices.IndexFunc(able, func(p Place) bool { return p.UUID == o.on })
				if chosen < 0 != (len(able) == 0) {
					t.Fatalf("begins on %q; it could on %v", o.on, able)
				}
				if chosen < 0 {
					continue
				}
				for _, p := range able {
					if c := able[chosen]; p.Tenants < c.Tenants || p.Tenants == c.Tenants && p.Reserved < c.Reserved {
						t.Fatalf("begins on %+v; %+v is better", c, p)
					}
				}
				o.bytes = min(o.bytes, 16*gib-ps[slices.IndexFunc(ps, func(p Place) bool { return p.UUID == o.on })].Owed)
				if rapid.IntRange(0, 3).Draw(t, "stays") == 0 {
					o.Fixed = "annotate it"
				}
				tenants[fmt.Sprint(step)] = o
			} else {
				o := tenants[rapid.SampledFrom(names).Draw(t, "tenant")]
				from := all[slices.IndexFunc(all, func(g GPU) bool { return g.UUID == o.on })]
				o.Uses = []GPU{from}
				if err := (Node{GPUs: all}).May(o.Tenant); (err != nil) != (o.Fixed != "") {
					t.Fatalf("%+v: %v", o, err)
				} else if err != nil {
					continue
				}
				ps := places(o)
				want := ""
				if rapid.Bool().Draw(t, "named") {
					want = rapid.SampledFrom(all).Draw(t, "want").UUID
				}
				var able []Place
				for _, p := range ps {
					if p.UUID != o.on && (want == "" || want == p.UUID) && slices.Contains(o.Reach, p.UUID) && !p.Drained && p.Fault == "" &&
						p.Model == from.Model && p.NoRoom == nil && (o.percent == 0 || p.Promised+o.percent <= 100) {
						able = append(able, p)
					}
				}
				to, err := Destination(o.Tenant, ps, want)
				chosen := slices.IndexFunc(able, func(p Place) bool { return p.UUID == to })
				if (err != nil) != (len(able) == 0) || err == nil && chosen < 0 {
					t.Fatalf("moves to %q, %v; it could to %v", to, err, able)
				}
				if err != nil {
					for _, p := range ps {
						if (want == p.UUID || want == "" && p.UUID != o.on) && !strings.Contains(err.Error(), fmt.Sprint("GPU ", p.Index, " ")) {
							t.Fatalf("GPU %d is not explained: %v", p.Index, err)
						}
					}
					continue
				}
				for _, p := range able {
					if p.Owed < able[chosen].Owed {
						t.Fatalf("moves to %+v; %+v is better", able[chosen], p)
					}
				}
				o.on = to
			}
			for _, g := range all {
				if percent, bytes, _ := promised(g.UUID, nil); percent > 100 || bytes > g.MemoryBytes {
					t.Fatalf("%s: promised are %d %% and %d bytes", g.UUID, percent, bytes)
				}
			}
		}
	})
}
