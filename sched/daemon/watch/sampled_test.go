// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"math/rand/v2"
	"testing"
)

// named returns samples as the driver makes them: each names one process for all of the GPU's time.
func named(seed uint64, part float64) func() float64 {
	dice := rand.New(rand.NewPCG(seed, 1))
	return func() float64 {
		if dice.Float64() < part {
			return 0.99
		}
		return 0
	}
}

// Processes that keep the GPU busy have what their slices give, whoever is named, and nobody is taken for a
// cheat, or for idle.
func TestNamesByChanceSayNothing(t *testing.T) {
	for seed := range uint64(200) {
		next, s := named(seed, 0.5), sampled{}
		wrong, idle := 0, 0
		for range 2000 {
			s.add(next(), 1, 0.5)
			if s.part(0.5) != 0.5 {
				wrong++
			}
			if s.idle() {
				idle++
			}
		}
		if wrong > 200 || idle > 100 {
			t.Errorf("seed %d: of 2000 samples %d tell another part, and %d an idle process", seed, wrong, idle)
		}
		for _, on := range []float64{0.3, 0.5, 0.1} { // in turns, with others that keep the GPU busy
			next, s = named(seed, on), sampled{}
			for i := range 2000 {
				if s.add(next(), on, on); s.excess >= freezeAt {
					t.Fatalf("seed %d: after %d samples a process that is on for %v of the time seems to cheat", seed, i, on)
				}
			}
		}
	}
}

func TestManySamplesTell(t *testing.T) {
	for seed := range uint64(200) {
		for what, c := range map[string]struct {
			part, on, fair float64
			told           func(*sampled) bool
		}{
			"longer slices of others harm it": {0.16, 1, 0.5, func(s *sampled) bool { return s.part(0.5) < 0.45 }},
			"it puts its channels on":         {1, 0.3, 0.3, func(s *sampled) bool { return s.excess >= freezeAt }},
			"the same beside another":         {1, 0.5, 0.5, func(s *sampled) bool { return s.excess >= freezeAt }},
			"it has no work":                  {0, 1, 0.5, (*sampled).idle},
		} {
			next, s, n := named(seed, c.part), sampled{}, 0
			for ; !c.told(&s) && n < 1000; n++ {
				s.add(next(), c.on, c.fair)
			}
			if n > 75 { // 15 seconds
				t.Errorf("seed %d: that %s is told after %d samples", seed, what, n)
			}
		}
	}
}
