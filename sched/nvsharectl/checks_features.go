// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

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

// A drain may take shortTurn before it is cut: in shorter turns little work may be done. In turns
// longer than longTurn others wait for longer than their users do.
const (
	shortTurn = 10 * time.Millisecond
	longTurn  = mostSeconds * time.Second
)

// checkConfig warns of settings with which GPUs are shared badly.
func checkConfig(p *patient) (all []finding) {
	if p.status == nil || len(p.status.Config) == 0 { // of an older scheduler
		return nil
	}
	hand := 0
	for _, v := range p.status.Config {
		if v.Origin == api.Origin_ORIGIN_HAND {
			hand++
		}
		if text := badly(p.status, v); text != "" {
			all = append(all, finding{Level: warn, Text: fmt.Sprintf("%s %s (%s): %s", v.Name, v.Value, whoSaid(p.status, v), text), Fix: goBack(p.status, v)})
		}
	}
	if len(all) > 0 {
		return all
	}
	if hand == 0 {
		return found(pass, "", "nothing is set by hand")
	}
	return found(pass, "", "%s by hand (nvsharectl config list)", numbered(hand, "value is set", "values are set"))
}

// badly says what is wrong with a value; "": nothing.
func badly(r *api.StatusResponse, v *api.ConfigValue) string {
	switch v.Name {
	case api.TurnLengthSetting:
		length, err := time.ParseDuration(v.Value)
		switch {
		case err != nil:
		case length < shortTurn:
			return fmt.Sprintf("a drain may take %v, so little of such a turn may be left for work", shortTurn)
		case length > longTurn:
			return "where tenants take turns, each waits that long for every other"
		}
	case api.SwapShareSetting:
		if v.Value != api.FormatPercent(0) {
			break
		}
		for _, g := range r.Gpus {
			if g.Swap != nil && (v.Uuid == "" || v.Uuid == g.Uuid) {
				return "turns are as long as turn-length says, and moving memory may take most of the time"
			}
		}
	}
	return ""
}

// whoSaid says where a value comes from, and of which GPU it is.
func whoSaid(r *api.StatusResponse, v *api.ConfigValue) string {
	text := "a flag of the scheduler"
	if v.Origin == api.Origin_ORIGIN_HAND {
		text = "set by hand"
		if by, since := authorOf(v); by != "" {
			text += " by " + by + ", " + since
		}
	}
	if v.Uuid != "" {
		text += ", on GPU " + gpuOf(r, v)
	}
	return text
}

// goBack is the command that takes a value back.
func goBack(r *api.StatusResponse, v *api.ConfigValue) string {
	if v.Origin != api.Origin_ORIGIN_HAND {
		return "start nvshare-scheduler without that flag"
	}
	text := "nvsharectl config reset " + v.Name
	if v.Uuid != "" {
		text += " --gpu " + gpuOf(r, v)
	}
	return text
}

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
	server, err := api.PeerOf(conn.(*net.UnixConn))
	if err != nil {
		return 0
	}
	return int(server.Pid)
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
