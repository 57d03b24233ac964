// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/nri/pkg/api"
	"pgregory.net/rapid"

	"github.com/nvshare/nvshare/cdi"
)

const gib = 1 << 30

// One step after the other on a node of three GPUs.
func TestPlacement(t *testing.T) {
	p := newPlacing(t, 3)
	for i, step := range []struct {
		end  string // a container that ends before
		name string
		asks []string
		want string // indices; empty: refused
		says []string
	}{
		{name: "a", asks: []string{"gpu-core-request=40", "gpu-memory-limit=4Gi"}, want: "0"},
		{name: "b", asks: []string{"gpu-core-request=60", "gpu-memory-limit=13Gi"}, want: "1"}, // memory
		{name: "c", asks: []string{"gpu-core-request=30"}, want: "1"},                          // best fit
		{name: "d", asks: []string{"gpu=1"}, want: "2"},                                        // the idle one
		{name: "e", asks: []string{"gpu=2", "gpu-core-request=50"}, want: "0 2"},
		{name: "f", asks: []string{"gpu=3", "gpu-core-request=11"}, says: []string{
			`pod ml/f, container "main": annotation nvshare.com/gpu="3": 3 different GPUs are asked for, with 11 % of each; 1 can give that`,
			"GPU 0 (" + gpuID(0) + ") has 10 % and 12Gi of 16Gi left (ml/e/main has 50 %, ml/a/main has 40 % and 4Gi): too little time",
			"GPU 1 (" + gpuID(1) + ") has 10 % and 3Gi of 16Gi left (ml/b/main has 60 % and 13Gi, ml/c/main has 30 %): too little time"}},
		{name: "f", asks: []string{"gpu=4"}, says: []string{`nvshare.com/gpu="4": 4 different GPUs are asked for, and this node has 3`}},
		{name: "f", asks: []string{"gpu-core-request=51"}, says: []string{`annotation nvshare.com/gpu-core-request="51": no GPU can give it 51 %`, "GPU 2"}},
		{name: "f", asks: []string{"gpu=1", "gpu-memory-limit=17Gi"}, says: []string{`nvshare.com/gpu="1": no GPU can give it 17Gi`, "has 50 % and 16Gi of 16Gi left"}},
		{name: "f", asks: []string{"gpu=3", "gpu-core-request=10"}, want: "0 1 2"},
		{name: "g", asks: []string{"gpu=nvshare.com/gpu=1", "gpu-memory-limit=8Gi"}, want: "1"}, // named: its memory may be shared
		{name: "h", asks: []string{"gpu=nvshare.com/gpu=1", "gpu-core-request=1"}, says: []string{"1 % cannot be promised: GPU 1 (" + gpuID(1) + ") has 0 % and 0Mi of 16Gi left (ml/b/main has 60 % and 13Gi, ml/c/main has 30 %, ml/f/main has 10 %, ml/g/main has 8Gi): too little time"}},
		{end: "f", name: "h", asks: []string{"gpu-core-request=10", "gpu-memory-limit=1Gi"}, want: "0"},
		{end: "b", name: "i", asks: []string{"gpu-core-request=70", "gpu-memory-limit=9Gi"}, says: []string{"GPU 1 (" + gpuID(1) + ") has 70 % and 8Gi of 16Gi left", "too little memory"}},
		{name: "i", asks: []string{"gpu-core-request=70", "gpu-memory-limit=8Gi"}, want: "1"},
		{name: "j", asks: []string{"gpu=2"}, want: "0 2"}, // 2 has time for it, 0 has memory that nobody was promised
	} {
		if step.end != "" {
			p.stop(step.end)
		}
		got, err := p.create(step.name, step.asks...)
		if got != step.want || (err == nil) != (step.want != "") {
			t.Errorf("step %d: %s %v was given %q, %v; want %q", i, step.name, step.asks, got, err, step.want)
		}
		for _, part := range step.says {
			if !strings.Contains(fmt.Sprint(err), part) {
				t.Errorf("step %d: %s %v: the error lacks %q: %v", i, step.name, step.asks, part, err)
			}
		}
	}
}

// Labels are those of a namespace, and hold for GPUs that are named as well.
func TestPlacementLabels(t *testing.T) {
	p := newPlacing(t, 2)
	give := func(name, want string, asks ...string) {
		t.Helper()
		if got, err := p.create(name, asks...); got != want {
			t.Errorf("%s %v: given %q, %v; want %q", name, asks, got, err, want)
		}
	}
	refuse := func(name, says string, asks ...string) {
		t.Helper()
		if got, err := p.create(name, asks...); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s %v: given %q, %v; want it refused: %s", name, asks, got, err, says)
		}
	}
	give("a", "0", "gpu=1", "gpu-exclusion=blue")
	give("b", "1", "gpu=1", "gpu-anti-affinity=x")
	give("c", "1", "gpu=1")
	give("d", "0", "gpu=1", "gpu-exclusion=blue")
	refuse("e", `annotation nvshare.com/gpu="nvshare.com/gpu=0": GPU 0 (`+gpuID(0)+`): it is only for exclusion label "ml/blue", which ml/a/main has`, "gpu=nvshare.com/gpu=0")
	refuse("e", `GPU 1 (`+gpuID(1)+`): ml/b/main is there without exclusion label "ml/blue"`, "gpu=nvshare.com/gpu=all", "gpu-exclusion=blue")
	refuse("e", `ml/b/main has the same anti-affinity label "ml/x"`, "gpu=nvshare.com/gpu=1", "gpu-anti-affinity=x")
	refuse("e", `it is in use, by nobody with affinity label "ml/red"`, "gpu=1", "gpu-affinity=red")
	refuse("e", `annotation nvshare.com/gpu-affinity="a b": not a label`, "gpu=1", "gpu-affinity=a b")

	p.containers.MayExclude = func(namespace string) bool { return namespace == "prod" }
	refuse("f", `annotation nvshare.com/gpu-exclusion="blue": not allowed in namespace "ml": see --exclusion-namespaces`, "gpu=1", "gpu-exclusion=blue")
	p.containers.MayExclude = func(string) bool { return true }
	other, ctr := podOf("other", "id-other", says("gpu=1", "gpu-exclusion=blue"))
	other.Namespace = "prod"
	if _, _, err := p.CreateContainer(context.Background(), other, ctr); err == nil || !strings.Contains(err.Error(), `exclusion label "prod/blue"`) {
		t.Errorf("the same label of another namespace: %v", err)
	}
}

