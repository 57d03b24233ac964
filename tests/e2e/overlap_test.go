//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// members is an overlap group as a test sees it.
type members struct {
	t     *testing.T
	ctx   context.Context
	since uint64 // the latest event before the test
}

func newMembers(t *testing.T) *members {
	t.Helper()
	g := &members{t: t, ctx: within(t)}
	g.since = g.events().Next
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("events of groups:\n%s", strings.Join(g.said(), "\n"))
		}
	})
	return g
}

func (g *members) events() *api.EventsResponse {
	g.t.Helper()
	conn := must(api.Dial(g.ctx, node.RunDir))(g.t)
	defer conn.Close()
	return must(conn.Events(g.ctx, &api.EventsRequest{Since: g.since, Types: []api.EventType{api.EventType_EVENT_TYPE_OVERLAP}}))(g.t)
}

// said returns what the events of groups say.
func (g *members) said() (all []string) {
	for _, e := range g.events().Events {
		all = append(all, e.Reason)
	}
	return all
}

var pidIn = regexp.MustCompile(`\(pid ([0-9]+)\)`)

// await waits for the nth event with a text, and returns the pid that it names.
func (g *members) await(text string, nth int) (pid int) {
	g.t.Helper()
	check(g.t, node.Until(g.ctx, fmt.Sprintf("event %d of %q", nth, text), func() error {
		n := 0
		for _, reason := range g.said() {
			if !strings.Contains(reason, text) {
				continue
			}
			if n++; n == nth {
				if m := pidIn.FindStringSubmatch(reason); m != nil {
					pid, _ = strconv.Atoi(m[1])
				}
				return nil
			}
		}
		return fmt.Errorf("there are %d", n)
	}))
	return pid
}

// pod starts a busy member.
func (g *members) pod(name string, more map[string]string) *node.Pod {
	g.t.Helper()
	annotations := map[string]string{gpuAnnotation: firstGPU, "nvshare.com/gpu-overlap": "small"}
	maps.Copy(annotations, more)
	return startPod(g.t, name, annotations, busy(name))
}

// together waits until two tenants have been on the GPU at the same time.
func (g *members) together(from int64, a, b string) {
	g.t.Helper()
	awaitEvidence(g.t, g.ctx, a+" and "+b+" to run at the same time", from, func(e *evidence) error {
		var only judge.Trace
		for _, iv := range e.trace.Intervals {
			if iv.Process.Tenant == a || iv.Process.Tenant == b {
				only.Intervals = append(only.Intervals, iv)
			}
		}
		if only.Lives = e.trace.Lives; judge.Judge(only, judge.Options{Since: from, Until: judge.Now()}).Overlaps() == 0 {
			return errors.New("they do not overlap")
		}
		return nil
	})
}

// nothingLeft waits until the groups and their processes are gone.
func (g *members) nothingLeft() {
	g.t.Helper()
	check(g.t, node.Until(g.ctx, "the end of the group", func() error {
		if _, err := os.Stat(filepath.Join(node.RunDir, api.OverlapBelow)); !os.IsNotExist(err) {
			return fmt.Errorf("its directory is there (%v)", err)
		}
		for _, comm := range must(filepath.Glob("/proc/[0-9]*/comm"))(g.t) {
			if name, err := os.ReadFile(comm); err == nil && strings.HasPrefix(string(name), "nvidia-cuda-mps") {
				return fmt.Errorf("%s runs", comm)
			}
		}
		return nil
	}))
}

func environ(t *testing.T, pid int) map[string]string {
	t.Helper()
	env := map[string]string{}
	for e := range strings.SplitSeq(string(must(os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid)))(t)), "\x00") {
		k, v, _ := strings.Cut(e, "=")
		env[k] = v
	}
	return env
}

