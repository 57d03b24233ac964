// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/stub"
	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/cdi"
)

// patience bounds every wait of these tests; what is waited for takes
// milliseconds.
const patience = 5 * time.Minute

func quiet() logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func TestMain(m *testing.M) {
	nrilog.Set(stubLogger{quiet()}) // NRI's runtime side logs to a global
	// A runtime drops a plugin after 2 s, which a machine that is busy may take.
	nri.SetPluginRegistrationTimeout(patience)
	nri.SetPluginRequestTimeout(patience)
	os.Exit(m.Run())
}

// fakeRuntime is NRI's own runtime side, as container runtimes embed it. It
// stands behind a relay, because only the end of a process closes the
// connections of plugins: cutting the relay is that.
type fakeRuntime struct {
	t       testing.TB
	socket  string // the relay's
	inner   string
	name    string
	version string
	pods    []*api.PodSandbox
	ctrs    []*api.Container
	listed  func() // is called between the list and the registration; nil: nothing is

	nri    *nri.Adaptation
	relay  net.Listener
	synced chan struct{} // one for each plugin that registered
	mu     sync.Mutex
	conns  []net.Conn
}

func newRuntime(t testing.TB, version string) *fakeRuntime {
	t.Helper()
	dir, err := os.MkdirTemp("", "nri") // short: socket paths are limited
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return &fakeRuntime{t: t, socket: dir + "/relay", inner: dir + "/nri.sock", name: "containerd", version: version, synced: make(chan struct{}, 100)}
}

func (r *fakeRuntime) start() {
	r.t.Helper()
	dir := filepath.Dir(r.socket)
	var err error
	r.nri, err = nri.New(r.name, r.version,
		func(ctx context.Context, sync nri.SyncCB) error {
			_, err := sync(ctx, r.pods, r.ctrs)
			if r.listed != nil {
				r.listed()
			}
			r.synced <- struct{}{} // create waits until NRI has taken note, too
			return err
		},
		func(context.Context, []*api.ContainerUpdate) ([]*api.ContainerUpdate, error) { return nil, nil },
		nri.WithSocketPath(r.inner), nri.WithPluginPath(dir+"/plugins"), nri.WithPluginConfigPath(dir+"/conf"))
	if err != nil {
		r.t.Fatal(err)
	}
	if err := r.nri.Start(); err != nil {
		r.t.Fatal(err)
	}
	await(r.t, r.synced, "the start") // NRI synchronizes the plugins it starts itself: none
	os.Remove(r.socket)
	if r.relay, err = net.Listen("unix", r.socket); err != nil {
		r.t.Fatal(err)
	}
	go func(l net.Listener) {
		for {
			outer, err := l.Accept()
			if err != nil {
				return
			}
			inner, err := net.Dial("unix", r.inner)
			if err != nil {
				outer.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, outer, inner)
			r.mu.Unlock()
			copy := func(to, from net.Conn) {
				io.Copy(to, from)
				to.Close()
				from.Close()
			}
			go copy(outer, inner)
			go copy(inner, outer)
		}
	}(r.relay)
}

// stop ends the runtime as the death of its process does.
func (r *fakeRuntime) stop() {
	r.relay.Close()
	r.nri.Stop()
	r.cut()
}

func (r *fakeRuntime) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.conns {
		c.Close()
	}
	r.conns = nil
}

func await[T any](t testing.TB, ch <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(patience):
		t.Fatalf("waited in vain for %s", what)
	}
	return v
}

// create asks the runtime to create a container and returns what plugins
// changed.
func (r *fakeRuntime) create(pod *api.PodSandbox, ctr *api.Container) (*api.ContainerAdjustment, error) {
	sync := r.nri.BlockPluginSync()
	defer sync.Unblock()
	rsp, err := r.nri.CreateContainer(context.Background(), &api.CreateContainerRequest{Pod: pod, Container: ctr})
	return rsp.GetAdjust(), err
}

// startPod has the runtime create the container of a new pod with these annotations, which runs
// then. It returns the indices of its GPUs.
func (r *fakeRuntime) startPod(name string, annotations ...string) (string, error) {
	r.t.Helper()
	pod, ctr := podOf(name, "id-"+name, says(annotations...))
	a, err := r.create(pod, ctr)
	if err != nil {
		return "", err
	}
	r.pods, r.ctrs = append(r.pods, pod), append(r.ctrs, applied(ctr, a))
	return indices(r.t, a), nil
}

// run runs the plugin against a runtime until the test ends or stop is called.
func run(t testing.TB, r *fakeRuntime, containers *Containers) (stop func()) {
	t.Helper()
	return runPlugin(t, r, New(quiet(), containers))
}

