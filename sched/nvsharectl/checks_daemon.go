// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
)

// findDaemon returns the process that serves the control socket of a run directory; 0: the
// kernel does not say, as in another PID namespace.
func findDaemon(ctx context.Context, runDir string) int {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", api.SocketPath(runDir))
	if err != nil {
		return 0
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	_ = raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cred.Pid)
		}
	})
	return pid
}

// ofDaemon returns the path of a file below /proc of the scheduler.
func (p *patient) ofDaemon(name string) string {
	return p.at(fmt.Sprintf("/proc/%d/%s", p.daemon, name))
}

// daemonRoot returns the root of the file system that the scheduler sees: it may run in a
// container. Only root can look there.
func (p *patient) daemonRoot() string {
	if root := p.ofDaemon("root"); isDir(root + "/.") {
		return root
	}
	return p.root
}

func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}

// rights are what a process may do.
type rights struct {
	uid                int // effective
	effective, ambient uint64
}

func (r rights) has(capability uint) bool { return r.effective&(1<<capability) != 0 }

// traces tells whether programs that the process starts may trace those of all users.
func (r rights) traces() bool {
	if r.uid == 0 {
		return r.has(unix.CAP_SYS_PTRACE)
	}
	return r.ambient&(1<<unix.CAP_SYS_PTRACE) != 0
}

// rights returns those of the scheduler; false: not known.
func (p *patient) rights() (r rights, known bool) {
	status := fieldsIn(p.ofDaemon("status"))
	if len(status["Uid"]) < 2 || len(status["CapEff"]) < 1 {
		return r, false
	}
	uid, err := strconv.Atoi(status["Uid"][1])
	if err != nil {
		return r, false
	}
	r.uid = uid
	if r.effective, err = strconv.ParseUint(status["CapEff"][0], 16, 64); err != nil {
		return r, false
	}
	if len(status["CapAmb"]) > 0 {
		r.ambient, _ = strconv.ParseUint(status["CapAmb"][0], 16, 64)
	}
	return r, true
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
	if limit, limited := p.cgroupLimit(); limited && limit < most {
		most, whose = limit, "the scheduler's cgroup"
	}
	return most, whose
}

// cgroupLimit returns the least memory limit of the scheduler's cgroup and those above it.
func (p *patient) cgroupLimit() (least uint64, limited bool) {
	text, _ := os.ReadFile(p.ofDaemon("cgroup"))
	path, v2 := strings.CutPrefix(strings.TrimSpace(string(text)), "0::")
	if !v2 {
		return 0, false
	}
	for dir := filepath.Join("/", path); ; dir = filepath.Dir(dir) {
		text, _ := os.ReadFile(filepath.Join(p.at("/sys/fs/cgroup"), dir, "memory.max"))
		if n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil && (!limited || n < least) {
			least, limited = n, true
		}
		if dir == "/" {
			return least, limited
		}
	}
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
