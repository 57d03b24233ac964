// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"

	sched "github.com/nvshare/nvshare/sched/api"
)

// liveSite is a plugin whose pod ml/train-a was made with some annotations.
type liveSite struct {
	*Plugin
	t   *testing.T
	pod *api.PodSandbox
}

func newLiveSite(t *testing.T, created map[string]string) *liveSite {
	p := New(quiet(), withState())
	p.SetInventory(inventory(t))
	annotations := map[string]string{Annotation: "nvshare.com/gpu=0"}
	for k, v := range created {
		annotations[k] = v
	}
	return &liveSite{p, t, pod(annotations)}
}

// create has the runtime create a container of the pod.
func (s *liveSite) create(name, id string) error {
	_, _, err := s.CreateContainer(context.Background(), s.pod, &api.Container{Id: id, PodSandboxId: "pod0", Name: name})
	return err
}

func (s *liveSite) mustCreate(name, id string) {
	s.t.Helper()
	if err := s.create(name, id); err != nil {
		s.t.Fatal(err)
	}
}

// annotated is the pod with other annotations.
func (s *liveSite) annotated(annotations map[string]string) Pod {
	return Pod{UID: s.pod.Uid, Namespace: s.pod.Namespace, Name: s.pod.Name, Annotations: annotations}
}

// annotate changes the pod's annotations, and returns what was refused.
func (s *liveSite) annotate(pairs ...string) string {
	annotations := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		annotations[pairs[i]] = pairs[i+1]
	}
	var refused []string
	for _, r := range s.SetPod(s.annotated(annotations)) {
		refused = append(refused, r.Container.Name+": "+r.Err.Error())
	}
	return strings.Join(refused, "\n")
}

// holds checks what the scheduler is to be told of a container.
func (s *liveSite) holds(when, id, want string) {
	s.t.Helper()
	all, _ := s.containers.snapshot()
	c := all[id]
	got := fmt.Sprintf("%s %d/%d %d %s %s", sched.FormatMemory(c.Terms.MemoryLimit), c.Terms.CoreLimit, c.Terms.CoreRequest, c.Terms.Weight,
		sched.FormatPriority(c.Terms.Priority), sched.FormatGang(c.Terms.Gang))
	if got != want {
		s.t.Errorf("%s: %s has %s, want %s", when, id, got, want)
	}
}

