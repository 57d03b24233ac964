// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"strings"
	"testing"
)

// What is in files takes no host memory, and room is kept for the largest to come back.
func TestArenasInFiles(t *testing.T) {
	a := Arenas{needed: 100}
	a.Bound(120, 10)
	a.Observe(Host{Used: 100})
	if a.Left() != 20 || a.fits(121) == nil || a.Lacked() != 1 || a.Refused() {
		t.Errorf("without files: %d left", a.Left())
	}
	a.Observe(Host{Used: 100, Filed: 80, Return: 40})
	if a.Left() != 60 || a.fits(160) != nil {
		t.Errorf("with files: %d left, %v", a.Left(), a.fits(160))
	}
	if err := a.fits(161); err == nil || !strings.Contains(err.Error(), "is kept") {
		t.Error(err)
	}
	if a.Fits(61) == nil || a.Lacked() != 1 {
		t.Error("a question counts as a refusal")
	}
	if a.needed = 160; a.Returns(40) != nil || a.Returns(41) == nil {
		t.Error("the room that is kept is for what comes back")
	}
	a.Observe(Host{Used: 160, Filed: 80, Return: 40, Free: 30, FreeKnown: true})
	if a.Left() != 0 || a.Returns(20) != nil || a.Returns(21) == nil {
		t.Error("the host has less")
	}
}
