// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/sirupsen/logrus"
	"golang.org/x/net/netutil"
	"golang.org/x/time/rate"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/api"
)

const (
	// scrapeTimeout is how long the scheduler may take to answer, sampleTimeout the
	// driver, which hangs when a GPU does. Prometheus gives up after 10 s.
	scrapeTimeout = 5 * time.Second
	sampleTimeout = 2 * time.Second
	// scrapeRate and scrapeBurst bound the requests that are answered: anybody
	// who reaches the port can ask. scrapeConns bounds their connections.
	scrapeRate  = 5 // per second
	scrapeBurst = 20
	scrapeConns = 16 // of the descriptors that the scheduler keeps from tenants
	// scrapePause is how old an answer may be that serves for the next
	// request too.
	scrapePause = 500 * time.Millisecond
)

// GPUSample is what the driver says of a GPU, just now.
type GPUSample struct {
	UUID string
	// From 0 to 1, negative if the driver does not say.
	Utilization       float64 // part of the time in which a kernel ran
	MemoryUtilization float64 // part of the time in which its memory was read or written
	// 0 if the driver does not say.
	Watts, Celsius uint32
	// Bytes, all 0 if the driver does not say.
	MemoryTotal, MemoryUsed, MemoryFree uint64
	// Processes are those that use the GPU, with the bytes of its memory that
	// they have (0: unknown), by pid. Nil if the driver does not say.
	Processes map[uint32]uint64
	// Draws are those of them that use it for graphics only, as a desktop does.
	Draws map[uint32]bool
	// Busy is which part of the GPU's time processes had lately, by pid, from 0 to 1: the mean
	// of the periods, of a second at most, that ended since the Sample before and in which somebody
	// used it. Nil if the driver does not say.
	Busy map[uint32]float64
	// Faults counts what ended all work on the GPU, since the first sample; Fault is the
	// latest.
	Faults uint64
	Fault  string
}

// Sampler asks the driver about all GPUs.
type Sampler func(ctx context.Context) ([]GPUSample, error)

// Traffic counts what tenants do, since the scheduler's start.
type Traffic struct {
	Bypasses      uint64 // programs that began to use GPUs, and whose self-proof failed
	UnloggedLines uint64 // lines of log that tenants caused and that were too many
}

// Snapshot is what the scheduler knows at one instant.
type Snapshot struct {
	Status  *api.StatusResponse
	Own     int     // so many of Status.Problems, the first, tenants cannot cause
	Turns   []Turns // by GPU, as in Status
	Traffic Traffic
	Managed map[uint32]bool // pids of clients, and of what runs on GPUs for them
}

// Source is the scheduler, as far as metrics need it. Snapshot waits for its loop until ctx is
// done.
type Source interface {
	Snapshot(ctx context.Context) (*Snapshot, error)
}

// Exporter serves /metrics and /healthz.
type Exporter struct {
	source    Source
	sample    Sampler // nil: the driver is not asked
	processes int
	dcgm      bool
	log       *logrus.Entry
	listener  net.Listener
	rate      *rate.Limiter
	descs     map[string]*prometheus.Desc

	mu        sync.Mutex
	latest    *scrape
	sampleErr string // of the latest sample; "": none
}

// scrape is what one round of questions found out.
type scrape struct {
	*Snapshot
	at      time.Time
	samples map[string]*GPUSample // by UUID
	sampled bool                  // the driver answered
}

// Options configure an Exporter.
type Options struct {
	Addr string // host:port
	// Processes is how many clients have metrics of their own. A tenant that starts
	// many processes in a row makes a new series of each metric for each of them.
	Processes int
	DCGM      bool    // also under the names of dcgm-exporter
	Sample    Sampler // nil: the driver is not asked
	Log       *logrus.Entry
}

// Listen opens the port. The caller calls Serve or Close.
func Listen(o Options, source Source) (*Exporter, error) {
	l, err := net.Listen("tcp", o.Addr)
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w (choose another address with --metrics-addr)", err)
	}
	return &Exporter{
		source: source, sample: o.Sample, processes: o.Processes, dcgm: o.DCGM, log: o.Log,
		listener: netutil.LimitListener(l, scrapeConns),
		rate:     rate.NewLimiter(scrapeRate, scrapeBurst),
		descs:    newDescs(),
	}, nil
}

// Addr is where the Exporter listens.
func (x *Exporter) Addr() string { return x.listener.Addr().String() }

// Close closes the port, if Serve is not called.
func (x *Exporter) Close() { x.listener.Close() }

// Serve answers until ctx is done.
func (x *Exporter) Serve(ctx context.Context) {
	lines := log.New(debugLines{x.log}, "", 0)
	registry := prometheus.NewRegistry()
	registry.MustRegister(x,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog:       lines,
		ErrorHandling:  promhttp.HTTPErrorOnError,
		CoalesceGather: true,
		Timeout:        2 * scrapeTimeout,
	}))
	mux.HandleFunc("GET /healthz", x.health)
	server := &http.Server{
		Handler:        x.limit(mux),
		ReadTimeout:    scrapeTimeout,
		WriteTimeout:   3 * scrapeTimeout,
		IdleTimeout:    4 * scrapeTimeout,
		MaxHeaderBytes: 16 << 10,
		ErrorLog:       lines,
		BaseContext:    func(net.Listener) context.Context { return ctx },
	}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	x.log.Infof("metrics: http://%s/metrics", x.Addr())
	if err := server.Serve(x.listener); err != nil && ctx.Err() == nil {
		x.log.WithError(err).Error("metrics: no longer served")
	}
}

