// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// Programs as people run them, in the model of makespan_test.go: bursts with pauses of
// milliseconds inside and between, tokens, trainings that wait for data, notebooks.

// decoder answers requests: tokens of 10 ms, with gaps of 0.1 to 3 ms, and a pause between
// two requests of 16 tokens.
func decoder(between time.Duration) use {
	u := use{work: 10 * ms, times: 12000, bytes: 4700 * mb}
	for i := range 16 {
		u.pauses = append(u.pauses, 100*time.Microsecond+time.Duration(i*7%16)*ms/5)
	}
	u.pauses[0] = between
	return u
}

// burst works in bursts of 100 to 200 ms, which pauses of 1 to 10 ms interrupt and separate.
func burst() use {
	u := use{work: 31 * ms, times: 2400, bytes: 4700 * mb}
	for i := range 12 {
		u.pauses = append(u.pauses, ms+time.Duration(i*5%12)*9*ms/11)
	}
	return u
}

// training computes steps, and waits for data after some of them.
func training(wait time.Duration) use {
	return use{work: 120 * ms, pauses: []time.Duration{wait, 2 * ms, 2 * ms, 2 * ms}, times: 500, bytes: 4700 * mb}
}

// notebook computes a cell from time to time.
func notebook() use {
	return use{work: 700 * ms, pauses: []time.Duration{90 * time.Second, 40 * time.Second, 3 * time.Second, 150 * time.Second}, times: 8, bytes: 4700 * mb}
}

// mixed says whether programs differ.
func mixed(uses []use) bool {
	return slices.ContainsFunc(uses, func(u use) bool { return u.work != uses[0].work })
}

func ofOneUser(uses ...use) (all []use) {
	for _, u := range uses {
		u.tenant = "one"
		all = append(all, u)
	}
	return all
}

// Programs with such rhythms get together what they get one after the other, or more where
// their pauses allow that, in equal parts, and nobody waits for longer than two turns of
// each of the others. Two decoders of one user got 0.75 of it: one that paused for longer
// than a millisecond gave the GPU up to the other, whose memory was away and who had asked
// before, and a quarter of the time went into moving. The memory of two is 1.5 times the
// GPU's, where a row says nothing else, that of three 2.3 times, or 1.4 of a larger one's.
func TestRhythms(t *testing.T) {
	const (
		gpu     = 6 * oneGiB
		longest = 2 * 7500 * ms // for each of the others: what moving 3.5 GiB is worth, twice
	)
	// several whose memory is so many times the GPU's
	filling := func(times float64, n int, u use) []use {
		u.bytes = uint64(times * float64(gpu/uint64(n)))
		return several(n, u)
	}
	longer := func(u use) use { // or three and more have few turns, whose ends decide about their parts
		u.times *= 4
		return u
	}
	for _, c := range []struct {
		name   string
		gpu    uint64
		uses   []use
		target float64
		share  float64 // of the time, that moving takes at most; 0: whatever its pauses pay for
	}{
		{"decoders", gpu, several(2, decoder(10*ms)), 0.98, 0.02},
		{"decoders of one user", gpu, ofOneUser(several(2, decoder(10*ms))...), 0.98, 0.02},
		{"decoders, pauses of 30 ms", gpu, several(2, decoder(30*ms)), 0.98, 0.02},
		{"decoders, pauses of 30 ms, of one user", gpu, ofOneUser(several(2, decoder(30*ms))...), 0.98, 0.02},
		{"decoders, pauses of 150 ms", gpu, several(2, decoder(150*ms)), 1.1, 0},
		{"decoders, pauses of 400 ms", gpu, several(2, decoder(400*ms)), 1.3, 0},
		{"three decoders", gpu, several(3, decoder(10*ms)), 0.98, 0.02},
		{"three decoders of one user", gpu, ofOneUser(several(3, decoder(10*ms))...), 0.98, 0.02},
		{"three decoders, two at a time", 10 * oneGiB, several(3, decoder(10*ms)), 1.05, 0.02},
		{"bursts", gpu, several(2, burst()), 0.98, 0.02},
		{"bursts of one user", gpu, ofOneUser(several(2, burst())...), 0.98, 0.02},
		{"trainings", gpu, several(2, training(40*ms)), 0.98, 0.02},
		{"trainings that wait long", gpu, several(2, training(600*ms)), 1.3, 0},
		{"decoder and training", gpu, []use{decoder(10 * ms), training(40 * ms)}, 0.98, 0.02},
		{"decoders, 1.3 times", gpu, filling(1.3, 2, decoder(10*ms)), 0.98, 0.02},
		{"decoders, pauses of 150 ms, 1.3 times", gpu, filling(1.3, 2, decoder(150*ms)), 1.1, 0},
		{"bursts, 1.3 times", gpu, filling(1.3, 2, burst()), 0.98, 0.02},
		{"trainings, 1.3 times", gpu, filling(1.3, 2, training(40*ms)), 0.98, 0.02},
		{"trainings that wait long, 1.3 times", gpu, filling(1.3, 2, training(600*ms)), 1.3, 0},
		{"three decoders, 2 times", gpu, filling(2, 3, decoder(10*ms)), 0.98, 0.02},
		{"three bursts, 2 times", gpu, filling(2, 3, longer(burst())), 0.98, 0.02},
		{"four decoders, 3 times", gpu, filling(3, 4, decoder(10*ms)), 0.98, 0.02},
		{"four decoders, pauses of 400 ms, 3 times", gpu, filling(3, 4, decoder(400*ms)), 1.3, 0},
		{"six decoders, two at a time, 3 times", gpu, filling(3, 6, decoder(10*ms)), 1.05, 0.02},
		{"four bursts, 3 times", gpu, filling(3, 4, longer(burst())), 0.98, 0.02},
		{"four trainings, 3 times", gpu, filling(3, 4, longer(training(40*ms))), 0.98, 0.02},
		{"four trainings that wait long, 3 times", gpu, filling(3, 4, training(600*ms)), 1.3, 0},
		{"notebook and training", gpu, []use{notebook(), training(40 * ms)}, 1.1, 0},
	} {
		w := share(t, c.gpu, 0, 10, c.uses...)
		t.Logf("%-40s %v, parts %.3f", c.name, w, w.parts)
		if w.faster() < c.target {
			t.Errorf("%s: %.3f times faster than one after the other, want %.2f", c.name, w.faster(), c.target)
		}
		if c.share != 0 && w.steady > c.share {
			t.Errorf("%s: moving takes %.1f %% of the time, want %.1f at most", c.name, 100*w.steady, 100*c.share)
		}
		if most := longest * time.Duration(len(c.uses)-1); w.longest > most {
			t.Errorf("%s: somebody waited for %v, want %v at most", c.name, w.longest, most)
		}
		if !mixed(c.uses) && slices.Max(w.parts) > 1.1*slices.Min(w.parts) {
			t.Errorf("%s: parts %.3f, want equal ones", c.name, w.parts)
		}
	}
}

