// SPDX-License-Identifier: Apache-2.0

package arena

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Where a host has several NUMA nodes, memory of the GPU's own is nearer to it.

// NoNode is the node of a GPU of which the kernel tells none.
const NoNode = -1

// NUMANode returns the node of a PCI device as the kernel tells it below sysfs: NoNode
// where a host has one node only and says so that way, or the device is not there.
func NUMANode(sysfs, busID string) int {
	if busID == "" || !filepath.IsLocal(busID) {
		return NoNode
	}
	text, err := os.ReadFile(filepath.Join(sysfs, "bus/pci/devices", busID, "numa_node"))
	if err != nil {
		return NoNode
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || n < 0 {
		return NoNode
	}
	return n
}

// prefer has this thread take memory from a node as long as the node has any, and then
// from other nodes, until restore. NoNode: nothing changes.
//
// A memfd without a policy of its own takes pages as the thread's policy says, whether
// write, fallocate or a fault makes them. A policy of the file (mbind of a shared mapping)
// would work for common pages only: hugetlbfs keeps none ("Shared Policies" in the
// kernel's numa_memory_policy).
func prefer(node int) (restore func() error, err error) {
	nothing := func() error { return nil }
	if node == NoNode {
		return nothing, nil
	}
	var mode int32
	var before, nodes unix.CPUSet // the same kind of mask
	if _, _, e := unix.Syscall6(unix.SYS_GET_MEMPOLICY, uintptr(unsafe.Pointer(&mode)), uintptr(unsafe.Pointer(&before)), 8*unsafe.Sizeof(before), 0, 0, 0); e != 0 {
		return nothing, os.NewSyscallError("get_mempolicy", e)
	}
	nodes.Set(node)
	if err := unix.SetMemPolicy(unix.MPOL_PREFERRED, &nodes); err != nil {
		return nothing, os.NewSyscallError("set_mempolicy", err)
	}
	return func() error { return unix.SetMemPolicy(int(mode), &before) }, nil
}