// Containers of pods that name a group run at the same time, through an MPS server that they
// share, and take turns with others, or share with them by time slices. A member that is
// killed ends alone. Nothing is left after the last member.
func TestOverlapGroupOfPods(t *testing.T) {
	g := newMembers(t)
	from := judge.Now()
	a := g.pod("small-a", nil)
	elsewhere := busy("small-b") // it has the sockets where its environment says
	elsewhere.Env[api.MPSPipeEnv] = "/run/mps"
	b := startPod(t, "small-b", map[string]string{gpuAnnotation: firstGPU, "nvshare.com/gpu-overlap": "small", coreLimitAnnotation: "40"}, elsewhere)
	g.await("server starts", 1)
	g.together(from, "small-a", "small-b")
	for pod, want := range map[*node.Pod][2]string{a: {cdi.ContainerMPSDir, ""}, b: {"/run/mps", "40"}} {
		env := environ(t, pod.PID())
		if got := [2]string{env[api.MPSPipeEnv], env[api.MPSThreadsEnv]}; got != want {
			t.Errorf("%s runs with %s and %s of %q, want %q", pod.Name, api.MPSPipeEnv, api.MPSThreadsEnv, got, want)
		}
	}
	outside := busyPod(t, "small-outside")
	from = judge.Now()
	for _, name := range []string{"small-a", "small-b", "small-outside"} {
		awaitTurns(t, g.ctx, name, from, turnsEach)
	}
	until := judge.Now()
	observe(t, from).noOverlapWithout(t, "small-a", from, until)
	observe(t, from).noOverlapWithout(t, "small-b", from, until)

	must(shared.Ctl(g.ctx, "-S", "auto"))(t)
	t.Cleanup(func() { must(shared.Ctl(within(t), "-S", "on"))(t) })
	check(t, node.Until(g.ctx, "the group and the other pod to share by time slices", func() error {
		if gpu := must(shared.Status(g.ctx))(t).Gpus[0]; gpu.Way != "slices" {
			return fmt.Errorf("they share by %s: %s", gpu.Way, gpu.WayReason)
		}
		return nil
	}))
	from = judge.Now()
	awaitEvidence(t, g.ctx, "the group and the other pod to work on", from, func(e *evidence) error {
		works := map[string]bool{}
		for _, iv := range e.trace.Intervals {
			works[iv.Process.Tenant] = works[iv.Process.Tenant] || iv.Start > from
		}
		if !works["small-a"] || !works["small-b"] || !works["small-outside"] {
			return fmt.Errorf("only %v", works)
		}
		return nil
	})
	must(shared.Ctl(g.ctx, "-S", "on"))(t)

	check(t, unix.Kill(b.PID(), unix.SIGKILL))
	must(b.Ended(g.ctx, b.Containers[0]))(t)
	from = judge.Now()
	awaitTurns(t, g.ctx, "small-a", from, turnsEach)
	if strings.Contains(strings.Join(g.said(), "\n"), "server ended") {
		t.Errorf("a killed member has taken the server along: %q", g.said())
	}
	for _, pod := range []*node.Pod{a, b, outside} {
		check(t, pod.Stop(g.ctx))
	}
	g.await(": ended", 1)
	g.nothingLeft()
}

// A killed server takes its members' work along, and a member that is started then has a new
// server. A killed control daemon is started again. Members outlive the scheduler, and the
// next one takes their group over.
func TestOverlapGroupFaults(t *testing.T) {
	g := newMembers(t)
	lost := g.pod("lost", nil)
	check(t, unix.Kill(g.await("server starts", 1), unix.SIGKILL))
	g.await("server ended", 1)
	if status := must(lost.Ended(g.ctx, lost.Containers[0]))(t); status == 0 {
		t.Errorf("the member has not noticed that its server is gone:\n%s", lost.Log())
	}
	from := judge.Now()
	next := g.pod("next", nil)
	g.await("server starts", 2)
	awaitTurns(t, g.ctx, next.Name, from, 1)

	runs := strings.Count(strings.Join(g.said(), "\n"), ": runs") // 2 where the group ended before its next member came
	check(t, unix.Kill(g.await(": runs", runs), unix.SIGKILL))
	g.await("daemon ended", 1)
	g.await(": runs", runs+1)
	must(next.Ended(g.ctx, next.Containers[0]))(t) // the server ended with its daemon's
	a, b := g.pod("again-a", nil), g.pod("again-b", nil)
	from = judge.Now()
	g.together(from, a.Name, b.Name)

	shared.Scheduler.Kill()
	check(t, shared.StartScheduler(g.ctx))
	g.since = 0 // events of another scheduler
	g.await("taken over", 1)
	from = judge.Now()
	g.together(from, a.Name, b.Name)
	for _, pod := range []*node.Pod{a, b} {
		check(t, pod.Stop(g.ctx))
	}
	g.nothingLeft()
}

