//go:build engines

// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/nvshare/nvshare/tests/node"
	"github.com/nvshare/nvshare/tests/readme"
)

// bootScript makes a copy on write of this machine's files, in memory, and starts systemd
// there as the first process. It runs in namespaces of its own, in a cgroup of its own, and
// sees few devices, because systemd would set up the host's: it makes cgroups and device
// nodes, and mounts their directory anew, read-only for all.
const bootScript = `
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount --bind /sys sys
mount -o remount,bind,ro sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
for node in null zero full random urandom tty; do
	touch dev/$node
	mount --bind /dev/$node dev/$node
done
mkdir dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mkdir -p "./$2"
mount --bind "$2" "./$2"
exec chroot . /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=other \
	/lib/systemd/systemd --system --unit=basic.target --log-target=journal --show-status=no
`

// enterScript starts a command in the cgroup $1.
const enterScript = `echo $$ >"$1/cgroup.procs" && shift && exec "$@"`

// ownCgroup makes a cgroup of version 2 among those of the node, which are removed even if the
// tests are ended by a time limit, and removes it in the end.
func ownCgroup(t *testing.T) string {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	check(t, err)
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 2 && f[2] == "cgroup2" {
			dir := filepath.Join(f[1], shared.Cgroup(), "boot")
			if err := os.MkdirAll(dir, 0o755); err != nil {
				t.Skipf("SKIPPED: no cgroup can be made here: %v", err)
			}
			t.Cleanup(func() { check(t, node.RemoveCgroup(dir)) })
			return dir
		}
	}
	t.Skip("there is no cgroup version 2 here")
	return ""
}

// machine is one that systemd has booted.
type machine struct {
	t    *testing.T
	ctx  context.Context
	init int // process id of systemd
}

