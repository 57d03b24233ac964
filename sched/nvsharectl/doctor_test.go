// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	stdio "io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// host makes the root of a host on which all is well.
func host(t *testing.T) *patient {
	t.Helper()
	root := t.TempDir()
	put := func(path, text string) {
		t.Helper()
		path = filepath.Join(root, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	put("/proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04\nGCC\n")
	put("/dev/nvidia-uvm", "")
	put("/proc/meminfo", "MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\nHugePages_Free: 0\nHugepagesize: 2048 kB\n")
	put("/proc/4711/status", "Name: nvshare-schedul\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n")
	put("/proc/4711/cgroup", "0::/system.slice/nvshare-scheduler.service\n")
	put("/sys/fs/cgroup/system.slice/memory.max", "max\n")
	put("/var/run/nri/nri.sock", "")
	put("/var/lib/nvshare/lib/current/libnvshare.so", "")
	put("/run/nvshare/tenant/x", "")
	l, err := net.Listen("unixpacket", filepath.Join(root, "run/nvshare/tenant/scheduler.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	if err := os.Chmod(filepath.Join(root, "run/nvshare/tenant/scheduler.sock"), 0o666); err != nil {
		t.Fatal(err)
	}
	put("/etc/containerd/config.toml", "version = 3\n[plugins.'io.containerd.nri.v1.nri']\n  disable = false\n[plugins.'x']\n  disable = true\n")
	r := sample()
	r.Version = api.Version
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			c.ShimVersion = api.Version
		}
	}
	return &patient{
		ctx: context.Background(), runDir: "/run/nvshare", root: root, status: r, daemon: 4711,
		program:   func(string) (string, error) { return "", nil },
		versionOf: versions("podman version 5.6.0"),
		smi:       func() (string, error) { return "0, Disabled, Default\n1, [N/A], Default\n", nil },
	}
}

func versions(podman string) func(string) (string, error) {
	return func(program string) (string, error) {
		return map[string]string{"podman": podman}[program], nil
	}
}

func write(t *testing.T, p *patient, path, text string) {
	t.Helper()
	path = filepath.Join(p.root, path)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
		t.Fatal(err)
	}
}

