// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// The phases of the demo. The quantum starts at the scheduler's default.
const (
	firstPhase  = 6 * time.Second
	secondPhase = 6 * time.Second
	lastPhase   = 4 * time.Second

	defaultQuantum = 100 * time.Millisecond
	longQuantum    = 300 * time.Millisecond

	startWithin = 60 * time.Second // of any single step
	watchEvery  = 5 * time.Millisecond
)

// simConfig is a simulated GPU whose memory any host can hold twice.
const simConfig = "memory_mib=512\n"

const gpuAnnotation = "nvshare.com/gpu"

type demo struct {
	build, work string
	simulated   bool
	screen      *screen
	node        *node.Node
	tenants     []tenant
}

type tenant struct {
	name   string
	engine string
	ctr    *node.Container
}

// client finds the tenant's process among the clients of a GPU, or nil.
func (t tenant) client(gpu *api.GPU) *api.Client {
	for _, c := range gpu.GetClients() {
		if int(c.Pid) == t.ctr.PID {
			return c
		}
	}
	return nil
}

// run plays the demo and reports whether the verdict is good.
func (d *demo) run(ctx context.Context) (bool, error) {
	if err := d.bringUp(ctx); err != nil {
		return false, err
	}
	if err := d.startTenants(ctx); err != nil {
		return false, err
	}
	var t times
	t.shared = d.now()
	if err := d.watch(ctx, firstPhase, nil); err != nil {
		return false, err
	}

	out, err := d.node.Ctl(ctx, "-T", longQuantum.String())
	if err != nil {
		return false, err
	}
	t.longer = d.now()
	d.screen.say("nvsharectl -T %v: %s", longQuantum, strings.Join(strings.Split(strings.TrimSpace(out), "\n"), "; "))
	if err := d.watch(ctx, secondPhase, nil); err != nil {
		return false, err
	}

	victim := d.tenants[1]
	if err := d.stopHolder(ctx, victim); err != nil {
		return false, err
	}
	t.killed = d.now()
	if err := unix.Kill(victim.ctr.PID, unix.SIGKILL); err != nil {
		return false, fmt.Errorf("kill %s: %w", victim.name, err)
	}
	d.screen.say("SIGKILL to %s in the middle of its grant", victim.name)
	if err := d.watch(ctx, lastPhase, nil); err != nil {
		return false, err
	}
	t.end = d.now()
	for _, x := range d.tenants {
		if x.name != victim.name {
			_ = unix.Kill(x.ctr.PID, unix.SIGTERM)
		}
	}
	whole, err := d.largePods(ctx)
	if err != nil {
		return false, err
	}
	return d.verdict(t, victim, whole)
}

// stopHolder stops a tenant in the middle of its turn, so that this is not over when the next signal comes, however
// busy the machine is. Who is stopped too late goes on, and is stopped again.
func (d *demo) stopHolder(ctx context.Context, x tenant) error {
	for {
		if err := d.watch(ctx, startWithin, func(gpu *api.GPU) bool {
			c := x.client(gpu) // its work runs by then
			return c.GetState() == api.ClientState_CLIENT_STATE_HOLDING && c.SinceNs > int64(longQuantum)/10
		}); err != nil {
			return err
		}
		if err := judge.Stop(x.ctr.PID); err != nil {
			return err
		}
		looks, kept := 0, true // a release may be on its way at the first look
		if err := d.watch(ctx, startWithin, func(gpu *api.GPU) bool {
			state := x.client(gpu).GetState()
			looks, kept = looks+1, state == api.ClientState_CLIENT_STATE_HOLDING || state == api.ClientState_CLIENT_STATE_DRAINING
			return looks == 2 || !kept
		}); err != nil || kept {
			return err
		}
		if err := unix.Kill(x.ctr.PID, unix.SIGCONT); err != nil {
			return fmt.Errorf("continue %s: %w", x.name, err)
		}
	}
}

