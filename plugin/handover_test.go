// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"slices"
	"testing"
)

// While a plugin replaces another one the runtime asks both. A container is given its GPU
// once, both know who has it, and at no moment is a container created without a plugin.
func TestHandover(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.start()
	defer r.stop()
	old := withState()
	stop := run(t, r, old)
	await(t, r.synced, "the old plugin")
	create := func(name string, annotations ...string) string {
		t.Helper()
		got, err := r.startPod(name, annotations...)
		if err != nil {
			return err.Error()
		}
		return got
	}
	if got := create("a", "gpu-core-request=60"); got != "0" {
		t.Fatalf("before: %q", got)
	}
	next := withState()
	run(t, r, next)
	await(t, r.synced, "the next plugin")
	if got := create("b", "gpu-core-request=60"); got != "1" {
		t.Errorf("beside each other: %q", got)
	}
	if got := create("c", "gpu=nvshare.com/gpu=1", "gpu-core-limit=20"); got != "1" {
		t.Errorf("a GPU by name, beside each other: %q", got)
	}
	was, _ := old.snapshot()
	is, _ := next.snapshot()
	if len(is) != 3 {
		t.Errorf("the next plugin knows %v", is)
	}
	for id, c := range was {
		if now := is[id]; !slices.Equal(now.GPUs, c.GPUs) || now.Terms != c.Terms {
			t.Errorf("%s: the old plugin knows %+v, the next one %+v", id, c, now)
		}
	}
	stop()
	if got := create("d", "gpu-core-request=60"); got == "0" || got == "1" {
		t.Errorf("by the next plugin alone: given GPU %s, though both are taken", got)
	}
	if got := create("e", "gpu-core-request=40"); got != "0" {
		t.Errorf("by the next plugin alone: %q", got)
	}
}

// A record that the pod has written is none: it would keep the container from nvshare. So the pod is refused.
func TestRecordOfThePod(t *testing.T) {
	p := newPlacing(t, 1)
	pod, ctr := podOf("a", "id-a", says("gpu=nvshare.com/gpu=0", "gpu-placement="+gpuID(0)))
	ctr.Annotations = pod.Annotations // as a runtime passes them on
	if a, _, err := p.CreateContainer(t.Context(), pod, ctr); err == nil {
		t.Errorf("given %v", a)
	}
}
