// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"path/filepath"
	"testing"
)

// BenchmarkSave is what each grant pays for the state file; 8 GPUs.
func BenchmarkSave(b *testing.B) {
	s := &state{Version: stateVersion, BootID: "a4a0d6df-ef63-4630-b4e1-7ef1a56f00d4", GPUs: map[string]*gpuState{}}
	for i := range 8 {
		g := gpuB
		g.UUID = g.UUID[:len(g.UUID)-1] + string(rune('0'+i))
		s.GPUs[g.UUID] = &gpuState{Epoch: 1 << 33, Holders: []holderState{{PID: 4711, StartTime: 123456}}}
	}
	path := filepath.Join(b.TempDir(), "state.json")
	for b.Loop() {
		if err := s.save(path); err != nil {
			b.Fatal(err)
		}
	}
}
