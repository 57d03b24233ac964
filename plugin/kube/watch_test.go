// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/client-go/rest"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/kubeapi"
)

// patience bounds every wait of these tests; nothing takes that long when it
// works.
const patience = 5 * time.Minute

func await[T any](t *testing.T, ch <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
	}
	return v
}

// listener is told of pods.
type listener struct {
	refuse func(plugin.Pod) []plugin.Refusal // may be nil

	mu   sync.Mutex
	pods map[string]plugin.Pod
	told chan string
}

func (l *listener) SetPods(all []plugin.Pod) (r []plugin.Refusal) {
	l.mu.Lock()
	l.pods = map[string]plugin.Pod{}
	l.mu.Unlock()
	for _, p := range all {
		r = append(r, l.set(p)...)
	}
	l.say("all", fmt.Sprint(len(all)))
	return r
}

func (l *listener) SetPod(p plugin.Pod) []plugin.Refusal {
	r := l.set(p)
	l.say(p.UID, fmt.Sprint(p.Annotations))
	return r
}

func (l *listener) set(p plugin.Pod) []plugin.Refusal {
	l.mu.Lock()
	l.pods[p.UID] = p
	l.mu.Unlock()
	if l.refuse != nil {
		return l.refuse(p)
	}
	return nil
}

func (l *listener) DropPod(uid string) {
	l.mu.Lock()
	delete(l.pods, uid)
	l.mu.Unlock()
	l.say("gone", uid)
}

func (l *listener) say(what ...string) { l.told <- strings.Join(what, " ") }

// lines keeps a log.
type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) Levels() []logrus.Level { return logrus.AllLevels }
func (l *lines) Fire(e *logrus.Entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, e.Level.String()+" "+e.Message)
	return nil
}
func (l *lines) get() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

func quiet() *logrus.Logger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func restConfig(s *kubeapi.Server) *rest.Config { return &rest.Config{Host: s.URL} }

// startWatcher watches until the test ends.
func startWatcher(t *testing.T, s *kubeapi.Server, to Pods) (*Watcher, *lines) {
	t.Helper()
	log, kept := quiet(), &lines{}
	log.AddHook(kept)
	w, err := New(restConfig(s), kubeapi.Node, to, log)
	if err != nil {
		t.Fatal(err)
	}
	run(t, w)
	return w, kept
}

// run has a watcher run until the test ends.
func run(t *testing.T, w *Watcher) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		w.Run(ctx)
		close(done)
	}()
	t.Cleanup(func() {
		cancel()
		await(t, done, "the end of Run")
	})
}

func newListener() *listener { return &listener{told: make(chan string, 1000)} }

func limit(value string) map[string]string {
	return map[string]string{plugin.MemoryLimitAnnotation: value}
}

func TestWatcherTellsOfAnnotations(t *testing.T) {
	for _, old := range []bool{false, true} {
		t.Run(fmt.Sprintf("old=%v", old), func(t *testing.T) {
			s, l := kubeapi.New(t), newListener()
			if old {
				s.NoStreams()
			}
			s.Set("a", "ml", "train", map[string]string{plugin.MemoryLimitAnnotation: "8Gi", "example.com/secret": "x", "gpu.nvshare.com/pod": "nvshare.com/gpu=0"})
			s.Set("b", "ml", "other", nil)
			startWatcher(t, s, l)
			if got := await(t, l.told, "all pods"); got != "all 2" {
				t.Errorf("told of %s", got)
			}
			for range 2 - map[bool]int{true: 0, false: 1}[old] {
				await(t, s.Asked, "the questions")
			}
			l.mu.Lock()
			a := l.pods["a"]
			l.mu.Unlock()
			want := map[string]string{plugin.MemoryLimitAnnotation: "8Gi", "gpu.nvshare.com/pod": "nvshare.com/gpu=0"}
			if a.Namespace != "ml" || a.Name != "train" || !maps.Equal(a.Annotations, want) {
				t.Errorf("told of %+v", a)
			}
			if old {
				await(t, s.Asked, "the watch")
			}
			s.Set("b", "ml", "other", map[string]string{"example.com/other": "y"}) // and changes of its status
			s.Set("a", "ml", "train", limit("4Gi"))
			if got := await(t, l.told, "a change"); got != "a map[nvshare.com/gpu-memory-limit:4Gi]" {
				t.Errorf("told of %s", got)
			}
			s.Set("c", "ml", "new", limit("1Gi"))
			if got := await(t, l.told, "a new pod"); got != "c map[nvshare.com/gpu-memory-limit:1Gi]" {
				t.Errorf("told of %s", got)
			}
			s.Remove("a")
			if got := await(t, l.told, "a removed pod"); got != "gone a" {
				t.Errorf("told of %s", got)
			}
		})
	}
}