// runPlugin is run for a plugin of the test's own.
func runPlugin(t testing.TB, r *fakeRuntime, p *Plugin) (stop func()) {
	t.Helper()
	p.SetInventory(inventory(t))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Run(ctx, Connection{Socket: r.socket, Name: "nvshare", Index: "10"}, p) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := await(t, done, "the plugin's end"); err != nil {
			t.Errorf("the plugin ended with %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

func pod(annotations map[string]string) *api.PodSandbox {
	return &api.PodSandbox{Id: "pod0", Name: "train-a", Namespace: "ml", Uid: "uid0", Annotations: annotations}
}

func ctr(name string, env ...string) *api.Container {
	return &api.Container{Id: "id-" + name, PodSandboxId: "pod0", Name: name, Env: env}
}

func cdiNames(a *api.ContainerAdjustment) []string {
	var names []string
	for _, d := range a.GetCDIDevices() {
		names = append(names, d.Name)
	}
	return names
}

func TestRuntimeGetsAdjustments(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.start()
	defer r.stop()
	run(t, r, NewContainers(quiet()))
	await(t, r.synced, "the registration")

	a, err := r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), ctr("main", "LD_PRELOAD=/user.so"))
	if env, _ := envOf(a); err != nil || !slices.Equal(cdiNames(a), []string{"nvshare.com/gpu-nri=0"}) || env["LD_PRELOAD"] != cdi.ShimPath+":/user.so" {
		t.Errorf("got %v, %v", a, err)
	}

	// Two containers, one of which asks.
	p := pod(map[string]string{"gpu.nvshare.com/container.train": "nvshare.com/gpu=all", Annotation + "/container.absent": "nonsense"})
	if a, err := r.create(p, ctr("train")); err != nil || !slices.Equal(cdiNames(a), []string{"nvshare.com/gpu-nri=all"}) {
		t.Errorf("the one that asks: %v, %v", a, err)
	}
	if a, err := r.create(p, ctr("sidecar", "LD_PRELOAD=/user.so")); err != nil || len(a.GetCDIDevices())+len(a.GetEnv())+len(a.GetMounts()) != 0 {
		t.Errorf("the one that does not: %v, %v", a, err)
	}
	if a, err := r.create(pod(nil), ctr("plain")); err != nil || len(a.GetCDIDevices())+len(a.GetEnv()) != 0 {
		t.Errorf("a pod without annotations: %v, %v", a, err)
	}

	for _, value := range []string{"", "nvshare.com/gpu=99", "nvidia.com/gpu=0", "0,,1"} {
		_, err := r.create(pod(map[string]string{Annotation: value}), ctr("main"))
		if err == nil {
			t.Errorf("%q was not refused", value)
			continue
		}
		for _, part := range []string{"ml/train-a", `"main"`, Annotation, `"` + value + `"`} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("the error for %q does not name %s: %v", value, part, err)
			}
		}
	}
	// A refusal is no failure: the plugin is still there.
	if a, err := r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=1"}), ctr("main")); err != nil || len(a.GetCDIDevices()) != 1 {
		t.Errorf("after the refusals: %v, %v", a, err)
	}
}

// containerd 2.0 drops the devices that plugins name, without a word: pods that ask are refused, and the
// plugin is not ready.
func TestRuntimeThatDropsDevicesIsRefused(t *testing.T) {
	r := newRuntime(t, "2.0.14")
	r.start()
	defer r.stop()
	cs := NewContainers(quiet())
	run(t, r, cs)
	await(t, r.synced, "the registration")
	if a, err := r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), ctr("main")); err == nil || !strings.Contains(err.Error(), "containerd 2.0.14 is not known to give") {
		t.Errorf("got %v, %v", a, err)
	}
	if why := strings.Join(cs.Health.Problems(), ";"); !strings.Contains(why, "needs containerd 2.1") {
		t.Errorf("the problems are %q", why)
	}
	if a, err := r.create(pod(nil), ctr("main")); err != nil || len(a.GetEnv()) != 0 {
		t.Errorf("a container that does not ask: %v, %v", a, err)
	}
}

// The kubelet may use another runtime than the one that has NRI, as with cri-dockerd: it does not know the
// plugin's own pod, and asks about none.
func TestRuntimeOfAnotherIsSaid(t *testing.T) {
	for name, known := range map[string]bool{"nvshare-x": true, "other": false} {
		r := newRuntime(t, "v2.4.2")
		r.pods = []*api.PodSandbox{{Id: "1", Namespace: "nvshare-system", Name: name}}
		r.start()
		cs := NewContainers(quiet())
		p := New(quiet(), cs)
		p.OwnPod = "nvshare-system/nvshare-x"
		runPlugin(t, r, p)
		await(t, r.synced, "the registration")
		if why := strings.Join(cs.Health.Problems(), ";"); (why == "") != known || !known && !strings.Contains(why, "cri-dockerd") {
			t.Errorf("pod %s: the problems are %q", name, why)
		}
		r.stop()
	}
}

