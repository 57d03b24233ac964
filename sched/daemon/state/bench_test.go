// SPDX-License-Identifier: Apache-2.0

package state

import (
	"fmt"
	"path/filepath"
	"testing"
)

// BenchmarkSave is what each grant pays for the state file; 8 GPUs.
func BenchmarkSave(b *testing.B) {
	s := &File{Version: version, BootID: "a4a0d6df-ef63-4630-b4e1-7ef1a56f00d4", GPUs: map[string]*GPU{}}
	for i := range 8 {
		s.GPUs[fmt.Sprintf("GPU-51600000-0000-4000-8000-%012d", i)] = &GPU{Epoch: 1 << 33, Holders: []Holder{{PID: 4711, StartTime: 123456}}}
	}
	path := filepath.Join(b.TempDir(), "state.json")
	for b.Loop() {
		if err := s.Save(path, nil); err != nil {
			b.Fatal(err)
		}
	}
}
