// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"pgregory.net/rapid"
)

// Whatever clients do and say, and however long ago the Step before was, Settle ends, and leaves nothing that is due:
// Check says that.
func TestSettleEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		arenas := NewArenas()
		mem := New(Config{Swap: true, Capacity: 100, Physical: 100}, &arenas, everybodyWaits{map[base.ClientID]bool{}}, func(base.Action) {})
		bytes := rapid.Uint64Range(0, 60)
		granted := map[base.ClientID]bool{}
		now := base.Time(1)
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			pauses := []time.Duration{0, time.Millisecond, time.Second, mostCut, 3 * mostCut}
			now = now.Add(rapid.SampledFrom(pauses).Draw(t, "pause"))
			mem.Begin(now, time.Second)
			id := base.ClientID(rapid.IntRange(1, 4).Draw(t, "client"))
			switch known := mem.members[id] != nil; {
			case !known || rapid.IntRange(0, 5).Draw(t, "attaches") == 0:
				mem.Attach(Client{ID: id, CanMove: rapid.IntRange(0, 2).Draw(t, "can move") > 0, Again: true, Cut: rapid.Bool().Draw(t, "cut"), Granted: granted[id]})
			case granted[id] && rapid.Bool().Draw(t, "releases"):
				mem.SetActive(id, true)
				mem.SetCut(id, rapid.Bool().Draw(t, "cut"))
				mem.Released(id, 0)
				granted[id] = false
			case !granted[id] && rapid.Bool().Draw(t, "granted"):
				mem.SetActive(id, true)
				mem.Granted(id, true)
				granted[id] = true
			case rapid.Bool().Draw(t, "reserves"):
				mem.Reserve(Reserve{Client: id, Total: bytes.Draw(t, "total"), Serial: 1})
			default:
				resident := bytes.Draw(t, "resident")
				mem.Moved(Moved{Client: id, Report: Report{Resident: resident, Fixed: min(resident, bytes.Draw(t, "fixed"))}, Seen: rapid.Uint32Range(0, 3).Draw(t, "seen"), Stuck: rapid.Bool().Draw(t, "stuck")})
			}
			mem.PlaceStranded()
			mem.PutBehind()
			mem.Settle()
			if err := mem.Check(); err != nil {
				t.Fatal(err)
			}
		}
	})
}
