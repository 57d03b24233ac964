// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Who had the GPU alone for long, and then left it, owes nothing to those who
// come later: it waits no longer than they do.
func TestTimeAloneIsNoDebt(t *testing.T) {
	c := New(Config{})
	now := base.Time(0)
	grants := map[base.ClientID]base.Epoch{}
	step := func(ev base.Event) {
		for _, a := range c.Step(now, ev) {
			if g, ok := a.(Grant); ok {
				grants[g.Client] = g.Epoch
			}
		}
		if err := c.Check(); err != nil {
			t.Fatalf("after %v: %v", base.Text(ev), err)
		}
	}
	step(Attach{Client: 1, Want: true})
	now = now.Add(time.Minute)
	step(Release{Client: 1, Epoch: grants[1], Reason: Idle})
	step(Attach{Client: 2, Want: true})
	step(Attach{Client: 3, Want: true})
	step(Request{Client: 1})
	before := grants[1]
	for range 3 { // turns of the others
		at, ok := c.Deadline()
		if !ok {
			break
		}
		now = at
		step(Tick{})
		for id := base.ClientID(2); id <= 3; id++ {
			step(Request{Client: id})
			step(Release{Client: id, Epoch: grants[id], Reason: Revoked})
		}
		if grants[1] != before {
			return
		}
	}
	t.Errorf("no grant within %v", time.Duration(now)-time.Minute)
}