// A member of another user is in a group of its own, though it has the same name. It may be as
// confined as Kubernetes' restricted standard has it.
func TestOverlapGroupIsOfOneUser(t *testing.T) {
	g := newMembers(t)
	from := judge.Now()
	g.pod("of-root", nil)
	server := g.await("server starts", 1)
	annotations := map[string]string{gpuAnnotation: firstGPU, "nvshare.com/gpu-overlap": "small"}
	var confined []*node.Pod
	for _, name := range []string{"of-nobody-a", "of-nobody-b"} {
		spec := busy(name)
		spec.Restricted = true
		confined = append(confined, startPod(t, name, annotations, spec))
	}
	if another := g.await("server starts", 2); another == server {
		t.Errorf("users share the server %d", server)
	} else if info := must(os.Stat(fmt.Sprintf("/proc/%d", another)))(t); info.Sys().(*syscall.Stat_t).Uid != 65534 {
		t.Errorf("the server of user 65534 runs as user %d", info.Sys().(*syscall.Stat_t).Uid)
	}
	g.together(from, "of-nobody-a", "of-nobody-b")
	until := judge.Now()
	observe(t, from).noOverlapWithout(t, "of-nobody-a", from, until)
	if shared, err := os.ReadDir(fmt.Sprintf("/proc/%d/root%s", confined[0].PID(), cdi.ContainerMPSDir)); err != nil || len(shared) == 0 {
		t.Errorf("the member sees no sockets: %v, %v", shared, err)
	}
}

// A pod that cannot be in its group is refused with the reason.
func TestOverlapGroupRefused(t *testing.T) {
	ctx := within(t)
	refused := func(want string, spec node.PodSpec) {
		t.Helper()
		pod, err := shared.Run(ctx, spec, busy(spec.Name))
		if err == nil {
			removePod(t, pod)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", spec.Name, err, want)
		}
	}
	with := func(gpus string) map[string]string {
		return map[string]string{gpuAnnotation: gpus, "nvshare.com/gpu-overlap": "small"}
	}
	refused("exactly one GPU", node.PodSpec{Name: "two-gpus", Annotations: with("nvshare.com/gpu=all")})
	refused("hostUsers", node.PodSpec{Name: "own-users", Annotations: with(firstGPU), OwnUsers: true})
	restartScheduler(t, "--overlap-namespaces", "prod")
	t.Cleanup(func() { restartScheduler(t) })
	refused("--overlap-namespaces", node.PodSpec{Name: "other-namespace", Annotations: with(firstGPU)})
}

// Containers of podman form groups of their own.
func TestOverlapGroupOfPodman(t *testing.T) {
	if !node.HavePodman() {
		t.Skip("there is no podman on this machine")
	}
	g := newMembers(t)
	from := judge.Now()
	for _, name := range []string{"overlap-a", "overlap-b"} {
		spec := busy(name)
		spec.Annotations = map[string]string{"nvshare.com/gpu-overlap": "small"}
		must(shared.RunPodman(g.ctx, name, []string{firstGPU}, spec))(t)
		t.Cleanup(func() { check(t, shared.RemovePodman(within(t), name)) })
	}
	g.await("server starts", 1)
	g.together(from, "overlap-a", "overlap-b")
	limited := busy("overlap-limited")
	limited.Annotations = map[string]string{"nvshare.com/gpu-overlap": "small", coreLimitAnnotation: "40"}
	_, err := shared.RunPodman(g.ctx, "overlap-limited", []string{firstGPU}, limited)
	check(t, shared.RemovePodman(g.ctx, "overlap-limited"))
	if err == nil || !strings.Contains(err.Error(), "--env "+api.MPSThreadsEnv+"=40") {
		t.Errorf("a core limit that the environment does not carry: %v", err)
	}
	for _, name := range []string{"overlap-a", "overlap-b"} {
		check(t, shared.RemovePodman(g.ctx, name))
	}
	g.nothingLeft()
}
