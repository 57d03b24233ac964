// SPDX-License-Identifier: Apache-2.0

package metrics

import "strconv"

// OverlapGroup is an overlap group on one GPU.
type OverlapGroup struct {
	Namespace string // "" outside containers
	UID       uint32
	Name      string
	GPU       string // UUID
	Members   int    // containers and programs
	Running   bool   // its MPS daemon answers
	Restarts  int    // of its MPS daemon
}

// maxMetricGroups is how many overlap groups have metrics; nvshare_metrics_left_out counts
// the rest.
const maxMetricGroups = 128

// overlap passes on the figures of overlap groups.
func (x *exposition) overlap() {
	for _, g := range x.s.Groups[:min(len(x.s.Groups), maxMetricGroups)] {
		labels := []string{g.Namespace, strconv.FormatUint(uint64(g.UID), 10), g.Name, g.GPU}
		x.put("nvshare_overlap_group_members", float64(g.Members), labels...)
		x.put("nvshare_overlap_group_running", number(g.Running), labels...)
		x.put("nvshare_overlap_group_restarts_total", float64(g.Restarts), labels...)
	}
	x.put("nvshare_metrics_left_out", float64(max(len(x.s.Groups)-maxMetricGroups, 0)), "overlap_group")
}
