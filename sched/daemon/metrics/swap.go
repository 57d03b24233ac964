// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"strconv"

	"github.com/nvshare/nvshare/sched/api"
)

// swap passes on the figures of a GPU whose memory is swapped.
func (x *exposition) swap(g *api.GPU) {
	s := g.Swap
	if s == nil {
		return
	}
	gpu := []string{g.Uuid, strconv.Itoa(int(g.Index))}
	x.put("nvshare_gpu_swap_capacity_bytes", float64(s.CapacityBytes), gpu...)
	x.put("nvshare_gpu_swap_promised_bytes", float64(s.PromisedBytes), gpu...)
	x.put("nvshare_gpu_swap_resident_bytes", float64(s.ResidentBytes), gpu...)
	x.put("nvshare_gpu_swap_fixed_bytes", float64(s.FixedBytes), gpu...)
	x.put("nvshare_gpu_swap_away_bytes", float64(s.AwayBytes), gpu...)
	x.put("nvshare_gpu_swap_share_ratio", float64(s.SharePercent)/100, gpu...)
	x.put("nvshare_gpu_swap_refused_reservations_total", float64(s.Refused), gpu...)
	x.put("nvshare_gpu_suspends_total", float64(s.Suspends), gpu...)
	x.put("nvshare_gpu_suspended_clients", float64(s.Suspended), gpu...)
	x.put("nvshare_gpu_arena_bytes", float64(s.ArenaBytes), gpu...)
	for _, d := range []struct {
		name               string
		bytes, times, rate uint64
		took               int64
	}{{"out", s.OutBytes, s.Outs, s.OutBytesPerSecond, s.OutNs}, {"in", s.InBytes, s.Ins, s.InBytesPerSecond, s.InNs}} {
		l := append(gpu[:2:2], d.name)
		x.put("nvshare_gpu_swap_bytes_total", float64(d.bytes), l...)
		x.put("nvshare_gpu_swap_seconds_total", seconds(d.took), l...)
		x.put("nvshare_gpu_swaps_total", float64(d.times), l...)
		x.put("nvshare_gpu_swap_bandwidth_bytes_per_second", float64(d.rate), l...)
	}
}

// arena passes on the figures of the node's host memory.
func (x *exposition) arena(r *api.StatusResponse) {
	for _, g := range r.Gpus {
		if g.Swap != nil {
			x.put("nvshare_arena_bytes", float64(g.Swap.ArenaLimitBytes))
			x.put("nvshare_arena_used_bytes", float64(g.Swap.ArenaUsedBytes))
			x.put("nvshare_arena_ready_bytes", float64(g.Swap.ArenaReadyBytes))
			x.put("nvshare_arena_file_bytes", float64(g.Swap.ArenaFileBytes))
			return
		}
	}
}
