// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
)

const (
	uuid = "GPU-51600000-0000-4000-8000-000000000000"
	pid  = 4711
	// processes is how many have metrics of their own in these tests.
	processes = 512
)

// patience bounds every wait in these tests. It only has to be longer than any
// machine takes.
const patience = 5 * time.Minute

// source is a scheduler with one GPU.
type source struct {
	asked        atomic.Int64
	own, tenants []string
	err          error
}

func (s *source) Snapshot(context.Context) (*Snapshot, error) {
	s.asked.Add(1)
	var turns Turns
	turns.Granted(time.Now(), &sched.Grant{})
	turns.Released(time.Now(), &sched.Released{Reason: sched.EndRevoked})
	abc := &api.Container{Id: "abc"}
	return &Snapshot{
		Own: len(s.own),
		Status: &api.StatusResponse{Version: "test", Problems: slices.Concat(s.own, s.tenants), Gpus: []*api.GPU{{
			Uuid: uuid, Name: "Test GPU", MemoryBytes: 1 << 30, Mode: api.Mode_MODE_AUTO,
			Clients: []*api.Client{{Id: 1, Pid: pid, Container: abc}},
			Tenants: []*api.TenantUse{{Container: abc}},
			Memory:  []*api.MemoryAccount{{Container: abc, UsedBytes: 2, LimitBytes: 1}},
			Swap:    &api.Swap{},
		}}},
		Turns: []Turns{turns},
	}, s.err
}

// serve serves until the test ends, and returns the URL.
func serve(t *testing.T, s Source, sample Sampler) string {
	t.Helper()
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	x, err := Listen(Options{Addr: "127.0.0.1:0", Processes: processes, Sample: sample, Log: logrus.NewEntry(logger)}, s)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() { x.Serve(ctx); close(served) }()
	t.Cleanup(func() { cancel(); <-served })
	return "http://" + x.Addr()
}