// otherPlugin comes before ours and preloads something.
type otherPlugin struct{}

func (otherPlugin) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	a := &api.ContainerAdjustment{}
	a.AddEnv("LD_PRELOAD", "/other.so")
	return a, nil, nil
}

func TestPreloadOfAnotherPluginIsKept(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.start()
	defer r.stop()
	other, err := stub.New(otherPlugin{}, stub.WithPluginName("other"), stub.WithPluginIdx("05"), stub.WithSocketPath(r.socket), stub.WithLogger(stubLogger{quiet()}))
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	defer other.Stop()
	await(t, r.synced, "the other plugin")
	run(t, r, NewContainers(quiet()))
	await(t, r.synced, "ours")
	a, err := r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), ctr("main"))
	if env, _ := envOf(a); err != nil || env["LD_PRELOAD"] != cdi.ShimPath+":/other.so" {
		t.Errorf("got %v, %v", a, err)
	}
}

func TestReconnects(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	ask := func(when string) {
		t.Helper()
		if a, err := r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), ctr("main")); err != nil || len(a.GetCDIDevices()) != 1 {
			t.Errorf("%s: %v, %v", when, a, err)
		}
	}
	stop := run(t, r, NewContainers(quiet())) // before the runtime is there
	r.start()
	await(t, r.synced, "the first registration")
	ask("at first")

	for _, when := range []string{"runtime restarted", "runtime restarted again"} {
		r.stop()
		r.start()
		await(t, r.synced, when)
		ask(when)
	}
	r.cut()
	await(t, r.synced, "registration after a lost connection")
	ask("connection lost")

	stop()
	run(t, r, NewContainers(quiet()))
	await(t, r.synced, "registration of a new plugin")
	ask("plugin restarted")
	r.stop()
}

// A runtime that dies between accepting a plugin and configuring it must not
// hold the plugin for ever; ending the plugin then must not hang either.
func TestEndsWhileRuntimeIsSilent(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	l, err := net.Listen("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	stop := run(t, r, NewContainers(quiet()))
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stop()
}

func TestBadNameEndsThePlugin(t *testing.T) {
	for _, c := range []Connection{{Name: "nvshare", Index: "1"}, {Name: "nvshare", Index: "abc"}, {Name: "nv share", Index: "10"}, {Name: "", Index: "10"}} {
		c.Socket = "/nonexistent"
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		if err := Run(ctx, c, New(quiet(), NewContainers(quiet()))); err == nil {
			t.Errorf("%+v was accepted", c)
		}
		cancel()
	}
}

// While the scheduler answers nothing at all, containers are created as ever.
func TestHungSchedulerDelaysNothing(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.start()
	defer r.stop()
	containers := NewContainers(quiet())
	containers.callLimit = 2 * patience // who waits for a call waits for longer than the runtime does
	s := newScheduler()
	s.hang.Store(true)
	stopContainers := runContainers(t, containers, s)
	defer stopContainers()
	run(t, r, containers)
	await(t, r.synced, "the registration")
	await(t, s.dialed, "a call to the scheduler")
	for range 50 {
		a, err := r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), ctr("main"))
		if err != nil || len(a.GetCDIDevices()) != 1 {
			t.Fatalf("got %v, %v", a, err) // a slow plugin is dropped: no devices
		}
		if err := r.nri.RemoveContainer(context.Background(), &api.RemoveContainerRequest{Pod: pod(nil), Container: ctr("main")}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSchedulerLearnsNames(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.pods = []*api.PodSandbox{pod(nil)}
	shim := &api.Mount{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}
	r.ctrs = []*api.Container{
		{Id: "uses", PodSandboxId: "pod0", Name: "uses", Mounts: []*api.Mount{shim}},
		{Id: "placed", PodSandboxId: "pod0", Name: "placed", Annotations: map[string]string{PlacementAnnotation: known[2]}},
		{Id: "plain", PodSandboxId: "pod0", Name: "plain"},
		{Id: "ended", PodSandboxId: "pod0", Name: "ended", Mounts: []*api.Mount{shim}, State: api.ContainerState_CONTAINER_STOPPED},
		{Id: "orphan", PodSandboxId: "none", Name: "orphan", Mounts: []*api.Mount{shim}},
	}
	r.start()
	defer r.stop()
	containers := NewContainers(quiet())
	containers.ping = time.Millisecond
	s := newScheduler()
	defer runContainers(t, containers, s)()
	run(t, r, containers)
	s.await(t, "placed", "uses")
	if _, err := r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), ctr("new")); err != nil {
		t.Fatal(err)
	}
	s.await(t, "id-new", "placed", "uses")
	if c := s.get("id-new"); !c.equal(Container{ID: "id-new", Name: "new", Namespace: "ml", Pod: "train-a", PodUID: "uid0", GPUs: known[2:3], Sandbox: "pod0"}) {
		t.Errorf("described as %+v", c)
	}
	if _, err := r.nri.StopContainer(context.Background(), &api.StopContainerRequest{Pod: pod(nil), Container: &api.Container{Id: "uses"}}); err != nil {
		t.Fatal(err)
	}
	s.await(t, "id-new", "placed")
	if err := r.nri.RemoveContainer(context.Background(), &api.RemoveContainerRequest{Pod: pod(nil), Container: &api.Container{Id: "placed"}}); err != nil {
		t.Fatal(err)
	}
	s.await(t, "id-new")

	// A restarted scheduler knows nothing and is told again.
	s.restart()
	s.await(t, "id-new")
}

