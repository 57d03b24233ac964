// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/util/version"

	"github.com/nvshare/nvshare/sched/api"
)

// checkView asks the socket that containers have.
func checkView(p *patient) []finding {
	if p.whyNot != nil && p.status == nil {
		return nil // said already
	}
	ctx, cancel := context.WithTimeout(p.ctx, callTimeout)
	defer cancel()
	r, err := api.AskView(ctx, p.at(p.runDir))
	if err != nil {
		return found(warn, p.scheduler("restart"), "users and containers get no status: %v", err)
	}
	return found(pass, "", "users and containers get a status of their own; this one is %s's", api.Tenant(r.View.Container, r.View.Uid))
}

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

// oldestRuntime is the oldest containerd that gives containers the CDI devices that NRI
// plugins name; 2.0 does not.
var oldestRuntime = version.MustParseGeneric("1.7.30")

// checkRuntime looks whether containerd is old enough to drop the devices of plugins.
func checkRuntime(p *patient) []finding {
	text, err := p.runtime()
	if err != nil {
		return nil // no containerd, or none in PATH
	}
	v, err := version.ParseGeneric(runtimeVer.FindString(text))
	if err != nil {
		return nil
	}
	if v.LessThan(oldestRuntime) || v.Major() == 2 && v.Minor() == 0 {
		return found(fail, "update containerd to 1.7.30, or to 2.1 or later", "containerd %v drops the devices that plugins give: pods that ask for a GPU are refused", v)
	}
	return found(pass, "", "containerd %v", v)
}

// containerdVersion is what containerd says of itself.
func containerdVersion() (string, error) { return hear("containerd", "--version") }

// hear returns what a program of the host says.
func hear(name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	text, err := exec.CommandContext(ctx, name, args...).Output()
	return string(text), err
}

// checkPCIe names GPUs whose link is narrower than it could be: swapping is as slow.
func checkPCIe(p *patient) (all []finding) {
	vendors, _ := filepath.Glob(p.at("/sys/bus/pci/devices") + "/*/vendor")
	n := 0
	for _, file := range vendors {
		dir := filepath.Dir(file)
		read := func(name string) string {
			text, _ := os.ReadFile(filepath.Join(dir, name))
			return strings.TrimSpace(string(text))
		}
		if read("vendor") != "0x10de" || !strings.HasPrefix(read("class"), "0x03") {
			continue
		}
		n++
		if has, could := read("current_link_width"), read("max_link_width"); has != could && has != "" && has != "0" {
			all = append(all, finding{Level: warn, Text: fmt.Sprintf("the GPU at %s has %s of %s PCIe lanes: moving memory is as slow", filepath.Base(dir), has, could),
				Fix: "look at the slot and the riser; lspci -vv -s " + filepath.Base(dir)})
		}
	}
	if n > 0 && len(all) == 0 {
		return found(pass, "", "the links of %s have all their lanes", numbered(n, "GPU", "GPUs"))
	}
	return all
}

// checkHugePages says which pages hold what is swapped.
func checkHugePages(p *patient) []finding {
	if !slices.ContainsFunc(p.status.GetGpus(), func(g *api.GPU) bool { return g.Swap.GetArenaLimitBytes() > 0 }) {
		return nil
	}
	reserved, _ := os.ReadFile(p.at("/proc/sys/vm/nr_hugepages"))
	if n := strings.TrimSpace(string(reserved)); n != "" && n != "0" {
		return found(pass, "", "%s huge pages are reserved for what is swapped", n)
	}
	shared, err := os.ReadFile(p.at("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
	if err == nil && strings.Contains(string(shared), "[never]") {
		return found(warn, "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled", "host memory for swapping has small pages: it is ready and pinned in twice the time")
	}
	return found(pass, "", "the kernel gives huge pages for what is swapped")
}
