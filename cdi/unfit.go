// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"os"
	"regexp"
	"strings"
)

// ErrWSL means that this host is the Windows Subsystem for Linux. GPUs there
// have no device nodes of their own: every program reaches all of them through
// /dev/dxg, with libraries that Windows mounts at /usr/lib/wsl. Nothing there
// keeps a container to one GPU, and the kernel cannot say which programs use it.
var ErrWSL = errors.New("this is WSL2, whose GPUs are not the Linux driver's: nvshare needs Linux on the machine itself, or in a virtual machine with the GPU passed through")

const wslNode = "/dev/dxg"

// isWSL reports whether the host is WSL2 and has no GPU of the Linux driver,
// which a machine in Hyper-V may well have.
func (h host) isWSL() bool {
	release, err := os.ReadFile(h.at("/proc/sys/kernel/osrelease"))
	return err == nil && strings.Contains(strings.ToLower(string(release)), "microsoft") &&
		h.exists(wslNode) && !h.exists(controlNode)
}

// GPUs of one chip with the processor have no memory of their own, which nvshare could count, limit and
// swap. Jetson's driver is another one, too.
var (
	errIntegrated = errors.New("its GPU uses the host's memory, which nvshare can neither count nor limit")
	integrated    = regexp.MustCompile(`\b(GB10|Orin|Thor|Xavier|Tegra)\b`)
)

// tegraFile is there on every Jetson with NVIDIA's system.
const tegraFile = "/etc/nv_tegra_release"