// Each fault is found by its check, and has a command that mends it.
func TestDoctor(t *testing.T) {
	remove := func(path string) func(*testing.T, *patient) {
		return func(t *testing.T, p *patient) {
			if err := os.Remove(filepath.Join(p.root, path)); err != nil {
				t.Fatal(err)
			}
		}
	}
	const spec = `{cdiVersion: 0.5.0, kind: nvshare.com/gpu, devices: [{name: "0", containerEdits: {env: [A=b]}}]}`
	for name, tc := range map[string]struct {
		harm  func(*testing.T, *patient)
		check string
		level level
		text  string
	}{
		"no driver":             {remove("/proc/driver/nvidia/version"), "driver", fail, "not loaded"},
		"no such simulated GPU": {func(_ *testing.T, p *patient) { p.simGPU = "/nonexistent" }, "driver", fail, "simulated GPU /nonexistent: "},
		"no uvm":                {remove("/dev/nvidia-uvm"), "driver", fail, "nvidia-uvm"},
		"no scheduler": {func(_ *testing.T, p *patient) {
			p.status, p.whyNot = nil, &api.UnreachableError{Path: "x", Err: fs.ErrNotExist}
		}, "scheduler", fail, "is nvshare-scheduler running"},
		"not root": {func(_ *testing.T, p *patient) {
			p.status, p.whyNot = nil, &api.UnreachableError{Path: "x", Err: fs.ErrPermission}
		}, "scheduler", warn, "needs root"},
		"skew": {func(_ *testing.T, p *patient) { p.status.Version = "0.0.9" }, "version", warn, "0.0.9"},
		"old shims": {func(_ *testing.T, p *patient) {
			p.status.Gpus[0].Clients[0].ShimVersion, p.status.Gpus[0].Clients[1].ShimVersion = "0.0.7", "0.0.7"
		}, "version", warn, "shims are 0.0.7 in 2 processes"},
		"MIG without devices": {func(_ *testing.T, p *patient) {
			p.smi = func() (string, error) { return "0, Enabled, Default\n", nil }
		}, "mig", fail, "has no MIG device"},
		"for one process": {func(_ *testing.T, p *patient) {
			p.smi = func() (string, error) { return "0, [N/A], Exclusive_Process\n", nil }
		}, "mig", fail, "Exclusive_Process"},
		"MPS":                {func(t *testing.T, p *patient) { write(t, p, "/proc/77/comm", "nvidia-cuda-mps\n") }, "mps", warn, "pid 77"},
		"MPS that has ended": {func(t *testing.T, p *patient) { write(t, p, "/tmp/nvidia-mps/control", "") }, "mps", warn, "MPS server"},
		"a problem":          {func(_ *testing.T, p *patient) { p.status.Problems = []string{"GPU 0: x is fenced"} }, "health", fail, "fenced"},
		"a driver that refuses": {func(_ *testing.T, p *patient) {
			g := p.status.Gpus[0]
			g.Preemptions = 7
			g.Clients[0].Controls = &api.Controls{Slices: "works", Channels: "works", Listed: true}
			g.Clients[1].Controls = &api.Controls{Slices: "works", Channels: "driver refused"}
			g.Clients[2].Controls = &api.Controls{Slices: "not tried", Channels: "not tried"}
		}, "controls", warn, "time slices and preemption work in 1 process; the driver refused them in 1; not tried yet in 1; 7 grants preempted"},
		"no socket": {remove("/run/nvshare/tenant/scheduler.sock"), "socket", fail, "no scheduler"},
		"closed socket": {func(t *testing.T, p *patient) {
			if err := os.Chmod(filepath.Join(p.root, "run/nvshare/tenant/scheduler.sock"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "socket", fail, "containers cannot connect"},
		"closed directory": {func(t *testing.T, p *patient) {
			if err := os.Chmod(filepath.Join(p.root, "run/nvshare/tenant"), 0o700); err != nil {
				t.Fatal(err)
			}
		}, "socket", fail, "tenant has mode -rwx------"},
		"no shim": {func(t *testing.T, p *patient) {
			remove("/var/lib/nvshare/lib/current/libnvshare.so")(t, p)
			for _, g := range p.status.Gpus {
				g.Clients = nil
			}
		}, "shim", fail, "no shim"},
		"a shim that is not installed": {remove("/var/lib/nvshare/lib/current/libnvshare.so"), "shim", warn, "the shim is loaded in 3 processes; none is installed"},
		"a wrong shim": {func(_ *testing.T, p *patient) {
			p.program = func(string) (string, error) { return "wrong ELF class", nil }
		}, "shim", fail, "wrong ELF class"},
		"no spec": {func(*testing.T, *patient) {}, "cdi", fail, "nvshare.com/gpu"},
		"no NRI":  {remove("/var/run/nri/nri.sock"), "nri", warn, "pods cannot ask"},
		"no rights to checkpoint": {func(_ *testing.T, p *patient) {
			p.status.Gpus[0].Swap, p.status.CheckpointProblem = &api.Swap{ArenaLimitBytes: 1 << 30}, "no CAP_SYS_PTRACE to pass on"
		}, "checkpoint", info, "none moves: no CAP_SYS_PTRACE"},
		"no rights in a pod": {func(t *testing.T, p *patient) {
			p.status.Gpus[0].Swap, p.status.CheckpointProblem = &api.Swap{ArenaLimitBytes: 1 << 30, Suspends: 1}, "no CAP_SYS_PTRACE to pass on"
			write(t, p, "/proc/4711/cgroup", "0::/kubepods.slice/x\n")
		}, "checkpoint", warn, "none moves: no CAP_SYS_PTRACE"},
		"no warden": {func(_ *testing.T, p *patient) { p.status.WardenProblem = "no nvshare-warden runs" }, "warden", info, "cooperative: programs without the shim are reported, and not held by nvshare-warden (experimental): no nvshare-warden"},
		"an unable warden": {func(_ *testing.T, p *patient) {
			p.status.WardenProblem = "nvshare-warden: it can hold nobody: " + api.YamaForbids
		}, "warden", warn, "ptrace_scope is 3"},
		"a warden": {func(_ *testing.T, p *patient) { p.status.Warden = true }, "warden", pass, "fenced ones are off the GPU"},
		"no swapping": {func(_ *testing.T, p *patient) {
			p.status.Gpus[0].NotSwapped, p.status.Gpus[1].NotSwapped = api.SwapMemoryZero, api.SwapMemoryZero
		}, "swap", pass, "off on GPU 0, 1: --swap-memory is 0"},
		"no NVML": {func(_ *testing.T, p *patient) {
			p.status.Gpus[0].NotSwapped, p.status.Gpus[1].Swap = "NVML does not tell", &api.Swap{ArenaLimitBytes: 1 << 30}
		}, "swap", info, "off on GPU 0: NVML does not tell"},
		"a full host":     {func(_ *testing.T, p *patient) { p.status.Gpus[0].Swap = &api.Swap{} }, "swap", info, "the host can spare no memory"},
		"too much to pin": {func(_ *testing.T, p *patient) { p.status.Gpus[0].Swap = &api.Swap{ArenaLimitBytes: 56 << 30} }, "swap", warn, "may pin 56Gi, and this host has 60Gi for it"},
		"too much for the cgroup": {func(t *testing.T, p *patient) {
			p.status.Gpus[0].Swap = &api.Swap{ArenaLimitBytes: 8 << 30}
			write(t, p, "/sys/fs/cgroup/system.slice/memory.max", "8589934592\n")
		}, "swap", warn, "may pin 8Gi, and the scheduler's cgroup has 8Gi"},
		"podman reads /etc/cdi only": {func(t *testing.T, p *patient) {
			write(t, p, "/var/run/cdi/nvshare.yaml", spec)
			write(t, p, "/etc/containers/containers.conf.d/9.conf", "[engine]\ncdi_spec_dirs = [\n  \"/etc/cdi\",\n]\n")
		}, "cdi", warn, "in /etc/cdi only"},
		"podman 5.5": {func(t *testing.T, p *patient) {
			write(t, p, "/var/run/cdi/nvshare.yaml", spec)
			p.versionOf = versions("podman version 5.5.1")
		}, "cdi", warn, "in /etc/cdi only"},
		"podman that reads both": {func(t *testing.T, p *patient) {
			write(t, p, "/var/run/cdi/nvshare.yaml", spec)
			write(t, p, "/etc/containers/containers.conf", "cdi_spec_dirs = ['/etc/cdi', '/var/run/cdi']\n")
			p.versionOf = versions("podman version 5.5.1")
		}, "cdi", pass, "engines find"},
		"NRI is off": {func(t *testing.T, p *patient) {
			write(t, p, "/etc/containerd/conf.d/99-other.toml", "[plugins.\"io.containerd.nri.v1.nri\"]\n  disable = true\n")
		}, "nri", warn, "99-other.toml"},
		"SELinux": {func(t *testing.T, p *patient) {
			dir := filepath.Join(p.root, "sys/fs/selinux")
			if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(dir+"/enforce", []byte("1"), 0o644)); err != nil {
				t.Fatal(err)
			}
		}, "selinux", warn, "enforces"},
	} {
		p := host(t)
		healthy := p.examine()
		for _, f := range healthy {
			if f.Level != pass && f.Check != "cdi" { // this host has no spec
				t.Fatalf("on a good host: %+v", f)
			}
		}
		tc.harm(t, p)
		all := p.examine()
		i := slices.IndexFunc(all, func(f finding) bool { return f.Check == tc.check && f.Level == tc.level })
		if i < 0 || !strings.Contains(all[i].Text, tc.text) || tc.level != pass && all[i].Fix == "" {
			t.Errorf("%s: %+v", name, all)
		}
	}
}

// What mends a problem goes by its code, and not by words that a tenant's name may have.
func TestFixOfAProblem(t *testing.T) {
	const text = "GPU 0: is fenced (pid 7): 2 entry points of CUDA bypass the shim; some of its work may not be scheduled"
	for _, tc := range []struct {
		codes  []api.ProblemCode
		simGPU string
		want   string
	}{
		{[]api.ProblemCode{api.ProblemCode_PROBLEM_CODE_BYPASS}, "", "NVSHARE_DEBUG=1"},
		{[]api.ProblemCode{api.ProblemCode_PROBLEM_CODE_FENCED}, "", "--fence-action kill"},
		{[]api.ProblemCode{api.ProblemCode_PROBLEM_CODE_MEMORY_LIMIT}, "", "nvsharectl set --list"},
		{[]api.ProblemCode{api.ProblemCode_PROBLEM_CODE_OVERPROMISED}, "", "nvsharectl set --list"},
		{[]api.ProblemCode{api.ProblemCode_PROBLEM_CODE_SLOW_RELEASE}, "", "nvsharectl events"},
		{[]api.ProblemCode{api.ProblemCode_PROBLEM_CODE_NO_GPU}, "", "nvidia-smi"},
		{[]api.ProblemCode{api.ProblemCode_PROBLEM_CODE_NO_GPU}, "/sim", "--simgpu"},
		{nil, "", "nvsharectl events"}, // an older scheduler
	} {
		p := &patient{simGPU: tc.simGPU, status: &api.StatusResponse{Problems: []string{text}, ProblemCodes: tc.codes}}
		if all := checkHealth(p); len(all) != 1 || all[0].Text != text || !strings.Contains(all[0].Fix, tc.want) {
			t.Errorf("%v: %+v, want %s", tc.codes, all, tc.want)
		}
	}
}

// What swapping may pin is compared with what there is to be had: what it has pinned already and
// huge pages that are reserved count as that.
func TestDoctorKnowsFreeMemory(t *testing.T) {
	for name, tc := range map[string]struct {
		swap   *api.Swap
		extra  uint64 // huge pages of 2 MiB
		cgroup string // memory.max of the scheduler's own
		want   level
	}{
		"a part":                  {&api.Swap{ArenaLimitBytes: 50 << 30}, 0, "max", pass},
		"more than is free":       {&api.Swap{ArenaLimitBytes: 56 << 30}, 0, "max", warn},
		"and pinned already":      {&api.Swap{ArenaLimitBytes: 56 << 30, ArenaUsedBytes: 10 << 30, ArenaReadyBytes: 5 << 30}, 0, "max", pass},
		"in files, so not pinned": {&api.Swap{ArenaLimitBytes: 56 << 30, ArenaUsedBytes: 10 << 30, ArenaFileBytes: 10 << 30}, 0, "max", warn},
		"huge pages":              {&api.Swap{ArenaLimitBytes: 56 << 30}, 10 << 9, "max", pass},
		"a large cgroup":          {&api.Swap{ArenaLimitBytes: 50 << 30}, 0, "107374182400", pass},
		"a small cgroup":          {&api.Swap{ArenaLimitBytes: 50 << 30}, 0, "34359738368", warn},
	} {
		p := host(t)
		p.status.Gpus[0].Swap = tc.swap
		write(t, p, "/proc/meminfo", fmt.Sprintf("MemTotal: 67108864 kB\nMemAvailable: 62914560 kB\nHugePages_Free: %d\nHugepagesize: 2048 kB\n", tc.extra))
		write(t, p, "/sys/fs/cgroup/system.slice/nvshare-scheduler.service/memory.max", tc.cgroup+"\n")
		if all := checkSwap(p); len(all) != 1 || all[0].Level != tc.want {
			t.Errorf("%s: %+v", name, all)
		}
	}
}

// An MPS daemon that the scheduler started for an overlap group is in nobody's way, nor is one
// that has ended and that nobody has waited for. MIG devices that are there are as good as GPUs.
func TestDoctorKnowsItsOwn(t *testing.T) {
	p := host(t)
	write(t, p, "/proc/78/comm", "nvidia-cuda-mps\n")
	write(t, p, "/proc/78/environ", "A=b\x00CUDA_MPS_PIPE_DIRECTORY=/run/nvshare/overlap/x\x00")
	write(t, p, "/proc/79/comm", "nvidia-cuda-mps\n")
	write(t, p, "/proc/79/stat", "79 (nvidia-cuda-mps) Z 1 79 79 0 -1\n")
	write(t, p, "/proc/driver/nvidia/capabilities/gpu0/mig/gi3/access", "")
	p.smi = func() (string, error) { return "0, Enabled, Default\n", nil }
	for _, f := range p.examine() {
		if f.Level != pass && f.Check != "cdi" {
			t.Errorf("%+v", f)
		}
	}
}

// The scheduler is who serves the control socket.
func TestFindDaemon(t *testing.T) {
	if pid := (&doctorFlags{}).patient(t.Context(), serve(t, &fake{})).daemon; pid != os.Getpid() {
		t.Errorf("it is %d, want %d", pid, os.Getpid())
	}
	if pid := (&doctorFlags{}).patient(t.Context(), t.TempDir()).daemon; pid != 0 {
		t.Errorf("it is %d, and there is none", pid)
	}
}

func TestDoctorCommand(t *testing.T) {
	f := &fake{status: sample(), events: func(req *api.EventsRequest) *api.EventsResponse {
		if req.Since != 0 {
			return &api.EventsResponse{Run: 1, Next: req.Since}
		}
		return &api.EventsResponse{Run: 1, Next: 99, Events: happened()}
	}}
	dir := serve(t, f)
	code, out, _ := ctl("doctor", "--run-dir", dir)
	if code != exitFailed || !strings.Contains(out, "PASS  scheduler ") || !strings.Contains(out, "FAIL  socket ") || !strings.Contains(out, " failed\n") {
		t.Errorf("exit %d\n%s", code, out)
	}
	if code, out, _ := ctl("doctor", "--run-dir", dir, "-o", "json"); code != exitFailed || !strings.Contains(out, `"level": "FAIL"`) {
		t.Errorf("exit %d\n%s", code, out)
	}

	file := filepath.Join(t.TempDir(), "bundle.tar.gz")
	if code, _, errs := ctl("doctor", "bundle", file, "--run-dir", dir); code != exitOK {
		t.Fatalf("exit %d, %s", code, errs)
	}
	in, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	z, err := gzip.NewReader(in)
	if err != nil {
		t.Fatal(err)
	}
	texts := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == stdio.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := stdio.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		texts[h.Name] = string(text)
	}
	for name, want := range map[string]string{"nvshare/status.json": `"healthy"`, "nvshare/events.jsonl": `"type":"fence"`, "nvshare/doctor.json": `"check"`, "nvshare/driver.txt": ""} {
		if text, there := texts[name]; !there || !strings.Contains(text, want) {
			t.Errorf("%s has %q", name, text)
		}
	}
	if code, _, errs := ctl("doctor", "bundle", file, "--run-dir", dir); code != exitFailed || !strings.Contains(errs, "exists") {
		t.Errorf("a file is overwritten: exit %d, %s", code, errs)
	}
	if code, out, errs := ctl("doctor", "bundle", "-", "--run-dir", dir); code != exitOK || !strings.HasPrefix(out, "\x1f\x8b") {
		t.Errorf("to standard output: exit %d, %s, %d bytes", code, errs, len(out))
	}
}

func TestControlsOfUnusedGPU(t *testing.T) {
	p := &patient{runDir: "/run/nvshare", status: &api.StatusResponse{Gpus: []*api.GPU{{}}}}
	if all := checkControls(p); len(all) != 1 || all[0].Level != pass || !strings.Contains(all[0].Text, "no program uses it: sudo nvsharectl doctor test runs two") {
		t.Errorf("%v", all)
	}
}

// Members of an overlap group have no time slice of their own: nothing is refused to them.
func TestControlsOfMembers(t *testing.T) {
	member := func(channels string) *api.Client {
		return &api.Client{Controls: &api.Controls{Slices: "no channel groups seen", Channels: channels}, Container: &api.Container{Share: &api.Share{Overlap: "small"}}}
	}
	for channels, want := range map[string]level{"works": pass, "driver refused": warn} {
		p := &patient{status: &api.StatusResponse{Gpus: []*api.GPU{{Clients: []*api.Client{member(channels)}}}}}
		if all := checkControls(p); len(all) != 1 || all[0].Level != want || (want == pass) != strings.Contains(all[0].Text, "1 in overlap groups") {
			t.Errorf("channels %s: %v", channels, all)
		}
	}
}

// Remedies are those of this installation: of systemd's scheduler or one with a run directory
// of its own, and each is one command.
func TestRemedies(t *testing.T) {
	p := &patient{runDir: "/run/nvshare", root: t.TempDir(), self: "/usr/local/bin/nvsharectl"}
	check := func(got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	check(p.scheduler("start"), "nvshare-scheduler &") // no systemd runs here
	check(p.scheduler("restart"), "end the nvshare-scheduler of /run/nvshare, then nvshare-scheduler &")
	check(p.sudo("doctor"), "sudo nvsharectl doctor")
	write(t, p, "/run/systemd/system/x", "")
	check(p.scheduler("start"), "systemctl start nvshare-scheduler")
	check(p.pluginOr("nvshare-plugin --no-nri"), "nvshare-plugin --no-nri")

	p.runDir = "/run/user/1000/nvshare"
	check(p.scheduler("start"), "nvshare-scheduler --run-dir /run/user/1000/nvshare &")
	check(p.scheduler("restart"), "end the nvshare-scheduler of /run/user/1000/nvshare, then nvshare-scheduler --run-dir /run/user/1000/nvshare &")
	p.whyNot = &api.UnreachableError{Path: "x", Err: fs.ErrNotExist} // none runs that could be ended
	check(p.scheduler("restart"), "nvshare-scheduler --run-dir /run/user/1000/nvshare &")
	write(t, p, "/etc/systemd/system/nvshare-plugin.service", "")
	check(p.pluginOr("nvshare-plugin --no-nri"), "systemctl restart nvshare-plugin")
	if err := os.RemoveAll(p.root + "/run/systemd"); err != nil {
		t.Fatal(err)
	}
	check(p.pluginOr("nvshare-plugin --no-nri"), "nvshare-plugin --no-nri") // units are installed, and no systemd runs
	p.simGPU, p.shim = "/sim", "/lib/libnvshare.so"                         // sudo drops NVSHARE_RUN_DIR and NVSHARE_SIMGPU
	check(p.sudo("doctor"), "sudo nvsharectl doctor --run-dir /run/user/1000/nvshare --simgpu /sim --shim /lib/libnvshare.so")
	p.self = "/home/me/bin/nvsharectl"
	check((&patient{runDir: "/var/run/nvshare", self: p.self}).sudo("doctor", "test"), "sudo "+p.self+" doctor test")
}

// Without systemd no remedy is a command of systemd's.
func TestRemediesWithoutSystemd(t *testing.T) {
	p := host(t)
	p.status.Version, p.status.CheckpointProblem = "0.0.9", "no CAP_SYS_PTRACE to pass on"
	p.status.Gpus[0].Swap = &api.Swap{ArenaLimitBytes: 1 << 30}
	write(t, p, "/etc/systemd/system/nvshare-plugin.service", "")
	if err := os.Remove(filepath.Join(p.root, "/run/nvshare/tenant/scheduler.sock")); err != nil {
		t.Fatal(err)
	}
	for _, systemd := range []bool{false, true} {
		var with []string
		for _, f := range p.examine() {
			if strings.Contains(f.Fix, "systemctl") {
				with = append(with, f.Check)
			}
		}
		if want := []string{"version", "socket", "cdi", "checkpoint"}; !systemd && with != nil || systemd && !slices.Equal(slices.Compact(with), want) {
			t.Errorf("systemd %v: its commands for %q", systemd, with)
		}
		write(t, p, "/run/systemd/system/x", "")
	}
}

// One is one.
func TestDoctorCounts(t *testing.T) {
	for n, want := range map[int]string{1: "2 passed, 1 warning, 1 failed\n", 2: "4 passed, 2 warnings, 2 failed\n"} {
		var out bytes.Buffer
		printFindings(streams{out: &out}, slices.Repeat([]finding{{Level: pass}, {Level: pass}, {Level: warn}, {Level: fail}}, n))
		if !strings.HasSuffix(out.String(), want) {
			t.Errorf("%q, want %q", &out, want)
		}
	}
	p := host(t)
	p.status.Gpus = p.status.Gpus[:1]
	for _, f := range p.examine() {
		if strings.Contains(f.Text, "1 GPUs") {
			t.Errorf("%+v", f)
		}
	}
}
