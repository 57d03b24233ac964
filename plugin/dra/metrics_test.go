// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"os"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	resourceapi "k8s.io/api/resource/v1"
)

// Dashboards of drivers for resource claims find their figures.
func TestMetrics(t *testing.T) {
	dir := shortDir(t)
	fits, tooMuch, noSpec := claimOf(uid(1), part(name0, "s1", "40", "20Gi"), part(name1, "s2", "40", "20Gi")), claimOf(uid(2), part(name0, "s1", "70", "")), claimOf(uid(4), part(name1, "s4", "10", ""))
	for _, c := range []*resourceapi.ResourceClaim{fits, tooMuch, noSpec} {
		c.Name = string(c.UID)
	}
	s := serve(t, dir, fits, tooMuch, noSpec)
	defer s.stop()
	check(t, s.prepare(fits))
	if s.prepare(tooMuch) == nil {
		t.Error("110 % of a GPU are prepared")
	}
	check(t, s.unprepare(claimOf(uid(3))))
	d := s.Driver
	check(t, os.RemoveAll(d.CDIDir))
	check(t, os.WriteFile(d.CDIDir, nil, 0o644))
	if s.prepare(noSpec) == nil {
		t.Error("prepared without a directory for CDI specs")
	}
	want := `# HELP nvshare_dra_node_prepare_errors_total Claims that the driver could not prepare.
# TYPE nvshare_dra_node_prepare_errors_total counter
nvshare_dra_node_prepare_errors_total{driver="nvshare.com",error_type="refused"} 1
nvshare_dra_node_prepare_errors_total{driver="nvshare.com",error_type="storage"} 1
# HELP nvshare_dra_prepared_devices Shares of devices that are prepared.
# TYPE nvshare_dra_prepared_devices gauge
nvshare_dra_prepared_devices{device_type="gpu",driver="nvshare.com",node="n0"} 3
nvshare_dra_prepared_devices{device_type="mig",driver="nvshare.com",node="n0"} 0
# HELP nvshare_dra_requests_inflight Requests of the kubelet that are worked on.
# TYPE nvshare_dra_requests_inflight gauge
nvshare_dra_requests_inflight{driver="nvshare.com",operation="prepare"} 0
nvshare_dra_requests_inflight{driver="nvshare.com",operation="unprepare"} 0
# HELP nvshare_dra_requests_total Requests of the kubelet that have ended.
# TYPE nvshare_dra_requests_total counter
nvshare_dra_requests_total{driver="nvshare.com",operation="prepare"} 3
nvshare_dra_requests_total{driver="nvshare.com",operation="unprepare"} 1
`
	if err := testutil.GatherAndCompare(d.metrics.registry, strings.NewReader(want), "nvshare_dra_node_prepare_errors_total", "nvshare_dra_prepared_devices", "nvshare_dra_requests_inflight", "nvshare_dra_requests_total"); err != nil {
		t.Error(err)
	}
	if n, err := testutil.GatherAndCount(d.metrics.registry, "nvshare_dra_request_duration_seconds"); err != nil || n != 2 {
		t.Errorf("%d durations, %v", n, err)
	}
}