func boot(t *testing.T) *machine {
	t.Helper()
	if _, err := os.Stat("/lib/systemd/systemd"); err != nil {
		t.Skip("there is no systemd here")
	}
	m := &machine{t: t, ctx: within(t)}
	cmd := exec.Command("sh", "-c", enterScript, "enter", ownCgroup(t),
		"unshare", "--mount", "--pid", "--uts", "--cgroup", "--fork", "--kill-child", "--propagation", "private",
		"sh", "-c", bootScript, "boot", t.TempDir(), buildDir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	check(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	children := fmt.Sprintf("/proc/%d/task/%[1]d/children", cmd.Process.Pid)
	if err := node.Until(m.ctx, "systemd to boot", func() error {
		select {
		case err := <-ended:
			ended <- err
			t.Skipf("systemd cannot be booted in a namespace here: %v\n%s", err, &said)
		default:
		}
		text, err := os.ReadFile(children)
		if err != nil {
			return err
		}
		if m.init, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil {
			return err
		}
		state, err := m.try("systemctl", "is-system-running") // an error, where it is degraded
		if strings.HasPrefix(state, "running") || strings.HasPrefix(state, "degraded") {
			return nil
		}
		return fmt.Errorf("%s, %w", state, err)
	}); err != nil {
		t.Fatal(err)
	}
	return m
}

// command is a program of the machine.
func (m *machine) command(argv ...string) *exec.Cmd {
	cmd := exec.CommandContext(m.ctx, "nsenter", append([]string{"-t", strconv.Itoa(m.init), "-m", "-p", "-r", "-w"}, argv...)...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	return cmd
}

func (m *machine) try(argv ...string) (string, error) {
	out, err := m.command(argv...).CombinedOutput()
	return string(out), err
}

func (m *machine) run(argv ...string) string {
	m.t.Helper()
	out, err := m.try(argv...)
	if err != nil {
		log, _ := m.try("journalctl", "--no-pager", "-n", "30", "-u", "nvshare-*")
		m.t.Fatalf("%s: %v\n%s\n%s", strings.Join(argv, " "), err, out, log)
	}
	return out
}

// processes finds those whose names begin so.
func processes(name string) string { return "grep -ls ^" + name + " /proc/[0-9]*/comm" }

// endTenants ends all cuda-busy, and returns when they have ended. nsenter waits for its program, which
// goes on if nsenter is killed.
func (m *machine) endTenants(all ...*exec.Cmd) {
	m.t.Helper()
	m.run("sh", "-c", "kill $("+processes("cuda-busy")+" | cut -d/ -f3)")
	for _, cmd := range all {
		_ = cmd.Wait()
	}
}

// await waits until nvsharectl says so.
func (m *machine) await(what string, says ...string) {
	m.t.Helper()
	if err := node.Until(m.ctx, what, func() error {
		out, err := m.try("nvsharectl", "status", "-o", "json")
		for _, want := range says {
			if err == nil && !strings.Contains(strings.ReplaceAll(out, " ", ""), want) {
				err = errors.New(out)
			}
		}
		return err
	}); err != nil {
		log, _ := m.try("journalctl", "--no-pager", "-n", "30", "-u", "nvshare-*")
		m.t.Fatalf("%v\n%s", err, log)
	}
}

// awaitLog waits until the journal has such a line of the scheduler, and returns all that
// the arguments find.
func (m *machine) awaitLog(line string, args ...string) (found string) {
	m.t.Helper()
	check(m.t, node.Until(m.ctx, "a line in the journal", func() (err error) {
		if found, err = m.try(append([]string{"journalctl", "--no-pager", "-u", "nvshare-scheduler.service"}, args...)...); err == nil && !strings.Contains(found, line) {
			err = fmt.Errorf("%q is missing in:\n%s", line, found)
		}
		return err
	}))
	return found
}

// The units, under a real systemd: the scheduler runs as a user of its own without a
// capability, takes over from one that ran as root, and serves tenants across restarts.
func TestUnderSystemd(t *testing.T) {
	m := boot(t)
	m.run("sh", "-c", `
set -e
mkdir -p /simgpu/run /etc/systemd/system/nvshare-scheduler.service.d
cp -r "$1/simgpu/bin" /simgpu/bin
cp -r "$1/simgpu" /simgpu/lib # the unit has a /tmp of its own, and the clone may be in the other
echo gpus=1 >/simgpu/run/config
chmod 777 /simgpu/run
printf '[Service]\nLimitNOFILE=16500\nEnvironment=NVSHARE_SIMGPU=/simgpu NVSHARE_DROP_LEAD_MS=5\nReadWritePaths=/simgpu\n' \
	>/etc/systemd/system/nvshare-scheduler.service.d/test.conf
mkdir -p /etc/systemd/system/nvshare-plugin.service.d
printf '[Service]\nEnvironment=NVSHARE_SIMGPU=/simgpu\n%s\n%s\n%s\n%s\n%s\n' \
	"ExecStartPost=/usr/local/bin/nvsharectl events -n 0" \
	"ExecStartPost=/bin/sh -c 'test -d /proc/1/root/etc'" \
	"ExecStartPost=/bin/sh -c 'mknod /dev/nvidia-test c 1 3 && head -c 0 /dev/nvidia-test && rm /dev/nvidia-test'" \
	"ExecStartPost=/bin/sh -c 'kill -0 \$\$(systemctl show --value -p MainPID nvshare-scheduler.service)'" \
	>/etc/systemd/system/nvshare-plugin.service.d/test.conf
mkdir -p /run/nvshare/tenant && touch /run/nvshare/lock # as root's scheduler left it
`, "prepare", buildDir)
	m.run(filepath.Join(buildDir, "release", "nvsharectl"), "install", "--start")
	m.run("systemctl", "disable", "--now", "nvshare-scheduler", "nvshare-plugin")
	enabled := 0
	for _, line := range must(readme.Commands(readme.Pages("../..")...))(t) {
		if command, ok := strings.CutPrefix(line, "sudo systemctl enable "); ok { // as after a package
			m.run(strings.Fields("systemctl enable " + command)...)
			enabled++
		}
	}
	if enabled != 1 {
		t.Errorf("README starts the services with %d commands", enabled)
	}
	m.run("systemctl", "is-enabled", "nvshare-scheduler", "nvshare-plugin")

	pid := strings.TrimSpace(m.run("systemctl", "show", "--value", "-p", "MainPID", "nvshare-scheduler.service"))
	status := m.run("cat", "/proc/"+pid+"/status")
	for _, want := range []string{"CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(status, want) {
			t.Errorf("the scheduler's status lacks %q:\n%s", want, status)
		}
	}
	if strings.Contains(status, "\nUid:\t0") {
		t.Errorf("the scheduler runs as root:\n%s", status)
	}
	if got := strings.TrimSpace(m.run("stat", "-c", "%U %a", "/run/nvshare", "/run/nvshare/tenant", "/run/nvshare/control.sock")); got != "nvshare 755\nnvshare 755\nnvshare 600" {
		t.Errorf("owners and modes: %q", got)
	}

	// The journal knows how grave a line is.
	if out := m.awaitLog("NVSHARE_DROP_LEAD_MS has no effect", "_PID="+pid, "-p", "warning"); strings.Contains(out, "time quantum") {
		t.Errorf("warnings in the journal:\n%s", out)
	}

	testPluginUnit(m)
	tenant := m.command("env", "NVSHARE_SIMGPU_DIR=/simgpu/run", "LD_LIBRARY_PATH=/simgpu/lib", "LD_PRELOAD=libnvshare.so",
		filepath.Join(buildDir, "bin", "cuda-busy"), "--tenant", "a", "--kernel-us", "500", "--depth", "4", "--report-ms", "0")
	check(t, tenant.Start())
	t.Cleanup(func() { _ = tenant.Process.Kill(); _ = tenant.Wait() })
	const holding = `"state":"holding"`
	m.await("the tenant to hold the GPU", holding)
	// The fields of a line find what concerns one program.
	m.awaitLog("nvshare-scheduler["+pid+"]: registered", "NVSHARE_COMMAND=cuda-busy")
	m.run("systemctl", "restart", "nvshare-scheduler.service")
	m.await("it to hold the GPU under the next scheduler", holding)

	m.endTenants(tenant)
	testEditedUnit(m)
	testOverlapUnit(m)
	testCheckpointUnit(m)
	m.run("nvsharectl", "uninstall")
	if out, err := m.try("ls", "/run/nvshare"); err == nil {
		t.Errorf("left behind: %s", out)
	}
}

// testPluginUnit: the plugin works inside its unit's bounds, where it may use the control
// socket, see containers' files, make device nodes and signal processes of other users:
// ExecStartPost did each of these.
func testPluginUnit(m *machine) {
	m.t.Helper()
	if err := node.Until(m.ctx, "the plugin to run and to write the CDI spec", func() error {
		out, err := m.try("sh", "-c", "systemctl is-active nvshare-plugin.service && test -s /run/cdi/nvshare.com-gpu.yaml && test -e /var/lib/nvshare/lib/current/libnvshare.so")
		if err != nil {
			log, _ := m.try("journalctl", "--no-pager", "-n", "10", "-u", "nvshare-plugin")
			return fmt.Errorf("%w: %s\n%s", err, out, log)
		}
		return nil
	}); err != nil {
		m.t.Fatal(err)
	}
	pid := strings.TrimSpace(m.run("systemctl", "show", "--value", "-p", "MainPID", "nvshare-plugin.service"))
	status := m.run("cat", "/proc/"+pid+"/status")
	for _, want := range []string{"CapBnd:\t0000000008090022", "NoNewPrivs:\t1", "Seccomp:\t2"} {
		if !strings.Contains(status, want) {
			m.t.Errorf("the plugin's status lacks %q:\n%s", want, status)
		}
	}
}

// testEditedUnit: what README has for systemctl edit gives the installed unit the option.
func testEditedUnit(m *machine) {
	m.t.Helper()
	var block string
	for _, b := range must(readme.Blocks(readme.Pages("../..")...))(m.t) {
		if b.Language == "ini" {
			block += b.Text
		}
	}
	const size = "--swap-memory 200Gi" // this machine may have less
	if strings.Count(block, size) != 1 {
		m.t.Fatalf("README's block for systemctl edit: %q", block)
	}
	m.run("sh", "-c", `printf %s "$1" >/tmp/block && printf '#!/bin/sh\ncat /tmp/block >"$1"\n' >/tmp/editor && chmod +x /tmp/editor`, "sh",
		strings.Replace(block, size, "--swap-memory 64Mi", 1))
	// It edits on a terminal only.
	m.run("script", "--quiet", "--return", "--command", "EDITOR=/tmp/editor systemctl edit nvshare-scheduler", "/dev/null")
	m.run("systemctl", "restart", "nvshare-scheduler")
	m.await("the scheduler to have the option", `"arena_limit_bytes":67108864`)
	m.run("rm", "/etc/systemd/system/nvshare-scheduler.service.d/override.conf")
	m.run("systemctl", "daemon-reload")
	m.run("systemctl", "restart", "nvshare-scheduler")
	m.await("the scheduler without the option", `"index":0`)
}

// testOverlapUnit: the unit refuses overlap groups, and says what to install. With that, a
// group runs, and its MPS daemon outlives the scheduler.
func testOverlapUnit(m *machine) {
	m.t.Helper()
	program := []string{"env", "NVSHARE_SIMGPU_DIR=/simgpu/run", "LD_LIBRARY_PATH=/simgpu/lib", "nvsharectl", "run", "--overlap", "small", "--gpu", "0", "--",
		filepath.Join(buildDir, "bin", "cuda-busy"), "--tenant", "member", "--kernel-us", "500", "--depth", "4", "--report-ms", "0"}
	const dropIn = "deployments/systemd/overlap-groups.conf"
	if out, err := m.try(program...); err == nil || !strings.Contains(out, dropIn) {
		m.t.Errorf("the unit without the drop-in: %v, %s", err, out)
	}
	m.run("install", "-D", "-m", "644", filepath.Join(buildDir, "release", dropIn), "/etc/systemd/system/nvshare-scheduler.service.d/overlap-groups.conf")
	m.run("systemctl", "daemon-reload")
	m.run("systemctl", "restart", "nvshare-scheduler.service")
	m.await("the next scheduler to find the GPU", `"index":0`)
	member := m.command(program...)
	var said strings.Builder
	member.Stdout, member.Stderr = &said, &said
	check(m.t, member.Start())
	m.t.Cleanup(func() { _ = member.Process.Kill(); _ = member.Wait() })
	const inGroup = `"overlap":"/0/small"`
	m.await("the member to hold the GPU", `"state":"holding"`, inGroup)
	mps := func() string {
		out, _ := m.try("sh", "-c", processes("nvidia-cuda-mps"))
		return out
	}
	running := mps()
	if strings.Count(running, "\n") != 2 {
		m.t.Errorf("the MPS daemon and server are %q", running)
	}
	owners := func() string { return m.run("find", "/run/nvshare", "-type", "d", "-printf", "%p %u %m\n") }
	before := owners()
	m.run("systemd-tmpfiles", "--create", "nvshare.conf") // as rpm does, at the upgrade of any package
	if after := owners(); after != before {
		m.t.Errorf("the owners were\n%sand are\n%s", before, after)
	}
	m.run("systemctl", "restart", "nvshare-scheduler.service")
	m.await("it to hold the GPU under the next scheduler", `"state":"holding"`, inGroup)
	if now := mps(); now != running {
		m.t.Errorf("the MPS daemon and server were %q, and are %q", running, now)
	}
	m.endTenants(member)
	if err := node.Until(m.ctx, "the end of the group", func() error {
		if left := mps(); left != "" {
			return fmt.Errorf("processes %q", left)
		}
		return nil
	}); err != nil {
		m.t.Error(err)
	}
}

// testCheckpointUnit: with its drop-ins the unit takes a process of another user off the GPU with its
// context, keeps its memory in a file, and brings it back as it was.
func testCheckpointUnit(m *machine) {
	m.t.Helper()
	tenant := fmt.Sprintf("/proc/%d/root/simgpu/suspend-tenant", m.init)
	cc := exec.Command("cc", "-std=c11", "-D_GNU_SOURCE", "-pthread", "-I../simgpu", "-o", tenant,
		"../workload/suspend-tenant.c", filepath.Join(buildDir, "simgpu", "libcuda.so.1"))
	if out, err := cc.CombinedOutput(); err != nil {
		m.t.Fatalf("build suspend-tenant: %v\n%s", err, out)
	}
	const dropIns = "/etc/systemd/system/nvshare-scheduler.service.d/"
	m.run("sh", "-c", `
set -e
rm "$2overlap-groups.conf"
for name in checkpoint.conf suspend-dir.conf; do
	install -D -m 644 "$1/$name" "$2$name"
done
printf '[Service]\nExecStart=\nExecStart=/usr/local/sbin/nvshare-scheduler %s\n' \
	"--swap-memory 150Mi --swap-ready 0 --suspend-dir /var/lib/nvshare/suspended" >"$2options.conf"
systemctl daemon-reload
systemctl restart nvshare-scheduler.service
`, "drop-ins", filepath.Join(buildDir, "release/deployments/systemd"), dropIns)
	m.await("the scheduler to swap", `"swap":{`)
	if out := m.run("nvsharectl", "status", "-o", "json"); strings.Contains(out, `"checkpoint_problem"`) {
		m.t.Errorf("contexts stay: %s", out)
	}
	// What is left of the host memory then is less than a quarter of it.
	cmd := m.command("env", "NVSHARE_SIMGPU_DIR=/simgpu/run", "LD_LIBRARY_PATH=/simgpu/lib", "LD_PRELOAD=libnvshare.so", "/simgpu/suspend-tenant", "64")
	in, err := cmd.StdinPipe()
	check(m.t, err)
	out, err := cmd.StdoutPipe()
	check(m.t, err)
	check(m.t, cmd.Start())
	m.t.Cleanup(func() { in.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "filled 0\n" {
		m.t.Fatalf("the tenant says %q, %v", line, err)
	}
	m.run("nvsharectl", "suspend", "0")
	m.await("its memory to be in a file", `"context":"away"`, `"arena_bytes":0`)
	if got := strings.TrimSpace(m.run("sh", "-c", "stat -c '%U %a' /var/lib/nvshare /var/lib/nvshare/suspended /var/lib/nvshare/suspended/*")); got != "root 755\nnvshare 700\nnvshare 600" {
		m.t.Errorf("owners and modes: %q", got)
	}
	_, err = in.Write([]byte("k"))
	check(m.t, err)
	check(m.t, in.Close())
	said, err := io.ReadAll(out)
	if err := errors.Join(err, cmd.Wait()); err != nil || string(said) != "k 0\n" {
		m.t.Errorf("the tenant ends with %v, and says %q", err, said)
	}
	m.run("rm", dropIns+"checkpoint.conf", dropIns+"suspend-dir.conf", dropIns+"options.conf")
}

// The units are as confined as their work allows; each says what it needs, and why.
func TestExposure(t *testing.T) {
	for _, c := range []struct {
		unit, most string // tenths
		dropIns    []string
	}{
		{"scheduler", "25", nil}, {"plugin", "40", nil},
		{"scheduler", "26", []string{"checkpoint.conf"}},
		{"scheduler", "27", []string{"checkpoint.conf", "suspend-dir.conf"}},
		{"scheduler", "37", []string{"overlap-groups.conf"}},
	} {
		dir, name := t.TempDir(), "nvshare-"+c.unit+".service"
		text, err := os.ReadFile("../../deployments/systemd/" + name)
		check(t, err)
		check(t, os.WriteFile(filepath.Join(dir, name), text, 0o644))
		dropIns(t, dir, append(c.dropIns, "none")...)
		out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--threshold="+c.most, "--no-pager", filepath.Join(dir, name)).CombinedOutput()
		if strings.Contains(string(out), "unrecognized option") || errors.Is(err, exec.ErrNotFound) {
			t.Skip("there is no systemd-analyze here that judges files (systemd 250)")
		}
		if err != nil {
			t.Errorf("%s with %v: %v, the exposure may be %s tenths at most:\n%s", name, c.dropIns, err, c.most, out)
		}
	}
}
