//go:build k8s

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/judge"
)

// running returns the IDs of the containers of the pods that run all the time.
func running(t *testing.T, ctx context.Context) string {
	return containers(t, ctx, "part-1", "part-2")
}

// managed wants no Event that one of these pods runs without nvshare. Other pods of the cluster may.
func managed(t *testing.T, ctx context.Context, pods ...string) {
	t.Helper()
	for _, pod := range pods {
		if out := mustGet(t, ctx, eventsPath+"?fieldSelector=reason=GPUUnmanaged,involvedObject.name="+pod, "{.items[*].message}"); out != "" {
			t.Errorf("%s is said to run without nvshare: %s", pod, out)
		}
	}
}

func draUndisturbed(t *testing.T, ctx context.Context, before string) {
	t.Helper()
	if after := running(t, ctx); after != before {
		t.Errorf("containers were %s, are %s", before, after)
	}
	managed(t, ctx, "part-1", "part-2")
	awaitHolding(t, ctx, "part-1", holding{core: 40, limit: 50, memory: 4 << 30})
	awaitHolding(t, ctx, "part-2", holding{core: 40, memory: 4 << 30})
	awaitTurns(t, ctx, judge.Now(), 1, "part-1", "part-2")
	_, err := cluster.Apply(ctx, part("part-3", "40", ""), "apply")
	check(t, err)
	ready(t, ctx, "part-3")
	awaitHolding(t, ctx, "part-3", holding{gpus: []string{"1"}, core: 40, memory: 4 << 30})
	kubectl(t, ctx, "delete", "pod", "part-3", "--timeout="+patience.String())
}

// A new driver, and then a new kubelet, know the claims of the pods that run.
func draRestart(t *testing.T) {
	ctx := within(t)
	before, accepts := running(t, ctx), shared.PluginAccepts()
	kubectl(t, ctx, "rollout", "restart", "-n", "nvshare-system", "daemonset/nvshare")
	rolledOut(t, ctx)
	accepted(t, ctx, accepts)
	check(t, cluster.StopKubelet())
	check(t, cluster.StartKubelet(ctx))
	draUndisturbed(t, ctx, before)
}

// A driver that is killed comes back with the claims.
func draKill(t *testing.T) {
	ctx := within(t)
	before, accepts := running(t, ctx), shared.PluginAccepts()
	for _, pid := range ours(t, "nvshare-plugin") {
		check(t, unix.Kill(pid, unix.SIGKILL))
	}
	accepted(t, ctx, accepts)
	draUndisturbed(t, ctx, before)
	kubectl(t, ctx, "delete", "pods", "part-1", "part-2", "--timeout="+patience.String())
	noClaims(t, ctx)
}

// draReplaced has the driver replaced while a pod runs, and creates another pod once the
// old driver has begun to end. replace leads to the replacement.
func draReplaced(t *testing.T, replace func(context.Context)) {
	t.Helper()
	ctx := within(t)
	_, err := cluster.Apply(ctx, part("stays", "40", ""), "apply")
	check(t, err)
	ready(t, ctx, "stays")
	before, from, old := containers(t, ctx, "stays"), judge.Now(), ours(t, "nvshare-plugin")
	replace(ctx)
	await(t, ctx, "the old driver to end, or the new one to start", func() error {
		if now := ours(t, "nvshare-plugin"); slices.Equal(now, old) {
			return fmt.Errorf("%v live", now)
		}
		return nil
	})
	_, err = cluster.Apply(ctx, part("comes", "40", ""), "apply")
	check(t, err)
	ready(t, ctx, "comes")
	rolledOut(t, ctx)
	awaitHolding(t, ctx, "comes", holding{core: 40, memory: 4 << 30})
	awaitHolding(t, ctx, "stays", holding{core: 40, memory: 4 << 30})
	awaitTurns(t, ctx, from, 1, "stays", "comes")
	if after := containers(t, ctx, "stays"); after != before {
		t.Errorf("the container was %s, is %s", before, after)
	}
	managed(t, ctx, "stays", "comes")
	kubectl(t, ctx, "delete", "pods", "stays", "comes", "--timeout="+patience.String())
	noClaims(t, ctx)
}

// While the driver is replaced by one of another configuration, pods that run do not
// notice, and a pod that comes meanwhile starts with the next driver.
func draUpgrade(t *testing.T) {
	draReplaced(t, func(ctx context.Context) {
		kubectl(t, ctx, "set", "env", "-n", "nvshare-system", "daemonset/nvshare", "-c", "plugin", "NVSHARE_DEBUG=1")
	})
	if out := mustGet(t, within(t), systemPodsPath, `{.items[*].spec.containers[?(@.name=="plugin")].env[?(@.name=="NVSHARE_DEBUG")].value}`); out != "1" {
		t.Errorf("the new drivers have NVSHARE_DEBUG=%s", out)
	}
}

// The same where the next driver may come before the old one has ended, because somebody
// has deleted the old one's pod by force.
func draForced(t *testing.T) {
	draReplaced(t, func(ctx context.Context) {
		kubectl(t, ctx, "delete", "pods", "-n", "nvshare-system", "-l", "app.kubernetes.io/name=nvshare", "--force", "--grace-period=0")
	})
}

// With the surge overlay the next driver is ready before the old one ends: the kubelet has a
// driver at each moment, and nobody has two that adjust containers.
func draSurge(t *testing.T) {
	ctx := within(t)
	kubectl(t, ctx, "apply", "-k", "simgpu-dra/surge")
	rolledOut(t, ctx)
	registered := func() []string {
		sockets, err := filepath.Glob("/var/lib/kubelet/plugins_registry/nvshare.com-*reg.sock")
		check(t, err)
		return sockets
	}
	var before []string
	await(t, ctx, "one driver", func() error {
		if before = registered(); len(before) != 1 {
			return fmt.Errorf("the kubelet knows %v", before)
		}
		return nil
	})
	accepts := shared.PluginAccepts()
	draReplaced(t, func(ctx context.Context) {
		kubectl(t, ctx, "rollout", "restart", "-n", "nvshare-system", "daemonset/nvshare")
		await(t, ctx, "the next driver alone", func() error {
			now := registered()
			if len(now) == 0 {
				t.Fatal("the kubelet has no driver")
			}
			if len(now) != 1 || now[0] == before[0] {
				return fmt.Errorf("the kubelet knows %v", now)
			}
			return nil
		})
	})
	accepted(t, ctx, accepts)
	if restarts := strings.Fields(mustGet(t, ctx, systemPodsPath, "{.items[*].status.containerStatuses[*].restartCount}")); slices.ContainsFunc(restarts, func(n string) bool { return n != "0" }) {
		t.Errorf("containers of nvshare restarted %v times", restarts)
	}
	kubectl(t, ctx, "apply", "-k", "simgpu-dra")
	rolledOut(t, ctx)
}
