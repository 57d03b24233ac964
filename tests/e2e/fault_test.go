//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// A holder that does not answer a revoke loses its grant after the grace period, and
// the others go on. Once it answers, it gets turns again.
func TestStoppedHolderIsFenced(t *testing.T) {
	ctx := within(t)
	// Long enough for the others on a machine that is busy: who is fenced may overlap.
	restartScheduler(t, "--grace", "3s")
	t.Cleanup(func() { restartScheduler(t) })
	stopped := busyPod(t, "stopped")
	busyPod(t, "other-a")
	busyPod(t, "other-b")
	awaitTurns(t, ctx, "stopped", 0, 1)
	stopHolder(t, stopped.PID())
	at := judge.Now()
	awaitTurns(t, ctx, "other-a", at, turnsEach)
	awaitTurns(t, ctx, "other-b", at, turnsEach)
	check(t, unix.Kill(stopped.PID(), unix.SIGCONT))
	resumed := judge.Now()
	awaitClient(t, ctx, "the fence to end", stopped.PID(), func(c *api.Client) bool {
		return c.State != api.ClientState_CLIENT_STATE_FENCED
	})
	back := judge.Now()
	awaitTurns(t, ctx, "stopped", back, 2)
	// Work that a stopped process had submitted may end late, which a fence cannot
	// prevent. Before and after that, nobody overlaps.
	observe(t, at).noOverlapWithout(t, "stopped", at, resumed)
	observe(t, back).noOverlap(t)
}

// stopHolder stops a process while it holds the GPU, and returns when its grant is
// fenced. The process may be stopped too late, with its release on the way. Then stopHolder lets
// it go on, and stops it again.
func stopHolder(t *testing.T, pid int) {
	t.Helper()
	ctx := within(t)
	for {
		awaitClient(t, ctx, "the holder", pid, holding)
		check(t, judge.Stop(pid))
		fenced := false
		awaitClient(t, ctx, "the fence", pid, func(c *api.Client) bool {
			fenced = c.State == api.ClientState_CLIENT_STATE_FENCED
			return fenced || c.State == api.ClientState_CLIENT_STATE_IDLE || c.State == api.ClientState_CLIENT_STATE_WAITING
		})
		if fenced {
			return
		}
		check(t, unix.Kill(pid, unix.SIGCONT))
	}
}

// restartScheduler ends the scheduler with SIGTERM and starts it with args.
func restartScheduler(t *testing.T, args ...string) {
	t.Helper()
	check(t, shared.Scheduler.Stop())
	check(t, shared.StartScheduler(within(t), args...))
}

// With NVSHARE_SCHEDULER_LOSS=closed no two tenants use the GPU at the same time, however
// long the scheduler is away: the holder runs on, and the others wait.
func TestKilledSchedulerClosed(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	var pods []*node.Pod
	for _, name := range []string{"closed-a", "closed-b"} {
		spec := busy(name)
		spec.Env["NVSHARE_SCHEDULER_LOSS"] = "closed"
		pods = append(pods, startPod(t, name, map[string]string{gpuAnnotation: firstGPU}, spec))
	}
	for _, pod := range pods {
		awaitTurns(t, ctx, pod.Name, from, 2)
	}
	// The scheduler must die during a grant: between two grants there is no holder.
	must(shared.Ctl(ctx, "-T", "30s"))(t)
	// A holder that a busy machine starves may give the GPU up in that very moment. Then nobody works, rightly, and it is tried again.
	for tries := 5; ; tries-- {
		check(t, node.Until(ctx, "a holder", func() error {
			for _, pod := range pods {
				if c := client(t, ctx, pod.PID()); c != nil && holding(c) {
					return nil
				}
			}
			return errors.New("nobody holds the GPU")
		}))
		shared.Scheduler.Kill()
		killed := judge.Now()
		soon, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := node.UntilEvery(soon, readEvery, "the holder to work on", func() error {
			e := observe(t, killed)
			a, b := e.hasTurns("closed-a", 1), e.hasTurns("closed-b", 1)
			if a != nil && b != nil {
				return errors.Join(a, b)
			}
			return nil
		})
		cancel()
		if err == nil {
			break
		}
		if tries == 1 {
			t.Fatal(err)
		}
		check(t, shared.StartScheduler(ctx))
	}
	check(t, shared.StartScheduler(ctx))
	back := judge.Now()
	for _, pod := range pods {
		awaitTurns(t, ctx, pod.Name, back, turnsEach)
		if running, err := pod.Running(ctx); err != nil || !running {
			t.Errorf("pod %s runs: %v %v", pod.Name, running, err)
		}
	}
	observe(t, from).noOverlap(t)
}

