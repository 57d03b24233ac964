// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"errors"
	stdio "io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

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
	put("/proc/meminfo", "MemTotal: 67108864 kB\n")
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
	put("/sys/bus/pci/devices/0000:17:00.0/vendor", "0x10de\n")
	put("/sys/bus/pci/devices/0000:17:00.0/class", "0x030200\n")
	put("/sys/bus/pci/devices/0000:17:00.0/current_link_width", "16\n")
	put("/sys/bus/pci/devices/0000:17:00.0/max_link_width", "16\n")
	put("/etc/containerd/config.toml", "version = 3\n[plugins.'io.containerd.nri.v1.nri']\n  disable = false\n[plugins.'x']\n  disable = true\n")
	r := sample()
	r.Version = api.Version
	answer, err := proto.Marshal(&api.StatusResponse{View: &api.View{}})
	if err != nil {
		t.Fatal(err)
	}
	listenView(t, filepath.Join(root, "run/nvshare"), answer)
	return &patient{
		ctx: context.Background(), runDir: "/run/nvshare", root: root, status: r,
		program: func(string) (string, error) { return "", nil },
		runtime: func() (string, error) { return "containerd containerd.io v2.1.0 abc", nil },
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
	for name, tc := range map[string]struct {
		harm  func(*testing.T, *patient)
		check string
		level level
		text  string
	}{
		"no driver": {remove("/proc/driver/nvidia/version"), "driver", fail, "not loaded"},
		"no uvm":    {remove("/dev/nvidia-uvm"), "driver", fail, "nvidia-uvm"},
		"no scheduler": {func(_ *testing.T, p *patient) {
			p.status, p.whyNot = nil, &api.UnreachableError{Path: "x", Err: fs.ErrNotExist}
		}, "scheduler", fail, "is nvshare-scheduler running"},
		"not root": {func(_ *testing.T, p *patient) {
			p.status, p.whyNot = nil, &api.UnreachableError{Path: "x", Err: fs.ErrPermission}
		}, "scheduler", warn, "for root"},
		"skew":      {func(_ *testing.T, p *patient) { p.status.Version = "0.0.9" }, "version", warn, "0.0.9"},
		"a problem": {func(_ *testing.T, p *patient) { p.status.Problems = []string{"GPU 0: x is fenced"} }, "health", fail, "fenced"},
		"a driver that refuses": {func(_ *testing.T, p *patient) {
			g := p.status.Gpus[0]
			g.Preemptions = 7
			g.Clients[0].Controls = &api.Controls{Slices: "works", Channels: "works", Listed: true}
			g.Clients[1].Controls = &api.Controls{Slices: "works", Channels: "driver refused"}
			g.Clients[2].Controls = &api.Controls{Slices: "not tried", Channels: "not tried"}
		}, "controls", warn, "proved in 1 processes, tried in 0, refused in 1, not known in 1; 7 grants preempted"},
		"no socket": {remove("/run/nvshare/tenant/scheduler.sock"), "socket", fail, "no scheduler"},
		"closed socket": {func(t *testing.T, p *patient) {
			if err := os.Chmod(filepath.Join(p.root, "run/nvshare/tenant/scheduler.sock"), 0o600); err != nil {
				t.Fatal(err)
			}
		}, "socket", fail, "containers cannot connect"},
		"no shim": {remove("/var/lib/nvshare/lib/current/libnvshare.so"), "shim", fail, "no shim"},
		"a wrong shim": {func(_ *testing.T, p *patient) {
			p.program = func(string) (string, error) { return "wrong ELF class", nil }
		}, "shim", fail, "wrong ELF class"},
		"no spec":         {func(*testing.T, *patient) {}, "cdi", fail, "nvshare.com/gpu"},
		"no NRI":          {remove("/var/run/nri/nri.sock"), "nri", warn, "pods cannot ask"},
		"too much to pin": {func(_ *testing.T, p *patient) { p.status.Gpus[0].Swap = &api.Swap{ArenaLimitBytes: 63 << 30} }, "swap", warn, "63Gi of this host's 64Gi"},
		"no status":       {remove("/run/nvshare/status.sock"), "status", warn, "get no status"},
		"an old runtime":  {func(_ *testing.T, p *patient) { p.runtime = func() (string, error) { return "containerd 1.7.13", nil } }, "runtime", fail, "1.7.13 drops"},
		"NRI is off": {func(t *testing.T, p *patient) {
			write(t, p, "/etc/containerd/conf.d/99-other.toml", "[plugins.\"io.containerd.nri.v1.nri\"]\n  disable = true\n")
		}, "nri", warn, "99-other.toml"},
		"a narrow link": {func(t *testing.T, p *patient) {
			write(t, p, "/sys/bus/pci/devices/0000:17:00.0/current_link_width", "4\n")
		}, "pcie", warn, "4 of 16"},
		"small pages": {func(t *testing.T, p *patient) {
			p.status.Gpus[0].Swap = &api.Swap{ArenaLimitBytes: 1 << 30}
			write(t, p, "/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always advise [never]\n")
		}, "hugepages", warn, "small pages"},
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
		if i < 0 || !strings.Contains(all[i].Text, tc.text) || all[i].Fix == "" {
			t.Errorf("%s: %+v", name, all)
		}
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
}
