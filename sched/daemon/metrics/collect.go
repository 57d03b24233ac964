// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// maxMetricTenants is how many tenants, over all GPUs, have metrics of their own;
// nvshare_metrics_left_out counts the rest.
const maxMetricTenants = 512

// exposition turns a scrape into metrics. metricNames has their names.
type exposition struct {
	ch               chan<- prometheus.Metric
	descs            map[string]*prometheus.Desc
	s                *scrape
	processes        int // how many clients may have metrics of their own
	clients, tenants int // so far
}

// put passes on one value. Names that end in _total are counters.
func (x *exposition) put(name string, v float64, labels ...string) {
	kind := prometheus.GaugeValue
	if strings.HasSuffix(name, "_total") {
		kind = prometheus.CounterValue
	}
	x.ch <- prometheus.MustNewConstMetric(x.descs[name], kind, v, labels...)
}

// putAll passes on each metric that is a value of things like this one.
func putAll[T any](x *exposition, of T, labels ...string) {
	for _, m := range metricNames {
		if value, ok := m.value.(func(T) float64); ok {
			x.put(m.name, value(of), labels...)
		}
	}
}

// What metrics are of, beside the parts of the status.
type (
	gpuFigures struct {
		*api.GPU
		states   map[api.ClientState]int
		running  int
		reserved uint64
	}
	gpuSwap  struct{ *api.Swap }
	nodeSwap struct{ *api.Swap }
)

func (x *exposition) histogram(name string, h *histogram, labels ...string) {
	count, buckets := h.cumulative()
	x.ch <- prometheus.MustNewConstHistogram(x.descs[name], count, h.sum.Seconds(), buckets, labels...)
}

func (x *exposition) all() {
	r := x.s.Status
	for i, g := range r.Gpus {
		x.gpu(g, &x.s.Turns[i])
		x.sample(g)
		if x.processes > 0 {
			for _, c := range g.Clients {
				x.client(g, c)
			}
		}
		x.tenantsOf(g)
	}
	if i := slices.IndexFunc(r.Gpus, func(g *api.GPU) bool { return g.Swap != nil }); i >= 0 { // each says the same of the node
		putAll(x, nodeSwap{r.Gpus[i].Swap})
	}
	putAll(x, x.s)
	x.put("nvshare_warden_info", number(r.Warden), r.WardenProblem)
	x.put("nvshare_build_info", 1, r.Version)
	x.put("nvshare_metrics_left_out", float64(max(x.clients-x.processes, 0)), "client")
	x.put("nvshare_metrics_left_out", float64(max(x.tenants-maxMetricTenants, 0)), "tenant")
}

func (x *exposition) gpu(g *api.GPU, turns *Turns) {
	gpu := []string{g.Uuid, strconv.Itoa(int(g.Index))}
	with := func(more ...string) []string { return append(gpu[:2:2], more...) }
	x.put("nvshare_gpu_info", 1, with(g.Name)...)
	x.put("nvshare_gpu_mode", 1, with(modeLabel(g.Mode), modeLabel(cmp.Or(g.EffectiveMode, g.Mode)))...)
	x.put("nvshare_gpu_way", 1, with(g.Way)...)

	sums := &gpuFigures{GPU: g, states: map[api.ClientState]int{}}
	for _, c := range g.Clients {
		sums.states[c.State]++
		switch c.State {
		case api.ClientState_CLIENT_STATE_HOLDING, api.ClientState_CLIENT_STATE_DRAINING, api.ClientState_CLIENT_STATE_LOST:
			sums.running++
		}
	}
	for n := range api.ClientState_name {
		state := api.ClientState(n)
		if state == api.ClientState_CLIENT_STATE_UNSPECIFIED {
			continue
		}
		name := strings.ToLower(strings.TrimPrefix(state.String(), "CLIENT_STATE_"))
		x.put("nvshare_gpu_clients", float64(sums.states[state]), with(name)...)
	}
	for _, m := range g.Memory {
		sums.reserved += m.UsedBytes
	}
	putAll(x, sums, gpu...)
	x.swap(g)
	x.histogram("nvshare_gpu_wait_seconds", &turns.wait, gpu...)
	x.histogram("nvshare_gpu_drain_seconds", &turns.drain, gpu...)
	x.histogram("nvshare_gpu_handover_seconds", &turns.handOver, gpu...)
}