func (x *Exporter) limit(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !x.rate.Allow() {
			w.Header().Set("Retry-After", "1")
			http.Error(w, "too many requests", http.StatusTooManyRequests)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// debugLines are what the HTTP server has to say: whoever asks can cause it.
type debugLines struct{ *logrus.Entry }

func (l debugLines) Write(b []byte) (int, error) {
	l.Debugf("metrics: %s", bytes.TrimSpace(b))
	return len(b), nil
}

// health says ok and the problems of tenants, or with status 503 what is wrong with
// the scheduler. Tenants choose names of programs, so no control character passes.
func (x *Exporter) health(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), scrapeTimeout)
	defer cancel()
	s, err := x.source.Snapshot(ctx)
	status, lines := http.StatusServiceUnavailable, []string(nil)
	switch {
	case err != nil:
		lines = []string{fmt.Sprintf("the scheduler does not answer: %v", err)}
	case s.Own > 0:
		lines = s.Status.Problems
	default:
		status, lines = http.StatusOK, append([]string{"ok"}, s.Status.Problems...)
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	for _, line := range lines {
		_, _ = fmt.Fprintln(w, printable(line))
	}
}

// printable escapes what a terminal would obey.
func printable(s string) string {
	quoted := strconv.QuoteToGraphic(s)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}

// scrape asks the driver, and the scheduler once.
func (x *Exporter) scrape() (*scrape, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.latest != nil && time.Since(x.latest.at) < scrapePause {
		return x.latest, nil
	}
	s := &scrape{}
	s.samples, s.sampled = x.askDriver()
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	var err error
	if s.Snapshot, err = x.source.Snapshot(ctx); err != nil {
		return nil, err
	}
	s.at = time.Now()
	x.latest = s
	return s, nil
}

// askDriver asks the driver; false: it does not answer.
func (x *Exporter) askDriver() (map[string]*GPUSample, bool) {
	if x.sample == nil {
		return nil, false
	}
	ctx, cancel := context.WithTimeout(context.Background(), sampleTimeout)
	defer cancel()
	samples, err := x.sample(ctx)
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != x.sampleErr && err != nil {
		x.log.WithError(err).Warn("metrics: the driver says nothing about GPUs")
	}
	x.sampleErr = text
	byUUID := make(map[string]*GPUSample, len(samples))
	for i := range samples {
		byUUID[samples[i].UUID] = &samples[i]
	}
	return byUUID, err == nil
}

// Collect is the prometheus.Collector's.
func (x *Exporter) Collect(ch chan<- prometheus.Metric) {
	s, err := x.scrape()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(x.descs["nvshare_scheduler_healthy"], errors.Join(errors.New("the scheduler does not answer"), err))
		return
	}
	e := &exposition{ch: ch, descs: x.descs, s: s, processes: x.processes}
	e.all()
	if x.dcgm {
		for _, g := range s.Status.Gpus {
			e.dcgm(g)
		}
	}
}

// Describe is the prometheus.Collector's.
func (x *Exporter) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range dcgmDescs {
		ch <- d
	}
	for _, d := range x.descs {
		ch <- d
	}
}

// turnBounds are the upper bounds of the histograms' buckets, each inclusive.
var turnBounds = [...]time.Duration{
	10 * time.Microsecond, 25 * time.Microsecond, 50 * time.Microsecond,
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond, 5 * time.Second,
	10 * time.Second, 30 * time.Second, time.Minute, 5 * time.Minute,
}

// histogram counts durations. The scheduler's loop adds to it at each turn, so it
// is cheaper than one of the Prometheus library, and no other goroutine sees it.
type histogram struct {
	counts [len(turnBounds) + 1]uint64 // the last one: longer than all bounds
	sum    time.Duration
	exact  account.Spread // for the status, whose percentiles want smaller steps
}

func (h *histogram) add(d time.Duration) {
	i := 0
	for i < len(turnBounds) && d > turnBounds[i] {
		i++
	}
	h.counts[i]++
	h.sum += d
	h.exact.Add(d)
}

// cumulative returns what Prometheus wants: how many durations in all, and by
// bound (in seconds) how many up to it.
func (h *histogram) cumulative() (count uint64, buckets map[float64]uint64) {
	buckets = make(map[float64]uint64, len(turnBounds))
	for i, bound := range turnBounds {
		count += h.counts[i]
		buckets[bound.Seconds()] = count
	}
	return count + h.counts[len(turnBounds)], buckets
}

// Turns sums up the turns of one GPU since the scheduler's start.
type Turns struct {
	wait, drain, handOver histogram
	ended                 time.Time // of the latest grant that has ended; zero after the next grant
}

// Granted counts a grant.
func (s *Turns) Granted(t time.Time, a *sched.Grant) {
	s.wait.add(a.Waited)
	if a.Latency || a.Beside {
		return
	}
	// A hand-over only if it was waited for: otherwise the GPU was free.
	if gap := t.Sub(s.ended); !s.ended.IsZero() && gap <= a.Waited {
		s.handOver.add(gap)
	}
	s.ended = time.Time{}
}

// Released counts a grant that has ended.
func (s *Turns) Released(t time.Time, a *sched.Released) {
	if a.Fenced { // others had the GPU meanwhile
		return
	}
	if a.Drained != 0 {
		s.drain.add(a.Drained)
	}
	s.ended = t
}

// Fill tells what turns took.
func (s *Turns) Fill(g *api.GPU) {
	g.Drains, g.HandOvers, g.Waits = Spread(&s.drain.exact), Spread(&s.handOver.exact), Spread(&s.wait.exact)
}

// Spread tells what was counted.
func Spread(s *account.Spread) *api.Spread {
	return &api.Spread{Count: s.Count(), P50Ns: int64(s.Percentile(50)), P99Ns: int64(s.Percentile(99))}
}