// What one namespace may be promised of a GPU has a bound, also where the pod names the GPU, and while it
// runs. What others have of the GPU counts once.
func TestBoundOfCoreRequests(t *testing.T) {
	p := newPlacing(t, 1)
	p.containers.MostCore = func(namespace string) uint32 {
		if namespace == "prod" {
			return 100
		}
		return 50
	}
	if got, err := p.create("a", "gpu-core-request=30"); err != nil || got != "0" {
		t.Fatalf("within the bound: %q, %v", got, err)
	}
	for _, asks := range [][]string{{"gpu-core-request=30"}, {"gpu=nvshare.com/gpu=0", "gpu-core-request=30"}} {
		_, err := p.create("b", asks...)
		if err == nil || !strings.Contains(err.Error(), "30 %") || !strings.Contains(err.Error(), "20 %") || !strings.Contains(err.Error(), "--max-core-request") {
			t.Errorf("%v: %v", asks, err)
		}
	}
	if _, err := p.create("c", "gpu=1"); err != nil {
		t.Errorf("without a request: %v", err)
	}
	other, ctr := podOf("other", "id-other", says("gpu-core-request=60"))
	other.Namespace = "prod"
	if _, _, err := p.CreateContainer(context.Background(), other, ctr); err != nil {
		t.Errorf("another namespace, with a bound of its own: %v", err)
	}
	if _, err := p.create("d", "gpu-core-request=20"); err == nil || strings.Contains(err.Error(), "--max-core-request") {
		t.Errorf("90 %% are promised already: %v", err)
	}
	p.RemoveContainer(context.Background(), other, ctr)
	refused := p.SetPod(Pod{UID: "uid-a", Namespace: "ml", Name: "a", Annotations: says("gpu-core-request=70")})
	if len(refused) != 1 || !strings.Contains(refused[0].Err.Error(), "--max-core-request") {
		t.Errorf("raised while it runs: %v", refused)
	}
}

// What somebody else has chosen (a device plugin, a claim) is not chosen again,
// and goes into the same book.
func TestPlacementByOthers(t *testing.T) {
	p := newPlacing(t, 2)
	pod, ctr := podOf("claimed", "id-claimed", says("gpu-core-request=70"))
	ctr.CDIDevices = []*api.CDIDevice{{Name: cdi.Kind + "=" + gpuID(1)}}
	adjust, _, err := p.CreateContainer(context.Background(), pod, ctr)
	if err != nil || len(adjust.GetCDIDevices()) != 0 {
		t.Errorf("given %v, %v", adjust, err)
	}
	for _, c := range [][3]string{{"a", "gpu-core-request=30", "1"}, {"b", "gpu-core-request=31", "0"}} {
		if got, err := p.create(c[0], c[1]); got != c[2] {
			t.Errorf("%s: given %q, %v; want %q", c[0], got, err, c[2])
		}
	}
	// Before containerd 2.3, all that is seen of a device is what it brings.
	pod, ctr = podOf("mounted", "id-mounted", says("gpu-core-request=10"))
	ctr.Mounts = []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}
	if adjust, _, err := p.CreateContainer(context.Background(), pod, ctr); err != nil && !strings.Contains(err.Error(), "cannot be promised") || adjust != nil {
		t.Errorf("with the shim mounted: given %v, %v", adjust, err)
	}
	// Who preloads the shim by himself has no GPU from anybody.
	pod, ctr = podOf("preloads", "id-preloads", says("gpu=1"))
	ctr.Env = []string{"LD_PRELOAD=" + cdi.ShimPath}
	if adjust, _, err := p.CreateContainer(context.Background(), pod, ctr); err != nil || indices(t, adjust) == "" {
		t.Errorf("with a preload of its own: given %v, %v", adjust, err)
	}
}

