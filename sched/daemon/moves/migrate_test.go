// SPDX-License-Identifier: Apache-2.0

package moves

import (
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
)

// What does not move is told how to be made, in the words of whatever made it.
func TestMadeToMove(t *testing.T) {
	for engine, want := range map[string]string{node.RunEngine: "nvsharectl run --migratable true", "podman": "the annotation nvshare.com/gpu-migratable=true", "": "the annotation nvshare.com/gpu-migratable=true"} {
		if got := madeToMove(&api.Container{Engine: engine}); !strings.Contains(got, want) {
			t.Errorf("%q: %q, want %q", engine, got, want)
		}
	}
}
