// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/cgroup"
)

// regionsOf returns what the kernel calls the memory of GPUs, by their UUIDs, where it holds containers to a limit: where
// /sys/fs/cgroup of the host is there, and its dmem.capacity names them (kernel 6.14, driver 615). Parts of a GPU
// have none.
func (p *Plugin) regionsOf(gpus []cdi.GPU) map[string]string {
	tree, err := cgroup.Find(p.root)
	if err != nil {
		return nil
	}
	regions := map[string]string{}
	for _, g := range gpus {
		if len(g.Instances) > 0 {
			continue
		}
		if region := tree.Region(g.PCIBusID, g.UUID); region != "" {
			regions[g.UUID] = region
		}
	}
	return regions
}

// limitByKernel has the kernel hold a container to its memory limit too, where it can.
func limitByKernel(adjust *api.ContainerAdjustment, inv *Inventory, c Container) *api.ContainerAdjustment {
	if c.Terms.MemoryLimit == 0 {
		return adjust
	}
	may := append(slices.Clone(c.Reach), c.GPUs...)
	var lines []string
	for _, g := range inv.gpus {
		if region := inv.regions[g.UUID]; region != "" && slices.Contains(may, g.UUID) {
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