// Whatever pauses programs make, they get together what they get one after the other.
func TestAnyRhythm(t *testing.T) {
	least := 10.0
	for seed := range uint64(30) {
		w := share(t, 6*oneGiB, 0, 10, anyUses(rand.New(rand.NewPCG(seed, 7)))...)
		if least = min(least, w.faster()); w.faster() < 0.975 {
			t.Errorf("seed %d: %v, parts %.3f", seed, w, w.parts)
		}
	}
	t.Logf("%.3f times faster than one after the other, or more", least)
}

// anyUses returns two to four programs, of one user or several, each of which works for
// 5 to 640 ms between pauses of 2 ms to 2 s that are even or not.
func anyUses(r *rand.Rand) (uses []use) {
	spread := func(least time.Duration, doublings float64) time.Duration {
		return time.Duration(float64(least) * math.Exp2(doublings*r.Float64()))
	}
	pause := []func(mean float64) float64{
		func(mean float64) float64 { return mean },
		func(mean float64) float64 { return mean * (0.5 + r.Float64()) },
		func(mean float64) float64 { return mean * r.ExpFloat64() },
		func(mean float64) float64 { return mean * []float64{0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 5}[r.IntN(8)] },
		func(mean float64) float64 { return mean * 0.3 / (r.Float64() + 0.003) },
	}
	n, bytes, tenant := 2+r.IntN(3), []uint64{2000, 4700, 5500}[r.IntN(3)]*mb, []string{"", "", "one"}[r.IntN(3)]
	for i := range n {
		if i > 0 && r.IntN(2) == 0 {
			uses = append(uses, uses[i-1])
			continue
		}
		u := use{work: spread(5*ms, 7), bytes: bytes, tenant: tenant}
		of, mean, sum := pause[r.IntN(len(pause))], float64(spread(2*ms, 10)), time.Duration(0)
		for range 300 {
			p := time.Duration(of(mean))
			u.pauses, sum = append(u.pauses, p), sum+p
		}
		u.times = max(int(100*time.Second/(u.work+sum/300)), 5)
		uses = append(uses, u)
	}
	return uses
}
