// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
)

// checkMIG looks whether GPUs are in a mode in which they cannot be shared.
func checkMIG(p *patient) (all []finding) {
	if p.simGPU != "" {
		return nil
	}
	text, err := p.smi()
	if err != nil {
		return nil // said of the driver already, or a container without nvidia-smi
	}
	for line := range strings.Lines(text) {
		fields := strings.Split(strings.TrimSpace(line), ", ")
		if len(fields) != 3 {
			continue
		}
		index, mig, mode := fields[0], fields[1], fields[2]
		if mig == "Enabled" && !p.hasInstances(index) {
			all = append(all, finding{Level: fail, Text: "GPU " + index + " is in MIG mode and has no MIG device: no program can use it",
				Fix: "nvidia-smi -i " + index + " -mig 0, or make devices: nvidia-smi mig -i " + index + " -cgi 0 -C"})
		}
		if mode != "Default" {
			all = append(all, finding{Level: fail, Text: "GPU " + index + " has the compute mode " + mode + ": a second tenant cannot start on it",
				Fix: "nvidia-smi -i " + index + " -c DEFAULT"})
		}
	}
	if len(all) == 0 {
		return found(pass, "", "MIG and compute modes let tenants share")
	}
	return all
}

// hasInstances tells whether the scheduler knows MIG devices of a GPU. Where it does not
// answer, nobody is accused.
func (p *patient) hasInstances(index string) bool {
	text, err := os.ReadDir(p.at("/proc/driver/nvidia/capabilities/gpu" + index + "/mig"))
	if err == nil {
		return slices.ContainsFunc(text, func(e os.DirEntry) bool { return strings.HasPrefix(e.Name(), "gi") })
	}
	return p.status == nil || slices.ContainsFunc(p.status.Gpus, func(g *api.GPU) bool { return strings.Contains(g.Name, " MIG ") })
}

// askSMI asks for the index, MIG mode and compute mode of each GPU.
func askSMI() (string, error) {
	return hear("nvidia-smi", "--query-gpu=index,mig.mode.current,compute_mode", "--format=csv,noheader")
}

// checkMPS looks for an MPS daemon that is not one of an overlap group.
func checkMPS(p *patient) []finding {
	const fix = "echo quit | nvidia-cuda-mps-control"
	pids, _ := filepath.Glob(p.at("/proc") + "/[0-9]*/comm")
	for _, file := range pids {
		name, _ := os.ReadFile(file)
		if !strings.HasPrefix(string(name), "nvidia-cuda-mps") {
			continue
		}
		if stat, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "stat")); strings.Contains(string(stat), ") Z ") {
			continue // a zombie: it has ended
		}
		environment, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "environ"))
		if strings.Contains(string(environment), "CUDA_MPS_PIPE_DIRECTORY="+p.runDir) {
			continue // the scheduler started it
		}
		return found(warn, fix, "an MPS daemon of the host runs (pid %s): its clients are one process for the GPU", filepath.Base(filepath.Dir(file)))
	}
	if _, err := os.Stat(p.at("/tmp/nvidia-mps/control")); err == nil {
		return found(warn, fix, "an MPS server of the host runs: its clients are one process for the GPU")
	}
	return nil
}

func checkSELinux(p *patient) []finding {
	text, err := os.ReadFile(p.at("/sys/fs/selinux/enforce"))
	if err != nil || strings.TrimSpace(string(text)) != "1" {
		return nil // nothing to say where it is not used
	}
	return found(warn, "podman run --security-opt label=disable", "SELinux enforces: it keeps labelled containers from the sockets and the shim")
}

// checkVersion compares the versions of all parts that run.
func checkVersion(p *patient) (all []finding) {
	if p.status == nil {
		return nil
	}
	own := p.status.Version
	if own != api.Version {
		fix := p.scheduler("restart")
		if p.unit() {
			fix += " nvshare-plugin"
		}
		all = found(warn, fix, "the scheduler is %s, nvsharectl is %s", own, api.Version)
	}
	old := map[string]map[uint32]bool{}
	for _, g := range p.status.Gpus {
		for _, c := range g.Clients {
			if c.ShimVersion != "" && c.ShimVersion != own {
				if old[c.ShimVersion] == nil {
					old[c.ShimVersion] = map[uint32]bool{}
				}
				old[c.ShimVersion][c.Pid] = true
			}
		}
	}
	var shims []string
	for v, pids := range old {
		shims = append(shims, fmt.Sprintf("%s in %s", v, numbered(len(pids), "process", "processes")))
	}
	if len(shims) > 0 {
		slices.Sort(shims)
		all = append(all, found(warn, "restart those programs when it suits: nvsharectl status -o json names them (shim_version)", "the scheduler is %s, shims are %s", own, strings.Join(shims, ", "))...)
	}
	if len(all) == 0 {
		return found(pass, "", "scheduler, shims and nvsharectl are %s", own)
	}
	return all
}
