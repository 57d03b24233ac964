// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/nvshare/nvshare/sched/api"
)

// Labels. A client is a process on one GPU, a tenant its container or, outside
// containers, its user. A process chooses none of these; the names come from
// the container engine.
var (
	gpuLabels    = []string{"gpu_uuid", "gpu_index"}
	clientLabels = []string{"namespace", "pod", "container", "client_id", "gpu_uuid"}
	tenantLabels = []string{"namespace", "pod", "container", "tenant", "gpu_uuid"}
)

// metricName describes one metric.
type metricName struct {
	name   string
	labels []string
	help   string
	value  any // of a thing of one type: a func(T) float64, for putAll; nil: collect.go puts it
}

// metricNames are all metrics of ours. Those that nvshare's fork (luogangyi) has, too, have its
// names and mean the same.
var metricNames = []metricName{
	{"nvshare_gpu_info", append(gpuLabels[:2:2], "gpu_name"), "A GPU of this node; always 1.", nil},
	{"nvshare_gpu_memory_total_bytes", gpuLabels, "Memory of the GPU.", nil},
	{"nvshare_gpu_memory_used_bytes", gpuLabels, "Memory in use on the GPU, by whomever, as NVML says.", nil},
	{"nvshare_gpu_utilization_ratio", gpuLabels, "Part of the latest moment in which a kernel ran, as NVML says, 0 to 1.", nil},
	{"nvshare_gpu_memory_utilization_ratio", gpuLabels, "Part of the latest moment in which the GPU's memory was read or written, as NVML says, 0 to 1.", nil},
	{"nvshare_gpu_processes", gpuLabels, "Processes that use the GPU, as NVML says.", nil},
	{"nvshare_gpu_unmanaged_processes", gpuLabels, "Processes that use the GPU and are no clients of the scheduler: nvshare does not schedule their work.", nil},
	{"nvshare_gpu_sampler_up", gpuLabels, "1 if NVML answered for this GPU.", nil},
	{"nvshare_nvml_up", nil, "1 if NVML answers.", func(s *scrape) float64 { return number(s.sampled) }},

	{"nvshare_gpu_mode", append(gpuLabels[:2:2], "set", "effective"), "How clients share the GPU, as it was set and as it is; always 1.", nil},
	{"nvshare_gpu_way", append(gpuLabels[:2:2], "way"), "How clients share the GPU now: turns, slices, driver (at the same time, by the driver's own time slices); always 1.", nil},
	{"nvshare_gpu_drained", gpuLabels, "1 while the GPU admits no new tenants (nvsharectl drain).", func(g *gpuFigures) float64 { return number(g.Drained) }},
	{"nvshare_gpu_migrations_total", gpuLabels, "Tenants that have moved to the GPU from others (nvsharectl migrate, drain).", func(g *gpuFigures) float64 { return float64(g.Migrations) }},
	{"nvshare_gpu_clients", append(gpuLabels[:2:2], "state"), "Clients of the GPU by what they do.", nil},
	{"nvshare_gpu_memory_reserved_bytes", gpuLabels, "Memory that clients have reserved.", func(g *gpuFigures) float64 { return float64(g.reserved) }},
	{"nvshare_gpu_grants_total", gpuLabels, "Grants given.", func(g *gpuFigures) float64 { return float64(g.Grants) }},
	{"nvshare_gpu_fences_total", gpuLabels, "Clients that did not release the GPU within the grace period.", func(g *gpuFigures) float64 { return float64(g.Fences) }},
	{"nvshare_gpu_oom_kills_total", gpuLabels, "Processes without the shim that nvshare-warden killed, because their tenant was above its memory limit.", func(g *gpuFigures) float64 { return float64(g.OomKills) }},
	{"nvshare_gpu_preemptions_total", gpuLabels, "Grants that ended with work left, which went on with the next one.", func(g *gpuFigures) float64 { return float64(g.Preemptions) }},
	{"nvshare_gpu_wait_seconds", gpuLabels, "From a client's request to its grant.", nil},
	{"nvshare_gpu_drain_seconds", gpuLabels, "From a revoke to the release.", nil},
	{"nvshare_gpu_handover_seconds", gpuLabels, "From a release to the next grant, if that was waited for: the scheduler's own part of a hand-over.", nil},

	{"nvshare_gpu_swap_capacity_bytes", gpuLabels, "What clients may have on the GPU together; absent if nothing is swapped.", func(s gpuSwap) float64 { return float64(s.CapacityBytes) }},
	{"nvshare_gpu_swap_promised_bytes", gpuLabels, "What clients have reserved, on the GPU or away.", func(s gpuSwap) float64 { return float64(s.PromisedBytes) }},
	{"nvshare_gpu_swap_resident_bytes", gpuLabels, "What clients have on the GPU.", func(s gpuSwap) float64 { return float64(s.ResidentBytes) }},
	{"nvshare_gpu_swap_away_bytes", gpuLabels, "What clients have in host memory, or never used.", func(s gpuSwap) float64 { return float64(s.AwayBytes) }},
	{"nvshare_gpu_swap_bytes_total", append(gpuLabels[:2:2], "direction"), "Memory moved.", nil},
	{"nvshare_gpu_swap_seconds_total", append(gpuLabels[:2:2], "direction"), "Time that clients took to move memory.", nil},
	{"nvshare_gpu_swap_share_ratio", gpuLabels, "Part of the time that moving memory may take, 0 to 1; 0: turns are as long as the time quantum says.", func(s gpuSwap) float64 { return float64(s.SharePercent) / 100 }},
	{"nvshare_gpu_swap_refused_reservations_total", gpuLabels, "Reservations refused because there was no place, on the GPU or in host memory.", func(s gpuSwap) float64 { return float64(s.Refused) }},
	{"nvshare_gpu_suspends_total", gpuLabels, "Times that a process was suspended, by nvsharectl suspend or because it was idle (--suspend-after).", func(s gpuSwap) float64 { return float64(s.Suspends) }},
	{"nvshare_gpu_suspended_clients", gpuLabels, "Processes that are suspended now.", func(s gpuSwap) float64 { return float64(s.Suspended) }},
	{"nvshare_arena_bytes", nil, "Host memory that there may be for what is away, of all GPUs.", func(s nodeSwap) float64 { return float64(s.ArenaLimitBytes) }},
	{"nvshare_arena_used_bytes", nil, "Of that, what clients were given.", func(s nodeSwap) float64 { return float64(s.ArenaUsedBytes) }},
	{"nvshare_arena_file_bytes", nil, "What is away of suspended clients in files, and takes no host memory (--suspend-dir).", func(s nodeSwap) float64 { return float64(s.ArenaFileBytes) }},

	{"nvshare_tenant_moving_seconds_total", tenantLabels, "Time that it had the GPU to move memory onto it, which is not billed.", nil},

	{"nvshare_client_info", append(clientLabels[:5:5], "gpu_index", "host_pid"), "A process that uses the GPU through the shim; always 1.", nil},
	{"nvshare_client_managed_allocated_bytes", clientLabels, "GPU memory that the process has allocated through the shim.", func(c *api.Client) float64 { return float64(c.MemoryBytes) }},

	{"nvshare_tenant_promised_ratio", tenantLabels, "Part of the GPU's time that it gets if it wants it, 0 to 1.", func(t *api.TenantUse) float64 { return float64(t.PromisedPermille) / 1000 }},
	{"nvshare_tenant_got_ratio", tenantLabels, "Part of the GPU's time that it got, over five seconds, 0 to 1.", func(t *api.TenantUse) float64 { return float64(t.GotPermille) / 1000 }},
	{"nvshare_tenant_used_seconds_total", tenantLabels, "GPU time that it was billed.", func(t *api.TenantUse) float64 { return seconds(t.UsedNs) }},
	{"nvshare_tenant_debt_seconds", tenantLabels, "GPU time that it used above its limit and has to make up for.", func(t *api.TenantUse) float64 { return seconds(t.DebtNs) }},
	{"nvshare_tenant_throttled_seconds", tenantLabels, "Time until its limit lets it go on; 0: it does.", func(t *api.TenantUse) float64 { return seconds(t.ThrottledNs) }},
	{"nvshare_tenant_waited_ratio", tenantLabels, "Part of the latest five seconds in which it wanted the GPU and had no grant, 0 to 1.", func(t *api.TenantUse) float64 { return float64(t.WaitedPermille) / 1000 }},
	{"nvshare_tenant_out_of_memory_total", tenantLabels, "Reservations of GPU memory that its memory limit refused, while it has processes.", func(t *api.TenantUse) float64 { return float64(t.OutOfMemory) }},
	{"nvshare_tenant_grants_total", tenantLabels, "Grants that its processes were given.", func(t *api.TenantUse) float64 { return float64(t.Grants) }},
	{"nvshare_tenant_clients", tenantLabels, "Its processes on the GPU.", func(t *api.TenantUse) float64 { return float64(t.Clients) }},
	{"nvshare_tenant_memory_reserved_bytes", tenantLabels, "GPU memory that its processes have reserved.", nil},
	{"nvshare_tenant_memory_limit_bytes", tenantLabels, "Limit of that; absent without one.", nil},

	{"nvshare_scheduler_running_clients", gpuLabels, "Clients with a grant: they hold the GPU, drain, or have lost their connection.", func(g *gpuFigures) float64 { return float64(g.running) }},
	{"nvshare_scheduler_request_queue_clients", gpuLabels, "Clients that wait for a grant.", func(g *gpuFigures) float64 { return float64(g.states[api.ClientState_CLIENT_STATE_WAITING]) }},
	{"nvshare_scheduler_clients", nil, "Registered processes.", func(s *scrape) float64 { return float64(s.Status.Clients) }},
	{"nvshare_scheduler_connections", nil, "Connections of clients.", func(s *scrape) float64 { return float64(s.Status.Connections) }},
	{"nvshare_scheduler_refused_connections_total", nil, "Connections refused, at a limit mostly.", func(s *scrape) float64 { return float64(s.Status.Refused) }},
	{"nvshare_scheduler_protocol_errors_total", nil, "Connections closed for a malformed frame.", func(s *scrape) float64 { return float64(s.Status.ProtocolErrors) }},
	{"nvshare_scheduler_bypassed_registrations_total", nil, "Those of them that can bypass the shim.", func(s *scrape) float64 { return float64(s.Traffic.Bypasses) }},
	{"nvshare_scheduler_healthy", nil, "1 if the scheduler itself has no problem: /healthz names them.", func(s *scrape) float64 { return number(s.Own == 0) }},
	{"nvshare_scheduler_problems", nil, "Problems that /healthz and nvsharectl name, those of tenants included.", func(s *scrape) float64 { return float64(len(s.Status.Problems)) }},
	{"nvshare_warden_info", []string{"problem"}, "1: nvshare-warden holds programs without the shim, and fenced ones; 0: they are cooperative, and why.", nil},
	{"nvshare_build_info", []string{"version"}, "The scheduler's version; always 1.", nil},
	{"nvshare_metrics_left_out", []string{"kind"}, "Clients (with --metrics-processes) and tenants that have no metrics of their own because there are too many.", nil},
}

func newDescs() map[string]*prometheus.Desc {
	descs := make(map[string]*prometheus.Desc, len(metricNames))
	for _, m := range metricNames {
		descs[m.name] = prometheus.NewDesc(m.name, m.help, m.labels, nil)
	}
	return descs
}
