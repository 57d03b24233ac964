// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// checkProc looks whether /proc shows the scheduler the processes of others: who it cannot tell
// apart takes no turns.
func checkProc(p *patient) []finding {
	text, err := os.ReadFile(p.ofDaemon("mountinfo")) // it may run in a container
	if err != nil {
		text, err = os.ReadFile(p.at("/proc/self/mountinfo"))
	}
	if err != nil {
		return nil
	}
	hidden, group := procOptions(string(text))
	status := fieldsIn(p.ofDaemon("status"))
	rights, known := p.rights()
	groups := slices.Concat(status["Gid"], status["Groups"])
	own := "GROUP"
	if len(status["Gid"]) > 1 {
		own = status["Gid"][1]
	}
	fix := fmt.Sprintf("mount -o remount,hidepid=2,gid=%s /proc, and the same options in /etc/fstab", own)
	ptraced := hidden == "ptraceable" || hidden == "4"
	switch {
	case hidden == "":
		return found(pass, "", "/proc shows the scheduler all processes")
	case !known:
		return found(warn, fix, "/proc hides processes (hidepid=%s): a scheduler of another user than root has to be in the group of its option gid=", hidden)
	case rights.has(unix.CAP_SYS_PTRACE), !ptraced && slices.Contains(groups, group):
		return found(pass, "", "/proc hides processes (hidepid=%s), but not from the scheduler", hidden)
	}
	return found(fail, fix, "/proc hides the processes of others from the scheduler (hidepid=%s): it knows none of them, and they take no turns", hidden)
}

// procOptions returns how the /proc of a mountinfo hides processes ("": it does not), and from
// which group not.
func procOptions(mountinfo string) (hidden, group string) {
	for line := range strings.Lines(mountinfo) {
		before, after, _ := strings.Cut(line, " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if len(fields) < 5 || fields[4] != "/proc" || len(kind) < 3 || kind[0] != "proc" {
			continue
		}
		hidden, group = "", "" // the last one is on top
		for option := range strings.SplitSeq(kind[2], ",") {
			if value, ok := strings.CutPrefix(option, "hidepid="); ok && value != "0" && value != "off" {
				hidden = value
			}
			if value, ok := strings.CutPrefix(option, "gid="); ok {
				group = value
			}
		}
	}
	return hidden, cmp.Or(group, "0")
}