// The plugin restarts: what it placed is where it was, also if the devices
// cannot be listed yet, and what ended is free.
func TestPlacementSurvivesARestart(t *testing.T) {
	p := newPlacing(t, 3)
	for _, c := range []struct{ name, asks, want string }{
		{"a", "gpu-core-request=60", "0"}, {"b", "gpu=1", "1"}, {"c", "gpu-core-request=50", "1"}, {"d", "gpu-core-request=40", "0"}, {"e", "gpu=nvshare.com/gpu=2", "2"},
	} {
		if got, err := p.create(c.name, c.asks, "gpu-memory-limit=5Gi", "gpu-exclusion=x"); got != c.want {
			t.Fatalf("%s: given %q, %v; want %q", c.name, got, err, c.want)
		}
	}
	p.stop("c")
	before := *p
	for name, n := range map[string]int{"as before": 3, "without devices at first": 0} {
		p := before.restarted(3)
		if n == 0 {
			p = newPlacing(t, 3)
			p.SetInventory(Unavailable(fmt.Errorf("not yet")))
			p.pods, p.ctrs = before.pods, maps.Clone(before.ctrs)
			if _, err := p.Synchronize(context.Background(), slices.Collect(maps.Values(p.pods)), slices.Collect(maps.Values(p.ctrs))); err != nil {
				t.Fatal(err)
			}
			if _, err := p.create("f", "gpu=1"); err == nil || !strings.Contains(err.Error(), "this node has no GPU; nvshare-plugin cannot say which GPUs there are: not yet") {
				t.Errorf("without devices: %v", err)
			}
			p.SetInventory(simulated(t, 3))
		}
		_, err := p.create("f", "gpu-core-request=1", "gpu-memory-limit=12Gi")
		for _, part := range []string{
			"GPU 0 (" + gpuID(0) + ") has 0 % and 6Gi of 16Gi left (ml/a/main has 60 % and 5Gi, ml/d/main has 40 % and 5Gi): too little time, too little memory, it is only for exclusion label \"ml/x\", which ml/a/main has",
			"GPU 1 (" + gpuID(1) + ") has 100 % and 11Gi of 16Gi left (ml/b/main has 5Gi): too little memory, it is only",
			"GPU 2 (" + gpuID(2) + ") has 100 % and 11Gi of 16Gi left (ml/e/main has 5Gi): too little memory, it is only",
		} {
			if !strings.Contains(fmt.Sprint(err), part) {
				t.Errorf("%s: the error lacks %q: %v", name, part, err)
			}
		}
		// Started again, it goes where it was, although GPU 2 would do as well.
		if got, err := p.createAs("c", "id-c2", "gpu-core-request=50", "gpu-exclusion=x"); got != "1" {
			t.Errorf("%s: c, started again, was given %q, %v", name, got, err)
		}
		delete(p.ctrs, "id-c2")
	}
}

// A container that is started again is not in its own way, and goes back to
// where it was as long as the runtime keeps what is left of it.
func TestPlacementOfARestartedContainer(t *testing.T) {
	p := newPlacing(t, 3)
	expect := func(got string, err error, want string) {
		t.Helper()
		if got != want {
			t.Errorf("given %q, %v; want %q", got, err, want)
		}
	}
	got, err := p.create("a", "gpu-core-request=60")
	expect(got, err, "0")
	got, err = p.create("b", "gpu-core-request=70")
	expect(got, err, "1")
	// Its end is heard of after its new beginning.
	got, err = p.createAs("b", "again", "gpu-core-request=70")
	expect(got, err, "1")
	p.stop("b")
	// Its end comes first: a third would fit it as well.
	p.stop("a")
	got, err = p.createAs("a", "again-a", "gpu-core-request=30")
	expect(got, err, "0")
	// What ended is free at once, for others too.
	if _, err := p.StopContainer(context.Background(), nil, &api.Container{Id: "again"}); err != nil {
		t.Fatal(err)
	}
	got, err = p.create("c", "gpu=2", "gpu-core-request=100")
	expect(got, err, "1 2")
	// And if it is not, another GPU is found, or none.
	if got, err = p.createAs("b", "b3", "gpu-core-request=71"); err == nil {
		t.Errorf("given %q", got)
	}
	got, err = p.createAs("b", "b3", "gpu-core-request=70")
	expect(got, err, "0")
	if n := len(p.containers.ended); n != 0 {
		t.Errorf("%d that ended are remembered", n)
	}
}

