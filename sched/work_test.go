// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"testing"
)

// crowd is a GPU of 512 MiB with n clients of 50 tenants, each with so much reserved.
func crowd(n int, bytes uint64) *GPU {
	c := New(Config{Memory: Memory{Bytes: 1 << 40, Swap: true, Capacity: 1 << 29, ArenaUnit: 64 << 20}})
	for i := range n {
		id := ClientID(i + 1)
		c.Step(0, Attach{Client: id, Tenant: fmt.Sprint(i % 50), CanMove: true})
		c.Step(0, Reserve{Client: id, Total: bytes, Least: 1})
	}
	c.Step(0, Request{1})
	return c
}

// hostile is what one client can send, again and again.
var hostile = map[string]func(i int) Event{
	"reserve": func(i int) Event { return Reserve{Client: 7, Total: 1<<24 + uint64(i%2), Least: 1} },
	"force":   func(i int) Event { return Reserve{Client: 7, Total: 1<<24 + uint64(i%2), Force: true} },
	"moved":   func(i int) Event { return Moved{Client: 7, Report: Report{Resident: uint64(i % 2)}} },
	"stuck": func(i int) Event {
		return Moved{Client: 7, Stuck: i%2 == 0, NoMemory: true, NoArena: true, Report: Report{Away: uint64(i % 2)}}
	},
	"attach": func(i int) Event {
		if i%2 == 0 {
			return Lost{7}
		}
		return Attach{Client: 7, Tenant: "6", CanMove: true, Again: true}
	},
	"request": func(i int) Event {
		if i%2 == 0 {
			return Request{7}
		}
		return Withdraw{7}
	},
}

// While all that is promised fits the GPU, no event is dearer because of who else is
// there. Where it does not fit, the cost is linear, and Work says so.
func TestWorkBesideACrowd(t *testing.T) {
	const events = 100
	for _, n := range []int{100, 1000} {
		for name, event := range hostile {
			for _, over := range []bool{false, true} {
				c := crowd(n, 1<<29/8000)
				if over {
					c = crowd(n, 1<<29/50)
				}
				before := c.Work()
				for i := range events {
					c.Step(Time(i), event(i))
				}
				passes := float64(c.Work()-before) * lookedPerWork / float64(events*n)
				if most := map[bool]float64{false: 0.1, true: 16}[over]; passes > most {
					t.Errorf("%s beside %d clients, beyond the GPU: %t: looks at each client %.1f times, want at most %v", name, n, over, passes, most)
				}
			}
		}
	}
}

// BenchmarkStepBesideACrowd: what an event costs beside idle clients, beside clients
// whose memory fits, and beside some whose memory does not.
func BenchmarkStepBesideACrowd(b *testing.B) {
	for _, n := range []int{64, 800, 4000} {
		for what, bytes := range map[string]uint64{"idle": 0, "fits": 1 << 16, "over": 16 << 20} {
			for name, event := range hostile {
				b.Run(fmt.Sprintf("%s/%s/clients=%d", what, name, n), func(b *testing.B) {
					c := crowd(n, bytes)
					for i := 0; b.Loop(); i++ {
						c.Step(0, event(i))
					}
				})
			}
		}
	}
}
