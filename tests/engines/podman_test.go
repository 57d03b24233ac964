//go:build engines

// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/node"
	"github.com/nvshare/nvshare/tests/readme"
)

// podman prepares an engine for podman, with the node's cgroups and network, and with
// the pinned runc, because crun refuses hybrid cgroup hierarchies.
func podman(t *testing.T, e *node.Engine) {
	t.Helper()
	conf := filepath.Join(e.Private, "containers.conf")
	check(t, os.WriteFile(conf, []byte(fmt.Sprintf(`[containers]
netns = "host"
no_hosts = true
apparmor_profile = "unconfined"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
tmp_dir = "/run/engine-%[2]s/tmp"
[engine.runtimes]
runc = ["%[1]s/runc"]
[network]
network_config_dir = "%[3]s/networks"
`, shared.Tools(), filepath.Base(e.Private), e.Private)), 0o644))
	e.Setenv("CONTAINERS_CONF", conf)
	storage := filepath.Join(e.Private, "storage.conf")
	check(t, os.WriteFile(storage, []byte(fmt.Sprintf("[storage]\ndriver = \"vfs\"\ngraphroot = \"%s/storage\"\nrunroot = \"/run/%s\"\n", e.Private, filepath.Base(e.Private))), 0o644))
	e.Setenv("CONTAINERS_STORAGE_CONF", storage)
	// As in package node: podman must not raise limits.
	wrapper(t, e, "podman", `sub=$1; shift
case $sub in
run) exec /usr/bin/podman run --cgroup-parent `+shared.Cgroup()+` --ulimit nofile=1024:1024 --ulimit nproc=1024:1024 "$@" ;;
*) exec /usr/bin/podman "$sub" "$@" ;;
esac
`)
	tar := filepath.Join(e.Private, "workload.tar")
	check(t, shared.WriteWorkload(tar))
	must(e.Run(within(t), "podman", "import", "--quiet", tar, image))(t)
}

func podmanVersion(t *testing.T, e *node.Engine) string {
	t.Helper()
	version := strings.Fields(must(e.Run(within(t), "podman", "--version"))(t))
	return version[len(version)-1]
}

// testPodman tests nvshare's devices with one version of podman.
func testPodman(t *testing.T, name, root, scripts string) {
	e := must(shared.NewEngine(name, root, map[string]string{examples: inside, filepath.Join(examples, "../quadlet"): "/quadlet"}))(t)
	podman(t, e)
	t.Logf("podman %s", podmanVersion(t, e))
	t.Run("example", func(t *testing.T) {
		c := runExample(t, e, name, append([]string{"sh", scripts + "/podman.sh", image}, busy(name)...)...)
		if c.Container.GetId() == "" {
			t.Errorf("the scheduler takes it for a process without container: %v", c)
		}
	})
	t.Run("rootless", func(t *testing.T) { testRootless(t, e, name) })
	run := func(t *testing.T, what string, options ...string) {
		t.Helper()
		argv := append([]string{"podman", "run", "--rm", "--device", "nvshare.com/gpu=1"}, options...)
		runExample(t, e, name+"-"+what, append(append(argv, image), busy(what)...)...)
	}
	t.Run("README", func(t *testing.T) { testREADME(t, e) })
	t.Run("any GPU", func(t *testing.T) { testAnyGPU(t, e, name) })
	t.Run("annotations", func(t *testing.T) { testAnnotations(t, e, limitedByCLI("podman", name)) })
	t.Run("in a pod", func(t *testing.T) { testInPod(t, e, name) })
	t.Run("read-only root", func(t *testing.T) { run(t, "readonly", "--read-only") })
	t.Run("another user", func(t *testing.T) {
		run(t, "user", "--user", "65534:65534", "--cap-drop", "all", "--security-opt", "no-new-privileges")
	})
	// As documented, CDI replaces the image's LD_PRELOAD.
	t.Run("an own LD_PRELOAD", func(t *testing.T) { run(t, "preload", "--env", "LD_PRELOAD="+node.UserLibrary) })
	if root != "" {
		t.Run("quadlet", func(t *testing.T) { testQuadlet(t, e) })
	}
	t.Run("unknown device", func(t *testing.T) {
		out, err := e.Run(within(t), "podman", "run", "--rm", "--device", "nvshare.com/gpu=99", image, "/usr/bin/sleep", "0")
		if err == nil || !strings.Contains(err.Error(), "nvshare.com/gpu=99") {
			t.Errorf("got %q, %v", out, err)
		}
	})
}

