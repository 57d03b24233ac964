// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/cdi"
	sched "github.com/nvshare/nvshare/sched/api"
)

func TestShare(t *testing.T) {
	for name, c := range map[string]struct {
		annotations map[string]string
		want        sched.Terms
		says        string // part of the error
	}{
		"none":         {nil, sched.Terms{}, ""},
		"limit":        {map[string]string{CoreLimitAnnotation: "60"}, sched.Terms{CoreLimit: 60}, ""},
		"percent sign": {map[string]string{CoreLimitAnnotation: "60%"}, sched.Terms{CoreLimit: 60}, ""},
		"spaces":       {map[string]string{CoreLimitAnnotation: " 60 "}, sched.Terms{CoreLimit: 60}, ""},
		"all": {map[string]string{CoreLimitAnnotation: "100", CoreRequestAnnotation: "100", WeightAnnotation: "10000", PriorityAnnotation: "latency", GangAnnotation: "ring-1", MemoryModeAnnotation: "resident"},
			sched.Terms{CoreLimit: 100, CoreRequest: 100, Weight: 10000, Priority: sched.Priority_PRIORITY_LATENCY, Gang: "ring-1", MemoryMode: sched.MemoryMode_MEMORY_MODE_RESIDENT}, ""},
		"the least":          {map[string]string{CoreLimitAnnotation: "1", CoreRequestAnnotation: "1", WeightAnnotation: "1", PriorityAnnotation: "batch"}, sched.Terms{CoreLimit: 1, CoreRequest: 1, Weight: 1, Priority: sched.Priority_PRIORITY_BATCH}, ""},
		"gang of itself":     {map[string]string{GangAnnotation: "true"}, sched.Terms{Gang: "true"}, ""},
		"no gang":            {map[string]string{GangAnnotation: "false"}, sched.Terms{}, ""},
		"narrowest scope":    {map[string]string{CoreLimitAnnotation: "60", CoreLimitAnnotation + "/pod": "50", "gpu-core-limit.nvshare.com/container.main": "40"}, sched.Terms{CoreLimit: 40}, ""},
		"for another":        {map[string]string{CoreLimitAnnotation + "/container.side": "60"}, sched.Terms{}, ""},
		"limit per pod":      {map[string]string{"gpu-weight.nvshare.com/pod": "5"}, sched.Terms{Weight: 5}, ""},
		"as much as allowed": {map[string]string{CoreLimitAnnotation: "60", CoreRequestAnnotation: "60"}, sched.Terms{CoreLimit: 60, CoreRequest: 60}, ""},

		"zero":           {map[string]string{CoreLimitAnnotation: "0"}, sched.Terms{}, `annotation nvshare.com/gpu-core-limit="0": "0" is not a percentage of the GPU's time: give a whole number from 1 to 100`},
		"too much":       {map[string]string{CoreLimitAnnotation: "101"}, sched.Terms{}, "from 1 to 100"},
		"negative":       {map[string]string{CoreRequestAnnotation: "-5"}, sched.Terms{}, `annotation nvshare.com/gpu-core-request="-5"`},
		"signed":         {map[string]string{CoreRequestAnnotation: "+5"}, sched.Terms{}, "from 1 to 100"},
		"fraction":       {map[string]string{CoreRequestAnnotation: "0.5"}, sched.Terms{}, "from 1 to 100"},
		"empty":          {map[string]string{CoreRequestAnnotation: ""}, sched.Terms{}, "from 1 to 100"},
		"huge":           {map[string]string{CoreRequestAnnotation: strings.Repeat("9", 200<<10)}, sched.Terms{}, "from 1 to 100"},
		"just a sign":    {map[string]string{CoreRequestAnnotation: "%"}, sched.Terms{}, "from 1 to 100"},
		"two signs":      {map[string]string{CoreRequestAnnotation: "5%%"}, sched.Terms{}, "from 1 to 100"},
		"weight":         {map[string]string{WeightAnnotation: "10001"}, sched.Terms{}, "from 1 to 10000"},
		"no weight":      {map[string]string{WeightAnnotation: "0"}, sched.Terms{}, "from 1 to 10000"},
		"priority":       {map[string]string{PriorityAnnotation: "high"}, sched.Terms{}, `annotation nvshare.com/gpu-priority="high": "high" is not a priority: give batch or latency`},
		"gang":           {map[string]string{GangAnnotation: "a/b"}, sched.Terms{}, `annotation nvshare.com/gpu-gang="a/b"`},
		"memory mode":    {map[string]string{MemoryModeAnnotation: "swapped"}, sched.Terms{}, `annotation nvshare.com/gpu-memory-mode="swapped"`},
		"gang, empty":    {map[string]string{GangAnnotation: ""}, sched.Terms{}, "give true, or a name"},
		"gang, too long": {map[string]string{GangAnnotation: strings.Repeat("x", 64)}, sched.Terms{}, "give true, or a name"},
		"more requested than allowed": {map[string]string{CoreLimitAnnotation: "50", "gpu-core-request.nvshare.com/pod": "60"}, sched.Terms{CoreLimit: 50, CoreRequest: 50},
			`annotation gpu-core-request.nvshare.com/pod="60": core request 60 % is above the core limit of 50 %, nvshare.com/gpu-core-limit="50"`},
		"several": {map[string]string{CoreLimitAnnotation: "x", WeightAnnotation: "7", PriorityAnnotation: "y"}, sched.Terms{Weight: 7}, `nvshare.com/gpu-priority="y"`},
	} {
		got, err := parsed(c.annotations, "main", known)
		if got.Terms != c.want || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %+v, %v; want %+v, %q", name, got.Terms, err, c.want, c.says)
		}
		if err != nil && len(err.Error()) > 8*maxShown {
			t.Errorf("%s: error of %d bytes", name, len(err.Error()))
		}
	}
}