// Limits go the way of names: told at once, and again to a scheduler that
// restarted; also those of containers from before the plugin.
func TestSchedulerLearnsLimits(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	limited := pod(map[string]string{MemoryLimitAnnotation: "8Gi", "gpu-memory-limit.nvshare.com/container.small": "512", MemoryLimitAnnotation + "/container.odd": "lots"})
	shim := &api.Mount{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}
	r.pods = []*api.PodSandbox{limited}
	r.ctrs = []*api.Container{
		{Id: "old", PodSandboxId: "pod0", Name: "old", Mounts: []*api.Mount{shim}},
		{Id: "odd", PodSandboxId: "pod0", Name: "odd", Mounts: []*api.Mount{shim}}, // let in by nobody of us
	}
	r.start()
	defer r.stop()
	containers := NewContainers(quiet())
	containers.ping = time.Millisecond
	s := newScheduler()
	defer runContainers(t, containers, s)()
	run(t, r, containers)
	s.await(t, "odd", "old")

	asking := pod(limited.Annotations)
	asking.Annotations[Annotation] = "nvshare.com/gpu=0"
	for _, name := range []string{"main", "small"} {
		if _, err := r.create(asking, ctr(name)); err != nil {
			t.Fatal(err)
		}
	}
	given := ctr("given", "LD_PRELOAD="+cdi.ShimPath) // by a device plugin, or a claim
	if _, err := r.create(limited, given); err != nil {
		t.Fatal(err)
	}
	_, err := r.create(asking, ctr("odd"))
	for _, part := range []string{"ml/train-a", `"odd"`, MemoryLimitAnnotation + "/container.odd", `"lots"`, "8Gi"} {
		if err == nil || !strings.Contains(err.Error(), part) {
			t.Errorf("the error does not name %s: %v", part, err)
		}
	}
	for range 2 {
		s.await(t, "id-given", "id-main", "id-small", "odd", "old")
		for id, want := range map[string]uint64{"id-given": 8 << 30, "id-main": 8 << 30, "id-small": 512 << 20, "odd": 0, "old": 8 << 30} {
			if got := s.get(id).Terms.MemoryLimit; got != want {
				t.Errorf("%s: the scheduler was told of a limit of %d, want %d", id, got, want)
			}
		}
		s.restart()
	}
}

// A busy node: what it tells at the registration comes in several messages, and
// must not cost us the registration. (Messages are cut by NRI's runtime side,
// which up to 0.12.5 never ends if there are far fewer pods than containers.)
func TestSynchronizeWithManyContainers(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	const n = 500
	var using []string
	for i := range n {
		p := pod(nil)
		p.Id = fmt.Sprintf("pod%03d", i/3)
		if i%3 == 0 {
			r.pods = append(r.pods, p)
		}
		c := &api.Container{Id: fmt.Sprintf("c%03d", i), PodSandboxId: p.Id, Name: "x", Env: []string{"BIG=" + strings.Repeat("x", 16<<10)}}
		if i%2 == 0 {
			c.Mounts = []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}
			using = append(using, c.Id)
		}
		r.ctrs = append(r.ctrs, c)
	}
	r.start()
	defer r.stop()
	containers, s := NewContainers(quiet()), newScheduler()
	defer runContainers(t, containers, s)()
	run(t, r, containers)
	await(t, r.synced, "the registration")
	s.await(t, using...)
	if a, err := r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), ctr("main")); err != nil || len(a.GetCDIDevices()) != 1 {
		t.Errorf("after it: %v, %v", a, err)
	}
}