// A creation that fails later must not keep its part, whatever the runtime says
// of it then: that it stopped, that it is removed, that its pod is, or nothing,
// and the kubelet tries again.
func TestFailedCreationsLeaveNothing(t *testing.T) {
	p := newPlacing(t, 1)
	ctx := context.Background()
	for round := range 48 { // nothing is said of the last one
		id := fmt.Sprintf("id-%d", round)
		if _, err := p.createAs("a", id, "gpu-core-request=100"); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		var err error
		switch round % 4 {
		case 0:
			_, err = p.StopContainer(ctx, nil, &api.Container{Id: id})
		case 1:
			err = p.RemoveContainer(ctx, nil, &api.Container{Id: id})
		case 2:
			err = p.StopPodSandbox(ctx, &api.PodSandbox{Id: "sandbox-a"})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := len(p.containers.want) + len(p.containers.ended); n > 1 {
		t.Errorf("%d containers are remembered", n)
	}
	if _, err := p.create("b", "gpu-core-request=1"); err == nil {
		t.Error("the last one counts no more")
	}
	if err := p.StopPodSandbox(ctx, &api.PodSandbox{}); err != nil { // says nothing of any
		t.Fatal(err)
	}
	if _, err := p.create("b", "gpu-core-request=1"); err == nil {
		t.Error("it was forgotten for a pod without an ID")
	}
	if err := p.StopPodSandbox(ctx, &api.PodSandbox{Id: "sandbox-a"}); err != nil {
		t.Fatal(err)
	}
	if n := len(p.containers.want) + len(p.containers.ended); n != 0 {
		t.Errorf("%d containers are left", n)
	}
	// A container that cannot be adjusted after all, either.
	if _, err := p.Configure(ctx, "", "containerd", "2.0.14"); err != nil {
		t.Fatal(err)
	}
	if got, err := p.create("c", "gpu-core-request=60"); err == nil {
		t.Errorf("given %q", got)
	}
	if n := len(p.containers.want); n != 0 {
		t.Errorf("%d containers are left", n)
	}
}

// The runtime calls one at a time; should one ever call twice at once, nothing
// is promised twice.
func TestParallelCreations(t *testing.T) {
	p := newPlacing(t, 4)
	var wg sync.WaitGroup
	given := make(chan string, 64)
	for i := range 64 {
		wg.Go(func() {
			pod, ctr := podOf(fmt.Sprintf("p%d", i), fmt.Sprintf("id-p%d", i), says("gpu-core-request=30", "gpu-memory-limit=1Gi"))
			if adjust, _, err := p.CreateContainer(context.Background(), pod, ctr); err == nil {
				given <- adjust.GetAnnotations()[PlacementAnnotation]
			}
		})
	}
	wg.Wait()
	close(given)
	on := map[string]int{}
	for uuid := range given {
		on[uuid]++
	}
	if want := map[string]int{gpuID(0): 3, gpuID(1): 3, gpuID(2): 3, gpuID(3): 3}; !maps.Equal(on, want) {
		t.Errorf("given: %v, want three on each", on)
	}
}

// Nobody new comes onto a GPU that is drained or does no more work; who had a drained one
// before goes back to it.
func TestClosedGPUs(t *testing.T) {
	p := newPlacing(t, 2)
	if got, err := p.create("a", "gpu=nvshare.com/gpu=0"); err != nil {
		t.Fatalf("given %q, %v", got, err)
	}
	p.containers.learn(State{IDs: []string{"id-a"}, GPUs: map[string]GPUState{gpuID(0): {Drained: true}, gpuID(1): {}}})
	if got, err := p.create("b", "gpu=1"); got != "1" {
		t.Errorf("given %q, %v", got, err)
	}
	if got, err := p.create("c", "gpu=nvshare.com/gpu=0"); err == nil || !strings.Contains(err.Error(), "it is drained") {
		t.Errorf("a container that names the drained GPU: given %q, %v", got, err)
	}
	if got, err := p.create("a", "gpu=nvshare.com/gpu=0"); err != nil {
		t.Errorf("a container that had the GPU: given %q, %v", got, err)
	}
	p.containers.learn(State{IDs: []string{"id-a"}, GPUs: map[string]GPUState{gpuID(0): {Drained: true}, gpuID(1): {Fault: "Xid 79: gone"}}})
	if got, err := p.create("d", "gpu=1"); err == nil || !strings.Contains(err.Error(), "it is drained") || !strings.Contains(err.Error(), "Xid 79: gone") {
		t.Errorf("given %q, %v", got, err)
	}
}

// A plugin that has just started does not choose before the scheduler has said what it alone
// knows: the container would get a GPU that does no work, or more memory than there is. A
// scheduler that is away is not waited for longer than stateLimit.
func TestChoosesByTheSchedulersWord(t *testing.T) {
	for name, answers := range map[string]bool{"the scheduler answers": true, "it is away": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlacing(t, 2)
				p.containers.noState = true
				s, started := newScheduler(), time.Now()
				s.gpus = map[string]GPUState{gpuID(0): {Fault: "Xid 79: gone"}, gpuID(1): {}}
				go p.containers.Run(t.Context(), func(ctx context.Context) (Scheduler, error) {
					if !answers || time.Since(started) < time.Second {
						return nil, errors.New("not there")
					}
					return s.dial(ctx)
				})
				synctest.Wait()
				if got, err := p.create("a", "gpu=1"); err == nil || !strings.Contains(err.Error(), "try again") {
					t.Errorf("at first: given %q, %v", got, err)
				}
				if got, err := p.create("named", "gpu=nvshare.com/gpu=1"); err != nil {
					t.Errorf("by name: given %q, %v", got, err)
				}
				time.Sleep(map[bool]time.Duration{true: 5 * time.Second, false: stateLimit}[answers])
				synctest.Wait()
				if got, err := p.create("a", "gpu=1"); got != map[bool]string{true: "1", false: "0"}[answers] {
					t.Errorf("then: given %q, %v", got, err)
				}
			})
		})
	}
}

// A plugin that serves beside an earlier one waits for that word too, if it is asked alone before
// it leads, and takes over what the earlier one has chosen meanwhile.
func TestWaitsForTheWordBeforeItLeads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlacing(t, 2)
		p.containers.noState = true
		time.Sleep(time.Hour)
		follows := func() {
			t.Helper()
			ctr := &api.Container{Id: "id-f", PodSandboxId: "pod-f", Name: "f", CDIDevices: []*api.CDIDevice{{Name: cdi.KindNRI + "=" + gpuID(0)}}}
			ctr.Annotations = map[string]string{PlacementAnnotation: gpuID(0)}
			pod := &api.PodSandbox{Id: "pod-f", Name: "f", Annotations: map[string]string{"nvshare.com/gpu": "1"}}
			if _, _, err := p.CreateContainer(t.Context(), pod, ctr); err != nil {
				t.Errorf("chosen by the earlier plugin: %v", err)
			}
		}
		refuses := func() {
			t.Helper()
			if got, err := p.create("a", "gpu=1"); err == nil || !strings.Contains(err.Error(), "try again") {
				t.Errorf("alone: given %q, %v", got, err)
			}
			follows()
		}
		follows()
		refuses()
		time.Sleep(stateLimit)
		if got, err := p.create("b", "gpu=1"); err != nil {
			t.Errorf("asked first for long: given %q, %v", got, err)
		}
		go p.containers.Run(t.Context(), func(context.Context) (Scheduler, error) { return nil, errors.New("not there") })
		synctest.Wait()
		refuses()
		time.Sleep(stateLimit - 1)
		refuses()
		time.Sleep(time.Nanosecond)
		if got, err := p.create("a", "gpu=1"); err != nil {
			t.Errorf("after the wait: given %q, %v", got, err)
		}
	})
}

