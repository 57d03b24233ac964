// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/nvshare/nvshare/tests/node"
)

// containersMinutes bounds the matrix' part of the step.
const containersMinutes = 3.5

// cdiResult is what CDI, and nothing else, does for a container.
type cdiResult struct {
	Validate string              `json:"validate"` // of nvsharectl
	Listed   []string            `json:"listed"`   // by the CDI library
	Edits    map[string][]string `json:"edits"`    // what it adds to a container's configuration
	Checks   []string            `json:"checks"`
	Problems []string            `json:"problems,omitempty"`
}

func (r *cdiResult) check(err error, what string) {
	if err == nil {
		r.Checks = append(r.Checks, what)
		fmt.Println("  ok      ", what)
		return
	}
	text := what + ": " + err.Error()
	r.Problems = append(r.Problems, text)
	fmt.Println("  PROBLEM ", text)
}

// containersStep runs rows of PyTorch's matrix in two containers, beside native
// processes outside, and checks what CDI does without NRI.
func (b *bench) containersStep(ctx context.Context, work string) error {
	ctx, cancel := context.WithTimeout(ctx, 6*time.Minute)
	defer cancel()
	if err := b.containers(ctx); err != nil {
		return err
	}
	var errs []error
	for _, part := range []struct {
		name string
		run  func(context.Context, string) error
	}{{"cdi", b.cdiAlone}, {"rows", b.rows}, {"groups", b.groupsInPods}} {
		if part.name == "groups" || b.cells.only == nil || b.cells.only.MatchString(part.name) {
			errs = append(errs, part.run(ctx, work))
		}
	}
	return errors.Join(errs...)
}

// cdiAlone checks the spec of our own discovery by the library that podman and
// containerd have, and has containerd apply it without NRI.
func (b *bench) cdiAlone(ctx context.Context, work string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	r := &cdiResult{Edits: map[string][]string{}}
	out, err := b.node.Ctl(ctx, "cdi", "validate")
	r.Validate = out
	r.check(err, "nvsharectl cdi validate: "+strings.ReplaceAll(strings.TrimSpace(out), "\n", "; "))

	dir := filepath.Join(work, "private", "cdi")
	args := []string{"cdi", "generate", "--output", filepath.Join(dir, "nvshare.com-gpu.yaml"), "--lib-dir", node.LibDir + "/current", "--hook", b.node.Bin("nvshare-cdi-hook")}
	if b.simulated {
		args = append(args, "--simgpu", node.SimGPU)
	}
	_, err = b.node.Ctl(ctx, args...)
	r.check(err, "nvsharectl cdi generate")
	_, err = b.node.Ctl(ctx, "cdi", "validate", "--cdi-dir", dir)
	r.check(err, "nvsharectl cdi validate of that")
	r.check(r.apply(dir), "the CDI library applies nvshare.com/gpu=0 to a container's configuration, and all that it names is there")
	r.check(b.busyByCDI(ctx), "a container with the device and without NRI works on the GPU, and the scheduler knows it")
	if err := b.saveJSON("cdi.json", r); err != nil {
		return err
	}
	if len(r.Problems) > 0 {
		return fmt.Errorf("%d problems with CDI", len(r.Problems))
	}
	return nil
}

// apply adds the first device to an empty configuration.
func (r *cdiResult) apply(dir string) error {
	cache, err := cdilib.NewCache(cdilib.WithSpecDirs(dir), cdilib.WithAutoRefresh(false))
	if err != nil {
		return err
	}
	var errs []error
	for path, of := range cache.GetErrors() {
		errs = append(errs, fmt.Errorf("%s: %w", path, errors.Join(of...)))
	}
	r.Listed = cache.ListDevices()
	spec := &oci.Spec{Process: &oci.Process{}}
	if unknown, err := cache.InjectDevices(spec, "nvshare.com/gpu=0"); err != nil {
		return errors.Join(append(errs, fmt.Errorf("unknown %v: %w", unknown, err))...)
	}
	there := func(kind, path string) {
		r.Edits[kind] = append(r.Edits[kind], path)
		if _, err := os.Stat(path); err != nil {
			errs = append(errs, err)
		}
	}
	r.Edits["env"] = spec.Process.Env
	for _, m := range spec.Mounts {
		there("mounts", m.Source)
	}
	if spec.Linux != nil {
		for _, d := range spec.Linux.Devices {
			there("devices", d.Path)
			var st unix.Stat_t
			if err := unix.Stat(d.Path, &st); err == nil && (int64(unix.Major(st.Rdev)) != d.Major || int64(unix.Minor(st.Rdev)) != d.Minor) {
				errs = append(errs, fmt.Errorf("%s is %d:%d, not %d:%d", d.Path, unix.Major(st.Rdev), unix.Minor(st.Rdev), d.Major, d.Minor))
			}
		}
	}
	if spec.Hooks != nil {
		for _, h := range slices.Concat(spec.Hooks.CreateContainer, spec.Hooks.CreateRuntime) {
			there("hooks", h.Path)
		}
	}
	if len(spec.Mounts) == 0 {
		errs = append(errs, errors.New("it mounts nothing"))
	}
	return errors.Join(errs...)
}