// sample passes on what the driver says.
func (x *exposition) sample(g *api.GPU) {
	gpu := []string{g.Uuid, strconv.Itoa(int(g.Index))}
	s := x.s.samples[g.Uuid]
	x.put("nvshare_gpu_sampler_up", number(s != nil), gpu...)
	if s == nil {
		if g.MemoryBytes != 0 {
			x.put("nvshare_gpu_memory_total_bytes", float64(g.MemoryBytes), gpu...)
		}
		return
	}
	if s.MemoryTotal != 0 {
		x.put("nvshare_gpu_memory_total_bytes", float64(s.MemoryTotal), gpu...)
		x.put("nvshare_gpu_memory_used_bytes", float64(s.MemoryUsed), gpu...)
	}
	if s.Utilization >= 0 {
		x.put("nvshare_gpu_utilization_ratio", s.Utilization, gpu...)
	}
	if s.MemoryUtilization >= 0 {
		x.put("nvshare_gpu_memory_utilization_ratio", s.MemoryUtilization, gpu...)
	}
	if s.Processes != nil {
		unmanaged := 0
		for pid := range s.Processes {
			if !x.s.Managed[pid] {
				unmanaged++
			}
		}
		x.put("nvshare_gpu_processes", float64(len(s.Processes)), gpu...)
		x.put("nvshare_gpu_unmanaged_processes", float64(unmanaged), gpu...)
	}
}

func (x *exposition) client(g *api.GPU, c *api.Client) {
	if x.clients++; x.clients > x.processes {
		return
	}
	l := append(names(c.Container), strconv.FormatUint(c.Id, 10), g.Uuid)
	x.put("nvshare_client_info", 1, append(l[:5:5], strconv.Itoa(int(g.Index)), strconv.Itoa(int(c.Pid)))...)
	putAll(x, c, l...)
}

func (x *exposition) tenantsOf(g *api.GPU) {
	for _, t := range g.Tenants {
		if x.tenants++; x.tenants > maxMetricTenants {
			continue
		}
		l := append(names(t.Container), tenantID(t.Container, t.Uid), g.Uuid)
		putAll(x, t, l...)
		if g.Swap != nil {
			x.put("nvshare_tenant_moving_seconds_total", seconds(t.MovedNs), l...)
		}
		if m := memoryOf(g, t.Container, t.Uid); m != nil {
			x.put("nvshare_tenant_memory_reserved_bytes", float64(m.UsedBytes), l...)
			if m.LimitBytes != 0 {
				x.put("nvshare_tenant_memory_limit_bytes", float64(m.LimitBytes), l...)
			}
		}
	}
}

// names are the first three of clientLabels and tenantLabels.
func names(c *api.Container) []string {
	return []string{
		strings.ToValidUTF8(c.GetNamespace(), "?"),
		strings.ToValidUTF8(c.GetPod(), "?"),
		strings.ToValidUTF8(cmp.Or(c.GetName(), fmt.Sprintf("%.12s", c.GetId())), "?"),
	}
}

func tenantID(c *api.Container, uid uint32) string {
	return cmp.Or(c.GetId(), peer.AccountOfUser(uid))
}

// sameTenant reports whether a container, or a user outside containers, is
// that of a client.
func sameTenant(c *api.Container, uid uint32, of *api.Container, ofUID uint32) bool {
	return c.GetId() == of.GetId() && (c.GetId() != "" || uid == ofUID)
}

func memoryOf(g *api.GPU, c *api.Container, uid uint32) *api.MemoryAccount {
	for _, m := range g.Memory {
		if sameTenant(m.Container, m.Uid, c, uid) {
			return m
		}
	}
	return nil
}

func modeLabel(m api.Mode) string {
	return strings.ToLower(strings.TrimPrefix(m.String(), "MODE_"))
}

func number(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

func seconds(ns int64) float64 { return time.Duration(ns).Seconds() }

// swap passes on the figures of a GPU whose memory is swapped.
func (x *exposition) swap(g *api.GPU) {
	s := g.Swap
	if s == nil {
		return
	}
	gpu := []string{g.Uuid, strconv.Itoa(int(g.Index))}
	putAll(x, gpuSwap{s}, gpu...)
	for direction, d := range map[string]struct {
		bytes uint64
		took  int64
	}{"out": {s.OutBytes, s.OutNs}, "in": {s.InBytes, s.InNs}} {
		l := append(gpu[:2:2], direction)
		x.put("nvshare_gpu_swap_bytes_total", float64(d.bytes), l...)
		x.put("nvshare_gpu_swap_seconds_total", seconds(d.took), l...)
	}
}

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