// A container that ends because its GPU does no more work, and is started again, gets
// another GPU where the plugin chooses: back on that one it would end again and again.
func TestRestartedAwayFromADeadGPU(t *testing.T) {
	p := newPlacing(t, 2)
	if got, err := p.create("a", "gpu=1"); got != "0" {
		t.Fatalf("given %q, %v", got, err)
	}
	if got, err := p.create("named", "gpu=nvshare.com/gpu=0"); got != "0" {
		t.Fatalf("given %q, %v", got, err)
	}
	one := GPUState{Drained: true}
	p.containers.learn(State{IDs: []string{"id-a", "id-named"}, GPUs: map[string]GPUState{gpuID(0): one, gpuID(1): {}}})
	p.stop("a")
	if got, err := p.create("a", "gpu=1"); got != "0" {
		t.Errorf("drained: given %q, %v; want the GPU that it had", got, err)
	}
	one.Fault = "Xid 79: gone"
	p.containers.learn(State{IDs: []string{"id-a", "id-named"}, GPUs: map[string]GPUState{gpuID(0): one, gpuID(1): {}}})
	p.stop("a")
	if got, err := p.create("a", "gpu=1"); got != "1" {
		t.Errorf("does no work: given %q, %v; want the other GPU", got, err)
	}
	if got, err := p.create("named", "gpu=nvshare.com/gpu=0"); got != "0" {
		t.Errorf("by name: given %q, %v", got, err)
	}
}

// Whoever publishes GPUs hears of each change that the scheduler tells, and of nothing else.
func TestChangesOfGPUsAreTold(t *testing.T) {
	p := newPlacing(t, 2)
	told := 0
	p.containers.OnGPUs = func() {
		told++
		p.containers.GPU(gpuID(0)) // holds no lock
	}
	one := func(s GPUState) State { return State{GPUs: map[string]GPUState{gpuID(0): s}} }
	for i, step := range []struct {
		state State
		told  int
	}{
		{one(GPUState{}), 1}, {one(GPUState{}), 1}, {one(GPUState{Drained: true}), 2}, {State{}, 2}, // a scheduler that has just started knows no GPU
		{one(GPUState{Drained: true}), 2}, {one(GPUState{Fault: "Xid 79: gone"}), 3},
	} {
		if p.containers.learn(step.state); told != step.told {
			t.Fatalf("step %d: told %d times, want %d", i, told, step.told)
		}
	}
}

// A scheduler that is started while NVML fails does not know how much memory a GPU has. The GPU
// has as much as before.
func TestMemoryOfGPUStays(t *testing.T) {
	p := newPlacing(t, 1)
	p.inventory.Load().gpus[0].MemoryBytes = 0
	for _, memory := range []uint64{16 * gib, 0} {
		p.containers.learn(State{GPUs: map[string]GPUState{gpuID(0): {Memory: memory, Sharing: SharedByTurns}}})
		if got, err := p.create("a", "gpu=1", "gpu-memory-limit=17Gi"); err == nil {
			t.Errorf("%d bytes are told: given %q", memory, got)
		}
	}
	p.containers.learn(State{GPUs: map[string]GPUState{gpuID(0): {Memory: 20 * gib}}}) // --gpu-memory is another one
	if _, err := p.create("a", "gpu=1", "gpu-memory-limit=17Gi"); err != nil {
		t.Error(err)
	}
}

// What the scheduler says counts: the size of GPUs that this host's kernel does
// not tell, and limits that were changed since.
func TestPlacementByTheSchedulersWord(t *testing.T) {
	p := newPlacing(t, 2)
	inv := p.inventory.Load()
	for i := range inv.gpus {
		inv.gpus[i].MemoryBytes = 0
	}
	if got, err := p.create("a", "gpu=1", "gpu-memory-limit=12Gi"); got != "0" {
		t.Fatalf("given %q, %v", got, err)
	}
	if got, err := p.create("b", "gpu=2", "gpu-memory-limit=99Gi"); got != "0 1" { // nobody knows
		t.Fatalf("given %q, %v", got, err)
	}
	p.remove("b")
	p.containers.learn(State{
		IDs:  []string{"id-a"},
		GPUs: map[string]GPUState{gpuID(0): {Memory: 16 * gib}, gpuID(1): {Memory: 8 * gib}},
		Promises: []Promise{
			{ID: "id-a", Who: "ml/a/main", UUID: gpuID(0), Memory: 6 * gib},
			{Who: "user 1000", UUID: gpuID(1), Memory: 3 * gib, Percent: 20},
		},
	})
	p.containers.learn(State{IDs: []string{"id-a"}, Promises: p.containers.promises}) // a scheduler that has just started
	_, err := p.create("c", "gpu=1", "gpu-memory-limit=11Gi")
	for _, part := range []string{"GPU 0 (" + gpuID(0) + ") has 100 % and 10Gi of 16Gi left (ml/a/main has 6Gi)", "GPU 1 (" + gpuID(1) + ") has 80 % and 5Gi of 8Gi left (1 tenant outside the namespace has 20 % and 3Gi)"} {
		if !strings.Contains(fmt.Sprint(err), part) {
			t.Errorf("the error lacks %q: %v", part, err)
		}
	}
	if got, err := p.create("c", "gpu=1", "gpu-memory-limit=10Gi"); got != "0" {
		t.Errorf("given %q, %v", got, err)
	}
	p.containers.PromiseMemory = 200
	if got, err := p.create("d", "gpu=1", "gpu-memory-limit=14Gi"); got == "" {
		t.Errorf("with twice the memory promised: %v", err)
	}
}