func FuzzShare(f *testing.F) {
	for i, seed := range []string{"60%", "60", "200", "latency", "ring"} {
		f.Add(uint(i), seed)
	}
	names := []string{CoreLimitAnnotation, CoreRequestAnnotation, WeightAnnotation, PriorityAnnotation, GangAnnotation, MemoryModeAnnotation, MemoryLimitAnnotation}
	f.Fuzz(func(t *testing.T, which uint, value string) {
		r, err := parsed(map[string]string{names[which%uint(len(names))]: value}, "main", known)
		s := &sched.Terms{CoreLimit: r.Terms.CoreLimit, CoreRequest: r.Terms.CoreRequest, Weight: r.Terms.Weight, Priority: r.Terms.Priority, Gang: r.Terms.Gang, MemoryMode: r.Terms.MemoryMode}
		if invalid := s.Validate(); invalid != nil {
			t.Fatalf("%q gave %v (%v)", value, invalid, err)
		}
		if err != nil && r.Terms != (sched.Terms{}) {
			t.Fatalf("%q is refused, and gave %+v", value, r.Terms)
		}
	})
}

// asking is a container of a pod of its own that asks for GPUs.
func asking(name, gpu, request string) (*api.PodSandbox, *api.Container) {
	annotations := map[string]string{Annotation: "nvshare.com/gpu=" + gpu}
	if request != "" {
		annotations[CoreRequestAnnotation] = request
	}
	return &api.PodSandbox{Id: "sandbox-" + name, Name: name, Namespace: "ml", Uid: "uid-" + name, Annotations: annotations},
		&api.Container{Id: "id-" + name, PodSandboxId: "sandbox-" + name, Name: "main"}
}

// A GPU is not promised twice; who would be too much is told who has it.
func TestPromises(t *testing.T) {
	p := New(quiet(), NewContainers(quiet()))
	p.SetInventory(inventory(t))
	ctx := context.Background()
	create := func(name, gpu, request string) error {
		_, _, err := p.CreateContainer(ctx, first(asking(name, gpu, request)), second(asking(name, gpu, request)))
		return err
	}
	for _, step := range []struct {
		name, gpu, request string
		end                string // containers that end before
		says               []string
	}{
		{name: "a", gpu: "0", request: "50"},
		{name: "b", gpu: known[2], request: "30%"}, // the same one
		{name: "c", gpu: "1", request: "90"},
		{name: "plain", gpu: "all"},
		{name: "d", gpu: "0", request: "21", says: []string{"ml/d", `"main"`, `nvshare.com/gpu-core-request="21"`, "21 % cannot be promised: GPU 0 (" + known[2], "has 20 % left (ml/a/main has 50 %, ml/b/main has 30 %)"}},
		{name: "d", gpu: "0", request: "20"},
		{name: "e", gpu: "all", request: "11", says: []string{"GPU 0", "has 0 % left"}},
		{name: "e", gpu: "all", request: "11", end: "a", says: []string{"GPU 1", "has 10 % left (ml/c/main has 90 %)"}},
		{name: "e", gpu: "all", request: "10"},
		{name: "b", gpu: "0", request: "70"}, // started again: what it had counts no more
		{name: "f", gpu: "0", request: "1", says: []string{"GPU 0", "(ml/b/main has 70 %, ml/d/main has 20 %, ml/e/main has 10 %)"}},
	} {
		for _, name := range strings.Fields(step.end) {
			if _, err := p.StopContainer(ctx, nil, &api.Container{Id: "id-" + name}); err != nil {
				t.Fatal(err)
			}
		}
		err := create(step.name, step.gpu, step.request)
		if (err == nil) != (step.says == nil) {
			t.Errorf("%s %s of %s: %v", step.name, step.request, step.gpu, err)
		}
		for _, part := range step.says {
			if !strings.Contains(fmt.Sprint(err), part) {
				t.Errorf("%s %s of %s: the error lacks %q: %v", step.name, step.request, step.gpu, part, err)
			}
		}
	}
}

