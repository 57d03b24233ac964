// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
)

// checks are what doctor looks at, in the order in which people read them: what others
// depend on comes first.
var checks = []struct {
	name  string
	check func(*patient) []finding
}{
	{"driver", checkDriver},
	{"scheduler", checkScheduler},
	{"version", checkVersion},
	{"health", checkHealth},
	{"controls", checkControls},
	{"proc", checkProc},
	{"socket", checkSocket},
	{"shim", checkShim},
	{"cdi", checkCDI},
	{"nri", checkNRI},
	{"swap", checkSwap},
	{"checkpoint", checkCheckpoint},
	{"warden", checkWarden},
	{"selinux", checkSELinux},
	{"mig", checkMIG},
	{"mps", checkMPS},
}

func (p *patient) examine() (all []finding) {
	for _, c := range checks {
		for _, f := range c.check(p) {
			f.Check = c.name
			all = append(all, f)
		}
	}
	return all
}

// found makes the one finding of a check.
func found(l level, fix, format string, args ...any) []finding {
	return []finding{{Level: l, Text: fmt.Sprintf(format, args...), Fix: fix}}
}

func checkDriver(p *patient) []finding {
	if p.simGPU != "" {
		if _, err := (cdi.Simulated{Dir: p.simGPU}).List(p.ctx); err != nil {
			return found(fail, "make simgpu, and NVSHARE_SIMGPU=.build/simgpu", "%v", err)
		}
		return found(pass, "", "simulated GPU in %s", p.simGPU)
	}
	text, err := os.ReadFile(p.at("/proc/driver/nvidia/version"))
	if err != nil {
		return found(fail, "install NVIDIA's driver and run modprobe nvidia", "NVIDIA's kernel driver is not loaded: %v", err)
	}
	if _, err := os.Stat(p.at("/dev/nvidia-uvm")); err != nil {
		return found(fail, "nvidia-modprobe -c 0 -u", "/dev/nvidia-uvm is missing, so CUDA cannot start in containers")
	}
	line, _, _ := strings.Cut(string(text), "\n")
	return found(pass, "", "%s", strings.TrimSpace(strings.TrimPrefix(line, "NVRM version:")))
}

func checkScheduler(p *patient) []finding {
	switch {
	case errors.Is(p.whyNot, fs.ErrPermission):
		return found(warn, p.sudo("doctor"), "the control socket needs root: what the scheduler reports is not checked")
	case p.whyNot != nil:
		return found(fail, p.scheduler("start"), "%v", p.whyNot)
	}
	return found(pass, "", "answers on %s, up %v, %s", api.SocketPath(p.runDir), time.Duration(p.status.UptimeNs).Round(time.Second), numbered(len(p.status.Gpus), "GPU", "GPUs"))
}

func checkHealth(p *patient) (all []finding) {
	if p.status == nil {
		return nil
	}
	for i, problem := range p.status.Problems {
		all = append(all, finding{Level: fail, Text: problem, Fix: p.fixOf(api.CodeOf(p.status, i))})
	}
	if len(all) == 0 {
		return found(pass, "", "the scheduler reports no problem")
	}
	return all
}

// fixOf returns the command that shows or mends a problem of the scheduler.
func (p *patient) fixOf(code api.ProblemCode) string {
	if code == api.ProblemCode_PROBLEM_CODE_NO_GPU && p.simGPU != "" {
		return "make simgpu, and nvshare-scheduler --simgpu .build/simgpu"
	}
	return api.Remedy(code)
}

// hasTried tells whether a client's shim has tried what the driver lets it do.
func hasTried(c *api.Client) bool {
	slices, channels := c.GetControls().GetSlices(), c.GetControls().GetChannels()
	return slices != "" && slices != "not tried" && channels != "" && channels != "not tried"
}