// largePods has two pods that want three quarters of the GPU's memory each, and says what came of it; "": nothing is
// swapped here, or too little.
func (d *demo) largePods(ctx context.Context) (said string, err error) {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	status, err := d.node.Status(ctx)
	if err != nil {
		return "", err
	}
	gpu := d.gpu(status)
	each := gpu.GetMemoryBytes() / 4 * 3 >> 20 << 20
	if 2*each > gpu.GetSwap().GetArenaLimitBytes() {
		d.screen.say("nothing can be swapped here (nvsharectl doctor says why), or too little: two pods that want 1.5 times the GPU's memory are not shown")
		return "", nil
	}
	var pods []tenant
	for _, name := range []string{"large-a", "large-b"} {
		w := d.workload(name)
		w.Args = append(w.Args, "--mem-mib", fmt.Sprint(each>>20))
		pod, err := d.node.RunPod(ctx, name, map[string]string{gpuAnnotation: "nvshare.com/gpu=0"}, w)
		if err != nil {
			return "", err
		}
		pods = append(pods, tenant{name, "CRI pod", pod.Containers[0]})
		d.screen.say("pod %s runs, and wants %s of memory", name, api.FormatMemory(each))
	}
	trains := d.tenants
	defer func() { d.tenants = trains }()
	d.tenants = pods // for the screen
	err = d.watch(ctx, startWithin, func(gpu *api.GPU) bool {
		return gpu.GetSwap().GetPromisedBytes() > gpu.GetMemoryBytes()/5*7 && pods[0].client(gpu).GetGrants() > 0 && pods[1].client(gpu).GetGrants() > 0
	})
	if err != nil {
		return "", fmt.Errorf("two pods that want 1.5 times the GPU's memory: %w; they printed: %s, %s", err, pods[0].ctr.Log(), pods[1].ctr.Log())
	}
	return fmt.Sprintf("large-a and large-b had turns, with %s each on a GPU of %s", api.FormatMemory(each), api.FormatMemory(gpu.MemoryBytes)), nil
}

func (d *demo) bringUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	kind := "the machine's GPU"
	if d.simulated {
		kind = "a simulated GPU"
		if !haveDriver() {
			kind += " (no NVIDIA driver here)"
		}
	}
	d.screen.say("nvshare demo on %s", kind)
	n, err := node.New(d.work, node.Options{Build: d.build, Simulated: d.simulated, SimConfig: simConfig})
	if err != nil {
		return err
	}
	d.node = n
	if err := n.StartContainerd(ctx); err != nil {
		return err
	}
	d.screen.say("the demo's own containerd runs, with CRI and NRI")
	if err := n.BuildImages(ctx); err != nil {
		return err
	}
	if err := n.StartScheduler(ctx); err != nil {
		return err
	}
	if err := n.StartPlugin(ctx); err != nil {
		return err
	}
	d.screen.say("nvshare-scheduler runs, nvshare-plugin is registered with containerd")
	return nil
}

func (d *demo) startTenants(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startWithin)
	defer cancel()
	for _, name := range []string{"train-a", "train-b"} {
		pod, err := d.node.RunPod(ctx, name, map[string]string{gpuAnnotation: "nvshare.com/gpu=0"}, d.workload(name))
		if err != nil {
			return err
		}
		d.tenants = append(d.tenants, tenant{name, "CRI pod", pod.Containers[0]})
		d.screen.say("pod %s runs, annotated %s: nvshare.com/gpu=0", name, gpuAnnotation)
	}
	if node.HavePodman() {
		c, err := d.node.RunPodman(ctx, "train-c", []string{"nvshare.com/gpu=0"}, d.workload("train-c"))
		if err != nil {
			return err
		}
		d.tenants = append(d.tenants, tenant{"train-c", "podman", c})
		d.screen.say("podman run --device nvshare.com/gpu=0 started train-c")
	} else {
		d.screen.say("no podman here: two tenants only")
	}
	// Shares are measured from the time at which all have begun.
	return node.Until(ctx, "all tenants to use the GPU", func() error {
		status, err := d.node.Status(ctx)
		if err != nil {
			return err
		}
		for _, t := range d.tenants {
			if gpu := d.gpu(status); t.client(gpu).GetGrants() == 0 {
				return fmt.Errorf("%s has had no grant; it printed: %s", t.name, t.ctr.Log())
			}
		}
		return nil
	})
}

func (d *demo) workload(name string) node.ContainerSpec {
	args := []string{"/usr/bin/cuda-busy", "--kernel-us", "500"}
	if d.simulated {
		// Nearly always with work, so that turns last the quantum.
		args = append(args, "--depth", "400")
	} else {
		// The program writes its record each time it waits for its work.
		args = append(args, "--depth", "64", "--record", "/record/"+name+".jsonl")
	}
	return node.ContainerSpec{Args: args, Env: map[string]string{node.TenantEnv: name}}
}

// gpu is the GPU that the tenants named.
func (d *demo) gpu(status *api.StatusResponse) *api.GPU {
	for _, g := range status.GetGpus() {
		if g.Index == 0 {
			return g
		}
	}
	return nil
}

// watch shows the state for the given time. With a condition, watch ends as soon as it
// holds, and returns an error if it never does.
func (d *demo) watch(ctx context.Context, long time.Duration, until func(*api.GPU) bool) error {
	pace := 50 * time.Millisecond
	if until != nil {
		pace = watchEvery
	}
	deadline := time.After(long)
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for {
		status, err := d.node.Status(ctx)
		if err != nil {
			return err
		}
		gpu := d.gpu(status)
		if until != nil && until(gpu) {
			return nil
		}
		d.screen.update(gpu, d.tenants)
		select {
		case <-tick.C:
		case <-deadline:
			if until != nil {
				return errors.New("the state that was waited for never came")
			}
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
