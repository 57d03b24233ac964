// SPDX-License-Identifier: Apache-2.0

package state

import (
	"encoding/json"
	"testing"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/tests/mutants"
)

func FuzzState(f *testing.F) {
	for _, s := range stateSeeds() {
		f.Add(s[0].([]byte))
	}
	f.Fuzz(readsState)
}

func TestStateMutants(t *testing.T) {
	mutants.Run(t, stateSeeds(), func(t *testing.T, in []any) { readsState(t, in[0].([]byte)) })
}

func stateSeeds() (seeds [][]any) {
	for _, s := range []string{
		`{"version":2,"boot_id":"x","gpus":{"GPU-1":{"epoch":9,"holders":[{"pid":5,"starttime":6,"epoch":8},{"pid":7,"starttime":6,"epoch":9}],"unrecorded":true}}}`,
		`{"version":2,"boot_id":"x","gpus":{"GPU-1":{"epoch":9,"holders":[{"pid":5,"starttime":6,"epoch":8},{"pid":7,"starttime":6,"epoch":9}],"way":"cohort"}}}`,
		`{"version":3}`, `{"version":2,"gpus":null}`, `{`, "", "null", `[1]`, "\x00\xff",
	} {
		seeds = append(seeds, []any{[]byte(s)})
	}
	return seeds
}

// Whatever is in the state file, the scheduler starts; with what it took from
// it, the cores do. (They panic on what only our own bugs could bring about.)
func readsState(t *testing.T, text []byte) {
	s, err := decode(text)
	if err != nil {
		return
	}
	for _, g := range s.GPUs {
		core := sched.New(sched.Config{Mode: sched.Auto, LastEpoch: g.Epoch, Way: g.Way})
		if g.Unrecorded {
			core.Step(1, sched.RestoreUnknown{Epoch: g.Epoch})
		}
		for i, h := range g.Holders {
			core.Step(1, sched.Restore{Client: base.ClientID(i + 1), Epoch: h.Epoch})
		}
		core.Step(2, sched.Attach{Client: 1000, Want: true})
		core.Step(base.Time(sched.MaxGrace), sched.Tick{})
		if err := core.Check(); err != nil {
			t.Fatalf("%+v: %v", g, err)
		}
	}
	s.Version = version
	again, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	s2, err := decode(again)
	if err != nil {
		t.Fatalf("taken, but not when written again as %s: %v", again, err)
	}
	if a, _ := json.Marshal(s2); string(a) != string(again) {
		t.Fatalf("%s became %s", again, a)
	}
}
