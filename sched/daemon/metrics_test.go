// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/arena"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/store"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/wire"
)

// withMetrics serves metrics, of GPUs that samples describes.
func withMetrics(samples func() ([]metrics.GPUSample, error)) func(*Options) {
	return func(o *Options) {
		o.MetricsAddr, o.MetricsProcesses = "127.0.0.1:0", 512
		o.Sample = func(context.Context) ([]metrics.GPUSample, error) { return samples() }
	}
}

// get asks an exporter that has not asked the scheduler before: what the test did
// is to be seen.
func get(t *testing.T, s *scheduler, path string) (code int, body string) {
	t.Helper()
	x, err := metrics.Listen(s.metricsOptions(), metricsSource{s.Daemon})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() { x.Serve(ctx); close(served) }()
	defer func() { cancel(); <-served }()
	return fetch(t, x.Addr(), path)
}

func fetch(t *testing.T, addr, path string) (code int, body string) {
	t.Helper()
	client := &http.Client{Timeout: patience}
	defer client.CloseIdleConnections()
	r, err := client.Get("http://" + addr + path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(text)
}

// values reads an exposition: by name, and by name and labels.
func values(text string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "} "); ok && name[0] != '#' {
			m[name+"}"] = value
			short, _, _ := strings.Cut(name, "{")
			m[short] = value
		} else if name, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name != "#" {
			m[name] = value
		}
	}
	return m
}