// Containers come and go, and the plugin as well: whatever it has been through,
// it gives what a plugin would that has just learned of all from the runtime,
// and promises nothing twice.
func TestPlacementIsWhatTheRuntimeTells(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const gpus = 3
		p := newPlacing(t, gpus)
		draw := func(what string, from ...string) string { return rapid.SampledFrom(from).Draw(rt, what) }
		for i := range rapid.IntRange(1, 20).Draw(rt, "steps") {
			name := fmt.Sprintf("c%d", i)
			if len(p.ctrs) > 0 {
				other := p.ctrs[draw("container", slices.Sorted(maps.Keys(p.ctrs))...)]
				old := strings.TrimPrefix(other.PodSandboxId, "sandbox-")
				switch draw("what happens", "nothing", "stop", "remove", "restart", "again") {
				case "stop":
					p.stop(old)
				case "remove":
					p.stop(old)
					p.remove(old)
				case "restart":
					p = p.restarted(gpus)
				case "again": // in the same pod, under another ID
					p.stop(old)
					p.remove(old)
					name = old
				}
			}
			var asks []string
			for _, a := range []string{
				draw("GPUs", "", "gpu=1", "gpu=1", "gpu=2", "gpu=nvshare.com/gpu=1"), draw("request", "", "gpu-core-request=30", "gpu-core-request=50", "gpu-core-request=100"),
				draw("memory", "", "gpu-memory-limit=4Gi", "gpu-memory-limit=9Gi"), draw("exclusion", "", "", "", "gpu-exclusion=x"),
				draw("affinity", "", "", "", "gpu-affinity=x"), draw("anti-affinity", "", "", "", "gpu-anti-affinity=x"),
			} {
				if a != "" {
					asks = append(asks, a)
				}
			}
			fresh := p.restarted(gpus)
			fresh.ctrs, fresh.pods = maps.Clone(p.ctrs), maps.Clone(p.pods)
			want, wantErr := fresh.create(name, asks...)
			got, err := p.create(name, asks...)
			if got != want || fmt.Sprint(err) != fmt.Sprint(wantErr) {
				rt.Fatalf("%s %v: given %q, %v; by a new plugin %q, %v", name, asks, got, err, want, wantErr)
			}
			core := map[string]uint32{}
			for _, c := range p.ctrs {
				if c.State == api.ContainerState_CONTAINER_STOPPED {
					continue
				}
				r, err := parsed(p.pods[c.PodSandboxId].Annotations, "main", nil)
				if err != nil && len(r.Devices) > 0 {
					rt.Fatal(err)
				}
				for uuid := range strings.SplitSeq(c.Annotations[PlacementAnnotation], ",") {
					if core[uuid] += r.Terms.CoreRequest; core[uuid] > 100 && uuid != "" {
						rt.Fatalf("%d %% of %s are promised", core[uuid], uuid)
					}
				}
			}
		}
	})
}

// MIG devices are devices of their own, and two of one GPU are not two GPUs. A
// GPU that has some is not given as a whole by choice.
func TestPlacementOnMIGDevices(t *testing.T) {
	null := []string{"/dev/null"}
	gpus := []cdi.GPU{
		{Index: 0, UUID: gpuID(0), DeviceNodes: null, Instances: []cdi.Instance{
			{Index: 0, UUID: "MIG-a", MemoryBytes: 5 * gib, DeviceNodes: null}, {Index: 1, UUID: "MIG-b", MemoryBytes: 10 * gib, DeviceNodes: null}}},
		{Index: 1, UUID: gpuID(1), DeviceNodes: null, Instances: []cdi.Instance{ // as the kernel shows them, one hidden
			{Index: 0, GPUInstance: 7, DeviceNodes: null}, {Index: 1, GPUInstance: 8, DeviceNodes: null}, {Index: 2, GPUInstance: 9}}},
		{Index: 2, UUID: gpuID(2), DeviceNodes: null, MemoryBytes: 16 * gib},
	}
	spec, err := cdi.Build(cdi.KindNRI, gpus, cdi.DriverBase(&cdi.Driver{}, gpus, cdi.DefaultPaths.Hook), cdi.DefaultPaths)
	if err != nil {
		t.Fatal(err)
	}
	p := newPlacing(t, 1)
	p.SetInventory(NewInventory(spec, gpus))
	kernels := "MIG-" + gpuID(1)
	for _, c := range []struct{ name, asks, memory, want, says string }{
		{"a", "gpu-core-request=60", "gpu-memory-limit=1Gi", kernels + ":7:0", ""}, // of unknown size, as if it had none to spare
		{"b", "gpu-core-request=60", "gpu-memory-limit=6Gi", kernels + ":8:0", ""},
		{"c", "gpu-core-request=60", "gpu-memory-limit=6Gi", "MIG-b", ""},
		{"d", "gpu-core-request=60", "gpu-memory-limit=4Gi", "MIG-a", ""},
		{"e", "gpu=3", "", "MIG-b," + kernels + ":7:0," + gpuID(2), ""}, // most memory
		{"f", "gpu=4", "", "", "4 different GPUs are asked for, and this node has 3"},
		{"g", "gpu=nvshare.com/gpu=1:1", "gpu-core-request=40", kernels + ":8:0", ""},
		{"h", "gpu=nvshare.com/gpu=1", "gpu-core-request=40", "", "40 % cannot be promised: MIG device 1:1 (of " + gpuID(1) + ") has 0 % left (ml/b/main has 60 % and 6Gi, ml/g/main has 40 %)"},
		{"i", "gpu-core-request=41", "gpu-memory-limit=17Gi", "", "MIG device 0:0 (MIG-a) has 40 % and 1Gi of 5Gi left (ml/d/main has 60 % and 4Gi): too little time, too little memory"},
	} {
		pod, ctr := podOf(c.name, "id-"+c.name, says(append([]string{c.asks}, strings.Fields(c.memory)...)...))
		adjust, _, err := p.CreateContainer(context.Background(), pod, ctr)
		if got := adjust.GetAnnotations()[PlacementAnnotation]; got != c.want || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s %s %s: given %q, %v; want %q, %q", c.name, c.asks, c.memory, got, err, c.want, c.says)
		}
		if strings.Join(recorded(pod, applied(ctr, adjust)), ",") != c.want {
			t.Errorf("%s: %q cannot be read back", c.name, c.want)
		}
	}
}