func TestAnnotationsChange(t *testing.T) {
	s := newLiveSite(t, map[string]string{MemoryLimitAnnotation: "1Gi", CoreLimitAnnotation: "10"})
	s.mustCreate("main", "1")
	s.mustCreate("side", "2")
	for i, step := range []struct {
		annotations []string
		main, side  string
		refused     string // parts, separated by |
	}{
		{[]string{MemoryLimitAnnotation, "8Gi", CoreLimitAnnotation, "50", CoreRequestAnnotation, "20", WeightAnnotation, "7", PriorityAnnotation, "latency", GangAnnotation, "ring"},
			"8Gi 50/20 7 latency ring", "8Gi 50/20 7 latency ring", ""},
		// The narrowest scope, in the form that Kubernetes takes.
		{[]string{MemoryLimitAnnotation, "8Gi", "gpu-memory-limit.nvshare.com/pod", "6Gi", "gpu-memory-limit.nvshare.com/container.side", "4Gi"},
			"6Gi 0/0 0 batch none", "4Gi 0/0 0 batch none", ""},
		// Nonsense leaves that one thing as it was, for whom it is said.
		{[]string{"gpu-memory-limit.nvshare.com/pod", "6Gi", "gpu-memory-limit.nvshare.com/container.side", "lots", CoreLimitAnnotation, "30"},
			"6Gi 30/0 0 batch none", "4Gi 30/0 0 batch none", `side: annotation gpu-memory-limit.nvshare.com/container.side="lots"`},
		{[]string{MemoryLimitAnnotation, "", CoreLimitAnnotation, "101", CoreRequestAnnotation, "-1", WeightAnnotation, "0", PriorityAnnotation, "high", GangAnnotation, "a/b"},
			"6Gi 30/0 0 batch none", "4Gi 30/0 0 batch none", `main: annotation|="101"|="-1"|gpu-weight="0"|="high"|="a/b"`},
		// A limit below the request, and a request above the limit that stays.
		{[]string{CoreLimitAnnotation, "50", CoreRequestAnnotation, "40"}, "none 50/40 0 batch none", "none 50/40 0 batch none", ""},
		{[]string{CoreLimitAnnotation, "30", CoreRequestAnnotation, "40"}, "none 50/40 0 batch none", "none 50/40 0 batch none", `nvshare.com/gpu-core-request="40": core request 40 % is above the core limit of 30 %`},
		{[]string{CoreLimitAnnotation, "none", CoreRequestAnnotation, "60", WeightAnnotation, "9"}, "none 50/40 9 batch none", "none 50/40 9 batch none", `="none"|60 % is above the core limit of 50 %`},
		// Removed: as if nothing had ever been said.
		{nil, "none 0/0 0 batch none", "none 0/0 0 batch none", ""},
	} {
		refused := s.annotate(step.annotations...)
		for _, part := range strings.Split(step.refused, "|") {
			if !strings.Contains(refused, part) || refused != "" && step.refused == "" {
				t.Errorf("step %d: refused is %q, want %q", i+1, refused, step.refused)
			}
		}
		when := fmt.Sprintf("step %d", i+1)
		s.holds(when, "1", step.main)
		s.holds(when, "2", step.side)
		// A container that is started again: the runtime has the old
		// annotations, and one that was refused must not keep it from running.
		s.mustCreate("main", "1")
		s.holds(when+", started again", "1", step.main)
	}
}

// A change that comes while a container is being created is not lost.
func TestAnnotationsChangeMeanwhile(t *testing.T) {
	for range 200 {
		s := newLiveSite(t, map[string]string{MemoryLimitAnnotation: "1Gi"})
		changed := make(chan struct{})
		go func() {
			s.SetPod(s.annotated(map[string]string{MemoryLimitAnnotation: "2Gi"}))
			close(changed)
		}()
		s.mustCreate("main", "1")
		<-changed
		s.holds("changed meanwhile", "1", "2Gi 0/0 0 batch none")
	}
}

// What was wrong at the creation can be put right.
func TestAnnotationIsCorrected(t *testing.T) {
	s := newLiveSite(t, map[string]string{MemoryLimitAnnotation: "lots"})
	s.annotate(MemoryLimitAnnotation, "lots")
	if err := s.create("main", "1"); err == nil || !strings.Contains(err.Error(), `"lots"`) {
		t.Errorf("created with %v", err)
	}
	s.annotate(MemoryLimitAnnotation, "2Gi")
	s.mustCreate("main", "1")
	s.holds("corrected", "1", "2Gi 0/0 0 batch none")
}

// Whoever may make pods cannot speak for others.
func TestPodOfAnotherName(t *testing.T) {
	s := newLiveSite(t, map[string]string{MemoryLimitAnnotation: "2Gi"})
	s.mustCreate("main", "1")
	s.SetPod(Pod{UID: s.pod.Uid, Namespace: "evil", Name: s.pod.Name, Annotations: map[string]string{MemoryLimitAnnotation: "1Gi"}})
	s.holds("another namespace", "1", "2Gi 0/0 0 batch none")
	s.mustCreate("main", "2")
	s.holds("another namespace", "2", "2Gi 0/0 0 batch none")
}

