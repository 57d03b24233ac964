// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/cgroup"
	"github.com/nvshare/nvshare/sched/checkpoint"
)

// checkCheckpoint says whether suspended tenants leave the GPU with their contexts, and whether
// tenants can move.
func checkCheckpoint(p *patient) []finding {
	if !slices.ContainsFunc(p.status.GetGpus(), func(g *api.GPU) bool { return g.Swap != nil }) {
		return nil // nothing leaves the GPU, and the scheduler does not look
	}
	why := p.status.CheckpointProblem
	if why == "" {
		return found(pass, "", "suspended tenants leave the GPU with their contexts, and can move")
	}
	level := info
	if slices.ContainsFunc(p.status.Gpus, func(g *api.GPU) bool { return g.Swap.GetSuspends() > 0 }) { // somebody has asked for it
		level = warn
	}
	return found(level, p.fixCheckpoint(why), "suspended tenants keep their contexts, and none moves: %s", why)
}

// checkWarden says whether programs without the shim are held.
func checkWarden(p *patient) []finding {
	switch {
	case p.status.GetWarden():
		return found(pass, "", "programs without the shim have their tenant's turns, time slices and limits, and fenced ones are off the GPU, by nvshare-warden")
	case p.status.GetWardenProblem() == "": // an older scheduler
		return nil
	}
	level := info
	if strings.Contains(p.status.WardenProblem, "can hold nobody") { // somebody has asked for it
		level = warn
	}
	return found(level, api.WardenRemedy(p.status.WardenProblem), "cooperative: programs without the shim are reported, and not held by nvshare-warden (experimental): %s", p.status.WardenProblem)
}

func (p *patient) fixCheckpoint(why string) string {
	switch {
	case strings.Contains(why, "CAP_SYS_PTRACE"):
		return p.giveTrace()
	case strings.Contains(why, "older than 570"):
		return "install a driver of CUDA 12.8 or later"
	case strings.Contains(why, checkpoint.ErrNone.Error()):
		return installed
	}
	return "nvshare-checkpoint state 1 tells more; see sched/README.md, Rights for that"
}

// giveTrace returns what gives the scheduler CAP_SYS_PTRACE, wherever it runs.
func (p *patient) giveTrace() string {
	switch {
	case p.inPod():
		return "apply overlays/checkpoint of deployments/kubernetes, or set checkpoint.enabled with Helm"
	case p.unit():
		return "install deployments/systemd/checkpoint.conf of the release into /etc/systemd/system/nvshare-scheduler.service.d, then systemctl daemon-reload and systemctl restart nvshare-scheduler"
	}
	return "start nvshare-scheduler with CAP_SYS_PTRACE"
}

// inPod says whether the scheduler runs in a pod.
func (p *patient) inPod() bool {
	cgroup, _ := os.ReadFile(p.ofDaemon("cgroup"))
	return strings.Contains(string(cgroup), "kubepods")
}

// ofDaemon returns the path of a file below /proc of the scheduler.
func (p *patient) ofDaemon(name string) string {
	return p.at(fmt.Sprintf("/proc/%d/%s", p.daemon, name))
}

// pinnable returns how much memory the scheduler can pin, with what it has pinned already, and
// what bounds that; 0: not known.
func (p *patient) pinnable(held uint64) (most uint64, whose string) {
	lines := fieldsIn(p.at("/proc/meminfo"))
	number := func(key string) (n uint64) {
		if f := lines[key]; len(f) > 0 {
			n, _ = strconv.ParseUint(f[0], 10, 64)
		}
		return n
	}
	if number("MemAvailable") == 0 {
		return 0, ""
	}
	most = number("MemAvailable")<<10 + number("HugePages_Free")*number("Hugepagesize")<<10 + held
	whose = "this host"
	if limit, _, limited := cgroup.Memory(p.at("/"), strconv.Itoa(p.daemon)); limited && limit < most {
		most, whose = limit, "the scheduler's cgroup"
	}
	return most, whose
}

// fieldsIn reads the lines "key: field ..." of a file of /proc.
func fieldsIn(path string) map[string][]string {
	lines := map[string][]string{}
	text, _ := os.ReadFile(path)
	for line := range strings.Lines(string(text)) {
		key, rest, _ := strings.Cut(line, ":")
		lines[key] = strings.Fields(rest)
	}
	return lines
}

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
	var effective uint64
	_, unknown := fmt.Sscanf(strings.Join(status["CapEff"], ""), "%x", &effective)
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
	case unknown != nil:
		return found(warn, fix, "/proc hides processes (hidepid=%s): a scheduler of another user than root has to be in the group of its option gid=", hidden)
	case effective&(1<<unix.CAP_SYS_PTRACE) != 0, !ptraced && slices.Contains(groups, group):
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