// The scheduler knows MIG devices by NVML only. One that it does not know is given to nobody.
func TestMIGDevicesThatTheSchedulerDoesNotKnow(t *testing.T) {
	null := []string{"/dev/null"}
	gpus := []cdi.GPU{{UUID: gpuID(0), DeviceNodes: null, Instances: []cdi.Instance{{GPUInstance: 7, DeviceNodes: null}}}}
	spec, err := cdi.Build(cdi.KindNRI, gpus, cdi.DriverBase(&cdi.Driver{}, gpus, cdi.DefaultPaths.Hook), cdi.DefaultPaths)
	if err != nil {
		t.Fatal(err)
	}
	unknown := "MIG-" + gpuID(0) + ":7:0"
	p := newPlacing(t, 1)
	p.SetInventory(NewInventory(spec, gpus))
	p.containers.learn(State{GPUs: map[string]GPUState{gpuID(0): {}}})
	for _, asks := range []string{"gpu=1", "gpu=nvshare.com/gpu=0:0", "gpu=nvshare.com/gpu=all"} {
		if _, err := p.create("a", asks); err == nil || !strings.Contains(err.Error(), unknownMIG) || strings.Contains(err.Error(), "undrain") {
			t.Errorf("%s: %v", asks, err)
		}
	}
	p.containers.learn(State{GPUs: map[string]GPUState{gpuID(0): {}, unknown: {}}})
	if _, _, err := p.CreateContainer(t.Context(), &api.PodSandbox{Id: "s", Uid: "u", Annotations: says("gpu=1")}, &api.Container{Id: "a"}); err != nil {
		t.Errorf("one that it knows: %v", err)
	}
}

// What ends all work on a GPU ends that of its MIG devices, and who drains it drains these.
func TestMIGDevicesOfClosedGPUs(t *testing.T) {
	null := []string{"/dev/null"}
	gpus := []cdi.GPU{
		{Index: 0, UUID: gpuID(0), DeviceNodes: null, Instances: []cdi.Instance{{UUID: "MIG-a", DeviceNodes: null}}},
		{Index: 1, UUID: gpuID(1), DeviceNodes: null, Instances: []cdi.Instance{{DeviceNodes: null}}}, // as the kernel shows it
	}
	spec, err := cdi.Build(cdi.KindNRI, gpus, cdi.DriverBase(&cdi.Driver{}, gpus, cdi.DefaultPaths.Hook), cdi.DefaultPaths)
	if err != nil {
		t.Fatal(err)
	}
	p := newPlacing(t, 1)
	p.SetInventory(NewInventory(spec, gpus))
	p.containers.learn(State{GPUs: map[string]GPUState{gpuID(0): {Fault: "Xid 79: gone"}, gpuID(1): {Drained: true}, "MIG-a": {}}})
	for _, asks := range []string{"gpu=1", "gpu=nvshare.com/gpu=MIG-a", "gpu=nvshare.com/gpu=1:0"} {
		if got, err := p.create("a", asks); err == nil || !strings.Contains(err.Error(), map[bool]string{true: "it is drained", false: "Xid 79: gone"}[strings.HasSuffix(asks, "1:0")]) {
			t.Errorf("%s: given %q, %v", asks, got, err)
		}
	}
}

// Where the runtime passes annotations of pods on to containers (CRI-O), a pod could write any of the records.
func TestForgedRecordsAreNotBelieved(t *testing.T) {
	records := map[string]string{
		PlacementAnnotation: gpuID(0), ReachAnnotation: gpuID(0) + "," + gpuID(1), LimitsAnnotation: "8 100", ClaimAnnotation: deviceOf(1, 0),
	}
	p := newPlacing(t, 2)
	pod, ctr := podOf("forger", "id-forger", records)
	ctr.Annotations = records
	if _, _, err := p.CreateContainer(t.Context(), pod, ctr); err == nil || strings.Count(err.Error(), "nvshare writes this itself") != len(records) {
		t.Errorf("created, %v", err)
	}
	ctr.State, ctr.Mounts = api.ContainerState_CONTAINER_RUNNING, []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}
	if _, err := p.Synchronize(t.Context(), []*api.PodSandbox{pod}, []*api.Container{ctr}); err != nil {
		t.Fatal(err)
	}
	all, _ := p.containers.snapshot()
	if c := all["id-forger"]; len(c.GPUs)+len(c.Reach)+len(c.Claims) > 0 || c.Limits != (Limits{}) || c.Terms.MemoryLimit != 0 || c.Keep != 0 {
		t.Errorf("known as %+v", c)
	}
}

// A pod that writes a record itself does not void the plugin's own, which such a runtime does not pass on.
func TestRecordsThatAPodWantsVoid(t *testing.T) {
	p := newPlacing(t, 2)
	pod, ctr := podOf("voider", "id-voider", says("gpu=1", "gpu-core-request=100"))
	ctr.Annotations = map[string]string{PlacementAnnotation: gpuID(0)}
	pod.Annotations[PlacementAnnotation] = "x"
	ctr.State, ctr.Mounts = api.ContainerState_CONTAINER_RUNNING, []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}
	if _, err := p.Synchronize(t.Context(), []*api.PodSandbox{pod}, []*api.Container{ctr}); err != nil {
		t.Fatal(err)
	}
	if got, err := p.create("honest", "gpu=1", "gpu-core-request=100"); err != nil {
		t.Errorf("the other GPU is booked, too: %v, %v", got, err)
	}
}

