// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	known "github.com/nvshare/nvshare/sched/daemon/node"

	"github.com/containerd/nri/pkg/api"
	"github.com/sirupsen/logrus"
	"k8s.io/client-go/rest"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/plugin/kube"
	core "github.com/nvshare/nvshare/sched"
	sched "github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon"
	"github.com/nvshare/nvshare/tests/kubeapi"
)

const gib = 1 << 30

func TestMain(m *testing.M) {
	if dir := os.Getenv(tenantEnv); dir != "" {
		if err := beTenant(dir); err != nil {
			fmt.Println("error", err)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

const liveGPU = "GPU-51600000-0000-4000-8000-000000000000"

// liveNode is a node with scheduler, plugin and one container of pod ml/train,
// and the API server that it belongs to.
type liveNode struct {
	t         *testing.T
	dir       string
	api       *kubeapi.Server
	container string
	created   map[string]string // annotations of the pod at its creation
}

// startScheduler runs one until the test ends or stop is called.
func (n *liveNode) startScheduler() (stop func()) {
	n.t.Helper()
	log := logrus.New()
	log.SetOutput(io.Discard)
	d, err := daemon.New(daemon.Options{
		Config: known.Config{RunDir: n.dir, Quantum: core.MaxQuantum, Log: logrus.NewEntry(log)}, Grace: core.MaxGrace,
		List: func(context.Context) ([]known.Found, error) {
			return []known.Found{{UUID: liveGPU, Name: "Test GPU", MemoryBytes: 64 * gib}}, nil
		},
	})
	if err != nil {
		n.t.Fatal(err)
	}
	return n.start(func(ctx context.Context) {
		if err := d.Run(ctx); err != nil {
			n.t.Errorf("scheduler: %v", err)
		}
	})
}

// start runs f until the test ends or stop is called.
func (n *liveNode) start(f func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		f(ctx)
		close(done)
	}()
	stop = func() {
		cancel()
		<-done
	}
	n.t.Cleanup(stop)
	return stop
}

// startPlugin runs one, to which the runtime says what it knows.
func (n *liveNode) startPlugin() (stop func()) {
	n.t.Helper()
	containers := plugin.NewContainers(quiet())
	p := plugin.New(quiet(), containers)
	ctx, cancel := context.WithCancel(context.Background())
	f := liveFlags{kubeconfig: filepath.Join(n.dir, "kubeconfig"), node: kubeapi.Node}
	pods, err := f.watch(ctx, p, quiet())
	if err != nil {
		n.t.Fatal(err)
	}
	if _, err := p.Synchronize(ctx,
		[]*api.PodSandbox{{Id: "p", Uid: "uid", Namespace: "ml", Name: "train", Annotations: n.created}},
		[]*api.Container{{Id: n.container, PodSandboxId: "p", Name: "main", Annotations: map[string]string{plugin.PlacementAnnotation: liveGPU}}}); err != nil {
		n.t.Fatal(err)
	}
	end := n.start(func(context.Context) {
		containers.Run(ctx, func(ctx context.Context) (plugin.Scheduler, error) {
			return dialScheduler(ctx, n.dir, quiet(), pods)
		})
	})
	stop = func() { cancel(); end() }
	n.t.Cleanup(stop)
	return stop
}

func (n *liveNode) annotate(memory string) {
	annotations := map[string]string{}
	if memory != "" {
		annotations[plugin.MemoryLimitAnnotation] = memory
	}
	n.api.Set("uid", "ml", "train", annotations)
}

// event waits for one that has these words.
func (n *liveNode) event(reason string, words ...string) {
	n.t.Helper()
	limit := time.After(patience)
	for {
		select {
		case e := <-n.api.Events:
			if strings.Contains(e.Note, "512Mi") { // the scheduler was told before the API server had answered
				continue
			}
			for _, w := range append(words, "container main: ") {
				if !strings.Contains(e.Note, w) || e.Reason != reason || e.Regarding.UID != "uid" {
					n.t.Errorf("event %s: %s; want %s with %q", e.Reason, e.Note, reason, w)
				}
			}
			return
		case <-limit:
			n.t.Fatalf("no event %s", reason)
		}
	}
}

func (n *liveNode) dial() *sched.Conn {
	n.t.Helper()
	c, err := sched.Dial(context.Background(), n.dir)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { c.Close() })
	return c
}

// An annotation reaches the page of a running tenant, whatever is restarted.
func TestLimitsChangeLive(t *testing.T) {
	dir, err := os.MkdirTemp("", "run") // short: socket paths are limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	n := &liveNode{t: t, dir: dir, api: kubeapi.New(t), container: fmt.Sprintf("%064x", time.Now().UnixNano()),
		created: map[string]string{plugin.MemoryLimitAnnotation: "512Mi"}}
	n.api.Kubeconfig(filepath.Join(dir, "kubeconfig"))
	n.annotate("1Gi") // changed before this plugin came
	stopScheduler := n.startScheduler()
	stopPlugin := n.startPlugin()
	x := startTenant(t, dir, n.container)
	x.await("limit 1Gi")

	begin := time.Now()
	n.annotate("4Gi")
	x.await("limit 4Gi")
	t.Logf("the page had the new limit after %v", time.Since(begin))
	n.event("GPUShareChanged", "memory limit 4Gi (was 1Gi)")

	x.say("3")
	x.await("reserved 3 ok")
	n.annotate("2Gi") // below what is in use: it stays, no more is granted
	x.await("limit 2Gi")
	n.event("GPUShareChanged", "memory limit 2Gi (was 4Gi)", "3Gi in use")
	x.say("4")
	x.await("reserved 3 refused")
	x.say("1")
	x.await("reserved 1 ok")

	n.annotate("2GiB")
	n.event("GPUShareRefused", `"2GiB" is not a size of memory`, "what held before stays")
	n.annotate("")
	x.await("limit none") // and 2Gi before
	n.event("GPUShareChanged", "memory limit none (was 2Gi)")

	// The operator's word goes before, until it is taken back.
	c := n.dial()
	set := func(bytes uint64) {
		t.Helper()
		if _, err := c.SetShare(context.Background(), &sched.SetShareRequest{Container: n.container, MemoryBytes: &bytes}); err != nil {
			t.Fatal(err)
		}
	}
	set(6 * gib)
	x.await("limit 6Gi")
	n.annotate("5Gi")
	n.event("GPUShareOverruled", "memory limit 5Gi (was none)", "without effect on GPU 0: 6Gi, set with nvsharectl")
	set(0)
	x.await("limit 5Gi")

	// While the scheduler is away.
	stopScheduler()
	n.annotate("7Gi")
	n.startScheduler()
	x = startTenant(t, dir, n.container)
	x.await("limit 7Gi") // and perhaps 5Gi before
	x.held = nil
	n.event("GPUShareChanged", "memory limit 7Gi (was 5Gi)")

	// A plugin that is restarted while the API server is away: the runtime says
	// 512Mi to it, the scheduler knows better.
	stopPlugin()
	n.api.FailWith(http.StatusServiceUnavailable)
	for len(n.api.Asked) > 0 {
		<-n.api.Asked
	}
	n.startPlugin()
	for range 2 { // a stream, then a list
		select {
		case <-n.api.Asked:
		case <-time.After(patience):
			t.Fatal("the API server was not asked")
		}
	}
	n.annotate("8GiB") // nonsense after the outage
	n.api.FailWith(0)
	n.event("GPUShareRefused", `"8GiB"`)
	n.annotate("9Gi")
	x.await("limit 9Gi")
	n.event("GPUShareChanged", "memory limit 9Gi (was 7Gi)")
	if got := strings.Join(x.held, " "); got != "9Gi" {
		t.Errorf("over the plugin's restart the limits were %s", got)
	}
}