// A pod whose annotations change without a pause is told of at most ten times a
// second, and the last value is among them.
func TestFloodOfChanges(t *testing.T) {
	s, l := kubeapi.New(t), newListener()
	s.Set("a", "ml", "train", nil)
	startWatcher(t, s, l)
	await(t, l.told, "all pods")
	begin := time.Now()
	for i := range 500 {
		s.Set("a", "ml", "train", limit(fmt.Sprint(i)))
	}
	n := 0
	for {
		n++
		if await(t, l.told, "the last value") == "a map[nvshare.com/gpu-memory-limit:499]" {
			break
		}
	}
	if most := 1 + int(time.Since(begin)/pause); n > most {
		t.Errorf("told %d times in %v, at most %d are right", n, time.Since(begin), most)
	}
}

// While the API server is away nothing changes, and it costs two lines of log.
func TestOutage(t *testing.T) {
	for _, code := range []int{http.StatusForbidden, http.StatusServiceUnavailable} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			t.Parallel()
			s, l := kubeapi.New(t), newListener()
			s.Set("a", "ml", "train", limit("8Gi"))
			s.Set("b", "ml", "other", nil)
			_, log := startWatcher(t, s, l)
			await(t, l.told, "all pods")
			await(t, s.Asked, "the first question")
			s.FailWith(code)
			for range 2 { // a stream, then a list
				if got := await(t, s.Asked, "another question"); got != fmt.Sprint(code) {
					t.Errorf("answered with %s", got)
				}
			}
			s.Set("a", "ml", "train", limit("4Gi"))
			s.Remove("b")
			select {
			case got := <-l.told:
				t.Errorf("told of %s while nothing can be known", got)
			default:
			}
			s.FailWith(0)
			if got := await(t, l.told, "all pods again"); got != "all 1" {
				t.Errorf("told of %s", got)
			}
			l.mu.Lock()
			if len(l.pods) != 1 || l.pods["a"].Annotations[plugin.MemoryLimitAnnotation] != "4Gi" {
				t.Errorf("after the outage: %v", l.pods)
			}
			l.mu.Unlock()
			if all := log.get(); len(all) != 2 || !strings.HasPrefix(all[0], "warning Kubernetes API: ") || !strings.Contains(all[0], "no: "+http.StatusText(code)) || !strings.Contains(all[1], "again") {
				t.Errorf("the log has %q", all)
			}
		})
	}
}

func TestRefusalsAreTold(t *testing.T) {
	s, l := kubeapi.New(t), newListener()
	names := []string{"main", "side", "debug"}
	l.refuse = func(p plugin.Pod) (r []plugin.Refusal) {
		for _, name := range names {
			if value := p.Annotations[plugin.MemoryLimitAnnotation]; value != "" {
				r = append(r, plugin.Refusal{Container: plugin.Container{Name: name, PodUID: p.UID, Pod: p.Name, Namespace: p.Namespace},
					Err: fmt.Errorf("%s is\nwrong", value)})
			}
		}
		return r
	}
	s.Set("a", "ml", "train", limit("x"))
	startWatcher(t, s, l)
	await(t, l.told, "all pods")
	expect := func(value string) {
		t.Helper()
		for _, name := range names {
			e := await(t, s.Events, "an event")
			if want := "container " + name + ": " + value + " is; wrong; what held before stays"; e.Note != want || e.Reason != "GPUShareRefused" || e.Type != "Warning" {
				t.Errorf("event %s %s: %s, want %s", e.Type, e.Reason, e.Note, want)
			}
			if r := e.Regarding; r.Kind != "Pod" || r.APIVersion != "v1" || r.UID != "a" || r.Name != "train" {
				t.Errorf("regarding %+v", r)
			}
		}
	}
	expect("x")
	// Said once: not after an outage, nor when something else is changed.
	s.Cut()
	await(t, l.told, "all pods again")
	s.Set("a", "ml", "train", map[string]string{plugin.MemoryLimitAnnotation: "x", "nvshare.com/gpu-weight": "5"})
	s.Set("a", "ml", "train", limit("y"))
	expect("y")
}

