// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// What comes back is named: memory, a context, both, or nothing, because nothing has left yet.
func TestDescribeResume(t *testing.T) {
	for want, g := range map[string]*api.Suspended{
		"GPU 1, user 1000: 2Gi come back to the GPU in its turn":                 {Index: 1, Bytes: 2 << 30},
		"GPU 1, user 1000: 2Gi and its context come back to the GPU in its turn": {Index: 1, Bytes: 2 << 30, Context: true},
		"GPU 1, user 1000: its context comes back to the GPU":                    {Index: 1, Context: true},
		"GPU 1, user 1000: it stays on the GPU":                                  {Index: 1},
	} {
		if got := strings.Join(describeResume(&api.SuspendResponse{Uid: 1000, Gpus: []*api.Suspended{g}}), "\n"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
