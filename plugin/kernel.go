// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/sched/cgroup"
)

// limitByKernel has the kernel hold a container to its memory limit too, where it can: where /sys/fs/cgroup of
// the host is there, and its dmem.capacity names the container's GPUs (kernel 6.14, driver 615).
func (p *Plugin) limitByKernel(adjust *api.ContainerAdjustment, inv *Inventory, c Container) *api.ContainerAdjustment {
	if c.Terms.MemoryLimit == 0 {
		return adjust
	}
	tree, err := cgroup.Find(p.root)
	if err != nil {
		return adjust
	}
	may := append(slices.Clone(c.Reach), c.GPUs...)
	var lines []string
	for _, g := range inv.gpus {
		if len(g.Instances) > 0 || !slices.Contains(may, g.UUID) { // not of parts of a GPU
			continue
		}
		if region := tree.Region(g.PCIBusID, g.UUID); region != "" {
			lines = append(lines, cgroup.Max(region, c.Terms.MemoryLimit))
		}
	}
	if len(lines) == 0 {
		return adjust
	}
	if adjust == nil {
		adjust = &api.ContainerAdjustment{}
	}
	adjust.AddLinuxUnified("dmem.max", strings.Join(lines, "\n"))
	return adjust
}
