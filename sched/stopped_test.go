// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"
)

// A stopped process moves nothing while others wait, again and again. That is forgotten when it goes on, also where it
// has nothing to move any more.
func TestStoppedGoesOn(t *testing.T) {
	s := newSayers(t, Exclusive)
	a := s.add("stopped", 60)
	s.run(time.Second)
	a.stopped = true
	b := s.add("waits", 60)
	s.run(40 * time.Second)
	stalls := func() (n int) {
		for _, c := range s.c.MemorySnapshot().Clients {
			if c.Client == a.id {
				n = c.Stalls
			}
		}
		return n
	}
	if n := stalls(); n < 2 {
		t.Fatalf("it was stopped, and %d stalls are known", n)
	}
	if b.epoch != 0 {
		s.step(Release{Client: b.id, Epoch: b.epoch, Reason: Idle})
		b.epoch = 0
	} else {
		s.step(Withdraw{Client: b.id})
	}
	s.run(10 * time.Second)
	a.stopped = false
	s.step(a.move())
	s.run(10 * time.Second)
	if n := stalls(); n != 0 {
		t.Errorf("it goes on, and %d stalls are known", n)
	}
}