// watchPods watches a server's pods for a plugin without containers, until ctx ends.
func watchPods(ctx context.Context, t *testing.T, s *kubeapi.Server) *live {
	t.Helper()
	file := filepath.Join(t.TempDir(), "kubeconfig")
	s.Kubeconfig(file)
	f := liveFlags{kubeconfig: file, node: kubeapi.Node}
	pods, err := f.watch(ctx, plugin.New(quiet(), plugin.NewContainers(quiet())), quiet())
	if err != nil {
		t.Fatal(err)
	}
	return pods
}

// What the audit finds is said on the pod.
func TestUnmanagedIsTold(t *testing.T) {
	s := kubeapi.New(t)
	ctx := t.Context()
	pods := watchPods(ctx, t, s)
	pods.unmanaged(plugin.Unmanaged{Namespace: "ml", Pod: "train", PodUID: "uid", Name: "main", Asked: `nvshare.com/gpu="1"`, Why: "it was created too early"})
	select {
	case e := <-s.Events:
		if e.Reason != "GPUUnmanaged" || e.Regarding.UID != "uid" || e.Note != `container main: runs without nvshare (asked for: nvshare.com/gpu="1"): it was created too early` {
			t.Errorf("event %s: %s", e.Reason, e.Note)
		}
	case <-time.After(patience):
		t.Fatal("no event")
	}
}

