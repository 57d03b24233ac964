// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"os/exec"
	"testing"
)

// What it costs to find out who the processes of a list are: the scheduler does that twice a second for
// those that use a GPU, where a warden runs.
func BenchmarkLookAtThousand(b *testing.B) {
	f, err := NewFinder()
	if err != nil {
		b.Fatal(err)
	}
	var pids []int32
	for range 1000 {
		c := exec.Command("sleep", "600")
		if err := c.Start(); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
		pids = append(pids, int32(c.Process.Pid))
	}
	for b.Loop() {
		for _, pid := range pids {
			if _, err := f.Look(pid); err != nil {
				b.Fatal(err)
			}
		}
	}
}
