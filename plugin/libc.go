// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Loaders of the two C libraries, at the paths that programs name.
var (
	glibcLoaders = []string{"lib64/ld-linux-x86-64.so.2", "lib/ld-linux-aarch64.so.1"}
	muslLoaders  = []string{"lib/ld-musl-x86_64.so.1", "lib/ld-musl-aarch64.so.1"}
)

// examine reports a container whose programs cannot load the shim. It reports nothing
// if the plugin cannot look into it.
func (p *Plugin) examine(u Unmanaged) {
	fd, err := openProcess(u.PID, u.ID)
	if err != nil {
		p.log.Debugf("%v: which C library it has is not known: %v", u, err)
		return
	}
	defer unix.Close(fd)
	musl := muslOnly(fmt.Sprintf("/proc/%d/root", u.PID)) // which takes CAP_SYS_PTRACE
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err == nil && !musl {
		musl = muslOnly(rootfs(string(mounts), u.ID))
	}
	if !ended(fd, 0) && musl { // else the file system was another process's
		u.Why = "its image has musl libc, which cannot load it, nor NVIDIA's driver libraries; use an image with glibc"
		p.tell(u)
	}
}

// rootfs returns where containerd has mounted a container's root file system, as this program's
// mounts (mountinfo) show it; "": it is not seen here.
func rootfs(mounts, id string) string {
	for line := range strings.Lines(mounts) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasSuffix(fields[4], "/"+id+"/rootfs") {
			return fields[4]
		}
	}
	return ""
}

// muslOnly tells whether an image has musl's loader and not glibc's. It follows the
// image's links inside the image.
func muslOnly(root string) bool {
	fd, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	exists := func(path string) bool {
		file, err := unix.Openat2(fd, path, &unix.OpenHow{
			Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
		})
		if err != nil {
			return false
		}
		unix.Close(file)
		return true
	}
	return slices.ContainsFunc(muslLoaders, exists) && !slices.ContainsFunc(glibcLoaders, exists)
}