// A request that cannot be promised is refused, and possible once others have
// gone.
func TestLiveRequestIsPromised(t *testing.T) {
	s := newLiveSite(t, map[string]string{CoreRequestAnnotation: "40"})
	s.mustCreate("main", "1")
	s.containers.add(Container{ID: "o", Name: "main", Namespace: "ml", Pod: "b", PodUID: "b", Terms: sched.Terms{CoreRequest: 50}})

	r := s.SetPod(s.annotated(map[string]string{CoreRequestAnnotation: "60", WeightAnnotation: "3"}))
	if len(r) != 1 || !r[0].Later || !strings.Contains(r[0].Err.Error(), `annotation nvshare.com/gpu-core-request="60": 60 % cannot be promised: GPU 0`) || !strings.Contains(r[0].Err.Error(), "ml/b/main has 50 %") {
		t.Errorf("refused: %+v", r)
	}
	s.holds("too much", "1", "none 0/40 3 batch none")
	s.mustCreate("main", "1") // nor does it keep the container from running
	s.holds("too much, started again", "1", "none 0/40 3 batch none")
	if refused := s.annotate(CoreRequestAnnotation, "50", WeightAnnotation, "3"); refused != "" {
		t.Errorf("as much as is left: %s", refused)
	}
	// What the scheduler said last is not what it will say next.
	s.containers.learn(State{IDs: []string{"1", "o"}, Promises: []Promise{{ID: "1", UUID: known[2], Percent: 50}, {ID: "o", UUID: known[2], Percent: 50}}})
	s.annotate(CoreRequestAnnotation, "10")
	if err := s.containers.tryAdmit(Container{ID: "p", Name: "p", PodUID: "p", Terms: sched.Terms{CoreRequest: 40}}, s.inventory.Load().gpus); err != nil {
		t.Errorf("room was made: %v", err)
	}
	s.containers.Remove("p")
	s.annotate(CoreRequestAnnotation, "60", WeightAnnotation, "3")
	s.holds("too much", "1", "none 0/10 3 batch none")
	s.containers.Remove("o")
	s.containers.learn(State{IDs: []string{"1"}})
	if refused := s.annotate(CoreRequestAnnotation, "60", WeightAnnotation, "3"); refused != "" {
		t.Errorf("others have gone: %s", refused)
	}
	s.holds("others have gone", "1", "none 0/60 3 batch none")
}

// Where the plugin chooses the GPU, memory limits are promises, and they can be
// lowered but not raised above what there is.
func TestLiveMemoryIsPromised(t *testing.T) {
	for _, c := range []struct {
		gpu     string
		created string
		live    []string // what is annotated
		holds   string
		refused string
	}{
		{"1", "8Gi", []string{"12Gi"}, "8Gi", `annotation nvshare.com/gpu-memory-limit="12Gi": cannot be promised: of the 16Gi of GPU`},
		{"1", "8Gi", []string{"10Gi"}, "10Gi", ""},
		{"1", "8Gi", []string{"4Gi"}, "4Gi", ""},
		{"1", "8Gi", []string{"12Gi", "9Gi"}, "9Gi", ""},
		{"1", "8Gi", []string{""}, "none", ""},                     // promises nothing
		{"1", "", []string{"12Gi"}, "12Gi", ""},                    // it may have less than before
		{"nvshare.com/gpu=0", "8Gi", []string{"12Gi"}, "12Gi", ""}, // who names a GPU may share its memory
	} {
		s := newLiveSite(t, map[string]string{Annotation: c.gpu, MemoryLimitAnnotation: c.created})
		if c.created == "" {
			delete(s.pod.Annotations, MemoryLimitAnnotation)
		}
		s.containers.learn(State{GPUs: map[string]GPUState{known[2]: {Memory: 16 << 30}, uuid: {Memory: 1 << 30}}})
		s.containers.add(Container{ID: "o", Name: "main", Namespace: "ml", Pod: "b", PodUID: "b", Terms: sched.Terms{MemoryLimit: 6 << 30}, GPUs: known[2:3]})
		s.mustCreate("main", "1")
		refused := ""
		for _, value := range c.live {
			if value == "" {
				refused = s.annotate()
			} else {
				refused = s.annotate(MemoryLimitAnnotation, value)
			}
		}
		if (refused == "") != (c.refused == "") || !strings.Contains(refused, c.refused) {
			t.Errorf("%+v: refused %q", c, refused)
		}
		s.holds(fmt.Sprint(c), "1", c.holds+" 0/0 0 batch none")
	}
}

