// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// A change of any field is said, and so is a setting of the operator that overrules
// the change on a GPU.
func TestEveryFieldIsReported(t *testing.T) {
	full := api.Terms{MemoryLimit: 3 << 30, CoreLimit: 60, CoreRequest: 30, Weight: 7, Priority: api.Priority_PRIORITY_LATENCY,
		Gang: "ring", MemoryMode: api.MemoryMode_MEMORY_MODE_RESIDENT, Overlap: "small", Migratable: true}
	for _, f := range api.Fields {
		var one api.Terms
		one.Copy(full, f.ID)
		was, is := f.Format(api.Terms{}), f.Format(one)
		c := &api.Container{Id: "1", Namespace: "ml"}
		c.SetTerms(one)
		inForce := one
		if inForce.Gang != "" {
			inForce.Gang = "ml/" + inForce.Gang
		}
		on := func(t api.Terms) *api.ShareChange {
			return &api.ShareChange{Index: 3, New: t.Share(), NewMemoryBytes: t.MemoryLimit}
		}
		now := termsOf(c, c.Share, c.MemoryLimitBytes)
		_, reason, note := changed(terms{id: "1"}, now, &api.DescribeContainerResponse{New: c, Changes: []*api.ShareChange{on(inForce)}})
		if want := fmt.Sprintf("%s %s (was %s)", f.Name, is, was); reason != "GPUShareChanged" || note != want {
			t.Errorf("%s: %s %q, want %q", f.Name, reason, note, want)
		}
		_, reason, note = changed(terms{id: "1"}, now, &api.DescribeContainerResponse{New: c, Changes: []*api.ShareChange{on(api.Terms{})}})
		if want := "without effect on GPU 3: " + was + ", set with nvsharectl"; reason != "GPUShareOverruled" || !strings.Contains(note, want) {
			t.Errorf("%s: %s %q, want %q", f.Name, reason, note, want)
		}
		if _, _, note := changed(now, now, &api.DescribeContainerResponse{New: c}); note != "" {
			t.Errorf("%s: nothing has changed, but %q", f.Name, note)
		}
	}
}
