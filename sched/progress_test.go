// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"testing"
	"time"
)

// A process that has worked on something else before is measured by what it does now.
func TestAloneFollowsTheProgram(t *testing.T) {
	var p progress
	const turn = 100 * time.Millisecond
	for range 40 {
		p.hadTurn(2000, turn) // a language model
	}
	p.hadTurn(60, turn) // a moment without launches
	for range 10 {
		p.hadTurn(2000, turn)
	}
	if rate, _, known := p.alone(); !known || rate < 19000 {
		t.Fatalf("after a short phase of something else: %.0f calls/s, %t", rate, known)
	}
	for range 6 {
		p.hadTurn(60, turn) // matrix products
	}
	if rate, _, known := p.alone(); !known || rate < 590 || rate > 610 {
		t.Errorf("after six turns of another program: %.0f calls/s, %t, want 600", rate, known)
	}
}