// A process that uses a GPU around nvshare is told of on its pod, once.
func TestBypassIsTold(t *testing.T) {
	s := kubeapi.New(t)
	s.Set("uid", "ml", "train", nil)
	ctx := t.Context()
	pods := watchPods(ctx, t, s)
	one := &sched.Unmanaged{Pid: 7, Index: 1, Command: "python", Container: &sched.Container{Id: "c", PodUid: "uid", Name: "main"}}
	other := &sched.Unmanaged{Pid: 8, Command: "python", Container: &sched.Container{Id: "c", PodUid: "uid"}}
	outside := &sched.Unmanaged{Pid: 9, Container: &sched.Container{}}
	until(t, "the pod to be known", func() error {
		if pods.bypassed([]*sched.Unmanaged{one, outside}); !pods.seen["uidc7"] {
			return errors.New("it is not")
		}
		return nil
	})
	pods.bypassed([]*sched.Unmanaged{one, outside})
	pods.bypassed([]*sched.Unmanaged{one, other})
	for _, want := range []string{"container main: process 7 (python) uses GPU 1 without nvshare", "process 8 (python) uses GPU 0 without nvshare"} {
		select {
		case e := <-s.Events:
			if e.Reason != "GPUBypassed" || e.Regarding.UID != "uid" || !strings.HasPrefix(e.Note, want) {
				t.Errorf("event %s on %s: %s", e.Reason, e.Regarding.UID, e.Note)
			}
		case <-time.After(patience):
			t.Fatalf("no event %q", want)
		}
	}
	(*live)(nil).bypassed([]*sched.Unmanaged{one}) // without an API server
}

// Whatever a pod does again and again makes no more events than its changes of annotations do.
func TestEventsOfPodAreBounded(t *testing.T) {
	s := kubeapi.New(t)
	s.Set("uid", "ml", "train", nil)
	s.Set("last", "ml", "last", nil)
	pods := watchPods(t.Context(), t, s)
	until(t, "the pods to be known", func() error {
		for _, uid := range []string{"uid", "last"} {
			if !pods.w.WarnPod(uid, "", "Known", "") {
				return errors.New("they are not")
			}
		}
		return nil
	})
	outOfMemory := func(uid, pod string) {
		pods.event(&sched.Event{Type: sched.EventType_EVENT_TYPE_OUT_OF_MEMORY, Container: &sched.Container{Namespace: "ml", Pod: pod, PodUid: uid}})
	}
	for range 50 {
		outOfMemory("uid", "train")
		pods.unmanaged(plugin.Unmanaged{Namespace: "ml", Pod: "train", PodUID: "uid"})
	}
	outOfMemory("last", "last")
	for n := 0; ; {
		select {
		case e := <-s.Events:
			if e.Regarding.UID == "uid" {
				n++
			} else if e.Reason != "Known" {
				if n > 10 {
					t.Errorf("%d events at once", n)
				}
				return
			}
		case <-time.After(patience):
			t.Fatal("no event of the last pod")
		}
	}
}

// Without an API server to ask, the plugin serves as the runtime has it, unless
// it was told that there is one.
func TestKubeFlags(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	t.Setenv("KUBERNETES_SERVICE_PORT", "")
	missing := filepath.Join(t.TempDir(), "missing")
	for _, c := range []struct {
		flags liveFlags
		says  string
	}{
		{liveFlags{}, ""}, {liveFlags{kubeconfig: missing}, ""},
		{liveFlags{startupTaint: true}, "--startup-taint: Kubernetes API: not in a Kubernetes pod"}, {liveFlags{advertise: true, kubeconfig: missing}, missing},
	} {
		pods, err := c.flags.watch(context.Background(), plugin.New(quiet(), plugin.NewContainers(quiet())), quiet())
		pods.answered(plugin.Container{}, nil, nil)
		pods.unmanaged(plugin.Unmanaged{})
		if pods != nil || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v", c.flags, err)
		}
	}
}

