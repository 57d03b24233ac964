// SPDX-License-Identifier: Apache-2.0

package timeslice

import (
	"testing"
	"time"
)

// A process that has worked on something else before is measured by what it does now.
func TestAloneFollowsTheProgram(t *testing.T) {
	var p Progress
	const turn = 100 * time.Millisecond
	for range 40 {
		p.HadTurn(2000, turn) // a language model
	}
	p.HadTurn(60, turn) // a moment without launches
	for range 10 {
		p.HadTurn(2000, turn)
	}
	if rate, _, known := p.Alone(); !known || rate < 19000 {
		t.Fatalf("after a short phase of something else: %.0f calls/s, %t", rate, known)
	}
	for range 6 {
		p.HadTurn(60, turn) // matrix products
	}
	if rate, _, known := p.Alone(); !known || rate < 590 || rate > 610 {
		t.Errorf("after six turns of another program: %.0f calls/s, %t, want 600", rate, known)
	}
}