func first[A, B any](a A, _ B) A  { return a }
func second[A, B any](_ A, b B) B { return b }

// A container that is started again has another id, and its end may be heard
// of after its new begin. Another pod of the same name is another.
func TestPromiseOfARestartedContainer(t *testing.T) {
	p := New(quiet(), NewContainers(quiet()))
	p.SetInventory(inventory(t))
	create := func(id, uid string) error {
		pod, ctr := asking("a", "0", "60")
		pod.Uid, ctr.Id = uid, id
		_, _, err := p.CreateContainer(context.Background(), pod, ctr)
		return err
	}
	for _, id := range []string{"first", "second"} {
		if err := create(id, "uid"); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	if err := create("third", "another"); err == nil {
		t.Error("another pod was promised what this one has")
	}
}

// Containers that began before the plugin are in the book: by their pod's annotation,
// by what the runtime says, or else on all GPUs. They are not refused.
func TestPromisesOfEarlierContainers(t *testing.T) {
	p := New(quiet(), NewContainers(quiet()))
	p.SetInventory(inventory(t))
	ctx := context.Background()
	shim := []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}
	var pods []*api.PodSandbox
	var ctrs []*api.Container
	add := func(name, gpu, request string, change func(*api.PodSandbox, *api.Container)) {
		pod, ctr := asking(name, gpu, request)
		ctr.Mounts = shim
		if change != nil {
			change(pod, ctr)
		}
		pods, ctrs = append(pods, pod), append(ctrs, ctr)
	}
	noAnnotation := func(pod *api.PodSandbox, _ *api.Container) { delete(pod.Annotations, Annotation) }
	add("annotated", "0", "70", nil)
	add("given", "0", "60", func(pod *api.PodSandbox, ctr *api.Container) {
		noAnnotation(pod, ctr)
		ctr.CDIDevices = []*api.CDIDevice{{Name: cdi.Kind + "=1"}}
	})
	add("unknown", "0", "30", noAnnotation)
	add("ended", "1", "99", func(_ *api.PodSandbox, ctr *api.Container) { ctr.State = api.ContainerState_CONTAINER_STOPPED })
	if _, err := p.Synchronize(ctx, pods, ctrs); err != nil {
		t.Fatal(err)
	}
	for gpu, says := range map[string]string{
		"0": "has 0 % left (ml/annotated/main has 70 %, ml/unknown/main has 30 %)",
		"1": "has 10 % left (ml/given/main has 60 %, ml/unknown/main has 30 %)",
	} {
		pod, ctr := asking("new", gpu, "11")
		if _, _, err := p.CreateContainer(ctx, pod, ctr); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("GPU %s: %v, want %q", gpu, err, says)
		}
	}
	pod, ctr := asking("new", "1", "10")
	if _, _, err := p.CreateContainer(ctx, pod, ctr); err != nil {
		t.Error(err)
	}
}

// What was promised by others' word than a pod's annotation counts as well, as
// soon as the scheduler has said so.
func TestPromisesOfTheScheduler(t *testing.T) {
	containers, s := NewContainers(quiet()), newScheduler()
	containers.ping = time.Millisecond
	s.promises = []Promise{
		{Who: "user 1000", UUID: known[2], Percent: 30},
		{ID: "podman's", Who: "container abc", UUID: known[3], Percent: 40},
		{ID: "id-a", Who: "ml/a/main", UUID: known[2], Percent: 20}, // lowered
		{ID: "ended", Who: "ml/ended/main", UUID: known[2], Percent: 99},
	}
	s.known = map[string]Container{"ended": {ID: "ended"}}
	p := New(quiet(), containers)
	p.SetInventory(inventory(t))
	create := func(name, gpu, request string) error {
		_, _, err := p.CreateContainer(context.Background(), first(asking(name, gpu, request)), second(asking(name, gpu, request)))
		return err
	}
	if err := create("a", "0", "60"); err != nil { // before anything is known
		t.Fatal(err)
	}
	defer runContainers(t, containers, s)()
	learned := func(n int) bool {
		containers.mu.Lock()
		defer containers.mu.Unlock()
		return len(containers.promises) == n
	}
	for end := time.Now().Add(patience); !learned(4); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the promises were not learned")
		}
	}
	for gpu, says := range map[string]string{
		"0": "has 50 % left (ml/a/main has 20 %, 1 tenant outside the namespace has 30 %)",
		"1": "has 60 % left (1 tenant outside the namespace has 40 %)",
	} {
		if err := create("new", gpu, "61"); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("GPU %s: %v, want %q", gpu, err, says)
		}
	}
	if err := create("new", "0", "50"); err != nil {
		t.Error(err)
	}
}