// A plugin that was restarted knows a container's terms from the scheduler's answer
// alone. Where the pod's annotations are nonsense, the container goes on with all
// of them.
func TestAnswerOfTheSchedulerIsKept(t *testing.T) {
	containers := plugin.NewContainers(quiet())
	p := plugin.New(quiet(), containers)
	p.ExpectPods()
	pod := &api.PodSandbox{Id: "p", Uid: "uid", Namespace: "ml", Name: "train"}
	ctr := &api.Container{Id: "1", PodSandboxId: "p", Name: "main", Annotations: map[string]string{plugin.PlacementAnnotation: liveGPU}}
	if _, err := p.Synchronize(context.Background(), []*api.PodSandbox{pod}, []*api.Container{ctr}); err != nil {
		t.Fatal(err)
	}
	described := make(chan plugin.Container, 10)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go containers.Run(ctx, func(context.Context) (plugin.Scheduler, error) { return recorder(described), nil })
	w, err := kube.New(&rest.Config{Host: "http://127.0.0.1:1"}, "node", p, quiet())
	if err != nil {
		t.Fatal(err)
	}
	known := sched.Terms{MemoryLimit: gib, CoreLimit: 60, CoreRequest: 30, Weight: 7, Priority: sched.Priority_PRIORITY_LATENCY,
		Gang: "ring", MemoryMode: sched.MemoryMode_MEMORY_MODE_RESIDENT, Overlap: "small", Migratable: true, SuspendAfter: 600}
	answer := &sched.Container{Id: "1"}
	answer.SetTerms(known)
	var c plugin.Container
	select {
	case c = <-described:
	case <-time.After(patience):
		t.Fatal("the container was not described")
	}
	(&live{w: w, p: p}).answered(c, &sched.DescribeContainerResponse{New: answer}, nil)

	nonsense := map[string]string{}
	for _, f := range sched.Fields {
		if !f.Said(known) {
			t.Fatalf("%s is not said", f.Name)
		}
		nonsense[f.Annotation()] = "?"
	}
	refused := p.SetPod(plugin.Pod{UID: "uid", Namespace: "ml", Name: "train", Annotations: nonsense})
	if len(refused) != 1 || refused[0].Container.Terms != known {
		t.Errorf("refused: %+v, want all of %+v to stay", refused, known)
	}
}

// recorder is a scheduler that hands on what it is told.
type recorder chan plugin.Container

func (r recorder) Report(context.Context, []string) error { return nil }

func (r recorder) Describe(_ context.Context, c plugin.Container) error { r <- c; return nil }
func (recorder) Forget(context.Context, string) error                   { return nil }
func (recorder) State(context.Context) (plugin.State, error)            { return plugin.State{}, nil }
func (recorder) Close() error                                           { return nil }

// eventful is a scheduler that has some events.
type eventful struct {
	sched.ControlService
	all []*sched.Event
}

func (s *eventful) Status(context.Context, *sched.StatusRequest) (*sched.StatusResponse, error) {
	return &sched.StatusResponse{}, nil
}

func (s *eventful) Events(_ context.Context, r *sched.EventsRequest) (*sched.EventsResponse, error) {
	return &sched.EventsResponse{Run: 7, Next: uint64(len(s.all)), Events: s.all[r.Since:]}, nil
}

// An allocation that a pod's memory limit refused, and a fault of its overlap group, is said
// on the pod, once, and not again by the plugin that follows.
func TestOutOfMemoryIsTold(t *testing.T) {
	s := kubeapi.New(t)
	ctx := t.Context()
	pods := watchPods(ctx, t, s)
	event := func(pod, why string) *sched.Event {
		return &sched.Event{Type: sched.EventType_EVENT_TYPE_OUT_OF_MEMORY, Reason: why, Container: &sched.Container{Id: "x", Namespace: "ml", Pod: pod, PodUid: "uid", Name: "main"}}
	}
	control := &eventful{all: []*sched.Event{event("train", "of an earlier plugin's time")}}
	dir, err := os.MkdirTemp("", "run") // short: socket paths are limited
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	serveControl(t, dir, control)
	conn, err := dialScheduler(ctx, dir, quiet(), pods)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ask := func() {
		t.Helper()
		if _, err := conn.State(ctx); err != nil {
			t.Fatal(err)
		}
	}
	ask()
	control.all = append(control.all, &sched.Event{Type: sched.EventType_EVENT_TYPE_FENCE}, event("", "of no pod"), event("train", "the limit of 1024 MiB"))
	ask()
	ask()
	select {
	case e := <-s.Events:
		if want := "container main: GPU 0: the limit of 1024 MiB; nvshare.com/gpu-memory-limit raises the limit"; e.Reason != "GPUOutOfMemory" || e.Regarding.UID != "uid" || e.Note != want {
			t.Errorf("event %s: %s", e.Reason, e.Note)
		}
	case <-time.After(patience):
		t.Fatal("no event")
	}
	lost := event("train", "overlap group ml/0/small: server ended")
	lost.Type = sched.EventType_EVENT_TYPE_OVERLAP
	control.all = append(control.all, lost)
	ask()
	select {
	case e := <-s.Events:
		if want := "container main: GPU 0: overlap group ml/0/small: server ended"; e.Reason != "GPUOverlapGroup" || e.Note != want {
			t.Errorf("event %s: %s", e.Reason, e.Note)
		}
	case <-time.After(patience):
		t.Fatal("no event of the group")
	}
	select {
	case e := <-s.Events:
		t.Errorf("another event %s: %s", e.Reason, e.Note)
	default:
	}
}