// testInPod: a container in a pod of podman's, whose cgroup is below the pod's, is a tenant of its own with
// its own limit. podman kube play always makes a pod.
func testInPod(t *testing.T, e *node.Engine, name string) {
	ctx := within(t)
	pod := name + "-pod"
	must(e.Run(ctx, "podman", "pod", "create", "--infra-image", image, "--infra-command", "/usr/bin/sleep infinity", "--share", "uts", "--network", "host", "--cgroup-parent", shared.Cgroup(), "--name", pod))(t)
	t.Cleanup(func() { must(e.Run(within(t), "podman", "pod", "rm", "--force", "--time", "0", pod))(t) })
	known := clients(t, ctx)
	argv := []string{"/usr/bin/podman", "run", "--rm", "--pod", pod, "--name", pod + "-main", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024",
		"--device", "nvshare.com/gpu=0", "--annotation", "nvshare.com/gpu-memory-limit=8Gi", image}
	p := must(e.Start(pod, append(argv, busy("pod")...)...))(t)
	c := awaitTurns(t, ctx, p, known)
	if got := c.Container; got.GetName() != pod+"-main" || got.GetMemoryLimitBytes() != 8<<30 {
		t.Errorf("the scheduler knows the container as %v", got)
	}
	end(t, ctx, p, c)
}

// testREADME runs README's commands for podman as they are printed, but for the names of an image
// and a program: two containers with a limit that each sees as the GPU's size and nvsharectl
// shows by name, and a member of an overlap group.
func testREADME(t *testing.T, e *node.Engine) {
	ctx := within(t)
	var member []string
	ran := 0
	for _, line := range must(readme.Commands(readme.Pages("../..")...))(t) {
		argv := strings.Fields(strings.TrimPrefix(line, "sudo "))
		if argv[0] != "podman" {
			continue
		}
		ran++
		for i, word := range argv {
			switch word {
			case "IMAGE":
				argv[i] = image
			case "PROGRAM":
				argv = append(argv[:i], busy("README")...)
			}
		}
		switch {
		case slices.Contains(argv, "nvshare.com/gpu-overlap=small"):
			member = append(argv, busy("README-member")...)
		case argv[1] == "run":
			name := argv[slices.Index(argv, "--name")+1]
			must(e.Run(ctx, argv...))(t)
			t.Cleanup(func() { must(e.Run(within(t), "podman", "rm", "--force", "--time", "0", name))(t) })
		case argv[1] == "exec":
			if said := must(e.Run(ctx, argv...))(t); !strings.Contains(said, " / 8192MiB") {
				t.Fatalf("%s: %s", line, said)
			}
		}
	}
	if ran < 4 || member == nil {
		t.Fatalf("README has %d commands for podman, and %q: the pattern is wrong", ran, member)
	}
	check(t, node.Until(ctx, "nvsharectl to name both containers", func() error {
		said := must(shared.Ctl(ctx))(t)
		for _, name := range []string{"a", "b"} {
			if !regexp.MustCompile(`(?m)^0 +` + name + ` .* of 8Gi`).MatchString(said) {
				return fmt.Errorf("no line of %s:\n%s", name, said)
			}
		}
		return nil
	}))
	known := clients(t, ctx)
	p := must(e.Start("README-member", member...))(t)
	c := awaitTurns(t, ctx, p, known)
	if got := c.Container.GetShare().GetOverlap(); got != "small" {
		t.Errorf("the member is in group %q: %v", got, c)
	}
	end(t, ctx, p, c)
}

// testAnyGPU: a container that may move can open all GPUs, begins on the one with the fewest
// tenants, and the scheduler knows both.
func testAnyGPU(t *testing.T, e *node.Engine, name string) {
	ctx := within(t)
	gpus := must(shared.Status(ctx))(t).Gpus
	all := []string{gpus[0].Uuid, gpus[1].Uuid}
	first := []string{"podman", "run", "--rm", "--device", "nvshare.com/gpu=any", "--name", name + "-any", image}
	known := clients(t, ctx)
	p := must(e.Start(name+"-any", append(first, busy("any")...)...))(t)
	c := awaitTurns(t, ctx, p, known)
	if got := c.Container; !slices.Equal(got.Gpus, all[:1]) || !slices.Equal(got.Reach, all) || !got.GetShare().GetMigratable() {
		t.Errorf("the scheduler knows the container as %v", got)
	}
	known[c.Pid] = true
	first[slices.Index(first, name+"-any")] = name + "-any2"
	q := must(e.Start(name+"-any2", append(first, busy("any2")...)...))(t)
	second := awaitTurns(t, ctx, q, known)
	if got := second.Container; !slices.Equal(got.Gpus, all[1:]) {
		t.Errorf("the scheduler knows the second container as %v", got)
	}
	// A second program of a container begins where the first one is. podman gives it nothing
	// of the device's environment; that of the simulated GPU stands for device nodes.
	known[second.Pid] = true
	var environment []string
	for i, uuid := range all {
		environment = append(environment, "--env", fmt.Sprintf("NVSHARE_SIMGPU_GPU_%d=%s", i, uuid))
	}
	exec := must(e.Start(name+"-any-exec", slices.Concat([]string{"podman", "exec"}, environment, []string{name + "-any2"}, busy("exec"))...))(t)
	third := awaitTurns(t, ctx, exec, known)
	on := map[uint32]int{}
	for i, gpu := range must(shared.Status(ctx))(t).Gpus {
		for _, cl := range gpu.Clients {
			on[cl.Pid] = i
		}
	}
	if on[c.Pid] != 0 || on[second.Pid] != 1 || on[third.Pid] != 1 {
		t.Errorf("the programs %d, %d and %d are on GPUs %v", c.Pid, second.Pid, third.Pid, on)
	}
	end(t, ctx, exec, third)
	end(t, ctx, q, second)
	end(t, ctx, p, c)
}