func get(t *testing.T, url string) (code int, body string) {
	t.Helper()
	client := &http.Client{Timeout: patience}
	defer client.CloseIdleConnections()
	r, err := client.Get(url)
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

// Every name of the list is there, once all of it has happened.
func TestNames(t *testing.T) {
	_, text := get(t, serve(t, &source{}, func(context.Context) ([]GPUSample, error) {
		return []GPUSample{{UUID: uuid, MemoryTotal: 3, MemoryUsed: 2, MemoryFree: 1, Processes: map[uint32]uint64{pid: 1}}}, nil
	})+"/metrics")
	for _, m := range metricNames {
		if !strings.Contains(text, "# TYPE "+m.name+" ") {
			t.Errorf("no %s", m.name)
		}
	}
}

// A driver that hangs, as it does when a GPU fell off the bus, costs its own
// figures only.
func TestDriverHangs(t *testing.T) {
	url := serve(t, &source{}, func(ctx context.Context) ([]GPUSample, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	code, text := get(t, url+"/metrics")
	for _, want := range []string{"\nnvshare_nvml_up 0\n", "\nnvshare_scheduler_healthy 1\n", `nvshare_gpu_memory_total_bytes{gpu_index="0",gpu_uuid="` + uuid + `"} 1.073741824e+09`} {
		if code != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%d, no %q in\n%s", code, want, text)
		}
	}
	if code, text := get(t, url+"/healthz"); code != http.StatusOK || text != "ok\n" {
		t.Errorf("%d %q", code, text)
	}
}

func TestHealth(t *testing.T) {
	s := &source{tenants: []string{"python\x1b[31m\r\u202e \"x\" ü is fenced", "a\nok"}}
	url := serve(t, s, nil)
	if code, text := get(t, url+"/healthz"); code != http.StatusOK || text != `ok
python\x1b[31m\r\u202e "x" ü is fenced
a\nok
` {
		t.Errorf("a tenant's problems: %d %q", code, text)
	}
	s.own, s.tenants = []string{"one", "two"}, nil
	if code, text := get(t, url+"/healthz"); code != http.StatusServiceUnavailable || text != "one\ntwo\n" {
		t.Errorf("with problems: %d %q", code, text)
	}
	s.err = errors.New("it hangs")
	if code, text := get(t, url+"/healthz"); code != http.StatusServiceUnavailable || !strings.Contains(text, "does not answer: it hangs") {
		t.Errorf("without an answer: %d %q", code, text)
	}
	if code, _ := get(t, url+"/metrics"); code != http.StatusInternalServerError {
		t.Errorf("metrics without an answer: %d", code)
	}
}

// Whoever asks too often is told so, and costs the scheduler nothing.
func TestScrapesAreLimited(t *testing.T) {
	s := &source{}
	url := serve(t, s, nil) + "/metrics"
	refused := 0
	began := time.Now()
	const requests = 100
	for range requests {
		if code, _ := get(t, url); code == http.StatusTooManyRequests {
			refused++
		}
	}
	answered := scrapeBurst + scrapeRate*time.Since(began).Seconds() + 1
	if served := requests - refused; float64(served) > answered {
		t.Errorf("%d of %d requests are served in %v", served, requests, time.Since(began))
	}
	if most := time.Since(began).Seconds()/scrapePause.Seconds() + 2; float64(s.asked.Load()) > most {
		t.Errorf("the scheduler is asked %d times in %v", s.asked.Load(), time.Since(began))
	}
}

// However many clients there are, the metrics end somewhere.
func TestBounded(t *testing.T) {
	gpu := &api.GPU{Uuid: uuid}
	const n = processes + 100
	for i := range uint32(n) {
		id := &api.Container{Id: fmt.Sprintf("%064x", i)}
		gpu.Clients = append(gpu.Clients, &api.Client{Id: uint64(i + 1), Container: id})
		gpu.Tenants = append(gpu.Tenants, &api.TenantUse{Container: id})
	}
	s := &scrape{Snapshot: &Snapshot{Status: &api.StatusResponse{Gpus: []*api.GPU{gpu}}, Turns: make([]Turns, 1)}}
	gather := func(processes int) (count map[string]int, leftOut map[string]float64) {
		registry := prometheus.NewPedanticRegistry()
		registry.MustRegister(fixed{s, newDescs(), processes})
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		count, leftOut = map[string]int{}, map[string]float64{}
		for _, f := range families {
			count[f.GetName()] = len(f.Metric)
			for _, m := range f.Metric {
				if f.GetName() == "nvshare_metrics_left_out" {
					leftOut[label(m, "kind")] = m.GetGauge().GetValue()
				}
			}
		}
		return count, leftOut
	}
	count, leftOut := gather(processes)
	if count["nvshare_client_info"] != processes || leftOut["client"] != 100 {
		t.Errorf("%d clients, %v left out", count["nvshare_client_info"], leftOut["client"])
	}
	if count["nvshare_tenant_got_ratio"] != maxMetricTenants || leftOut["tenant"] != n-maxMetricTenants {
		t.Errorf("%d tenants, %v left out", count["nvshare_tenant_got_ratio"], leftOut["tenant"])
	}
	count, _ = gather(0)
	for name, n := range count {
		if strings.HasPrefix(name, "nvshare_client_") {
			t.Errorf("%d of %s, though nobody asked for metrics of processes", n, name)
		}
	}
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.Label {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// fixed collects one scrape.
type fixed struct {
	s         *scrape
	descs     map[string]*prometheus.Desc
	processes int
}

func (f fixed) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range f.descs {
		ch <- d
	}
}

func (f fixed) Collect(ch chan<- prometheus.Metric) {
	(&exposition{ch: ch, descs: f.descs, s: f.s, processes: f.processes}).all()
}

func TestHistogram(t *testing.T) {
	var h histogram
	for _, d := range []time.Duration{0, 10 * time.Microsecond, 11 * time.Microsecond, time.Second, time.Hour} {
		h.add(d)
	}
	count, buckets := h.cumulative()
	if count != 5 || buckets[1e-5] != 2 || buckets[2.5e-5] != 3 || buckets[1] != 4 || buckets[300] != 4 || h.sum != time.Hour+time.Second+21*time.Microsecond {
		t.Errorf("%d %v %v", count, buckets, h.sum)
	}
}
