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

// hasDefaultDir reports whether a run directory is that of systemd's scheduler.
func hasDefaultDir(runDir string) bool {
	short := func(dir string) string { return strings.TrimPrefix(filepath.Clean(dir), "/var") } // /var/run is /run
	return short(runDir) == short(cdi.DefaultRunDir)
}

// systemd reports whether systemd runs on the host.
func (p *patient) systemd() bool {
	_, err := os.Stat(p.at("/run/systemd/system"))
	return err == nil
}

// unit reports whether the scheduler is, or may be, that of systemd.
func (p *patient) unit() bool { return hasDefaultDir(p.runDir) && p.systemd() }

// scheduler returns the command that starts or restarts the scheduler of the run directory.
func (p *patient) scheduler(verb string) string {
	if p.unit() {
		return "systemctl " + verb + " nvshare-scheduler"
	}
	start := "nvshare-scheduler &"
	if !hasDefaultDir(p.runDir) {
		start = "nvshare-scheduler --run-dir " + p.runDir + " &"
	}
	none := errors.Is(p.whyNot, fs.ErrNotExist) || errors.Is(p.whyNot, unix.ECONNREFUSED)
	if verb == "restart" && !none {
		return "end the nvshare-scheduler of " + p.runDir + ", then " + start
	}
	return start
}

// pluginOr returns the command that restarts systemd's plugin; where systemd has none, another.
func (p *patient) pluginOr(other string) string {
	for _, dir := range []string{"/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"} {
		if _, err := os.Stat(p.at(dir + "/nvshare-plugin.service")); err == nil && p.systemd() {
			return "systemctl restart nvshare-plugin"
		}
	}
	return other
}

// sudo returns a command of doctor for root. sudo drops variables of the environment, and finds
// programs in directories of its own.
func (p *patient) sudo(words ...string) string {
	self := "nvsharectl"
	if dir := filepath.Dir(p.self); p.self != "" && dir != "/usr/bin" && dir != "/usr/local/bin" {
		self = p.self
	}
	words = append([]string{"sudo", self}, words...)
	if !hasDefaultDir(p.runDir) {
		words = append(words, "--run-dir", p.runDir)
	}
	if p.simGPU != "" {
		words = append(words, "--simgpu", p.simGPU)
	}
	if p.shim != "" {
		words = append(words, "--shim", p.shim)
	}
	return strings.Join(words, " ")
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
