// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"testing"

	"github.com/nvshare/nvshare/sched"
)

// What a client does within a grant, or did before a look could know, is no reproach.
func TestUseWithinGrants(t *testing.T) {
	const all = 1.0
	for name, looks := range map[string][]sched.ClientSnapshot{
		"the first looks":      {{}, {}},
		"has a grant":          {{Epoch: 1}, {Epoch: 1, Held: 1}, {Epoch: 1, Held: 2}, {Epoch: 1, Held: 3}},
		"had one in between":   {{}, {Held: 1}, {Held: 2}, {Held: 3}},
		"fenced, not released": {{Epoch: 1, Held: 1}, {Epoch: 1, Held: 1}, {Epoch: 1, Held: 1}, {Epoch: 1, Held: 1}},
		"its grant has ended":  {{Epoch: 1}, {Held: 1}, {Held: 1}},
	} {
		var o outside
		for i, cs := range looks {
			if o.look(cs, all) {
				t.Errorf("%s: told in look %d", name, i)
			}
		}
	}
	var o outside
	for _, part := range []float64{all, all, 0, all, 0.01, all} {
		if o.look(sched.ClientSnapshot{}, part) {
			t.Error("told of single looks")
		}
	}
	if !o.look(sched.ClientSnapshot{}, all) || o.look(sched.ClientSnapshot{}, all) {
		t.Error("not told once, in the second of two looks")
	}
}