// As long as nobody knows how much memory a GPU has, nothing is counted: at a creation, and now.
func TestLiveMemoryOfUnknownGPU(t *testing.T) {
	s := newLiveSite(t, map[string]string{Annotation: "1", MemoryLimitAnnotation: "8Gi"})
	s.mustCreate("main", "1")
	if refused := s.annotate(MemoryLimitAnnotation, "12Gi"); refused != "" {
		t.Error(refused)
	}
	s.holds("raised", "1", "12Gi 0/0 0 batch none")
}

// Which GPUs a container asks for was said when the pod was created.
func TestLiveRequestAsksForNothing(t *testing.T) {
	request := func(created map[string]string, live ...string) Request {
		t.Helper()
		s := newLiveSite(t, nil)
		s.pod.Annotations = created
		s.annotate(live...)
		r, err := s.containers.request(s.pod, "main", s.inventory.Load().Devices())
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if r := request(map[string]string{CoreRequestAnnotation: "40"}); r.Count != 1 || r.Terms.CoreRequest != 0 {
		t.Errorf("removed: %+v", r)
	}
	if r := request(nil, CoreRequestAnnotation, "40"); r.Count != 0 || r.Terms.CoreRequest != 40 {
		t.Errorf("added: %+v", r)
	}
	if r := request(map[string]string{CoreRequestAnnotation: "lots"}, CoreRequestAnnotation, "40"); r.Count != 1 || r.Terms.CoreRequest != 40 {
		t.Errorf("corrected: %+v", r)
	}
}

// A plugin that was restarted has the runtime's old annotations. Until the API
// server has answered, and where annotations are nonsense, the scheduler keeps
// what it knows, and a container that is started again gets that.
func TestRestartedPluginKeeps(t *testing.T) {
	s := newLiveSite(t, map[string]string{MemoryLimitAnnotation: "8Gi"})
	running := func(id string) *api.Container {
		return &api.Container{Id: id, PodSandboxId: "pod0", Name: "main", Annotations: map[string]string{PlacementAnnotation: known[2]}}
	}
	s.ExpectPods()
	_, _ = s.Synchronize(context.Background(), []*api.PodSandbox{s.pod}, []*api.Container{running("1")})
	container := func(id string) Container {
		all, _ := s.containers.snapshot()
		if _, ok := all[id]; !ok {
			t.Fatalf("no container %s in %v", id, all)
		}
		return all[id]
	}
	if c := container("1"); c.Keep != sched.AllFields || c.Terms.MemoryLimit != 8<<30 {
		t.Errorf("before the API server has answered: %+v", c)
	}
	s.KeptByScheduler(container("1"), sched.Terms{MemoryLimit: 4 << 30, Weight: 5}) // as the scheduler answers
	s.holds("as the scheduler knows", "1", "4Gi 0/0 5 batch none")

	s.SetPods([]Pod{s.annotated(map[string]string{MemoryLimitAnnotation: "4GiB", CoreLimitAnnotation: "50"})})
	if c := container("1"); c.Keep != sched.MemoryLimitField {
		t.Errorf("with nonsense: %+v", c)
	}
	s.holds("with nonsense", "1", "4Gi 50/0 0 batch none")
	s.mustCreate("main", "2")
	s.holds("started again", "2", "4Gi 50/0 0 batch none")

	stale := container("2")
	s.annotate(MemoryLimitAnnotation, "2Gi")
	s.KeptByScheduler(stale, sched.Terms{MemoryLimit: 4 << 30})
	s.holds("an answer that comes late", "2", "2Gi 0/0 0 batch none")
	if c := container("2"); c.Keep != 0 {
		t.Errorf("nothing is in doubt, but %+v is kept", c.Keep)
	}

	// A pod that the API server has not: the runtime's word is all there is.
	s.ExpectPods()
	s.containers.live.byUID = nil
	_, _ = s.Synchronize(context.Background(), []*api.PodSandbox{s.pod}, []*api.Container{running("1")})
	s.SetPods(nil)
	if c := container("1"); c.Keep != 0 || c.Terms.MemoryLimit != 8<<30 {
		t.Errorf("without a pod: %+v", c)
	}
	// It is gone: what held does, as long as containers take to end.
	s.annotate(MemoryLimitAnnotation, "2Gi")
	s.DropPod(s.pod.Uid)
	s.holds("after the pod", "1", "2Gi 0/0 0 batch none")
}

func TestIsAnnotation(t *testing.T) {
	for key, want := range map[string]bool{
		MemoryLimitAnnotation: true, MemoryLimitAnnotation + "/pod": true, "gpu-core-limit.nvshare.com/container.a": true,
		"gpu-gang.nvshare.com": true, Annotation: true, "gpu.nvshare.com/container.a": true,
		"nvshare.com/gpu-other": false, "example.com/gpu": false, "": false, "/pod": false, "kubectl.kubernetes.io/last-applied-configuration": false,
	} {
		if IsAnnotation(key) != want {
			t.Errorf("%q: %v", key, !want)
		}
	}
	if IsShareAnnotation(Annotation) || IsShareAnnotation("gpu.nvshare.com/pod") {
		t.Error("which GPUs a pod gets does not change")
	}
}

// Whoever misspells an annotation of a container is told which one is meant, and the container does not
// start without what it asks for.
func TestMisspeltAnnotations(t *testing.T) {
	p := newPlacing(t, 1)
	for key, want := range map[string]string{
		"nvshare.com/gpu-memory-limits":         `annotation nvshare.com/gpu-memory-limits="8Gi": unknown (did you mean nvshare.com/gpu-memory-limit?)`,
		"nvshare.com/gpus":                      "(did you mean nvshare.com/gpu?)",
		"gpu-memory.nvshare.com/container.main": "(did you mean gpu-memory-limit.nvshare.com?)",
		"nvshare.com/gpu-priorty/pod":           "(did you mean nvshare.com/gpu-priority?)",
		"gpu-memory.nvshare.com/container.side": "",
		"nvshare.com/gpu-of-a-later-nvshare":    "",
		"nvshare.com/gpu-mode":                  "",
		"example.com/gpu-priorty":               "",
	} {
		_, ctr := podOf("a", "id-a", nil)
		_, _, err := p.CreateContainer(t.Context(), &api.PodSandbox{Id: "s", Uid: "u", Annotations: map[string]string{Annotation: "1", key: "8Gi"}}, ctr)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// What is unknown is named.
func TestUnknownAnnotations(t *testing.T) {
	for key, known := range map[string]bool{
		MemoryLimitAnnotation: true, "gpu-core-limit.nvshare.com/container.a": true, Annotation + "/pod": true, "gpu.nvshare.com": true,
		"nvshare.com/other": true, "example.com/gpu-memory": true, "nvshare.community/gpu": true, "": true, "/pod": true,
		"nvshare.com/gpu-memory-limits": false, "nvshare.com/gpus": false, "gpu-memory.nvshare.com/container.a": false, "nvshare.com/gpu-priorty/pod": false,
	} {
		text := UnknownAnnotations(map[string]string{key: "8Gi", Annotation: "1"})
		if known && text != "" || !known && !strings.Contains(text, key+"; those of nvshare are nvshare.com/gpu, ") {
			t.Errorf("%q: %q", key, text)
		}
	}
	if text := UnknownAnnotations(map[string]string{"nvshare.com/gpu-mode": "off"}); !strings.Contains(text, "nvsharectl -S") {
		t.Error(text)
	}
	many := map[string]string{}
	for i := range 1000 {
		many[fmt.Sprintf("nvshare.com/gpu-%d%s", i, strings.Repeat("x", 10*maxShown))] = ""
	}
	if text := UnknownAnnotations(many); len(text) > 8*maxShown || !strings.Contains(text, "and 996 more") {
		t.Errorf("%d bytes: %s", len(text), text)
	}
}