// What a scheduler answers, as events.
func TestAnswersAreTold(t *testing.T) {
	s, l := kubeapi.New(t), newListener()
	s.Set("a", "ml", "train", nil)
	w, _ := startWatcher(t, s, l)
	await(t, l.told, "all pods")

	c := plugin.Container{ID: "1", Name: "main", PodUID: "a", Pod: "train", Namespace: "ml"}
	described := func(memory uint64, share *api.Share) *api.Container {
		return &api.Container{Id: "1", Name: "main", Namespace: "ml", MemoryLimitBytes: memory, Share: share}
	}
	const gi = 1 << 30
	in := func(old, new, used uint64, share *api.Share) []*api.ShareChange {
		return []*api.ShareChange{{Index: 3, OldMemoryBytes: old, NewMemoryBytes: new, UsedMemoryBytes: used, New: share}}
	}
	for i, step := range []struct {
		r    *api.DescribeContainerResponse
		err  error
		want string // type, reason, note; "": no event
	}{
		{r: &api.DescribeContainerResponse{}, want: ""},                                                    // of a scheduler that knows no more
		{r: &api.DescribeContainerResponse{New: described(gi, nil), Changes: in(0, gi, 0, nil)}, want: ""}, // created so
		{r: &api.DescribeContainerResponse{Old: described(gi, nil), New: described(gi, nil)}, want: ""},    // told again
		{err: status.Error(codes.Unavailable, "ended"), want: ""},                                          // will be
		{r: &api.DescribeContainerResponse{New: described(8*gi, nil), Changes: in(gi, 8*gi, 2*gi, nil)}, want: ` // of a scheduler that was restarted
			Normal GPUShareChanged container main: memory limit 8Gi (was 1Gi)`},
		{r: &api.DescribeContainerResponse{Old: described(8*gi, nil), New: described(2*gi, &api.Share{CoreLimit: 50, Gang: "ring"}), Changes: in(8*gi, 2*gi, 3*gi, &api.Share{CoreLimit: 50, Gang: "ml/ring"})}, want: `
			Normal GPUShareChanged container main: memory limit 2Gi (was 8Gi); core limit 50% (was none); gang ring (was none); GPU 3: 3Gi in use, it gets no more until it has freed enough`},
		{r: &api.DescribeContainerResponse{New: described(2*gi, &api.Share{CoreLimit: 40, Gang: "ring"}), Changes: in(2*gi, 2*gi, 3*gi, &api.Share{CoreLimit: 90, Gang: "ml/ring"})}, want: `
			Warning GPUShareOverruled container main: core limit 40% (was 50%), without effect on GPU 3: 90%, set with nvsharectl, holds there`},
		{r: &api.DescribeContainerResponse{New: described(0, nil), Changes: in(2*gi, 0, 3*gi, nil)}, want: `
			Normal GPUShareChanged container main: memory limit none (was 2Gi); core limit none (was 40%); gang none (was ring)`},
		{r: &api.DescribeContainerResponse{New: described(0, &api.Share{MemoryMode: api.MemoryMode_MEMORY_MODE_RESIDENT})}, want: `
			Normal GPUShareChanged container main: memory mode resident (was swap)`},
		{err: status.Error(codes.InvalidArgument, "odd"), want: `Warning GPUShareRefused container main: the scheduler refuses: odd`},
	} {
		w.Answered(c, step.r, step.err)
		if step.want == "" {
			continue
		}
		_, want, _ := strings.Cut(step.want, "\n")
		if want == "" {
			want = step.want
		}
		e := await(t, s.Events, "an event")
		if got := e.Type + " " + e.Reason + " " + e.Note; got != strings.TrimSpace(want) {
			t.Errorf("step %d: got  %s\nwant %s", i+1, got, strings.TrimSpace(want))
		}
	}
	// A container started again has what it has; one known from before a
	// restart of the plugin is compared with what the scheduler knew.
	second, third := c, c
	second.ID, third.ID = "2", "3"
	w.Answered(second, &api.DescribeContainerResponse{New: &api.Container{Id: "2", MemoryLimitBytes: gi}}, nil)
	w.Answered(third, &api.DescribeContainerResponse{Old: &api.Container{Id: "3", MemoryLimitBytes: gi}, New: &api.Container{Id: "3", MemoryLimitBytes: 2 * gi}}, nil)
	if e := await(t, s.Events, "an event"); e.Note != "container main: memory limit 2Gi (was 1Gi)" {
		t.Errorf("got %s", e.Note)
	}
	// Not on somebody else's pod.
	other := c
	other.Namespace = "evil"
	w.Answered(other, nil, status.Error(codes.InvalidArgument, "odd"))
	// A misspelt annotation neither; that is said once.
	for range 2 {
		s.Set("a", "ml", "train", map[string]string{"nvshare.com/gpu-memory": "8Gi"})
	}
	if e := await(t, s.Events, "an event"); e.Reason != "GPUAnnotationUnknown" || !strings.HasPrefix(e.Note, "annotations without effect: nvshare.com/gpu-memory; ") {
		t.Errorf("got %+v", e)
	}
	// Another choice of GPUs has no effect.
	s.Set("a", "ml", "train", map[string]string{plugin.Annotation: "nvshare.com/gpu=1"})
	if e := await(t, s.Events, "an event"); e.Reason != "GPUChoiceStays" {
		t.Errorf("got %+v", e)
	}
}

