// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// What leaves is named: memory, a context, or neither.
func TestDescribeSuspend(t *testing.T) {
	for want, g := range map[string]*api.Suspended{
		"GPU 1, user 1000: 2Gi of memory moves to the host until its next CUDA call; then its context leaves the GPU, if the driver can do that":    {Index: 1, Bytes: 2 << 30, Context: true},
		"GPU 1, user 1000: 2Gi of memory moves to the host until its next CUDA call; its context stays on the GPU (nvshare-scheduler --checkpoint)": {Index: 1, Bytes: 2 << 30},
		"GPU 1, user 1000: no memory of it is on the GPU; its context leaves the GPU until its next CUDA call, if the driver can do that":           {Index: 1, Context: true},
		"GPU 1, user 1000: no memory of it is on the GPU; its context stays on the GPU (nvshare-scheduler --checkpoint)":                            {Index: 1},
	} {
		if got := strings.Join(describeSuspend(&api.SuspendResponse{Uid: 1000, Gpus: []*api.Suspended{g}}), "\n"); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	e := &api.Event{Type: api.EventType_EVENT_TYPE_SUSPEND, Reason: "it was idle for 10m0s"}
	if got := eventText(e); got != "leaves the GPU until it calls CUDA again: it was idle for 10m0s" {
		t.Errorf("%q", got)
	}
	if e.Bytes = 2 << 30; eventText(e) != "2Gi leave the GPU until it calls CUDA again: it was idle for 10m0s" {
		t.Errorf("%q", eventText(e))
	}
}

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
