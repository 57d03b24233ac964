// SPDX-License-Identifier: Apache-2.0

package account

import (
	"cmp"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Bounds of Tuning's fields. The windows and intervals of the seeds' documents
// lie within.
const (
	DefaultWindow = 500 * time.Millisecond
	MinWindow     = 50 * time.Millisecond
	MaxWindow     = 20 * time.Second
	MaxSample     = time.Second
)

// Tuning says how time is accounted. The zero Tuning is the default, and the
// most exact.
type Tuning struct {
	// Window is what a limit allows a tenant to catch up on: what it could not
	// use of it for having to wait, over that long at most. 0: DefaultWindow.
	Window time.Duration `always:"window=%v"`
	// Sample is how often a holder's use is compared with its limit. 0: at
	// the very moment that it reaches it.
	Sample time.Duration `always:"sample=%v"`
	// DropCarry is the percentage of an overshoot that is forgiven when a
	// grant ends. 0: all of it is a debt.
	DropCarry int `always:"dropcarry=%v"`
	// DropTail is the percentage of the time from a revoke to the release that
	// is not billed. 0: all of it is.
	DropTail int `always:"droptail=%v"`
}

// Clamped returns the tuning within the bounds.
func (t Tuning) Clamped() Tuning {
	t.Window = base.Clamp(cmp.Or(t.Window, DefaultWindow), MinWindow, MaxWindow)
	t.Sample = base.Clamp(t.Sample, 0, MaxSample)
	t.DropCarry = min(max(t.DropCarry, 0), 100)
	t.DropTail = min(max(t.DropTail, 0), 100)
	return t
}

func (t Tuning) String() string { return base.Fields(t) }