func TestMetrics(t *testing.T) {
	pid := uint32(0)
	serve := withMetrics(func() ([]metrics.GPUSample, error) {
		return []metrics.GPUSample{{
			UUID: gpuA.UUID, Utilization: 0.5, MemoryUtilization: 0.25, MemoryTotal: 100, MemoryUsed: 60, MemoryFree: 40,
			Processes: map[uint32]uint64{pid: 7, math.MaxUint32: 8},
		}}, nil
	})
	s := start(t, t.TempDir(), func(o *Options) { serve(o); swapping(o) })
	ctl := dial(t, s)
	p, a := newClient(t, s)
	pid = uint32(p.cmd.Process.Pid)
	const account = peer.ContainerAccount + "abc"
	if err := s.Ask(context.Background(), func() {
		// The cgroup is a machine's own; this is what a pod's container looks like.
		g, cl := s.Gpus[uuidOf(gpuA)], s.Clients[base.ClientID(a.id)]
		cl.Container, cl.Account = "abc", account
		s.Names["abc"] = &api.Container{Id: "abc", Namespace: "ml", Pod: "train", Name: "main"}
		s.step(g, sched.Attach{Client: cl.ID, Tenant: account})
		s.step(g, residency.SetTenantMemory{Tenant: account, Limit: 50})
	}); err != nil {
		t.Fatal(err)
	}
	a.expect(wire.TypeRoom)
	a.send(wire.Frame{Type: wire.TypeReserve, Code: wire.ReserveForce, Reserve: wire.Reserve{Total: 60, Least: 60}})
	a.expect(wire.TypeRoom)
	a.expect(wire.TypeReserved)
	a.request()
	e := a.granted()
	a.send(wire.Frame{Type: wire.TypeStats, Stats: wire.Stats{Calls: 5, Waits: 1, WaitNs: 2e9, MemBytes: 3, MemPeak: 4}})
	_, b := newClient(t, s)
	b.request()
	s.await("b waits", func(r *api.StatusResponse) bool {
		return stateOf(r, b.id) == api.ClientState_CLIENT_STATE_WAITING && r.Gpus[0].Clients[0].Calls == 5
	})

	code, text := get(t, s, "/metrics")
	if code != http.StatusOK {
		t.Fatalf("%d %s", code, text)
	}
	gpu := fmt.Sprintf(`gpu_index="0",gpu_uuid="%s"`, gpuA.UUID)
	client := func(more, id string) string {
		return fmt.Sprintf(`{client_id="%d",container="main",%sgpu_uuid="%s"%s,namespace="ml",pod="train"}`, a.id, more, gpuA.UUID, id)
	}
	got := values(text)
	for name, want := range map[string]string{
		// What the documents of nvshare's fork name.
		"nvshare_gpu_utilization_ratio{" + gpu + "}":                                         "0.5",
		"nvshare_gpu_memory_used_bytes{" + gpu + "}":                                         "60",
		"nvshare_client_managed_allocated_bytes" + client("", ""):                            "3",
		"nvshare_scheduler_running_clients{" + gpu + "}":                                     "1",
		"nvshare_scheduler_request_queue_clients{" + gpu + "}":                               "1",
		"nvshare_client_info" + client(`gpu_index="0",`, fmt.Sprintf(`,host_pid="%d"`, pid)): "1",
		"nvshare_gpu_memory_total_bytes{" + gpu + "}":                                        "100",
		"nvshare_gpu_memory_utilization_ratio{" + gpu + "}":                                  "0.25",
		"nvshare_gpu_sampler_up{" + gpu + "}":                                                "1",
		"nvshare_nvml_up":                                                                    "1",
		// Ours.
		"nvshare_gpu_processes{" + gpu + "}":           "2",
		"nvshare_gpu_unmanaged_processes{" + gpu + "}": "1",
		"nvshare_gpu_grants_total{" + gpu + "}":        "1",
		"nvshare_gpu_wait_seconds_count{" + gpu + "}":  "1",
		"nvshare_scheduler_healthy":                    "1",
		"nvshare_scheduler_problems":                   "1", // a tenant is over its memory limit
		"nvshare_scheduler_clients":                    "2",
		"nvshare_gpu_swap_capacity_bytes{" + gpu + "}": "1.073741824e+09",
		"nvshare_gpu_swap_share_ratio{" + gpu + "}":    "0.1",
		"nvshare_arena_bytes":                          "2.147483648e+09",
	} {
		if got[name] != want {
			t.Errorf("%s is %q, want %s", name, got[name], want)
		}
	}
	if _, ok := got[fmt.Sprintf(`nvshare_gpu_utilization_ratio{gpu_index="1",gpu_uuid="%s"}`, gpuB.UUID)]; ok {
		t.Error("a utilization of which the driver says nothing")
	}
	if strings.Contains(text, "daemon.test") || strings.Contains(text, `command`) {
		t.Errorf("a name that the tenant chose:\n%s", text)
	}

	// A hand-over.
	if _, err := ctl.Set(context.Background(), &api.SetRequest{QuantumNs: int64(sched.MinQuantum)}); err != nil {
		t.Fatal(err)
	}
	a.expect(wire.TypeRevoke)
	a.release(e)
	b.granted()
	_, text = get(t, s, "/metrics")
	got = values(text)
	for name, want := range map[string]string{
		"nvshare_gpu_handover_seconds_count{" + gpu + "}":            "1",
		"nvshare_gpu_drain_seconds_count{" + gpu + "}":               "1",
		`nvshare_gpu_handover_seconds_bucket{` + gpu + `,le="+Inf"}`: "1",
		"nvshare_gpu_drained{" + gpu + "}":                           "0",
	} {
		if got[name] != want {
			t.Errorf("after a hand-over %s is %q, want %s", name, got[name], want)
		}
	}

	// All are well formed.
	problems, err := promlint.New(strings.NewReader(text)).Lint()
	if err != nil {
		t.Error(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	if tool, err := exec.LookPath("promtool"); err == nil {
		cmd := exec.Command(tool, "check", "metrics")
		cmd.Stdin = strings.NewReader(text)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool check metrics: %v\n%s", err, out)
		}
	}
}

// Without the driver there are the scheduler's own figures.
func TestMetricsWithoutTheDriver(t *testing.T) {
	s := start(t, t.TempDir(), withMetrics(func() ([]metrics.GPUSample, error) { return nil, errors.New("no NVML") }))
	s.await("GPUs are found", func(r *api.StatusResponse) bool { return len(r.Gpus) == 2 })
	code, text := get(t, s, "/metrics")
	got := values(text)
	if code != http.StatusOK || got["nvshare_nvml_up"] != "0" || got["nvshare_gpu_sampler_up"] != "0" || got["nvshare_gpu_memory_total_bytes"] != "1.073741824e+09" {
		t.Errorf("%d %s", code, text)
	}
	if strings.Contains(text, "nvshare_gpu_utilization_ratio{") {
		t.Error("a utilization out of nothing")
	}
}

func TestHealthz(t *testing.T) {
	s := start(t, t.TempDir(), withMetrics(func() ([]metrics.GPUSample, error) { return nil, nil }))
	s.await("GPUs are found", func(r *api.StatusResponse) bool { return len(r.Gpus) == 2 })
	if code, text := fetch(t, s.ports[0].server.(*metrics.Exporter).Addr(), "/healthz"); code != http.StatusOK || text != "ok\n" {
		t.Errorf("%d %q", code, text)
	}
	c := newProc(t, s.dir, 0).connect()
	f := registerFrame()
	f.Register.Bypassed = 2
	c.send(f)
	c.expect(wire.TypeWelcome)
	c.attach(0, gpuA, 0, 0)
	// A tenant says so, and nobody shall restart the scheduler for that.
	if code, text := get(t, s, "/healthz"); code != http.StatusOK || !strings.Contains(text, "2 entry points of CUDA bypass the shim") {
		t.Errorf("%d %q", code, text)
	}
	if code, _ := fetch(t, s.ports[0].server.(*metrics.Exporter).Addr(), "/"); code != http.StatusNotFound {
		t.Errorf("/: %d", code)
	}
}

func TestMetricsAddressThatIsNone(t *testing.T) {
	dir := t.TempDir()
	o := testOptions(dir)
	o.MetricsAddr = "nonsense"
	if d, err := New(o); err == nil || !strings.Contains(err.Error(), "--metrics-addr") {
		t.Errorf("%v, %v", d, err)
	}
	start(t, dir, nil) // nothing is left behind
}

// crowd is a scheduler that does not run, with clients of a number of containers on each GPU.
func crowd(t testing.TB, gpus, containers, clients int) *Daemon {
	d := bare(t)
	d.discovered = 1
	d.memory.OpenArena(plenty{}, 0, 0)
	for i := range gpus {
		g := &node.GPU{Found: gpuA, Core: sched.New(sched.Config{})}
		g.Index = i
		d.Order = append(d.Order, g)
	}
	for i := range clients {
		id := fmt.Sprintf("%064x", i%containers)
		cl := &node.Client{ID: base.ClientID(i + 1), Peer: &peer.Peer{Container: id, Account: peer.ContainerAccount + id, Command: "python3"}}
		cl.Attached = map[*node.GPU]*node.Attachment{}
		d.Clients[cl.ID] = cl
		d.Names[id] = &api.Container{Id: id, Namespace: "ml", Pod: "train", Name: "main"}
		for _, g := range d.Order {
			cl.Attached[g] = &node.Attachment{Client: cl, GPU: g}
			g.Core.Step(loop.Now(), sched.Attach{Client: cl.ID, Tenant: cl.Account, Want: true})
			g.Core.Step(loop.Now(), residency.Reserve{Client: cl.ID, Total: 1 << 30, Least: 1 << 30})
		}
	}
	return d
}

// What tenants fill is no fault of the scheduler: it is well, and says what is short.
func TestFullIsNotUnwell(t *testing.T) {
	s := start(t, t.TempDir(), swapping, func(d *Daemon) { d.memory.Pool.Host = fullHost{} })
	for range 2 { // more than the GPU has
		newSwapper(t, s).send(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: 600 * mib, Least: 600 * mib, Serial: 1}})
	}
	s.await("host memory is short", func(r *api.StatusResponse) bool {
		return slices.Contains(r.ProblemCodes, api.ProblemCode_PROBLEM_CODE_HOST_MEMORY)
	})
	says := func(files error, status int, head string) {
		t.Helper()
		if err := s.Ask(t.Context(), func() { s.away.Files.Err = files }); err != nil {
			t.Fatal(err)
		}
		code, text := get(t, s, "/healthz")
		if code != status || !strings.HasPrefix(text, head) || !strings.Contains(text, "is swapped out is short") || !strings.Contains(text, files.Error()) {
			t.Errorf("%d: %s", code, text)
		}
	}
	says(fmt.Errorf("%w in the directory", store.ErrFull), http.StatusOK, "ok\n")
	says(errors.New("the disk has failed"), http.StatusServiceUnavailable, "memory of suspended processes")
}