// testRootless: without root, podman reads the same specs, and the scheduler knows the
// user.
func testRootless(t *testing.T, e *node.Engine, name string) {
	if e.Root == "" {
		t.Skip("the machine's user database is not for tests: make engines does it elsewhere")
	}
	ctx := within(t)
	home, run := "/home/user", "/run/user-"+name
	check(t, errors.Join(os.Mkdir(run, 0o700), os.Chown(run, uid, uid)))
	// A user has no cgroups here. With cgroup v2 only crun works without; with v1 runc
	// does too.
	runtime, cgroups := "crun", []string{"--cgroups", "disabled"}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
		runtime, cgroups = "runc", nil
	}
	conf := filepath.Join(e.Private, "rootless.conf")
	check(t, os.WriteFile(conf, []byte(fmt.Sprintf("[containers]\nnetns = \"host\"\nno_hosts = true\n[engine]\nevents_logger = \"file\"\nruntime = %q\n[engine.runtimes]\nrunc = [%q]\n",
		runtime, shared.Tools()+"/runc")), 0o644))
	env := []string{"/usr/bin/env", "-u", "CONTAINERS_STORAGE_CONF", "CONTAINERS_CONF=" + conf, "HOME=" + home, "XDG_RUNTIME_DIR=" + run, "TMPDIR=/tmp", "USER=user"}
	podman := func(what string, args ...string) *node.Process {
		return must(e.StartAs(uid, name+"-"+what, append(append(slices.Clone(env), "/usr/bin/podman", "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs"), args...)...))(t)
	}
	tar := filepath.Join(e.Private, "workload.tar")
	load := podman("import", "import", tar, image)
	if status, err := load.Wait(ctx); err != nil || status != 0 {
		t.Fatalf("podman import: %d, %v\n%s", status, err, load.Tail(10))
	}
	known := clients(t, ctx)
	p := podman("rootless", slices.Concat([]string{"run", "--rm"}, cgroups, []string{"--device", "nvshare.com/gpu=0", image}, busy("rootless"))...)
	c := awaitTurns(t, ctx, p, known)
	if c.Uid != uid || c.Bypassed != 0 || c.Interposed == 0 {
		t.Errorf("the scheduler sees %v", c)
	}
	end(t, ctx, p, c)
}

const uid = 1000

// testQuadlet: systemd's generator turns the quadlet into podman run with the device.
func testQuadlet(t *testing.T, e *node.Engine) {
	e.Setenv("QUADLET_UNIT_DIRS", "/quadlet")
	out := must(e.Run(within(t), "/usr/libexec/podman/quadlet", "--dryrun"))(t)
	var start string
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "ExecStart=") {
			start = line
		}
	}
	for _, want := range []string{"podman run", "--device nvshare.com/gpu=0", "localhost/nvshare-workload:1 /usr/bin/cuda-busy"} {
		if !strings.Contains(start, want) {
			t.Errorf("ExecStart lacks %q:\n%s", want, out)
		}
	}
	// The container starts after the plugin, which writes the spec.
	if !strings.Contains(out, "After=nvshare-scheduler.service nvshare-plugin.service") {
		t.Errorf("the unit does not start after nvshare's:\n%s", out)
	}
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Log("there is no systemd-analyze here to look at the unit")
		return
	}
	unit := filepath.Join(t.TempDir(), "nvshare-example.service")
	_, unitText, _ := strings.Cut(out, "---nvshare-example.service---\n")
	check(t, os.WriteFile(unit, []byte(strings.ReplaceAll(unitText, "/usr/bin/podman", "/bin/true")), 0o644))
	if text, err := exec.Command("systemd-analyze", "verify", "--man=no", unit).CombinedOutput(); err != nil || strings.Contains(string(text), "nvshare-example") {
		t.Errorf("systemd-analyze verify: %v\n%s%s", err, text, unitText)
	}
}

func TestPodman(t *testing.T) {
	if !node.HavePodman() {
		t.Skip("there is no podman on this machine")
	}
	testPodman(t, "podman", "", examples)
}

func TestPodman5Stable(t *testing.T) {
	testPodman(t, "podman-trixie", release(t, "trixie"), inside)
}

func TestPodman5Latest(t *testing.T) {
	testPodman(t, "podman-sid", release(t, "sid"), inside)
}
