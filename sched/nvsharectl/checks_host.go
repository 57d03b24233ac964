// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/nvshare/nvshare/cdi"
)

var (
	nriTable   = regexp.MustCompile(`(?s)io\.containerd\.nri\.v1\.nri['"]\]([^\[]*)`)
	nriOff     = regexp.MustCompile(`(?m)^\s*disable\s*=\s*true`)
	runtimeVer = regexp.MustCompile(`[0-9]+\.[0-9]+\.[0-9]+`)
)

// nriIsOff returns the file of containerd's configuration in which NRI is switched off.
// Operators of other vendors write such files too.
func nriIsOff(p *patient) string {
	files, _ := filepath.Glob(p.at("/etc/containerd/conf.d") + "/*.toml")
	for _, file := range append([]string{p.at("/etc/containerd/config.toml")}, files...) {
		text, _ := os.ReadFile(file)
		for _, m := range nriTable.FindAllSubmatch(text, -1) {
			if nriOff.Match(m[1]) {
				return strings.TrimPrefix(file, p.root)
			}
		}
	}
	return ""
}

var podmanDirs = regexp.MustCompile(`(?m)^\s*cdi_spec_dirs\s*=\s*\[([^\]]*)\]`)

// podmanFinds names the directories that podman reads, if none of them has our devices.
func podmanFinds(p *patient) []finding {
	const etc = "/etc/containers/containers.conf"
	text, err := p.versionOf("podman")
	if err != nil {
		return nil // no podman, or none in PATH
	}
	var dirs, found []string
	if v, err := version.ParseGeneric(runtimeVer.FindString(text)); err == nil && v.Major() == 5 && v.Minor() == 5 {
		dirs = []string{"/etc/cdi"} // its default lacks the other one (containers/common#2460)
	}
	files, _ := filepath.Glob(p.at(etc+".d") + "/*.conf")
	for _, file := range append([]string{p.at("/usr/share/containers/containers.conf"), p.at(etc)}, files...) {
		text, _ := os.ReadFile(file)
		if m := podmanDirs.FindSubmatch(text); m != nil {
			dirs = strings.FieldsFunc(string(m[1]), func(r rune) bool { return strings.ContainsRune(` "',`+"\n", r) })
		}
	}
	for _, dir := range dirs {
		found = append(found, p.at(dir))
	}
	for _, v := range cdi.Validate(cdi.Options{HostRoot: p.root, SimDir: p.simGPU}, found...) {
		if v.Bad && v.File == "" && len(dirs) > 0 {
			return []finding{{Level: warn, Text: fmt.Sprintf("podman finds no device of %s: it reads CDI specs in %s only", cdi.Kind, strings.Join(dirs, ", ")),
				Fix: fmt.Sprintf(`cdi_spec_dirs = ["/etc/cdi", %q] below [engine] in %s`, cdi.DefaultSpecDir, etc)}}
		}
	}
	return nil
}

// installed is what installs nvshare.
const installed = "sudo nvsharectl install"

// versionOf is what a program says of itself.
func versionOf(program string) (string, error) { return hear(program, "--version") }

// hear returns what a program of the host says.
func hear(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	text, err := exec.CommandContext(ctx, name, args...).Output()
	return string(text), err
}

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
