// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"pgregory.net/rapid"

	sched "github.com/nvshare/nvshare/sched/api"
)

// counted is a node whose pods ask by their specs, with kube-scheduler and API server.
type counted struct {
	*placing
	specs  map[string]Pod // of the API server, by name
	silent bool           // it does not answer
	asked  int
	late   func() // happens before its answer comes; may be nil
}

func newCounted(t testing.TB, gpus int) *counted {
	return (&counted{specs: map[string]Pod{}}).with(newPlacing(t, gpus))
}

func (s *counted) with(p *placing) *counted {
	s.placing = p
	p.SetSpecs(func(_ context.Context, _, name string) (Pod, error) {
		s.asked++
		if s.silent {
			return Pod{}, errors.New("no answer")
		}
		found := s.specs[name]
		if s.late != nil {
			s.late()
		}
		return found, nil
	})
	p.ExpectPods()
	if p.containers.complete = true; !s.silent {
		p.SetPods(slices.Collect(maps.Values(s.specs)))
	}
	return s
}

// spec is the pod of podOf as the API server has it.
func spec(name string, l Limits, annotations ...string) Pod {
	return Pod{UID: "uid-" + name, Namespace: "ml", Name: name, Annotations: says(annotations...), Counted: l, Limits: map[string]Limits{"main": l}}
}

// bind has kube-scheduler place a pod here.
func (s *counted) bind(name string, l Limits, annotations ...string) {
	s.specs[name] = spec(name, l, annotations...)
	s.SetPod(s.specs[name])
}

func (s *counted) capacity(want Limits) {
	s.t.Helper()
	if got, ok := s.Capacity(); !ok || got != want {
		s.t.Errorf("the capacity is %v (%v), want %v", got, ok, want)
	}
}

// has checks the container's terms.
func (s *counted) has(name string, want sched.Terms) {
	s.t.Helper()
	all, _ := s.containers.snapshot()
	if got := all["id-"+name].Terms; got != want {
		s.t.Errorf("%s has %s, want %s", name, describeTerms(got), describeTerms(want))
	}
}

// A container has what its spec says, and annotations may only lower it, or say what it leaves open.
func TestLimitsBecomeTerms(t *testing.T) {
	for _, c := range []struct {
		limits      Limits
		annotations string
		want        sched.Terms
		refused     string
	}{
		{limits: Limits{8, 25}, want: sched.Terms{MemoryLimit: 8 * gib, CoreLimit: 25, CoreRequest: 25}},
		{limits: Limits{8, 0}, want: sched.Terms{MemoryLimit: 8 * gib}},
		{limits: Limits{0, 25}, want: sched.Terms{CoreLimit: 25, CoreRequest: 25}},
		{limits: Limits{8, 25}, annotations: "gpu-memory-limit=4Gi gpu-core-limit=10", want: sched.Terms{MemoryLimit: 4 * gib, CoreLimit: 10, CoreRequest: 10}},
		{limits: Limits{8, 25}, annotations: "gpu-memory-limit=9Gi gpu-core-limit=26 gpu-core-request=26", want: sched.Terms{MemoryLimit: 8 * gib, CoreLimit: 25, CoreRequest: 25}},
		{limits: Limits{8, 0}, annotations: "gpu-core-request=30 gpu-weight=7", want: sched.Terms{MemoryLimit: 8 * gib, CoreRequest: 30, Weight: 7}},
		{limits: Limits{8, 0}, annotations: "gpu=1", want: sched.Terms{MemoryLimit: 8 * gib}},
		{limits: Limits{8, 0}, annotations: "gpu=any", want: sched.Terms{MemoryLimit: 8 * gib, Migratable: true}},
		{limits: Limits{8, 0}, annotations: "gpu=2", refused: "has counted one GPU"},
		{limits: Limits{8, 0}, annotations: "gpu=nvshare.com/gpu=0", refused: "has counted one GPU"},
		{limits: Limits{8, 0}, annotations: "gpu=none", refused: "has counted one GPU"},
		{limits: Limits{8, 101}, refused: "percent of one GPU"},
		{limits: Limits{17, 0}, refused: "no GPU can give it 17Gi"}, // of 16
	} {
		gpus := 2
		if strings.Contains(c.annotations, "any") { // it could open both
			gpus = 1
		}
		s := newCounted(t, gpus)
		annotations := strings.Fields(c.annotations)
		s.bind("a", c.limits, annotations...)
		gpu, err := s.create("a", annotations...)
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("%v with %s: %v, want %q", c.limits, c.annotations, err, c.refused)
			}
			continue
		}
		if err != nil || gpu != "0" {
			t.Errorf("%v with %s: GPU %q, %v", c.limits, c.annotations, gpu, err)
		}
		s.has("a", c.want)
	}
}