// fullHost is one whose memory others have.
type fullHost struct{ arena.Kernel }

func (fullHost) Make(uint64, func(uint64) error) (arena.Segment, error) {
	return arena.Segment{}, errors.New("cannot allocate memory")
}

// The counters of a GPU are its own, also where another one is found that comes before it.
func TestTurnsAreOfTheirGPU(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) {
		o.List = func(context.Context) ([]node.Found, error) { return []node.Found{gpuB}, nil }
	})
	var got *metrics.Snapshot
	var want metrics.Turns
	if err := s.Ask(t.Context(), func() {
		s.overview().until = math.MaxInt64
		s.Order[0].Turns.Granted(time.Now(), &sched.Grant{})
		want = s.Order[0].Turns
		if err := s.addGPU(gpuA); err != nil {
			t.Error(err)
		}
		got = s.snapshot()
	}); err != nil {
		t.Fatal(err)
	}
	if len(got.Status.Gpus) != 1 || got.Status.Gpus[0].Uuid != gpuB.UUID || got.Turns[0] != want {
		t.Errorf("%v has the counters %v, want %v", got.Status.Gpus, got.Turns, want)
	}
}

// BenchmarkScrape is how long the loop is kept by one, with 256 clients of 64
// containers on a GPU.
func BenchmarkScrape(b *testing.B) {
	d := crowd(b, 1, 64, 256)
	for b.Loop() {
		d.latest = nil
		d.snapshot()
	}
}

// BenchmarkOverview is what a question costs the loop on a large node where many ask.
func BenchmarkOverview(b *testing.B) {
	d := crowd(b, 8, 100, 1000)
	for b.Loop() {
		d.overview()
	}
}

// A scrape waits no longer than it may for a loop that hangs.
func TestSampleWhileTheLoopHangs(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { o.Sample = (&occupants{}).sample })
	hangs, over := make(chan struct{}), make(chan struct{})
	s.Do(func() { close(hangs); <-over })
	defer close(over)
	<-hangs
	for len(s.Loop.Events) < cap(s.Loop.Events) {
		s.Try(func() {})
	}
	sampled := make(chan error, 1)
	go func() { _, err := s.metricsOptions().Sample(t.Context()); sampled <- err }()
	select {
	case err := <-sampled:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("it waits for the loop")
	}
}
