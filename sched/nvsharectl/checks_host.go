// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/nvshare/nvshare/cdi"
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

// checkRuntime looks whether containerd is old enough to drop the devices of plugins.
func checkRuntime(p *patient) []finding {
	text, err := p.versionOf("containerd")
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

// versionOf is what a program says of itself.
func versionOf(program string) (string, error) { return hear(program, "--version") }

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

// nobody is the user as which doctor connects from inside a container.
const nobody = 65534

// errNotTried means that this process cannot make a container of its own.
var errNotTried = errors.New("it needs root that may make namespaces and mounts")

// setUp begins what reachFromInside says where it cannot make the container.
const setUp = "set up: "

// checkInside connects to the tenant socket as a program in a container would.
func checkInside(p *patient) []finding {
	dir := p.at(filepath.Join(p.runDir, "tenant"))
	if _, err := os.Stat(filepath.Join(dir, "scheduler.sock")); err != nil {
		return nil // said already
	}
	switch err := p.inside(dir); {
	case errors.Is(err, errNotTried):
		return found(warn, p.sudo("doctor"), "the socket was not tried from inside a container: %v", err)
	case err != nil:
		return found(fail, p.scheduler("restart")+", which makes "+filepath.Join(p.runDir, "tenant")+" again; then start the container again", "a program inside a container does not reach the scheduler: %v", err)
	}
	return found(pass, "", "a program inside a container, with no rights, reaches the scheduler")
}

// connectInside runs doctor inside in namespaces of its own.
func connectInside(dir string) error {
	if os.Getuid() != 0 {
		return errNotTried
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*callTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, self, "doctor", "inside", dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS}
	text, err := cmd.CombinedOutput()
	switch said := strings.TrimSpace(string(text)); {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission), strings.Contains(said, setUp):
		return fmt.Errorf("%w: %w %s", errNotTried, err, said)
	default:
		return fmt.Errorf("%w: %s", err, said)
	}
}

// insideCommand is the part of checkInside that runs in the namespaces.
func insideCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "inside DIRECTORY",
		Short:  "What doctor runs as a container",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			return onOneThread(func() error { return reachFromInside(args[0]) })
		},
	}
}

// reachFromInside makes a root file system that has only the tenant directory, becomes
// nobody, and connects. Mounts are those of the process's own namespace.
func reachFromInside(dir string) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf(setUp+"make mounts private: %w", err)
	}
	root := "/proc" // any directory that is there on each host: the mount covers it
	source, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf(setUp+"open %s: %w", dir, err)
	}
	tree, err := unix.OpenTree(source, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf(setUp+"mount %s: %w", dir, err)
	}
	err = unix.Mount("tmpfs", root, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=64k")
	if err == nil {
		err = os.Mkdir(root+"/tenant", 0o755)
	}
	if err == nil {
		err = unix.MoveMount(tree, "", unix.AT_FDCWD, root+"/tenant", unix.MOVE_MOUNT_F_EMPTY_PATH)
	}
	if err == nil {
		err = errors.Join(unix.Chroot(root), unix.Chdir("/"))
	}
	if err != nil {
		return fmt.Errorf(setUp+"make a root file system: %w", err)
	}
	if err := errors.Join(unix.Setgroups(nil), unix.Setresgid(nobody, nobody, nobody), unix.Setresuid(nobody, nobody, nobody)); err != nil {
		return fmt.Errorf(setUp+"become nobody: %w", err)
	}
	conn, err := net.DialTimeout("unixpacket", "/tenant/scheduler.sock", 10*time.Second)
	if err != nil {
		return err
	}
	return conn.Close()
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
