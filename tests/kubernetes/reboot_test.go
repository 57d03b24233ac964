//go:build k8s

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

const (
	tainted = "nvshare-add-small-pod-1" // a manifest
	// rebootTenants run whether they have a GPU or not, and so show who has none.
	rebootTenants = 5
	rebootedPods  = `{apiVersion: apps/v1, kind: Deployment, metadata: {name: rebooted}, spec: {replicas: %d, selector: {matchLabels: {app: rebooted}},
		template: {metadata: {labels: {app: rebooted}, annotations: {%s}},
		spec: {terminationGracePeriodSeconds: 0, automountServiceAccountToken: false,
		containers: [{name: main, image: localhost/nvshare-workload:1, command: [/usr/bin/sleep, "1234567"], resources: {limits: {%s}}}]}}}}`
)

// tenants counts the processes of the tenants, and those that have the shim.
func tenants(t *testing.T) (all, with int) {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	check(t, err)
	for _, dir := range dirs {
		line, _ := os.ReadFile(dir + "/cmdline") // empty: it has ended
		if string(line) != "/usr/bin/sleep\x001234567\x00" {
			continue
		}
		all++
		if _, err := os.Stat(dir + "/root/usr/lib/nvshare/libnvshare.so"); err == nil {
			with++
		}
	}
	return all, with
}

// After a reboot the kubelet starts tenants before there is a plugin: the node does not wait for its own
// DaemonSet. The plugin ends these containers once it has registered, and the kubelet starts them again,
// with their GPU.
func reboot(t *testing.T) { rebootWith(t, `nvshare.com/gpu: "1"`, "") }

// Pods with a claim wait for it.
func draReboot(t *testing.T) { rebootWith(t, "", "nvshare.com/gpu: 1") }

func rebootWith(t *testing.T, annotations, limits string) {
	ctx := within(t)
	_, err := cluster.Apply(ctx, fmt.Sprintf(rebootedPods, rebootTenants, annotations, limits), "apply")
	check(t, err)
	claims := limits != ""
	complete := func() error {
		if all, with := tenants(t); all != rebootTenants || with != all {
			return fmt.Errorf("%d tenants run, %d of them with the shim", all, with)
		}
		return nil
	}
	awaitTenants(t, ctx, claims, complete)
	reboots, err := strconv.Atoi(cmp.Or(os.Getenv("NVSHARE_TEST_REBOOTS"), "1"))
	check(t, err)
	for range reboots {
		rebootOnce(t, claims, complete)
	}
	kubectl(t, within(t), "delete", "deployment", "rebooted", "--cascade=foreground", "--timeout="+patience.String())
}

func awaitTenants(t *testing.T, ctx context.Context, claims bool, complete func() error) {
	t.Helper()
	if claims {
		complete = nudged(ctx, complete, "--selector=app=rebooted")
	}
	await(t, ctx, "all tenants to have a GPU", complete)
}

func rebootOnce(t *testing.T, claims bool, complete func() error) {
	ctx := within(t)
	before := shared.PluginAccepts()
	check(t, cluster.Reboot(ctx))
	begin := time.Now()
	accepted(t, ctx, before)
	t.Logf("the plugin has registered %.1f s after the node was ready", time.Since(begin).Seconds())
	all, with := tenants(t)
	t.Logf("then %d tenants run, %d of them with the shim", all, with)
	awaitTenants(t, ctx, claims, complete)
	t.Logf("all tenants have a GPU %.1f s after the node was ready", time.Since(begin).Seconds())
	if claims && all > with {
		t.Errorf("%d tenants with a claim ran without the shim", all-with)
	} else if all > with {
		out := mustGet(t, ctx, eventsPath, "{range .items[*]}{.reason} {.message}{\"\\n\"}{end}")
		if !strings.Contains(out, "GPUUnmanaged") || !strings.Contains(out, "stopping it") {
			t.Errorf("no Event says that a container was ended:\n%s", tail(out, 40))
		}
	}
}

// A node that comes with the startup taint gets no pods before the plugin has registered, which removes the
// taint. The plugin's token can change nothing else of the node, and no other node.
func startupTaint(t *testing.T) {
	ctx := within(t)
	const taint = "nvshare.com/not-ready"
	kubectl(t, ctx, "taint", "node", node.KubeNode, taint+"=:NoSchedule")
	kubectl(t, ctx, "apply", "-f", manifest(tainted))
	if out, err := cluster.Kubectl(ctx, "wait", "--for=condition=PodScheduled=false", "pod/nvshare-add-small-1", "--timeout="+patience.String()); err != nil {
		t.Errorf("the pod is not refused by the taint: %v %s", err, out)
	}
	kubectl(t, ctx, "apply", "-k", "simgpu-taint")
	from := judge.Now()
	runPods(t, ctx, tainted)
	awaitTurns(t, ctx, from, 1, "add-small-1")
	if out := mustGet(t, ctx, nodesPath+"/"+node.KubeNode, "{.spec.taints}"); strings.Contains(out, taint) {
		t.Errorf("the node has the taints %s", out)
	}
	rolledOut(t, ctx)
	server := kubectl(t, ctx, "config", "view", "--raw", "-o", "jsonpath={.clusters[0].cluster.server}")
	pod := pluginPod(t, ctx)
	token := strings.TrimSpace(kubectl(t, ctx, "create", "token", "nvshare", "-n", "nvshare-system", "--bound-object-kind=Pod", "--bound-object-name="+pod))
	_, err := cluster.Apply(ctx, `{apiVersion: v1, kind: Node, metadata: {name: other}, spec: {taints: [{key: `+taint+`, effect: NoSchedule}]}}`, "create")
	check(t, err)
	for patch, says := range map[string]string{
		"other " + `{"spec":{"taints":null}}`:                                      "may not change node 'other'",
		node.KubeNode + ` {"metadata":{"labels":{"a":"b"}}}`:                       "and nothing else",
		node.KubeNode + ` {"spec":{"unschedulable":true}}`:                         "and nothing else",
		node.KubeNode + ` {"spec":{"taints":[{"key":"x","effect":"NoSchedule"}]}}`: "and nothing else",
	} {
		name, text, _ := strings.Cut(patch, " ")
		_, err := cluster.Kubectl(ctx, "patch", "node", name, "--type=merge", "--dry-run=server", "-p", text,
			"--kubeconfig=/dev/null", "--server="+server, "--token="+token, "--insecure-skip-tls-verify")
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %s", patch, err, says)
		}
	}
	kubectl(t, ctx, "delete", "node", "other")
	deletePods(t, ctx, tainted)
	kubectl(t, ctx, "delete", "-f", objectsDir+"startup-taint/rbac.yaml", "-f", objectsDir+"startup-taint/policy.yaml")
	kubectl(t, ctx, "apply", "-k", "simgpu")
	rolledOut(t, ctx)
}
