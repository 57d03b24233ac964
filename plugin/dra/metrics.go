// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"io/fs"
	"path"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
)

// metrics are those that drivers for resource claims have, as NVIDIA's: the names differ
// in their first word, the labels do not differ.
type metrics struct {
	registry *prometheus.Registry
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	inFlight *prometheus.GaugeVec
	errors   map[string]*prometheus.CounterVec // by operation
}

// The operations of the kubelet, as labels.
const (
	opPrepare   = "prepare"
	opUnprepare = "unprepare"
)

// What kinds of errors there are, as labels.
const (
	errRefused = "refused" // the claim cannot be had: wrong, too much, or of another node
	errStorage = "storage" // record or CDI spec could not be written or removed
)

// newMetrics counts from now on. prepared returns the records of prepared claims.
func newMetrics(nodeName string, prepared func() []Record) *metrics {
	of := []string{"driver", "operation"}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "nvshare_dra_requests_total", Help: "Requests of the kubelet that have ended."}, of),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "nvshare_dra_request_duration_seconds", Help: "How long requests of the kubelet took, with what the driver read from the API server.",
			Buckets: []float64{.001, .002, .003, .005, .0075, .01, .015, .02, .025, .03, .035, .04, .045, .05, .06, .075, .1, .15, .25, .5, 1, 2.5, 5, 10}}, of),
		inFlight: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "nvshare_dra_requests_inflight", Help: "Requests of the kubelet that are worked on."}, of),
		errors:   map[string]*prometheus.CounterVec{},
	}
	m.registry.MustRegister(m.requests, m.seconds, m.inFlight)
	for _, kind := range []string{typeGPU, typeMIG} {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "nvshare_dra_prepared_devices", Help: "Shares of devices that are prepared.",
			ConstLabels: prometheus.Labels{"node": nodeName, "driver": DriverName, "device_type": kind}}, func() (n float64) {
			for _, r := range prepared() {
				for _, s := range r.Shares {
					if typeOf(s.GPU) == kind {
						n++
					}
				}
			}
			return n
		}))
	}
	for _, op := range []string{opPrepare, opUnprepare} {
		m.errors[op] = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "nvshare_dra_node_" + op + "_errors_total", Help: "Claims that the driver could not " + op + "."}, []string{"driver", "error_type"})
		m.registry.MustRegister(m.errors[op])
		m.requests.WithLabelValues(DriverName, op)
		for _, kind := range []string{errRefused, errStorage} {
			m.errors[op].WithLabelValues(DriverName, kind)
		}
	}
	return m
}

// intercept counts the kubelet's requests, from their arrival to the answer.
func (m *metrics) intercept(ctx context.Context, request any, call *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	switch path.Base(call.FullMethod) {
	case "NodePrepareResources":
		defer m.begin(opPrepare)()
	case "NodeUnprepareResources":
		defer m.begin(opUnprepare)()
	}
	return handle(ctx, request)
}

// begin counts a request; the function that it returns counts the request's end.
func (m *metrics) begin(op string) (end func()) {
	begin := time.Now()
	m.inFlight.WithLabelValues(DriverName, op).Inc()
	return func() {
		m.inFlight.WithLabelValues(DriverName, op).Dec()
		m.requests.WithLabelValues(DriverName, op).Inc()
		m.seconds.WithLabelValues(DriverName, op).Observe(time.Since(begin).Seconds())
	}
}

// failed counts a claim.
func (m *metrics) failed(op string, err error) {
	kind := errRefused
	if errors.As(err, new(*fs.PathError)) {
		kind = errStorage
	}
	m.errors[op].WithLabelValues(DriverName, kind).Inc()
}
