// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
)

// scheduler returns the command that starts or restarts the scheduler of the run directory.
// systemd's has the default one.
func (p *patient) scheduler(verb string) string {
	short := func(dir string) string { return strings.TrimPrefix(filepath.Clean(dir), "/var") } // /var/run is /run
	if short(p.runDir) == short(cdi.DefaultRunDir) {
		return "systemctl " + verb + " nvshare-scheduler"
	}
	start := "nvshare-scheduler --run-dir " + p.runDir + " &"
	none := errors.Is(p.whyNot, fs.ErrNotExist) || errors.Is(p.whyNot, unix.ECONNREFUSED)
	if verb == "restart" && !none {
		return "end the nvshare-scheduler of " + p.runDir + ", then " + start
	}
	return start
}

// pluginOr returns the command that restarts systemd's plugin; where systemd has none, another.
func (p *patient) pluginOr(other string) string {
	for _, dir := range []string{"/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"} {
		if _, err := os.Stat(p.at(dir + "/nvshare-plugin.service")); err == nil {
			return "systemctl restart nvshare-plugin"
		}
	}
	return other
}

// install returns the command that installs nvshare: the programs of a clone have to be laid
// out as a release first.
func (p *patient) install() string {
	clone := filepath.Dir(filepath.Dir(filepath.Dir(p.self))) // of CLONE/.build/bin/nvsharectl
	for _, name := range []string{"go.mod", "Makefile"} {
		if _, err := os.Stat(filepath.Join(clone, name)); p.self == "" || err != nil {
			return "sudo nvsharectl install"
		}
	}
	return "cd " + clone + " && make stage && sudo .build/release/nvsharectl install"
}

// underShim counts the processes that the scheduler hears of: the shim is in each of them.
func (p *patient) underShim() int {
	pids := map[uint32]bool{}
	for _, g := range p.status.GetGpus() {
		for _, c := range g.Clients {
			if c.Connected {
				pids[c.Pid] = true
			}
		}
	}
	return len(pids)
}
