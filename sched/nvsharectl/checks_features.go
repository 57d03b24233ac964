// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
)

// groupRights are what a scheduler that is root needs for overlap groups of all users; for
// those of containers it needs CAP_SYS_ADMIN as well.
var groupRights = []struct {
	name string
	bit  uint
}{
	{"CAP_CHOWN", unix.CAP_CHOWN}, {"CAP_DAC_OVERRIDE", unix.CAP_DAC_OVERRIDE}, {"CAP_KILL", unix.CAP_KILL},
	{"CAP_SETGID", unix.CAP_SETGID}, {"CAP_SETUID", unix.CAP_SETUID},
}

// checkOverlap says whether overlap groups can run, and whose.
func checkOverlap(p *patient) []finding {
	if p.status == nil {
		return nil
	}
	inContainers, anybody := wantOverlap(p.status)
	worse := func(asked bool) level {
		if asked {
			return warn
		}
		return info
	}
	if _, err := cdi.FindMPSControl(cdi.Options{SimDir: p.simGPU, HostRoot: p.daemonRoot()}); err != nil {
		return found(worse(anybody), "install the driver's MPS programs where the scheduler sees them", "no overlap group can run: the scheduler finds no nvidia-cuda-mps-control")
	}
	r, known := p.rights()
	if !known {
		return found(info, "", "whether overlap groups can run is not known: the kernel does not tell here what the scheduler may do")
	}
	var missing []string
	for _, c := range groupRights {
		if !r.has(c.bit) {
			missing = append(missing, c.name)
		}
	}
	what, why := "", ""
	switch {
	case r.uid != 0:
		what, why = fmt.Sprintf("programs of user %d", r.uid), "the scheduler is not root"
	case len(missing) > 0:
		what, why = "programs of user 0", "the scheduler has no "+strings.Join(missing, ", ")
	case !r.has(unix.CAP_SYS_ADMIN):
		what, why = "programs", "the scheduler has no CAP_SYS_ADMIN"
	default:
		return found(pass, "", "overlap groups can run, also of containers")
	}
	const can = "overlap groups can run for %s outside containers only: %s"
	if r.uid != 0 && r.uid == p.uid && !inContainers { // those are the ones that this user has
		return found(pass, "", can, what, why)
	}
	command := "start nvshare-scheduler as root"
	if r.uid == 0 {
		command = "start nvshare-scheduler with " + strings.Join(append(missing, "CAP_SYS_ADMIN"), ", ")
	}
	return found(worse(inContainers), p.giveRights("overlap-groups.conf", "overlap-groups", "overlapGroups.enabled", command), can, what, why)
}

// wantOverlap tells whether a container, and whether anybody, is to be in an overlap group.
func wantOverlap(r *api.StatusResponse) (inContainers, anybody bool) {
	note := func(c *api.Container) {
		if c.GetShare().GetOverlap() != "" {
			anybody = true
			inContainers = inContainers || c.Engine != runEngine
		}
	}
	for _, c := range r.Containers {
		note(c)
	}
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			note(c.Container)
		}
	}
	return inContainers, anybody
}

// checkCheckpoint says whether suspended tenants leave the GPU with their contexts, and whether
// tenants can move.
func checkCheckpoint(p *patient) []finding {
	if len(p.status.GetGpus()) == 0 {
		return nil
	}
	if !slices.ContainsFunc(p.status.Gpus, func(g *api.GPU) bool { return g.Swap != nil }) {
		return p.couldCheckpoint()
	}
	why := p.status.CheckpointProblem
	if why == "" {
		return found(pass, "", "suspended tenants leave the GPU with their contexts, and can move")
	}
	return found(warn, p.fixCheckpoint(why), "suspended tenants keep their contexts, and none moves: %s", why)
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

// couldCheckpoint says what checkCheckpoint would find if memory were swapped: without that the
// scheduler does not look.
func (p *patient) couldCheckpoint() []finding {
	err := p.checkpoint()
	if r, known := p.rights(); err == nil && known && !r.traces() {
		err = errors.New("the scheduler has no CAP_SYS_PTRACE to pass on, so only processes of its user could leave")
	}
	if err != nil {
		why, _, _ := strings.Cut(err.Error(), "\n") // one line of each place where the driver is not
		return found(info, p.fixCheckpoint(why), "with --swap-memory, suspended tenants would keep their contexts, and none would move: %s", why)
	}
	return found(pass, "", "the driver can checkpoint processes: with --swap-memory, suspended tenants would leave the GPU with their contexts, and could move")
}

func (p *patient) fixCheckpoint(why string) string {
	switch {
	case strings.Contains(why, "CAP_SYS_PTRACE"):
		return p.giveRights("checkpoint.conf", "checkpoint", "checkpoint.enabled", "start nvshare-scheduler with CAP_SYS_PTRACE")
	case strings.Contains(why, "older than 570"):
		return "install a driver of CUDA 12.8 or later"
	case strings.Contains(why, checkpoint.ErrNone.Error()):
		return p.install()
	}
	return "nvshare-checkpoint state 1 tells more; see sched/README.md, Rights for that"
}

// giveRights returns what gives the scheduler rights: a file of deployments/systemd, an overlay
// of deployments/kubernetes or a value of the Helm chart, or else a command.
func (p *patient) giveRights(unit, overlay, value, command string) string {
	cgroup, _ := os.ReadFile(p.ofDaemon("cgroup"))
	switch {
	case strings.Contains(string(cgroup), "kubepods"):
		return "apply overlays/" + overlay + " of deployments/kubernetes, or set " + value + " with Helm"
	case p.unit():
		return "install deployments/systemd/" + unit + " of the release into /etc/systemd/system/nvshare-scheduler.service.d, then systemctl daemon-reload and systemctl restart nvshare-scheduler"
	}
	return command
}

// canCheckpoint returns what asks the driver whether it can checkpoint processes.
func (p *patient) canCheckpoint() func() error {
	return func() error {
		r := &checkpoint.Runner{Program: checkpoint.Find(), Limit: callTimeout}
		if beside := filepath.Join(filepath.Dir(p.self), "../sbin", checkpoint.Name); r.Program == "" { // PATH of a user has no sbin
			r.Program, _ = exec.LookPath(beside)
		}
		if p.simGPU != "" {
			r.Env = []string{"LD_LIBRARY_PATH=" + filepath.Join(p.simGPU, "lib"), "NVSHARE_SIMGPU_DIR=" + filepath.Join(p.simGPU, "run")}
		}
		ctx, cancel := context.WithTimeout(p.ctx, callTimeout)
		defer cancel()
		return r.Check(ctx)
	}
}
