// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
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

// pinnable returns how much memory the scheduler can pin, in words too, with what it has pinned
// already; 0: not known.
func (p *patient) pinnable(held uint64) (most uint64, whose string) {
	info := numbersIn(p.at("/proc/meminfo"), 10)
	if info["MemAvailable"] == 0 {
		return 0, ""
	}
	most = info["MemAvailable"]<<10 + info["HugePages_Free"]*info["Hugepagesize"]<<10 + held
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

// numbersIn reads the lines "key: number" of a file of /proc; of several numbers the first
// counts.
func numbersIn(path string, base int) map[string]uint64 {
	numbers := map[string]uint64{}
	text, _ := os.ReadFile(path)
	for line := range strings.Lines(string(text)) {
		key, rest, _ := strings.Cut(line, ":")
		if fields := strings.Fields(rest); len(fields) > 0 {
			if n, err := strconv.ParseUint(fields[0], base, 64); err == nil {
				numbers[key] = n
			}
		}
	}
	return numbers
}