// checkControls says of each GPU in how many processes the driver's controls work.
func checkControls(p *patient) (all []finding) {
	for _, g := range p.status.GetGpus() {
		var proved, tried, refused, silent, members int
		for _, c := range g.Clients {
			switch k := c.Controls; {
			case !hasTried(c):
				silent++
			case c.Container.GetShare().GetOverlap() != "" && k.Channels == "works":
				members++ // the slice is that of the MPS server
			case k.Slices != "works" || k.Channels != "works":
				refused++
			case k.Listed:
				proved++
			default:
				tried++
			}
		}
		if len(g.Clients) == 0 {
			all = append(all, finding{Level: pass, Text: fmt.Sprintf("GPU %d: not tried now, because no program uses it: %s runs two", g.Index, p.sudo("doctor", "test"))})
			continue
		}
		f := finding{Level: pass, Text: fmt.Sprintf("GPU %d: time slices and preemption work in %s", g.Index, numbered(proved+tried, "process", "processes"))}
		for _, part := range []struct {
			n    int
			text string
		}{
			{tried, ", %d of them with a driver version that nvshare was not tested with"}, {refused, "; the driver refused them in %d"},
			{silent, "; not tried yet in %d"}, {members, "; %d in overlap groups have the driver's own slices"}, {int(g.Preemptions), "; %d grants preempted"},
		} {
			if part.n > 0 {
				f.Text += fmt.Sprintf(part.text, part.n)
			}
		}
		if refused > 0 {
			f.Level, f.Fix = warn, "another driver (deployments/kubernetes/operations.md); nvsharectl status -o json names the control that was refused"
		}
		all = append(all, f)
	}
	return all
}

func checkSocket(p *patient) []finding {
	dir := filepath.Join(p.runDir, "tenant") // all that containers see
	path := filepath.Join(dir, "scheduler.sock")
	for _, part := range []struct {
		path  string
		needs fs.FileMode // for everybody
	}{{dir, 0o001}, {path, 0o006}} {
		info, err := os.Stat(p.at(part.path))
		if err != nil {
			return found(fail, p.scheduler("restart"), "programs find no scheduler: %v", err)
		}
		if info.Mode()&part.needs != part.needs {
			return found(fail, p.scheduler("restart"), "%s has mode %v: containers cannot connect", part.path, info.Mode().Perm())
		}
	}
	conn, err := (&net.Dialer{Timeout: callTimeout}).DialContext(p.ctx, "unixpacket", p.at(path))
	if err != nil {
		return found(fail, p.scheduler("restart"), "%v", err)
	}
	conn.Close()
	return found(pass, "", "programs can connect to %s", path)
}

// shimPaths are where the shim is put: by the plugin, and by installations, that of this
// program (nvsharectl install --prefix) before others.
func shimPaths() []string {
	paths := []string{cdi.DefaultPaths.ShimDir + "/" + cdi.ShimFile}
	if self, err := os.Executable(); err == nil {
		paths = append(paths, filepath.Join(filepath.Dir(self), "../lib", cdi.ShimFile))
	}
	for _, path := range []string{"/usr/local/lib/" + cdi.ShimFile, "/usr/lib/" + cdi.ShimFile} {
		if !slices.Contains(paths, path) {
			paths = append(paths, path)
		}
	}
	return paths
}

func checkShim(p *patient) []finding {
	paths := shimPaths()
	if p.shim != "" {
		paths = []string{p.shim}
	}
	for _, path := range paths {
		path = p.at(path)
		if _, err := os.Stat(path); err != nil {
			continue
		}
		var st unix.Statfs_t
		if err := unix.Statfs(path, &st); err == nil && st.Flags&unix.ST_NOEXEC != 0 {
			return found(fail, "nvshare-plugin --lib-dir a directory on another mount", "%s is on a noexec mount: no program can load it", path)
		}
		if said, err := p.program(path); err != nil || said != "" {
			return found(fail, installed, "a program under %s: %v %s", path, err, strings.TrimSpace(said))
		}
		return found(pass, "", "programs load %s", path)
	}
	if n := p.underShim(); n > 0 && p.shim == "" {
		return found(warn, installed, "the shim is loaded in %s; none is installed, so containers get none", numbered(n, "process", "processes"))
	}
	return found(fail, installed, "no shim is at %s", strings.Join(paths, ", "))
}