// Signs of nvshare that anybody can write into a pod book nothing, and keep nobody
// from the GPUs.
func TestForgedSignsBookNothing(t *testing.T) {
	elsewhere := &api.Mount{Source: "/var/lib/kubelet/pods/x/volumes/kubernetes.io~empty-dir/v", Destination: cdi.ShimDir}
	record := map[string]string{PlacementAnnotation: gpuID(0)}
	for name, forge := range map[string]func(*api.PodSandbox, *api.Container){
		"preload": func(_ *api.PodSandbox, c *api.Container) { c.Env = []string{cdi.PreloadEnv + "=" + cdi.ShimPath} },
		"mount":   func(_ *api.PodSandbox, c *api.Container) { c.Mounts = []*api.Mount{elsewhere} },
		"record": func(p *api.PodSandbox, c *api.Container) { // with pod_annotations in containerd's settings
			maps.Copy(p.Annotations, record)
			c.Annotations = record
		},
	} {
		p := newPlacing(t, 1)
		pod, ctr := podOf("forger", "forger", says("gpu=none", "gpu-core-request=100", "gpu-exclusion=mine"))
		forge(pod, ctr)
		if adjust, _, err := p.CreateContainer(context.Background(), pod, ctr); adjust != nil || (err != nil) != (name == "record") {
			t.Errorf("%s: created with %v, %v", name, adjust, err)
		}
		if _, err := p.create("honest", "gpu=1", "gpu-core-request=100"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		// Nor does a plugin that comes later believe them.
		later := newPlacing(t, 1)
		if _, err := later.Synchronize(context.Background(), []*api.PodSandbox{pod}, []*api.Container{ctr}); err != nil {
			t.Fatal(err)
		}
		if _, err := later.create("honest", "gpu=1", "gpu-core-request=100"); err != nil {
			t.Errorf("%s, after a restart: %v", name, err)
		}
		if name == "record" { // which is refused
			continue
		}
		// Who asks for a GPU gets one all the same.
		pod, ctr = podOf("asking", "asking", says("gpu=1"))
		forge(pod, ctr)
		if adjust, _, err := newPlacing(t, 1).CreateContainer(context.Background(), pod, ctr); err != nil || len(cdiNames(adjust)) != 1 {
			t.Errorf("%s: asked for a GPU and got %v, %v", name, adjust, err)
		}
	}
}

// A container that may move gets the nodes of all GPUs like its own and sees one. The plugin
// counts it where the scheduler says that it is, also after a restart.
func TestContainersThatMayMove(t *testing.T) {
	p := newPlacing(t, 2)
	for name, asks := range map[string][]string{
		"any":   {"gpu=any"},
		"named": {"gpu=nvshare.com/gpu=0", "gpu-migratable=true"},
		"count": {"gpu=1", "gpu-migratable=true"},
	} {
		pod, ctr := podOf(name, "id-"+name, says(append(asks, "gpu-core-request=30")...))
		ctr.Env = []string{"CUDA_VISIBLE_DEVICES=0"}
		adjust, _, err := p.CreateContainer(context.Background(), pod, ctr)
		if err != nil {
			t.Fatal(err)
		}
		env, removed := envOf(adjust)
		on := adjust.GetAnnotations()[PlacementAnnotation]
		if want := []string{cdi.KindNRI + "=" + gpuID(0), cdi.KindNRI + "=" + gpuID(1)}; !slices.Equal(cdiNames(adjust), want) ||
			on == "" || env["CUDA_VISIBLE_DEVICES"] != on || env["NVSHARE_GPU"] != "any" || !slices.Contains(removed, "CUDA_VISIBLE_DEVICES") {
			t.Errorf("%s: %v on %q, sees %q", name, cdiNames(adjust), on, env["CUDA_VISIBLE_DEVICES"])
		}
		c := p.containers.want["id-"+name]
		if !c.Terms.Migratable || !slices.Equal(c.GPUs, []string{on}) || !slices.Equal(c.Reach, []string{gpuID(0), gpuID(1)}) {
			t.Errorf("%s: %+v", name, c)
		}
		if name != "any" {
			p.remove(name)
			continue
		}
		p.pods[pod.Id], p.ctrs[ctr.Id] = pod, applied(ctr, adjust)
	}

	had := p.containers.want["id-any"].GPUs[0]
	other := gpuID(1 - strings.Index(gpuID(0)+gpuID(1), had)/len(had))
	state := State{IDs: []string{"id-any"}, On: map[string][]string{"id-any": {other}, "id-unknown": {other}}}
	p.containers.learn(state)
	p = p.restarted(2)
	if c := p.containers.want["id-any"]; !slices.Equal(c.GPUs, []string{had}) || len(c.Reach) == 0 {
		t.Errorf("recorded: %+v", c)
	}
	p.containers.learn(state)
	if c := p.containers.want["id-any"]; !slices.Equal(c.GPUs, []string{other}) || len(p.containers.want) != 1 {
		t.Errorf("after a restart: %+v", p.containers.want)
	}
	if _, err := p.create("full", "gpu=nvshare.com/gpu="+other, "gpu-core-request=80"); err == nil {
		t.Error("80 % are promised beside 30 %")
	}
	if _, err := p.create("free", "gpu=nvshare.com/gpu="+had, "gpu-core-request=100"); err != nil {
		t.Error(err)
	}
	// Alone of its model, or with several GPUs, it stays.
	for _, asks := range [][]string{{"gpu=2", "gpu-migratable=true"}, {"gpu=nvshare.com/gpu=0,nvshare.com/gpu=1", "gpu-migratable=true"}} {
		p := newPlacing(t, 2)
		if _, err := p.create("several", asks...); err != nil || p.containers.want["id-several"].Reach != nil {
			t.Errorf("%v: %v, %+v", asks, err, p.containers.want)
		}
	}
	alone := newPlacing(t, 1)
	if _, err := alone.create("alone", "gpu=any"); err != nil || alone.containers.want["id-alone"].Reach != nil {
		t.Errorf("%v, %+v", err, alone.containers.want)
	}
}
