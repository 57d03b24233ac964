// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
)

// hostUserNamespace has a fixed number (include/linux/proc_ns.h).
const hostUserNamespace = "user:[4026531837]"

// Obstacle says why this process cannot copy descriptors of those that a scheduler names; "": nothing was found that
// keeps it from that. root is that of the file system; scheduler is 0 where this process does not see it.
func Obstacle(root string, scheduler int) string {
	self := filepath.Join(root, "proc", "self")
	text := func(path ...string) string {
		b, _ := os.ReadFile(filepath.Join(path...))
		return strings.TrimSpace(string(b))
	}
	namespace := func(of, name string) string {
		now, _ := os.Readlink(filepath.Join(root, "proc", of, "ns", name))
		return now
	}
	other := func(name string) bool {
		its := namespace(strconv.Itoa(scheduler), name)
		return its != "" && its != namespace("self", name)
	}
	profile := text(self, "attr", "apparmor", "current")
	switch {
	case scheduler == 0, other("pid"):
		return api.OtherPIDNamespace
	case other("user") && namespace("self", "user") != hostUserNamespace:
		return api.OtherUserspace
	case text(root, "proc/sys/kernel/yama/ptrace_scope") == "3":
		return api.YamaForbids
	case !traces(text(self, "status")):
		if hides(text(self, "mountinfo")) {
			return api.NoPtrace + ", and " + api.ProcIsHidden
		}
		return api.NoPtrace
	case containerProfile(profile):
		return fmt.Sprintf("%s (%.64s)", api.UnderAppArmor, profile)
	}
	return ""
}

// traces says whether CAP_SYS_PTRACE is among the capabilities of a status.
func traces(status string) bool {
	_, caps, ok := strings.Cut(status, "CapEff:")
	fields := strings.Fields(caps)
	if !ok || len(fields) == 0 {
		return true // it is not known
	}
	n, err := strconv.ParseUint(fields[0], 16, 64)
	return err != nil || n>>unix.CAP_SYS_PTRACE&1 != 0
}

// hides says whether /proc is mounted with hidepid.
func hides(mountinfo string) bool {
	for line := range strings.Lines(mountinfo) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == "/proc" && strings.Contains(line, "hidepid=") && !strings.Contains(line, "hidepid=0") && !strings.Contains(line, "hidepid=off") {
			return true
		}
	}
	return false
}

// containerProfile says whether an AppArmor profile is the default one of a container engine, which lets a
// process trace those of the same profile only.
func containerProfile(profile string) bool {
	name, mode, _ := strings.Cut(profile, " ")
	begins := []string{"docker-default", "cri-containerd.apparmor.d", "crio-default", "containers-default", "nerdctl-default", "lxc-container-default"}
	return mode != "(complain)" && slices.ContainsFunc(begins, func(begin string) bool { return strings.HasPrefix(name, begin) })
}