// underShim runs a program that does nothing with the shim loaded, and returns what it
// or the dynamic linker says.
func underShim(shim string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "true")
	cmd.Env = append(os.Environ(), cdi.PreloadEnv+"="+shim)
	cmd.Stderr = &stderr
	err := cmd.Run()
	return stderr.String(), err
}

func checkCDI(p *patient) []finding {
	dirs := []string{p.at("/etc/cdi"), p.at(cdi.DefaultSpecDir)}
	var all []finding
	for _, v := range cdi.Validate(cdi.Options{HostRoot: p.root, SimDir: p.simGPU}, dirs...) {
		if v.Bad {
			all = append(all, finding{Level: fail, Text: strings.TrimSpace(v.File + " " + v.Text), Fix: p.pluginOr("nvshare-plugin --no-nri")})
		}
	}
	if len(all) == 0 {
		all = podmanFinds(p)
	}
	if len(all) == 0 {
		return found(pass, "", "engines find the devices of %s", cdi.Kind)
	}
	return all
}

func checkNRI(p *patient) []finding {
	const socket = "/var/run/nri/nri.sock"
	if file := nriIsOff(p); file != "" {
		return found(warn, "remove disable = true of io.containerd.nri.v1.nri there, and restart containerd", "%s switches NRI off, perhaps for another operator: pods cannot ask for GPUs", file)
	}
	if _, err := os.Stat(p.at(socket)); err != nil {
		return found(warn, "enable NRI in the container runtime (deployments/containerd/nri-cdi.toml for containerd 1.7)",
			"%s is missing: pods cannot ask for GPUs; podman, Docker, nerdctl and ctr can", socket)
	}
	return found(pass, "", "the container runtime serves NRI")
}

func checkSwap(p *patient) (all []finding) {
	if p.status == nil {
		return nil
	}
	var limit, held uint64
	swaps, not := false, map[string][]string{} // GPUs by the reason
	for _, g := range p.status.Gpus {
		if s := g.Swap; s != nil { // each says the same of the node
			swaps, limit = true, s.ArenaLimitBytes
			taken := s.ArenaUsedBytes + s.ArenaReadyBytes
			held = taken - min(taken, s.ArenaFileBytes)
		} else if g.NotSwapped != "" {
			not[g.NotSwapped] = append(not[g.NotSwapped], fmt.Sprint(g.Index))
		}
	}
	for _, why := range slices.Sorted(maps.Keys(not)) {
		f := finding{Level: info, Text: fmt.Sprintf("off on GPU %s: %s", strings.Join(not[why], ", "), why), Fix: p.fixSwap(why)}
		if why == api.SwapMemoryZero { // somebody has asked for that
			f.Level, f.Fix = pass, ""
		}
		all = append(all, f)
	}
	if !swaps {
		return all
	}
	return append(all, p.hostMemory(limit, held)...)
}

// fixSwap returns what has memory swapped.
func (p *patient) fixSwap(why string) string {
	switch {
	case strings.Contains(why, "NVML") && p.inPod():
		return "set nvml.enabled with Helm, or apply overlays/nvml of deployments/kubernetes"
	case strings.Contains(why, "restarted"):
		return p.scheduler("restart")
	}
	return "sched/README.md, Swapping, says what it needs"
}

// hostMemory says how much memory what is away from GPUs may have, of which the scheduler has some already.
func (p *patient) hostMemory(limit, held uint64) []finding {
	if limit == 0 {
		return found(info, "free memory of the host", "on, but the host can spare no memory for it now")
	}
	if most, whose := p.pinnable(held); most != 0 && limit > most/10*9 {
		return found(warn, "nvshare-scheduler --swap-memory with less", "swapping may pin %s, and %s has %s for it", size(limit), whose, size(most))
	}
	return found(pass, "", "what does not fit on a GPU has at most %s of host memory", size(limit))
}