// A plugin after ours that claims LD_PRELOAD as well: the runtime refuses the
// container and names both, so that nobody loses the shim without a word.
func TestPreloadClaimedAfterOurs(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.start()
	defer r.stop()
	run(t, r, NewContainers(quiet()))
	await(t, r.synced, "ours")
	other, err := stub.New(otherPlugin{}, stub.WithPluginName("other"), stub.WithPluginIdx("90"), stub.WithSocketPath(r.socket), stub.WithLogger(stubLogger{quiet()}))
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	defer other.Stop()
	await(t, r.synced, "the other plugin")
	_, err = r.create(pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), ctr("main"))
	if err == nil || !strings.Contains(err.Error(), "nvshare") || !strings.Contains(err.Error(), "other") || !strings.Contains(err.Error(), "LD_PRELOAD") {
		t.Errorf("got %v", err)
	}
	if a, err := r.create(pod(nil), ctr("plain")); err != nil || len(a.GetCDIDevices()) != 0 {
		t.Errorf("a pod that does not ask: %v, %v", a, err)
	}
}

// healthOf returns a function that waits until the health is as ok wants it.
func healthOf(t *testing.T, health *Health) func(what string, ok func() bool) {
	return func(what string, ok func() bool) {
		t.Helper()
		for limit := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
			if time.Now().After(limit) {
				t.Fatalf("waited in vain for %s: %q, not ready: %q", what, health.Problems(), health.NotReady())
			}
		}
	}
}

// A runtime that stops a container with a long grace period does not send its list before the
// end of that. The plugin does not know, and names both causes.
func TestListThatComesLate(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.start()
	defer r.stop()
	stopping := r.nri.BlockPluginSync()
	containers := NewContainers(quiet())
	health := &containers.Health
	p := New(quiet(), containers)
	p.syncLimit = time.Millisecond
	runPlugin(t, r, p)
	until := healthOf(t, health)
	until("the problem", func() bool { return len(health.Problems()) == 1 })
	for _, part := range []string{"grace period", "4 MiB", "new containers wait"} {
		if got := health.Problems()[0]; !strings.Contains(got, part) {
			t.Errorf("it does not say %q: %s", part, got)
		}
	}
	stopping.Unblock()
	await(t, r.synced, "the registration")
	until("the plugin to be well", func() bool { return len(health.NotReady()) == 0 })
}

// A list that comes as syncLimit ends is there: the plugin would stay not ready for as long as
// the connection lasts, and with it the update of a DaemonSet.
func TestListThatComesAtTheLimit(t *testing.T) {
	for name, list := range map[string]bool{"it has come": true, "it has not": false} {
		p := New(quiet(), NewContainers(quiet()))
		s := &session{Plugin: p, configured: make(chan struct{}), synchronized: make(chan struct{})}
		if list {
			if _, err := s.Synchronize(t.Context(), nil, nil); err != nil {
				t.Fatal(err)
			}
		}
		s.late() // which the runtime's list has just overtaken
		if got := p.containers.Health.NotReady(); (len(got) == 0) != list {
			t.Errorf("%s: not ready for %q", name, got)
		}
	}
}

// A pod whose containers are too large for NRI's messages keeps the runtime from sending
// its list. The plugin is configured, and asked about no pod. It says so, with the cause,
// and is well again when the containers are smaller.
func TestListTooLargeForNRIIsSaid(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.pods = []*api.PodSandbox{pod(nil)}
	for i := range 6 {
		r.ctrs = append(r.ctrs, ctr(fmt.Sprint("large", i), "LARGE="+strings.Repeat("x", 1000<<10)))
	}
	r.start()
	defer r.stop()
	containers := NewContainers(quiet())
	health := &containers.Health
	run(t, r, containers)
	until := healthOf(t, health)
	until("the problem", func() bool {
		p := health.Problems()
		return len(p) == 1 && strings.Contains(p[0], "4 MiB") && strings.Contains(p[0], "crictl")
	})
	if len(health.NotReady()) != 1 {
		t.Errorf("not ready for %q", health.NotReady())
	}
	release := r.nri.BlockPluginSync() // the list is read while plugins are synchronized
	r.ctrs = r.ctrs[:3]
	release.Unblock()
	until("the plugin to be well", func() bool { return len(health.NotReady()) == 0 && len(health.Problems()) == 0 })
}