// Whoever may annotate a pod cannot flood the API server with events.
func TestEventsAreBounded(t *testing.T) {
	s, l := kubeapi.New(t), newListener()
	s.Set("a", "ml", strings.Repeat("n", 253), nil)
	s.Set("b", "ml", "other", nil)
	w, _ := startWatcher(t, s, l)
	await(t, l.told, "all pods")
	begin := time.Now()
	c := plugin.Container{ID: "1", Name: "main", PodUID: "a", Pod: strings.Repeat("n", 253), Namespace: "ml"}
	for i := range 1000 {
		w.Answered(c, nil, status.Error(codes.InvalidArgument, fmt.Sprint(i, strings.Repeat("é", 1000))))
	}
	spent := time.Since(begin)
	w.Warn(plugin.Pod{UID: "b", Namespace: "ml", Name: "other"}, "main", "Odd", "last")
	n := 0
	for e := range s.Events {
		if e.Regarding.UID == "b" {
			break
		}
		n++
	}
	if most := eventBurst + 1 + int(spent/eventEvery); n < eventBurst || n > most {
		t.Errorf("%d events, want %d to %d", n, eventBurst, most)
	}
}

func TestConfig(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	t.Setenv("KUBERNETES_SERVICE_PORT", "")
	file := t.TempDir() + "/config"
	if _, err := Config(""); err != ErrNone {
		t.Errorf("no kubeconfig: %v", err)
	}
	if _, err := Config(file); err == nil || err == ErrNone || !strings.Contains(err.Error(), file) {
		t.Errorf("%s: %v", file, err)
	}
	if name, err := NodeName("given"); name != "given" || err != nil {
		t.Errorf("name %s, %v", name, err)
	}
	if name, err := NodeName(""); name == "" || err != nil {
		t.Errorf("name %s, %v", name, err)
	}
}
