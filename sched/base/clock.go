// SPDX-License-Identifier: Apache-2.0

package base

import "time"

const (
	// MaxLate is how late a Step may be, after the earliest deadline, for the time before that
	// Step to count in full.
	MaxLate = 100 * time.Millisecond
	// Suspension is how late a Step is that comes after a suspension. A busy machine is less late.
	Suspension = time.Second
)

// Clock is the time of a node, and of all times inside the core. It follows the caller's clock, but
// stands still while the machine is suspended, or the scheduler is stopped: else holders would owe
// hours to the others, and clients would be fenced that had no time to drain.
type Clock struct {
	Now       Time                       // of the latest Step of any GPU; never runs backwards
	Deadlines []func() (t Time, ok bool) // of the GPUs

	lost time.Duration // the caller's clock is ahead by that much
}

// Advance returns the time of a Step that comes at this time of the caller's clock.
func (k *Clock) Advance(caller Time) Time {
	now := k.FromCaller(caller)
	counts := max(k.Now, now)
	var e Earliest
	for _, deadline := range k.Deadlines {
		e.Either(deadline())
	}
	if due := e.At; e.OK && now > k.Now && now.Sub(due) > MaxLate {
		counts = k.Now
		if now.Sub(due) < Suspension {
			// The wait counts up to a moment before the deadline: in that moment the caller reads
			// what has come meanwhile. After that moment the deadline passes, however late ticks are.
			counts = max(k.Now, min(max(k.Now.Add(MaxLate), due.Add(-MaxLate)), due.Add(MaxLate)))
		}
		k.lost += now.Sub(counts)
	}
	k.Now = counts
	return k.Now
}

// FromCaller and ToCaller convert times of the caller's clock.
func (k *Clock) FromCaller(t Time) Time { return t.Add(-k.lost) }
func (k *Clock) ToCaller(t Time) Time   { return t.Add(k.lost) }
