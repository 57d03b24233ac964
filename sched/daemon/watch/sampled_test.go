// SPDX-License-Identifier: Apache-2.0

package watch

import "testing"

// alike returns the samples of two that share the GPU half and half, of which the driver names the same one for so
// many samples.
func alike(n int, yes func(named float64)) {
	for i := range 4000 {
		yes(float64(i / n % 2))
	}
}

// The driver's samples keep step with turns and rounds of slices, so that it names the same process for seconds. That
// makes nobody a cheat, and nobody idle.
func TestSamplesInStepSayNothing(t *testing.T) {
	for _, n := range []int{1, 2, 7, 40, 100} {
		for _, turns := range []bool{true, false} {
			var s sampled
			alike(n, func(named float64) {
				s.seemed(named, 0.5)
				if s.add(named, 1, 0.5); s.idle(turns) || s.excess > 0 {
					t.Fatalf("named for %d samples in a row, in turns %v: idle, or a cheat: %+v", n, turns, s)
				}
			})
		}
	}
}

func TestSamplesTell(t *testing.T) {
	for _, c := range []struct {
		what   string
		sample func(*sampled) (told bool)
		most   int
	}{
		{"alone it has all of the GPU, and was on for 30 %", func(s *sampled) bool { s.had(1, 0.3); return s.excess >= freezeAt }, 8},
		{"it was off, and had some", func(s *sampled) bool { s.had(1, 0); return s.excess >= freezeAt }, 6},
		{"beside another it always has the GPU", func(s *sampled) bool { s.seemed(1, 0.5); return s.suspect >= suspectAt }, 30},
		{"it has no work in its turns", func(s *sampled) bool { s.add(0, 0.5, 0.5); return s.idle(true) }, 15},
		{"it has no work, alone", func(s *sampled) bool { s.add(0, 0, 1); return s.idle(true) }, 7},
		{"it has no work beside another", func(s *sampled) bool { s.add(0, 1, 0.5); return s.idle(false) }, 150},
	} {
		var s sampled
		n := 1
		for ; !c.sample(&s) && n < 1000; n++ {
		}
		if n > c.most {
			t.Errorf("%s: told after %d samples, at most %d are wanted", c.what, n, c.most)
		}
	}
}

// A hand-over between two processes that the warden holds takes 1 to 3 ms of a turn of 100 ms. That is no gap in their work: who
// is said to have gaps never gets longer slices.
func TestHandoverIsNoGap(t *testing.T) {
	for _, c := range []struct {
		what       string
		all, anyOn float64
		saturates  bool
	}{
		{"two that keep the GPU busy, in turns of 100 ms", 0.97, 0.97, true},
		{"the same beside one with a shim, of which it is not known when it was on", 0.985, 1, true},
		{"a limit of 30 % that is used", 0.30, 0.30, true},
		{"a program with gaps", 0.90, 0.985, false},
		{"it uses half of its limit", 0.15, 0.30, false},
	} {
		s := newSampled()
		for range 50 {
			s.inTurns(c.all, c.anyOn)
		}
		if s.saturates() != c.saturates {
			t.Errorf("%s: saturates is %v, of its turns %.3f were used", c.what, s.saturates(), s.use())
		}
	}

	// The limit of one that used all of it is gone: the next sample is of both times.
	one := newSampled()
	for range 20 {
		one.inTurns(0.30, 0.30)
	}
	if one.inTurns(0.65, 1); !one.saturates() {
		t.Errorf("one that used all of its limit has gaps once there is none: %.3f", one.use())
	}

	// What samples say of a process with a limit varies: they are of other moments.
	s := newSampled()
	for range 25 {
		s.inTurns(0.50, 0.30)
		s.inTurns(0.15, 0.30)
	}
	if !s.saturates() {
		t.Errorf("one that uses all of its limit does not saturate: %.3f", s.use())
	}
}
