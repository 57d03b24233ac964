// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/node"
)

// readyWithin bounds a tenant's start: PyTorch alone takes ten seconds.
const readyWithin = 2 * time.Minute

// A window is one measurement: who worked, and what each got done.
type window struct {
	Case    string            `json:"case"`
	Quantum string            `json:"quantum,omitempty"`
	Tenants map[string]tenant `json:"tenants"`
	Sum     float64           `json:"products_per_s"`
	OfAlone float64           `json:"of_alone"` // Sum over native alone's median
}

// tenant is what gemm.py reports.
type tenant struct {
	Seconds    float64 `json:"seconds"`
	Products   float64 `json:"products"`
	LongestGap float64 `json:"longest_gap_s"`
	Turns      int     `json:"turns"`
}

type gemmResult struct {
	Host    json.RawMessage     `json:"host"`
	Alone   float64             `json:"native_alone_products_per_s"` // median
	Windows []*window           `json:"windows"`
	Status  *api.StatusResponse `json:"status"` // the scheduler's, at the end
}

// group is a set of tenants that read the same go files.
type group struct {
	b      *bench
	dir    string
	passed int
}

func (b *bench) gemm(ctx context.Context, work string) error {
	if err := b.containers(ctx); err != nil {
		return err
	}
	var r gemmResult
	add := func(g *group, name, quantum string, names ...string) error {
		w, err := g.window(ctx, name, quantum, names)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		r.Windows = append(r.Windows, w)
		return nil
	}

	// The driver alone: one tenant, two tenants, one again at the very end.
	native := &group{b: b, dir: filepath.Join(work, "native")}
	if err := os.MkdirAll(native.dir, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"n1", "n2"} {
		if err := native.startProcess(ctx, name); err != nil {
			return err
		}
	}
	if err := add(native, "native alone", "", "n1"); err != nil {
		return err
	}
	if err := add(native, "native, time slicing", "", "n1", "n2"); err != nil {
		return err
	}
	if err := add(native, "native alone", "", "n1"); err != nil {
		return err
	}

	shared := &group{b: b, dir: b.node.Records}
	if err := b.hostUsr(work); err != nil {
		return err
	}
	if err := b.startContainer(ctx, work, shared, "c1"); err != nil {
		return err
	}
	if err := add(shared, "one container", "100ms", "c1"); err != nil {
		return err
	}
	if err := b.startContainer(ctx, work, shared, "c2"); err != nil {
		return err
	}
	for _, quantum := range []string{"100ms", "1s", "20ms", "5ms", "100ms"} {
		if _, err := b.node.Ctl(ctx, "-T", quantum); err != nil {
			return err
		}
		if err := add(shared, "two containers", quantum, "c1", "c2"); err != nil {
			return err
		}
	}
	if err := add(shared, "one container, another idle", "100ms", "c1"); err != nil {
		return err
	}
	status, err := b.node.Status(ctx)
	if err != nil {
		return err
	}
	r.Status = status
	if err := add(native, "native alone", "", "n1"); err != nil {
		return err
	}

	var alone []float64
	for _, w := range r.Windows {
		if w.Case == "native alone" {
			alone = append(alone, w.Sum)
		}
	}
	r.Alone = median(alone)
	for _, w := range r.Windows {
		w.OfAlone = w.Sum / r.Alone
		fmt.Printf("%-28s %-6s %8.1f products/s  %6.2f %% of alone", w.Case, w.Quantum, w.Sum, 100*w.OfAlone)
		for name, t := range w.Tenants {
			fmt.Printf("   %s %.1f/s, %d turns, longest gap %.0f ms", name, t.Products/t.Seconds, t.Turns, 1000*t.LongestGap)
		}
		fmt.Println()
	}
	if r.Host, err = os.ReadFile(filepath.Join(native.dir, "n1.ready")); err != nil {
		return err
	}
	if out, err := b.node.Ctl(ctx, "status"); err == nil {
		fmt.Print(out)
	}
	return b.saveJSON("gemm.json", r)
}

// window lets the tenants work at the same time and collects what they did.
func (g *group) window(ctx context.Context, name, quantum string, names []string) (*window, error) {
	k := g.passed
	g.passed++
	start := time.Duration(monotonic()) + 300*time.Millisecond
	order, err := json.Marshal(map[string]any{"start": start.Seconds(), "seconds": g.b.seconds, "names": names})
	if err != nil {
		return nil, err
	}
	file := filepath.Join(g.dir, fmt.Sprintf("go.%d", k))
	if err := os.WriteFile(file+".tmp", order, 0o644); err != nil {
		return nil, err
	}
	if err := os.Rename(file+".tmp", file); err != nil {
		return nil, err
	}
	w := &window{Case: name, Quantum: quantum, Tenants: map[string]tenant{}}
	for _, n := range names {
		var t tenant
		if err := g.await(ctx, fmt.Sprintf("%s.%d.json", n, k), &t); err != nil {
			return nil, err
		}
		w.Tenants[n] = t
		w.Sum += t.Products / t.Seconds
	}
	return w, nil
}

// await reads a file that a tenant writes when it is done.
func (g *group) await(ctx context.Context, name string, v any) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	return node.Until(ctx, name, func() error {
		data, err := os.ReadFile(filepath.Join(g.dir, name))
		if err != nil {
			return err
		}
		return json.Unmarshal(data, v)
	})
}

func (g *group) startProcess(ctx context.Context, name string) error {
	cmd := exec.CommandContext(ctx, g.b.python, filepath.Join(g.b.bundle, "gemm.py"), name, g.dir)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }()
	var ignored any
	return g.await(ctx, name+".ready", &ignored)
}

// hostUsr mounts a copy-on-write view of the host's /usr, because the driver's
// libraries and the shim get their mount points inside it.
func (b *bench) hostUsr(work string) error {
	base := filepath.Join(work, "private", "usr")
	for _, d := range []string{"upper", "work", "merged"} {
		if err := os.MkdirAll(filepath.Join(base, d), 0o755); err != nil {
			return err
		}
	}
	data := fmt.Sprintf("lowerdir=/usr,upperdir=%s/upper,workdir=%s/work", base, base)
	if err := unix.Mount("overlay", filepath.Join(base, "merged"), "overlay", 0, data); err != nil {
		return fmt.Errorf("mount a view of /usr: %w", err)
	}
	return nil
}

func (b *bench) startContainer(ctx context.Context, work string, g *group, name string) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	pod, err := b.node.RunPod(ctx, name, map[string]string{"nvshare.com/gpu": "nvshare.com/gpu=0"}, node.ContainerSpec{
		Args: []string{b.python, "/bundle/gemm.py", name, "/record"},
		Env:  map[string]string{"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root"},
		Mounts: []node.Mount{
			{Host: filepath.Join(work, "private", "usr", "merged"), Container: "/usr"},
			{Host: "/opt", Container: "/opt"},
			{Host: b.bundle, Container: "/bundle"},
		},
	})
	if err != nil {
		return err
	}
	var ignored any
	if err := g.await(ctx, name+".ready", &ignored); err != nil {
		return fmt.Errorf("%w; the container printed: %s", err, pod.Log())
	}
	return nil
}

// monotonic is CLOCK_MONOTONIC in nanoseconds, as the tenants read it.
func monotonic() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // the clock exists on every Linux
	}
	return t.Nano()
}