// Annotations that change stay below the spec, and what they leave unused stays the container's.
func TestLimitsBoundLiveAnnotations(t *testing.T) {
	s := newCounted(t, 1)
	s.bind("a", Limits{8, 60})
	if _, err := s.create("a"); err != nil {
		t.Fatal(err)
	}
	if r := s.SetPod(spec("a", Limits{8, 60}, "gpu-memory-limit=12Gi", "gpu-core-limit=20")); len(r) != 1 || !strings.Contains(r[0].Err.Error(), "what the pod's spec has: 8Gi holds") {
		t.Errorf("refused: %v", r)
	}
	s.has("a", sched.Terms{MemoryLimit: 8 * gib, CoreLimit: 20, CoreRequest: 20})
	s.capacity(Limits{16, 100})
	if _, err := s.create("other", "gpu-core-request=50"); err == nil {
		t.Error("another one was promised what kube-scheduler has counted")
	}
	s.SetPod(spec("a", Limits{8, 60}))
	s.has("a", sched.Terms{MemoryLimit: 8 * gib, CoreLimit: 60, CoreRequest: 60})
}

// A pod that the watch has not told yet is asked for, by its UID. While the API server is silent a container
// has what it had before, and others are refused, but those of the node itself.
func TestLimitsOfAPodThatIsNotTold(t *testing.T) {
	s := newCounted(t, 2)
	if _, err := s.create("plain"); err != nil || s.asked != 1 {
		t.Errorf("a pod that does not exist, %d questions: %v", s.asked, err)
	}
	s.specs["a"] = spec("a", Limits{8, 0})
	if gpu, err := s.create("a"); err != nil || gpu == "" || s.asked != 2 {
		t.Errorf("GPU %q, %v, %d questions", gpu, err, s.asked)
	}
	other := spec("b", Limits{8, 0})
	other.UID = "another"
	s.specs["b"] = other
	if gpu, err := s.create("b"); err != nil || gpu != "" {
		t.Errorf("another pod of the name: GPU %q, %v", gpu, err)
	}

	s.silent = true
	var next *counted
	s.restarted(2, func(p *placing) { next = s.with(p) })
	s.has("a", sched.Terms{MemoryLimit: 8 * gib})
	next.stop("a")
	if _, err := next.createAs("a", "id-a2"); err != nil {
		t.Errorf("started again: %v", err)
	}
	if _, err := next.create("c"); err == nil || !strings.Contains(err.Error(), "the API server does not say") {
		t.Errorf("an unknown one: %v", err)
	}
	for what, pod := range map[string]*api.PodSandbox{
		"static":       {Annotations: map[string]string{"kubernetes.io/config.source": "file"}},
		"host network": {Linux: &api.LinuxPodSandbox{Namespaces: []*api.LinuxNamespace{{Type: "ipc"}}}},
	} {
		if _, _, err := next.CreateContainer(t.Context(), pod, &api.Container{Id: "x", Name: "main"}); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// What the watch tells is later than an answer that comes after it: nobody would tell of the pod again.
func TestWatchGoesBeforeAnAnswer(t *testing.T) {
	s := newCounted(t, 1)
	s.specs["gone"], s.specs["known"] = spec("gone", Limits{8, 0}), spec("known", Limits{8, 0})
	s.late = func() { s.DropPod("uid-gone") }
	if _, err := s.create("gone"); err != nil {
		t.Error(err)
	}
	s.late = func() { s.SetPod(spec("known", Limits{8, 0}, "gpu-weight=7")) }
	if _, err := s.create("known"); err != nil {
		t.Error(err)
	}
	s.has("known", sched.Terms{MemoryLimit: 8 * gib, Weight: 7})
	if all := s.containers.live.byUID; len(all) != 1 || len(s.containers.live.dropped) != 0 {
		t.Errorf("known are %v, dropped %v", all, s.containers.live.dropped)
	}
	s.capacity(Limits{16, 100})
}

// A record that no plugin has made is none.
func TestLimitsAreRecorded(t *testing.T) {
	_, ctr := podOf("a", "id-a", nil)
	for text, want := range map[string]Limits{"8 25": {8, 25}, "8 0": {8, 0}, "": {}, "8": {}, "-8 25": {}, "8 101": {}, "x": {}} {
		ctr.Annotations = map[string]string{LimitsAnnotation: text}
		if got := recordedLimits(nil, ctr); got != want {
			t.Errorf("%q is read as %v", text, got)
		}
	}
}

// What was started without a plugin, and asked by its spec, is found once the API server says so.
func TestAuditFindsLimits(t *testing.T) {
	s := newCounted(t, 1)
	found := make(chan Unmanaged, 1)
	s.Audit, s.Report = AuditReport, func(u Unmanaged) { found <- u }
	s.bind("a", Limits{8, 25})
	pod, ctr := podOf("a", "id-a", nil)
	ctr.State = api.ContainerState_CONTAINER_RUNNING
	if _, err := s.Synchronize(t.Context(), []*api.PodSandbox{pod}, []*api.Container{ctr}); err != nil {
		t.Fatal(err)
	}
	if u := await(t, found, "the audit"); u.ID != "id-a" || !strings.Contains(u.Asked, MemoryResource+": 8") {
		t.Errorf("found %+v", u)
	}
}

// One that asks for nothing may ask by its spec, which nobody may tell. Others do not wait for it.
func TestAuditBeforeTheSpecs(t *testing.T) {
	s := (&counted{silent: true}).with(newPlacing(t, 1))
	found := make(chan Unmanaged, 1)
	s.Audit, s.Report = AuditReport, func(u Unmanaged) { found <- u }
	plain, first := podOf("plain", "id-plain", nil)
	asking, second := podOf("a", "id-a", says("gpu=1"))
	first.State, second.State = api.ContainerState_CONTAINER_RUNNING, api.ContainerState_CONTAINER_RUNNING
	if _, err := s.Synchronize(t.Context(), []*api.PodSandbox{plain, asking}, []*api.Container{first, second}); err != nil {
		t.Fatal(err)
	}
	if u := await(t, found, "the audit"); u.ID != "id-a" {
		t.Errorf("found %+v", u)
	}
	s.SetPods([]Pod{spec("plain", Limits{8, 25})})
	if u := await(t, found, "the audit by the spec"); u.ID != "id-plain" {
		t.Errorf("found %+v", u)
	}
}

// Nobody waits for the API server, which may never say: a node can start many containers meanwhile. Those
// that are gone by then are not reported.
func TestAuditWaitsForNoSpec(t *testing.T) {
	s := (&counted{silent: true}).with(newPlacing(t, 1))
	found := make(chan Unmanaged, 2)
	s.Audit, s.Report = AuditReport, func(u Unmanaged) { found <- u }
	looked := make(chan struct{})
	go func() {
		defer close(looked)
		for _, name := range []string{"gone", "plain"} {
			pod, ctr := podOf(name, "id-"+name, nil)
			ctr.State = api.ContainerState_CONTAINER_RUNNING
			s.lookAt(pod, ctr)
		}
	}()
	await(t, looked, "the looks at both")
	pod, ctr := podOf("gone", "id-gone", nil)
	if err := s.RemoveContainer(t.Context(), pod, ctr); err != nil {
		t.Fatal(err)
	}
	s.SetPods([]Pod{spec("gone", Limits{8, 25}), spec("plain", Limits{8, 25})})
	if u := await(t, found, "the audit by the spec"); u.ID != "id-plain" {
		t.Errorf("found %+v", u)
	}
	if n := len(s.containers.live.unjudged); n > 0 {
		t.Errorf("%d containers are kept", n)
	}
}

// Nothing is said before runtime, API server and scheduler were heard. One GPU is advertised as it is,
// whatever its pods are about to do; of several, a pod that fits on none does not fit the node.
func TestCapacity(t *testing.T) {
	p := newPlacing(t, 1)
	p.SetSpecs(nil)
	p.ExpectPods()
	p.containers.noState = true
	steps := []func(){
		func() { p.containers.complete = true },
		func() { p.SetPods(nil) },
		func() { p.containers.learn(State{GPUs: map[string]GPUState{gpuID(0): {Memory: 16 * gib}}}) },
	}
	for i, step := range steps {
		if c, ok := p.Capacity(); ok {
			t.Fatalf("%v is advertised before step %d", c, i)
		}
		step()
	}
	if c, ok := p.Capacity(); !ok || c != (Limits{16, 100}) {
		t.Errorf("advertised: %v, %v", c, ok)
	}

	s := newCounted(t, 2)
	s.capacity(Limits{16, 100}) // the largest part of one
	s.bind("a", Limits{12, 60})
	s.capacity(Limits{12 + 16, 60 + 100}) // it goes to one of them
	if _, err := s.create("a"); err != nil {
		t.Fatal(err)
	}
	s.capacity(Limits{12 + 16, 60 + 100})
	s.bind("b", Limits{12, 60})
	s.capacity(Limits{24 + 4, 120 + 40})
	if _, err := s.create("b"); err != nil {
		t.Fatal(err)
	}
	s.capacity(Limits{24 + 4, 120 + 40})
	if _, err := s.create("by-annotation", "gpu=1", "gpu-memory-limit=3Gi"); err != nil {
		t.Fatal(err)
	}
	s.capacity(Limits{24 + 4, 120 + 40}) // the other GPU has 4 left
	s.stop("a")                          // the pod may start it again
	s.capacity(Limits{24 + 4, 120 + 40})
	over := s.specs["a"]
	over.Over = true
	s.SetPod(over)
	s.capacity(Limits{12 + 13, 60 + 100}) // 3 of that GPU are the annotation's
	s.DropPod("uid-a")
	s.capacity(Limits{12 + 13, 60 + 100})
	s.DropPod("uid-b") // its container still runs
	s.capacity(Limits{13, 100})
	s.SetInventory(Unavailable(errors.New("gone")))
	s.capacity(Limits{})
}

// Where claims give the GPUs nothing is advertised, and containers that were counted before are said.
func TestCapacityWithClaims(t *testing.T) {
	s := newClaimSite(t)
	s.containers.complete = true
	s.containers.add(Container{ID: "x", Namespace: "ml", Pod: "a", Name: "main", Limits: Limits{8, 25}})
	if c, ok := s.Capacity(); !ok || c != (Limits{}) {
		t.Errorf("advertised: %v, %v", c, ok)
	}
	if why := fmt.Sprint(s.containers.Health.Problems()); !strings.Contains(why, "do not count") {
		t.Errorf("the problems are %s", why)
	}
}

// A node whose memory is not known says so.
func TestCapacityOfUnknownMemory(t *testing.T) {
	s := newCounted(t, 1)
	s.SetInventory(inventory(t))
	s.capacity(Limits{0, 100})
	if why := fmt.Sprint(s.containers.Health.Problems()); !strings.Contains(why, "--gpu-memory") {
		t.Errorf("the problems are %s", why)
	}
}

// Those who are created first leave the room of those who are placed already and are larger.
func TestCountedRoomIsKept(t *testing.T) {
	s := newCounted(t, 2)
	for name, memory := range map[string]uint64{"large": 13, "one": 1, "three": 3, "four": 4} {
		s.bind(name, Limits{Memory: memory})
	}
	if _, err := s.create("by-annotation", "gpu=1", "gpu-memory-limit=13Gi"); err == nil || !strings.Contains(err.Error(), "ml/large/main, which waits has 13Gi") {
		t.Errorf("one that nobody has counted: %v", err)
	}
	for _, name := range []string{"one", "four", "three", "large"} {
		if _, err := s.create(name); err != nil {
			t.Error(err)
		}
	}
}

// step creates a container of a bound pod, "pod/container", ends it, "-pod/container", or binds a pod, "+pod".
func (s *counted) step(pods map[string]Pod, what string) {
	s.t.Helper()
	if name, ok := strings.CutPrefix(what, "+"); ok {
		pod := pods[name]
		pod.UID, pod.Namespace, pod.Name = "uid-"+name, "ml", name
		s.SetPod(pod)
		return
	}
	ended := strings.HasPrefix(what, "-")
	what = strings.TrimPrefix(what, "-")
	name, container, _ := strings.Cut(what, "/")
	pod, ctr := podOf(name, "id-"+what, nil)
	if ctr.Name = container; ended {
		s.stop(what)
	} else if _, _, err := s.CreateContainer(s.t.Context(), pod, ctr); err != nil {
		s.t.Errorf("%s: %v", what, err)
	}
}

// What is counted for a pod is the most that its containers have together: an init container ends before the
// next one starts, a sidecar does not.
func TestInitContainersHaveWhatIsCounted(t *testing.T) {
	one := func(l Limits) Pod { return Pod{Counted: l, Limits: map[string]Limits{"main": l}} }
	memory := func(n uint64) Limits { return Limits{Memory: n} }
	cores := func(n uint32) Limits { return Limits{Cores: n} }
	for name, c := range map[string]struct {
		gpus  int
		pods  map[string]Pod
		steps string
		left  Limits
	}{
		"as large as the other": {1, map[string]Pod{
			"p": {Counted: memory(10), Limits: map[string]Limits{"setup": memory(10), "main": memory(10)}, Init: map[string]bool{"setup": true}},
		}, "+p p/setup -p/setup p/main -p/main p/main", memory(16)},
		"first by name": {1, map[string]Pod{
			"o": one(memory(8)),
			"p": {Counted: memory(8), Limits: map[string]Limits{"a": memory(8), "main": memory(8)}, Init: map[string]bool{"a": true}},
		}, "+o o/main +p p/a -p/a p/main -o/main o/main", memory(16)},
		"with a sidecar": {1, map[string]Pod{
			"o": one(memory(7)),
			"p": {Counted: memory(9), Limits: map[string]Limits{"a": memory(6), "side": memory(1), "main": memory(8)}, Init: map[string]bool{"a": true}},
		}, "+o o/main +p p/a -p/a p/side p/main -p/side p/side -p/main p/main", memory(16)},
		"a small init container": {1, map[string]Pod{
			"o": one(memory(6)),
			"p": {Counted: memory(10), Limits: map[string]Limits{"a": memory(2), "m": memory(5), "n": memory(5)}, Init: map[string]bool{"a": true}},
		}, "+o o/main +p p/a -p/a p/m p/n -p/m p/m", memory(16)},
		"several of different sizes": {1, map[string]Pod{
			"o": one(memory(4)),
			"p": {Counted: memory(12), Limits: map[string]Limits{"a": memory(12), "b": memory(3), "m": memory(5), "n": memory(6)}, Init: map[string]bool{"a": true, "b": true}},
		}, "+o o/main +p p/a -p/a p/b -p/b p/m p/n -p/n -p/m p/n p/m", memory(16)},
		// 30 are left of one GPU, and all of the other.
		"the large part is kept": {2, map[string]Pod{
			"o": one(cores(70)),
			"p": {Counted: cores(60), Limits: map[string]Limits{"a": cores(30), "b": cores(30), "setup": cores(60)}, Init: map[string]bool{"setup": true}},
		}, "+o o/main +p", cores(70 + 60 + 40)},
		// The others have split up, and there is no GPU any more that has all of it.
		"until the others were there": {2, map[string]Pod{
			"o": one(cores(40)), "q": one(cores(60)),
			"p": {Counted: cores(100), Limits: map[string]Limits{"m": cores(60), "n": cores(40), "setup": cores(100)}, Init: map[string]bool{"setup": true}},
		}, "+o o/main +p p/setup -p/setup p/m p/n +q q/main -p/m -p/n", cores(40 + 100 + 60)},
	} {
		t.Run(name, func(t *testing.T) {
			s := newCounted(t, c.gpus)
			for what := range strings.FieldsSeq(c.steps) {
				s.step(c.pods, what)
			}
			got, _ := s.Capacity()
			if c.left.Memory != 0 && got.Memory != c.left.Memory || c.left.Cores != 0 && got.Cores != c.left.Cores {
				t.Errorf("the capacity is %v, want %v", got, c.left)
			}
		})
	}
}

// However pods come, start, end and go, kube-scheduler finds what the capacity leaves, and a container that
// it has placed is not refused: on one GPU, whose capacity never changes; on several where it is counted
// by memory and is created before the next pod is placed.
func TestCapacityHolds(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		gpus := rapid.IntRange(1, 3).Draw(rt, "gpus")
		s := newCounted(t, gpus)
		bound, running := map[string]Limits{}, map[string]bool{}
		for i := range rapid.IntRange(1, 25).Draw(rt, "steps") {
			have, ok := s.Capacity()
			if !ok {
				rt.Fatal("no capacity")
			}
			if gpus == 1 && have != (Limits{16, 100}) {
				rt.Fatalf("one GPU has %v with %v, running %v", have, bound, running)
			}
			free := have
			for _, l := range bound {
				if l.least(free) != l {
					rt.Fatalf("%v is less than what is bound, %v", have, bound)
				}
				free = free.without(l)
			}
			names := slices.Sorted(maps.Keys(bound))
			draw := func(from []string) string { return rapid.SampledFrom(from).Draw(rt, "pod") }
			switch what := rapid.SampledFrom([]string{"bind", "start", "stop", "drop"}).Draw(rt, "step"); {
			case what == "bind":
				want := Limits{Memory: rapid.Uint64Range(1, 16).Draw(rt, "memory")}
				if gpus == 1 {
					want.Cores = rapid.Uint32Range(0, 100).Draw(rt, "cores")
				}
				if want.least(free) == want { // what kube-scheduler asks
					name := fmt.Sprint("pod", i)
					bound[name] = want
					if s.bind(name, want); gpus == 1 {
						break
					}
					if _, err := s.create(name); err != nil {
						rt.Fatalf("%s with %v: %v", name, want, err)
					}
					running[name] = true
				}
			case len(names) == 0:
			case what == "start":
				if name := draw(names); !running[name] {
					if _, err := s.create(name); err != nil {
						rt.Fatalf("%s with %v: %v", name, bound[name], err)
					}
					running[name] = true
				}
			case what == "stop" && gpus == 1:
				name := draw(names)
				running[name] = false
				s.stop(name)
			default: // the pod's containers end before it goes
				name := draw(names)
				s.stop(name)
				s.remove(name)
				s.DropPod("uid-" + name)
				delete(bound, name)
				delete(running, name)
			}
		}
	})
}
