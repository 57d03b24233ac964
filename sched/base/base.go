// SPDX-License-Identifier: Apache-2.0

// Package base has what all packages of the scheduler's core name: times, clients, epochs of
// grants, and what events and actions are.
package base

import (
	"cmp"
	"math/bits"
	"time"
)

// Time is a point on a monotonic clock that the caller chooses, in
// nanoseconds.
type Time int64

// Add returns t moved by d.
func (t Time) Add(d time.Duration) Time { return t + Time(d) }

// Sub returns the duration from u to t.
func (t Time) Sub(u Time) time.Duration { return time.Duration(t - u) }

// ClientID names a process on this GPU; 0 names none. The caller gives the
// same process the same ClientID again when it reconnects, and never reuses
// one before it has sent Gone.
type ClientID uint64

// Epoch numbers grants of one GPU and rises with each; 0 names none. The low
// 32 bits are the word in the grant page, hence never 0 or 0xffffffff.
type Epoch uint64

// NextEpoch returns the smallest epoch above e whose low 32 bits can stand in
// a grant page.
func NextEpoch(e Epoch) Epoch {
	for e++; uint32(e) == 0 || uint32(e) == 0xffffffff; e++ {
	}
	return e
}

// Event is something that happened.
type Event interface{ Event() (name string) }

// Action is something that the caller must carry out, in the order returned. Close, Fence,
// ArenaWanted and those with nothing to carry out may concern a client whose connection is
// lost; the clients of all other actions have one.
type Action interface{ Action() (name string) }

// Earliest is the earliest of some times.
type Earliest struct {
	At Time
	OK bool // there is one
}

// Either makes it the earlier one of itself and a time, if ok says that this is one.
func (e *Earliest) Either(at Time, ok bool) {
	if ok && (!e.OK || at < e.At) {
		e.At, e.OK = at, true
	}
}

// Clamp returns the value from lo to hi that is nearest to v.
func Clamp[T cmp.Ordered](v, lo, hi T) T { return min(max(v, lo), hi) }

// MostScaled is 73 years in nanoseconds: sums of three fit.
const MostScaled = 1 << 61

// Scale returns a·num/den, and MostScaled at most. Neither a nor num is below 0.
func Scale(a, num, den int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(num))
	if hi >= uint64(den) {
		return MostScaled
	}
	q, _ := bits.Div64(hi, lo, uint64(den))
	return int64(min(q, MostScaled))
}

// Portion returns d·num/den, bounded as Scale is.
func Portion(d time.Duration, num, den int) time.Duration {
	return time.Duration(Scale(int64(d), int64(num), int64(den)))
}