// busyByCDI runs a container by ctr, which knows CDI and neither CRI nor NRI.
func (b *bench) busyByCDI(ctx context.Context) error {
	const name = "cdi-alone"
	c, err := b.node.RunCtr(ctx, name, "nvshare.com/gpu=0", node.ContainerSpec{
		Args: []string{"cuda-busy", "--seconds", "20", "--tenant", name}})
	if err != nil {
		return err
	}
	seen := node.Until(ctx, "a client that works", func() error {
		status, err := b.node.Status(ctx)
		if err != nil {
			return err
		}
		for _, g := range status.Gpus {
			for _, k := range g.Clients {
				if int(k.Pid) == c.PID && k.Calls > 100 && k.Bypassed == 0 {
					return nil
				}
			}
		}
		return fmt.Errorf("not yet; it printed %q", c.Log())
	})
	return errors.Join(seen, b.node.RemoveCtr(context.WithoutCancel(ctx), name))
}

// inContainers are the paths that containers have of the host.
var inContainers = regexp.MustCompile(`^/(usr|opt)/`)

// rows is the matrix with containers in place of the processes with the shim.
func (b *bench) rows(ctx context.Context, work string) error {
	m, err := b.matrixOfPods(work)
	if err != nil {
		return err
	}
	started := 0
	var pods []*node.Pod
	defer func() {
		for _, p := range pods {
			_ = p.Remove(context.WithoutCancel(ctx))
		}
	}()
	m.begin = func(g loadGroup, who string) (*worker, error) {
		started++
		apart := *m
		apart.tenantEnv = func(string, string) []string { return nil } // CDI and NRI do that
		w, pod, err := b.startPod(ctx, work, m, g, who, started, nil, apart.environ(g, who))
		if pod != nil {
			pods = append(pods, pod)
		}
		return w, err
	}
	group := loadGroup{framework: "torch", allocator: "default", backend: "torch", loads: []string{"gemm", "conv", "graph", "small-step"}}
	if b.simulated {
		group = loadGroup{framework: "driver", allocator: "default", backend: "driver", loads: []string{"spin"}}
	}
	return m.run(ctx, []loadGroup{group})
}

// matrixOfPods is the matrix whose workers startPod starts.
func (b *bench) matrixOfPods(work string) (*matrix, error) {
	results := filepath.Join(b.results, "containers")
	if err := os.MkdirAll(results, 0o755); err != nil {
		return nil, err
	}
	if !inContainers.MatchString(b.python) {
		return nil, fmt.Errorf("containers see the host's /usr and /opt only, and the interpreter is %s: name another one in PYTHON", b.python)
	}
	if err := b.hostUsrOnce(work); err != nil {
		return nil, err
	}
	o := b.cells
	o.minutes, o.peer = containersMinutes, ""
	m, err := newMatrix(o, filepath.Join(work, "private", "rows"))
	if err != nil {
		return nil, err
	}
	m.python, m.script, m.results, m.arbiter, m.tenantEnv = b.python, b.script("worker.py"), results, nodeArbiter{b.node}, b.tenantEnv
	return m, nil
}

// startPod starts a worker in a pod that has this environment, with a process here that relays
// to it.
func (b *bench) startPod(ctx context.Context, work string, m *matrix, g loadGroup, who string, number int, annotations map[string]string, environ []string) (*worker, *node.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	name := fmt.Sprintf("rows-%s-%d", who, number)
	var fifos []string
	for _, end := range []string{"in", "out"} {
		fifo := filepath.Join(b.node.Records, name+"."+end)
		if err := unix.Mkfifo(fifo, 0o666); err != nil {
			return nil, nil, err
		}
		fifos = append(fifos, fifo)
	}
	env := map[string]string{"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root"}
	for _, e := range environ {
		k, v, _ := strings.Cut(e, "=")
		env[k] = v
	}
	all := map[string]string{"nvshare.com/gpu": "nvshare.com/gpu=0"}
	maps.Copy(all, annotations)
	pod, err := b.node.RunPod(ctx, name, all, node.ContainerSpec{
		Args: []string{b.python, "-B", "/bundle/pipe.py", "serve", "/record/" + name + ".in", "/record/" + name + ".out", g.backend},
		Env:  env,
		Mounts: []node.Mount{
			{Host: filepath.Join(work, "private", "usr", "merged"), Container: "/usr"},
			{Host: "/opt", Container: "/opt"},
			{Host: filepath.Dir(b.script("pipe.py")), Container: "/bundle"},
			{Host: m.dir, Container: m.dir}, // caches
		},
	})
	if err != nil {
		return nil, nil, err
	}
	log := filepath.Join(m.dir, fmt.Sprintf("%s-%s-%s.stderr", g.framework, g.allocator, who))
	w, err := startWorker(b.python, b.script("pipe.py"), who, log, nil, "relay", fifos[0], fifos[1])
	if err != nil {
		return nil, pod, err
	}
	w.client, w.more = pod.PID(), pod.Log
	return w, pod, nil
}

// hostUsrOnce is hostUsr, unless another step has made it.
func (b *bench) hostUsrOnce(work string) error {
	if entries, err := os.ReadDir(filepath.Join(work, "private", "usr", "merged")); err == nil && len(entries) > 0 {
		return nil
	}
	return b.hostUsr(work)
}