// Many who hold promises are not all named.
func TestManyPromises(t *testing.T) {
	p := New(quiet(), NewContainers(quiet()))
	p.SetInventory(inventory(t))
	for i := range 50 {
		pod, ctr := asking(fmt.Sprintf("p%02d", i), "0", "2")
		if _, _, err := p.CreateContainer(context.Background(), pod, ctr); err != nil {
			t.Fatal(err)
		}
	}
	pod, ctr := asking("new", "0", "1")
	_, _, err := p.CreateContainer(context.Background(), pod, ctr)
	if err == nil || !strings.Contains(err.Error(), "ml/p07/main has 2 %, 42 more have the rest)") {
		t.Errorf("refused with %v", err)
	}
}

// Shares go the way of names.
func TestSchedulerLearnsShares(t *testing.T) {
	containers, s := NewContainers(quiet()), newScheduler()
	defer runContainers(t, containers, s)()
	p := New(quiet(), containers)
	p.SetInventory(inventory(t))
	pod, ctr := asking("a", "all", "10%")
	pod.Annotations[WeightAnnotation] = "7"
	if _, _, err := p.CreateContainer(context.Background(), pod, ctr); err != nil {
		t.Fatal(err)
	}
	s.await(t, "id-a")
	if c := s.get("id-a"); c.Terms != (sched.Terms{CoreRequest: 10, Weight: 7}) || !slices.Equal(c.GPUs, known[2:4]) {
		t.Errorf("described as %+v", c)
	}
}

// Every field is read from the annotations of the pod's creation and from those of
// now, stays when it is annotated with nonsense or not known, and reaches the
// scheduler.
func TestEveryFieldOfTheTerms(t *testing.T) {
	full := sched.Terms{MemoryLimit: 3 << 30, CoreLimit: 60, CoreRequest: 30, Weight: 7, Priority: sched.Priority_PRIORITY_LATENCY,
		Gang: "ring", MemoryMode: sched.MemoryMode_MEMORY_MODE_RESIDENT, Overlap: "small", Migratable: true, SuspendAfter: 600}
	for _, f := range sched.Fields {
		if f.ID&sched.FixedFields != 0 {
			continue // see TestOverlapGroupOfAPod
		}
		var one sched.Terms
		one.Copy(full, f.ID)
		if one == (sched.Terms{}) || !IsShareAnnotation(f.Annotation()) {
			t.Fatalf("%s: nothing to say", f.Name)
		}
		value := f.Format(one)
		s := newLiveSite(t, map[string]string{f.Annotation(): value})
		scheduler := newScheduler()
		stop := runContainers(t, s.containers, scheduler)
		has := func(when, id string, want sched.Terms, keep sched.FieldSet) {
			t.Helper()
			all, _ := s.containers.snapshot()
			if c := all[id]; c.Terms != want || c.Keep != keep {
				t.Errorf("%s, %s: %+v, keep %b, want %+v, %b", f.Name, when, c.Terms, c.Keep, want, keep)
			}
		}
		s.mustCreate("main", "1")
		has("created", "1", one, 0)
		s.annotate()
		has("removed", "1", sched.Terms{}, 0)
		s.annotate(f.Annotation(), value)
		has("annotated", "1", one, 0)
		s.annotate(f.Annotation(), "?")
		has("nonsense", "1", one, f.ID)
		s.mustCreate("main", "2")
		has("started again", "2", one, f.ID)
		scheduler.await(t, "2")
		if c := scheduler.get("2"); c.Terms != one {
			t.Errorf("%s: the scheduler is told %+v", f.Name, c.Terms)
		}
		if log := describeTerms(one); !strings.Contains(log, f.Name+" "+value) {
			t.Errorf("%s: the log says %q", f.Name, log)
		}
		stop()
	}
}
