// SPDX-License-Identifier: Apache-2.0

package api

import "strings"

// What may keep nvshare-warden from copying descriptors of other processes, in the words in which it says so.
const (
	NoPtrace          = "it has no CAP_SYS_PTRACE"
	YamaForbids       = "kernel.yama.ptrace_scope is 3: nobody may trace"
	OtherPIDNamespace = "it is in a PID namespace of its own"
	OtherUserspace    = "it is in a user namespace of its own"
	UnderAppArmor     = "its AppArmor profile lets it trace nobody outside"
	ProcIsHidden      = "/proc hides the processes of others from it"
)

// IsHeld says whether what a status says of a process (Client.held, Unmanaged.held) means that the warden holds it.
func IsHeld(how string) bool { return strings.HasPrefix(how, "held ") }

// WardenRemedy says what mends a problem of the warden.
func WardenRemedy(problem string) string {
	for _, r := range [][2]string{
		{NoPtrace, "give it CAP_SYS_PTRACE: its unit of systemd and the chart's warden.enabled do (with kernel.yama.ptrace_scope 2, nobody traces without)"},
		{YamaForbids, "set kernel.yama.ptrace_scope to 2 or less in /etc/sysctl.d, and restart the machine: 3 holds until then"},
		{OtherPIDNamespace, "run it on the host, or in a container of the host's PID namespace (hostPID: true, --pid host)"},
		{OtherUserspace, "run it as root of the host, not of a rootless engine or a pod with hostUsers: false"},
		{UnderAppArmor, "run its container without a profile (appArmorProfile: {type: Unconfined}, --security-opt apparmor=unconfined)"},
		{ProcIsHidden, "mount -o remount,hidepid=0 /proc where it runs, or give it CAP_SYS_PTRACE"},
	} {
		if strings.Contains(problem, r[0]) {
			return r[1]
		}
	}
	return "systemctl enable --now nvshare-warden"
}