// With NVSHARE_SCHEDULER_LOSS=open, the default, waiting tenants run on too after a
// while. All take turns again once the scheduler is back.
func TestKilledSchedulerOpen(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	pods := []*node.Pod{busyPod(t, "open-a"), busyPod(t, "open-b")}
	for _, pod := range pods {
		awaitTurns(t, ctx, pod.Name, from, 2)
	}
	shared.Scheduler.Kill()
	killed := judge.Now()
	for _, pod := range pods {
		awaitTurns(t, ctx, pod.Name, killed, 1)
	}
	// The holder may have just ended the work of its turn. Only work at the same time
	// shows that both run without turns.
	awaitEvidence(t, ctx, "both to run", killed, func(e *evidence) error {
		if e.report.Overlaps() == 0 {
			return errors.New("the tenants still take turns")
		}
		return nil
	})
	check(t, shared.StartScheduler(ctx))
	arbitrated(t, ctx, pods...)
}

// arbitrated waits until the pods have had grants, and checks that they do not overlap
// from then on.
func arbitrated(t *testing.T, ctx context.Context, pods ...*node.Pod) {
	t.Helper()
	for _, pod := range pods {
		awaitClient(t, ctx, "grants to "+pod.Name, pod.PID(), func(c *api.Client) bool { return c.Grants >= 2 })
	}
	from := judge.Now()
	for _, pod := range pods {
		awaitTurns(t, ctx, pod.Name, from, turnsEach)
	}
	observe(t, from).noOverlap(t)
}

func TestSchedulerAbsentAtStart(t *testing.T) {
	ctx := within(t)
	check(t, shared.Scheduler.Stop())
	from := judge.Now()
	debug := busy("early-b")
	debug.Env["NVSHARE_DEBUG"] = "1"
	pods := []*node.Pod{
		busyPod(t, "early-a"),
		startPod(t, "early-b", map[string]string{gpuAnnotation: firstGPU}, debug),
	}
	for _, pod := range pods {
		awaitTurns(t, ctx, pod.Name, from, 1)
	}
	for line := range strings.Lines(pods[0].Log()) {
		if !strings.HasPrefix(line, "{") {
			t.Errorf("the shim printed without NVSHARE_DEBUG: %s", line)
		}
	}
	check(t, node.Until(ctx, "the shim to mention the scheduler, with NVSHARE_DEBUG=1", func() error {
		if log := pods[1].Log(); !strings.Contains(log, "scheduler") { // the runtime passes on what it prints
			return errors.New(log)
		}
		return nil
	}))
	check(t, shared.StartScheduler(ctx))
	arbitrated(t, ctx, pods...)
}

func TestKilledPlugin(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	before := busyPod(t, "before-plugin-kill")
	shared.Plugin.Kill()
	awaitTurns(t, ctx, before.Name, judge.Now(), 1)
	check(t, shared.StartPlugin(ctx))
	after := busyPod(t, "after-plugin-kill")
	for _, pod := range []*node.Pod{before, after} {
		awaitTurns(t, ctx, pod.Name, from, turnsEach)
	}
	observe(t, from).noOverlap(t)
}

// Running pods survive containerd, and the plugin finds the new one.
func TestKilledContainerd(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	before := busyPod(t, "old-containerd")
	accepted := shared.PluginAccepts()
	shared.Containerd.Kill()
	check(t, shared.StartContainerd(ctx))
	check(t, shared.PluginAccepted(ctx, accepted))
	after := busyPod(t, "new-containerd")
	for _, pod := range []*node.Pod{before, after} {
		awaitTurns(t, ctx, pod.Name, from, turnsEach)
	}
	observe(t, from).noOverlap(t)
	awaitClient(t, ctx, "the name of "+after.Name, after.PID(), func(c *api.Client) bool { return c.Container.GetPod() == after.Name })
}
