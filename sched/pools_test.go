// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"fmt"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/residency"
)

// given has a process have so much host memory, as the daemon makes it: what it has it keeps.
func (p *proc) given(bytes uint64) {
	w := p.w
	if p.done || bytes <= p.arena {
		return
	}
	p.arena = bytes
	sum := uint64(0)
	for _, o := range w.order {
		if !o.done {
			sum += o.arena
		}
	}
	w.host.Observe(residency.Host{Used: sum})
	w.step(residency.ArenaChanged{Client: p.id, Bytes: bytes})
}

// Programs that begin with a pool of most of the GPU, as JAX's, beside little host memory. Whoever is promised memory
// has its turns, none further apart than a bound, and host memory for what is away. Who could never have them, is
// refused when it asks, as natively.
func TestPoolsBesideLittleHostMemory(t *testing.T) {
	const (
		gpu   = 8 * oneGiB
		ample = 200 // percent of what all ask for is enough for all
	)
	for _, mix := range []struct {
		name  string
		pools []uint64 // percent of the GPU
	}{{"two of 75", []uint64{75, 75}}, {"three of 60", []uint64{60, 60, 60}}, {"one of 95 beside five", []uint64{95, 8, 8, 8, 8, 8}}} {
		for _, host := range []uint64{1, 10, 50, 100, ample} {
			for _, cold := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, host memory of %d percent, cold %t", mix.name, host, cold), func(t *testing.T) {
					node, all := NewNode(), uint64(0)
					w := newSharing(t, gpu, 0, 10)
					w.core, w.host = New(Config{SwapShare: 10, Memory: w.memory(), Node: node}), &node.Arenas
					for _, n := range mix.pools {
						all += gpu * n / 100
					}
					node.Arenas.Bound(all*host/100, 0)
					for _, n := range mix.pools {
						w.add(use{work: 100 * ms, times: 300, bytes: gpu * n / 100, cold: cold})
					}
					w.run(time.Second)
					begun := w.order[:0]
					for _, p := range w.order {
						if !p.done {
							begun = append(begun, p)
						}
					}
					w.order = begun
					w.share()
					t.Logf("%d of %d begin: %v", len(begun), len(mix.pools), w)
					if len(begun) == 0 || host == ample && len(begun) != len(mix.pools) {
						t.Errorf("%d of %d begin", len(begun), len(mix.pools))
					}
					bound := easyRound
					if cold { // host memory is made while they move
						bound = maxStretch
					}
					if w.longest > bound {
						t.Errorf("one waited for %v, more than %v", w.longest, bound)
					}
				})
			}
		}
	}
}
