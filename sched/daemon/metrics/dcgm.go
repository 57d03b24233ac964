// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nvshare/nvshare/sched/api"
)

// Metrics under the names, labels and units of NVIDIA's dcgm-exporter, so that dashboards
// that people have show what each pod gets of a GPU that it shares. A GPU without tenants
// has them without a pod, as dcgm-exporter has it for a GPU that no pod was given.

var dcgmLabels = []string{"gpu", "UUID", "device", "modelName", "Hostname", "DCGM_FI_DRIVER_VERSION", "namespace", "pod", "container"}

var (
	dcgmUtil = prometheus.NewDesc("DCGM_FI_DEV_GPU_UTIL", "Part of the GPU's time that the tenant got, over five seconds (%).", dcgmLabels, nil)
	dcgmUsed = prometheus.NewDesc("DCGM_FI_DEV_FB_USED", "GPU memory that the tenant has (MiB).", dcgmLabels, nil)
	dcgmFree = prometheus.NewDesc("DCGM_FI_DEV_FB_FREE", "GPU memory that the tenant's limit leaves, or, without one, the GPU (MiB).", dcgmLabels, nil)
	dcgmXid  = prometheus.NewDesc("DCGM_FI_DEV_XID_ERRORS", "The latest XID error that ended all work on the GPU; 0: none.", dcgmLabels, nil)

	dcgmDescs = []*prometheus.Desc{dcgmUtil, dcgmUsed, dcgmFree, dcgmXid}
)

// dcgm passes on what the tenants of a GPU have.
func (x *exposition) dcgm(g *api.GPU) {
	host, _ := os.Hostname() // in Kubernetes the pod's: NODE_NAME is better
	if node := os.Getenv("NODE_NAME"); node != "" {
		host = node
	}
	var reserved uint64
	for _, m := range g.Memory {
		reserved += m.UsedBytes
	}
	put := func(d *prometheus.Desc, v float64, of []string) {
		l := append([]string{strconv.Itoa(int(g.Index)), g.Uuid, fmt.Sprintf("nvidia%d", g.Index), g.Name, host, g.GetModel().GetDriverVersion()}, of...)
		x.ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, l...)
	}
	mib := func(bytes uint64) float64 { return float64(bytes >> 20) }
	var xid float64
	if n, ok := strings.CutPrefix(g.Fault, "Xid "); ok {
		_, _ = fmt.Sscanf(n, "%f", &xid) // 0 where it is no number
	}
	seen := map[[3]string]bool{}
	for i, t := range g.Tenants {
		if i == maxMetricTenants {
			return
		}
		of := names(t.Container)
		// Labels that two tenants have would fail the whole scrape. Users have no names here, and
		// engines may have containers of the same name.
		if t.Container.GetId() == "" || seen[[3]string(of)] {
			of[2] = tenantID(t.Container, t.Uid)
		}
		if seen[[3]string(of)] {
			continue // somebody has named a container like another one's id
		}
		seen[[3]string(of)] = true
		used, most := uint64(0), g.MemoryBytes
		left := most - min(reserved, most)
		if m := memoryOf(g, t.Container, t.Uid); m != nil {
			used = m.UsedBytes
			if m.LimitBytes != 0 {
				left = m.LimitBytes - min(used, m.LimitBytes)
			}
		}
		put(dcgmUtil, float64(t.GotPermille)/10, of)
		put(dcgmUsed, mib(used), of)
		put(dcgmFree, mib(left), of)
		put(dcgmXid, xid, of)
	}
	if len(g.Tenants) > 0 {
		return
	}
	nobody := []string{"", "", ""}
	if s := x.s.samples[g.Uuid]; s != nil {
		if s.Utilization >= 0 {
			put(dcgmUtil, 100*s.Utilization, nobody)
		}
		put(dcgmUsed, mib(s.MemoryUsed), nobody)
		put(dcgmFree, mib(s.MemoryFree), nobody)
	}
	put(dcgmXid, xid, nobody)
}
