//go:build k8s

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/node"
)

// driverMetrics reads the driver's metrics, by series.
func driverMetrics(ctx context.Context) (map[string]float64, error) {
	pod, err := get(ctx, systemPodsPath, "{.items[0].metadata.name}")
	if err != nil {
		return nil, err
	}
	return scrape(ctx, systemPodsPath+"/"+pod+":9403/proxy/metrics")
}

func scrape(ctx context.Context, path string) (map[string]float64, error) {
	text, err := get(ctx, path, "")
	if err != nil {
		return nil, err
	}
	values := map[string]float64{}
	for line := range strings.Lines(text) {
		if i := strings.LastIndexByte(line, ' '); i > 0 && line[0] != '#' {
			if values[line[:i]], err = strconv.ParseFloat(strings.TrimSpace(line[i:]), 64); err != nil {
				return nil, err
			}
		}
	}
	return values, nil
}

// The driver counts the kubelet's requests, under the names that such drivers have.
func draMetrics(t *testing.T) {
	ctx := within(t)
	const (
		prepared  = `nvshare_dra_prepared_devices{device_type="gpu",driver="nvshare.com",node="node1"}`
		requests  = `nvshare_dra_requests_total{driver="nvshare.com",operation="%s"}`
		count     = `nvshare_dra_request_duration_seconds_count{driver="nvshare.com",operation="%s"}`
		sum       = `nvshare_dra_request_duration_seconds_sum{driver="nvshare.com",operation="%s"}`
		inFlight  = `nvshare_dra_requests_inflight{driver="nvshare.com",operation="%s"}`
		errorKind = `nvshare_dra_node_%s_errors_total{driver="nvshare.com",error_type="%s"}`
	)
	var before map[string]float64
	await(t, ctx, "metrics", func() (err error) {
		before, err = driverMetrics(ctx)
		return err
	})
	awaitMetrics := func(operation string, devices float64) {
		t.Helper()
		of := func(name string) string { return fmt.Sprintf(name, operation) }
		await(t, ctx, "the metrics of "+operation, func() error {
			now, err := driverMetrics(ctx)
			if err != nil {
				return err
			}
			for _, kind := range []string{"refused", "storage"} {
				name := fmt.Sprintf(errorKind, operation, kind)
				if n, ok := now[name]; !ok || n != before[name] {
					err = errors.Join(err, fmt.Errorf("%s is %v (%v), was %v", name, n, ok, before[name]))
				}
			}
			for name, ok := range map[string]bool{
				prepared: now[prepared] == before[prepared]+devices, of(requests): now[of(requests)] > before[of(requests)],
				of(count): now[of(count)] == now[of(requests)], of(sum): now[of(sum)] > before[of(sum)], of(inFlight): now[of(inFlight)] == 0,
			} {
				if _, known := now[name]; !known || !ok {
					err = errors.Join(err, fmt.Errorf("%s is %v (%v), was %v", name, now[name], known, before[name]))
				}
			}
			return err
		})
	}
	_, err := cluster.Apply(ctx, part("counted", "40", ""), "apply")
	check(t, err)
	ready(t, ctx, "counted")
	awaitMetrics("prepare", 1)
	kubectl(t, ctx, "delete", "pod", "counted", "--timeout="+patience.String())
	noClaims(t, ctx)
	awaitMetrics("unprepare", 0)
}

// latency logs how long the kubelet waited for the driver to prepare claims, with the reading
// of the claims from the real API server, by the driver's own metrics and by those of the
// kubelet, which has no finer ones.
func latency(t *testing.T, ctx context.Context) {
	t.Helper()
	driver, err := driverMetrics(ctx)
	check(t, err)
	const prefix, suffix = `nvshare_dra_request_duration_seconds_bucket{driver="nvshare.com",operation="prepare",le="`, `"}`
	took := map[float64]float64{}
	for name, n := range driver {
		if le, ok := strings.CutPrefix(name, prefix); ok {
			bound, err := strconv.ParseFloat(strings.TrimSuffix(le, suffix), 64)
			check(t, err)
			took[bound] = n
		}
	}
	t.Logf("driver: of %v requests to prepare, %v took 50 ms at most; p50 %.1f ms, p90 %.1f ms, p99 %.1f ms", took[math.Inf(1)], took[0.05],
		1000*quantile(took, 0.5), 1000*quantile(took, 0.9), 1000*quantile(took, 0.99))
	kubelet, err := scrape(ctx, nodesPath+"/"+node.KubeNode+"/proxy/metrics")
	check(t, err)
	const grpc = `dra_grpc_operations_duration_seconds_%s{driver_name="nvshare.com",grpc_status_code="OK",method_name="/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"%s}`
	n := kubelet[fmt.Sprintf(grpc, "count", "")]
	t.Logf("kubelet: of %v requests to prepare, %v took 100 ms at most; mean %.1f ms", n, kubelet[fmt.Sprintf(grpc, "bucket", `,le="0.1"`)], 1000*kubelet[fmt.Sprintf(grpc, "sum", "")]/n)
}

// quantile returns a quantile of a histogram with these cumulative buckets, with a straight
// line within a bucket.
func quantile(buckets map[float64]float64, q float64) float64 {
	bounds := slices.Sorted(maps.Keys(buckets))
	want, low, below := q*buckets[math.Inf(1)], 0.0, 0.0
	for _, high := range bounds {
		if n := buckets[high]; n >= want {
			if math.IsInf(high, 1) || n == below {
				return low
			}
			return low + (high-low)*(want-below)/(n-below)
		}
		low, below = high, buckets[high]
	}
	return low
}
