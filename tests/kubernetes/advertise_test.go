//go:build k8s

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/node"
)

// TestAdvertise has kube-scheduler count GPUs by resources in the node's status, without a device plugin.
func TestAdvertise(t *testing.T) {
	runSteps(t, []step{
		{"deploy", func(t *testing.T) {
			ctx := within(t)
			before := shared.PluginAccepts()
			// A pod that comes first waits.
			counted(t, ctx, "first", 24, 25, "2048")
			unschedulable(t, ctx, "first", "nvshare.com/gpu-memory")
			kubectl(t, ctx, "apply", "-k", "simgpu-advertise")
			rolledOut(t, ctx)
			accepted(t, ctx, before)
		}},
		{"schedule", schedule},
		{"quota", quota},
		{"node-policy", nodePolicy},
		{"churn", churnCounted},
		{"restart", restartAdvertised},
		{"uninstall", func(t *testing.T) {
			ctx := within(t)
			kubectl(t, ctx, "delete", "-n", "nvshare-system", "daemonset/nvshare", "--cascade=foreground", "--timeout="+patience.String())
			capacity(t, ctx, "")
			kubectl(t, ctx, "delete", "pods", "first", "third", "--timeout="+patience.String())
		}},
		{"claims", func(t *testing.T) { // the driver removes what a killed plugin has left
			ctx := within(t)
			kubectl(t, ctx, "patch", "node", node.KubeNode, "--subresource=status", "--type=merge", "-p", `{"status":{"capacity":{"nvshare.com/gpu-memory":"7","nvshare.com/gpu-cores":"7"}}}`)
			kubectl(t, ctx, "apply", "-k", "simgpu-dra") // which does not get ready before Kubernetes 1.36
			capacity(t, ctx, "")
			uninstallOf(t, "simgpu-dra")
		}},
	})
}

// counted creates a pod that asks for memory, GiB, and time, percent, and allocates some MiB.
func counted(t *testing.T, ctx context.Context, name string, memory, cores int, mib string) {
	t.Helper()
	_, err := cluster.Apply(ctx, fmt.Sprintf(`{apiVersion: v1, kind: Pod, metadata: {name: %[1]s}, spec: {restartPolicy: Never, terminationGracePeriodSeconds: 1,
		automountServiceAccountToken: false, containers: [{name: main, image: "localhost/nvshare-workload:1", imagePullPolicy: IfNotPresent,
		args: [/usr/bin/cuda-busy, --tenant, %[1]s, --mem-mib, %[4]q, --kernel-us, "500", --depth, "4"],
		resources: {limits: {nvshare.com/gpu-memory: %[2]d, nvshare.com/gpu-cores: %[3]d}}}]}}`, name, memory, cores, mib), "create")
	check(t, err)
}

// unschedulable waits until kube-scheduler says what of the node is too little for a pod.
func unschedulable(t *testing.T, ctx context.Context, name, resource string) {
	t.Helper()
	await(t, ctx, name+" to be refused by kube-scheduler", func() error {
		out, err := get(ctx, podsPath+"/"+name, `{.status.phase} {.status.conditions[?(@.type=="PodScheduled")].message}`)
		if err == nil && (!strings.HasPrefix(out, "Pending") || !strings.Contains(out, "Insufficient "+resource)) {
			err = fmt.Errorf("it is %s", out)
		}
		return err
	})
}

// capacity waits until the node has memory and cores, capacity and allocatable.
func capacity(t *testing.T, ctx context.Context, want string) {
	t.Helper()
	await(t, ctx, fmt.Sprintf("the capacity %q", want), func() error {
		for _, list := range []string{"capacity", "allocatable"} {
			out, err := get(ctx, nodesPath+"/"+node.KubeNode, fmt.Sprintf(`{.status.%s.nvshare\.com/gpu-memory} {.status.%[1]s.nvshare\.com/gpu-cores}`, list))
			if err != nil {
				return err
			}
			if got := strings.TrimSpace(out); got != want {
				return fmt.Errorf("%s is %q", list, got)
			}
		}
		return nil
	})
}

func areReady(t *testing.T, ctx context.Context, pods ...string) {
	t.Helper()
	for _, p := range pods {
		kubectl(t, ctx, "wait", "--for=condition=Ready", "--timeout="+patience.String(), "pod/"+p)
	}
}

// Two pods fit, one on each GPU of 32 GiB, and have limits, which TestCluster/memory-limit shows in force. A third one fits the sum that is left and no GPU: it waits in
// kube-scheduler until there is room.
func schedule(t *testing.T) {
	ctx := within(t)
	areReady(t, ctx, "first")
	counted(t, ctx, "second", 24, 25, "2048")
	areReady(t, ctx, "second")
	for _, pod := range []string{"first", "second"} {
		if memory, cores, err := known(ctx, pod); err != nil || memory != 24<<30 || cores != 25 {
			t.Errorf("%s has %d bytes, %d %%, %v", pod, memory, cores, err)
		}
		if out := kubectl(t, ctx, "exec", pod, "--", "nvidia-smi"); !strings.Contains(out, "/ 24576MiB") {
			t.Errorf("%s sees a GPU of %s", pod, out)
		}
	}
	capacity(t, ctx, fmt.Sprint(24+24+8, " ", 25+25+75))
	counted(t, ctx, "third", 16, 10, "2048")
	unschedulable(t, ctx, "third", "nvshare.com/gpu-memory")
	if out := kubectl(t, ctx, "describe", "node", node.KubeNode); !strings.Contains(out, "nvshare.com/gpu-memory") {
		t.Errorf("the node is %s", out)
	}
	kubectl(t, ctx, "delete", "pod", "second", "--timeout="+patience.String())
	areReady(t, ctx, "third")
	capacity(t, ctx, fmt.Sprint(24+16+16, " ", 25+10+90))
}

// Pods that come and go find what kube-scheduler has counted for them: none fails, or is refused on the node.
func churnCounted(t *testing.T) {
	ctx := within(t)
	_, err := cluster.Apply(ctx, `{apiVersion: batch/v1, kind: Job, metadata: {name: counted}, spec: {completions: 12, parallelism: 8, backoffLimit: 0, template: {spec: {
		restartPolicy: Never, automountServiceAccountToken: false, containers: [{name: main, image: "localhost/nvshare-workload:1", imagePullPolicy: IfNotPresent,
		args: [/usr/bin/cuda-busy, --launches, "8", --depth, "4"], resources: {limits: {nvshare.com/gpu-memory: 5, nvshare.com/gpu-cores: 5}}}]}}}}`, "create")
	check(t, err)
	kubectl(t, ctx, "wait", "--for=condition=Complete", "job/counted", "--timeout="+patience.String())
	if out := kubectl(t, ctx, "logs", "-n", "nvshare-system", "ds/nvshare", "-c", "plugin"); strings.Contains(out, "no GPU can give") {
		t.Errorf("refused on the node:\n%s", tail(out, 60))
	}
	kubectl(t, ctx, "delete", "job", "counted", "--cascade=foreground", "--timeout="+patience.String())
}

// The samples count what a namespace has, and refuse what nobody counts.
func quota(t *testing.T) {
	ctx := within(t)
	const sample = deployments + "quota/advertised.yaml"
	kubectl(t, ctx, "apply", "-f", sample)
	await(t, ctx, "the quota", func() error {
		out, err := get(ctx, "/api/v1/namespaces/default/resourcequotas/gpu", `{.status.used.requests\.nvshare\.com/gpu-memory} {.status.used.requests\.nvshare\.com/gpu-cores}`)
		if err == nil && out != "40 35" {
			err = fmt.Errorf("it counts %s", out)
		}
		return err
	})
	_, err := cluster.Apply(ctx, `{apiVersion: v1, kind: Pod, metadata: {name: more}, spec: {automountServiceAccountToken: false, containers: [{name: main, image: none, resources: {limits: {nvshare.com/gpu-memory: 1}}}]}}`, "create", "--dry-run=server")
	if err == nil || !strings.Contains(err.Error(), "exceeded quota") {
		t.Errorf("one more: %v", err)
	}
	kubectl(t, ctx, "delete", "-f", sample)

	const policy = deployments + "quota/limits-only.yaml"
	kubectl(t, ctx, "apply", "-f", policy)
	create := func(annotation string) error {
		_, err := cluster.Apply(ctx, `{apiVersion: v1, kind: Pod, metadata: {name: more, annotations: {`+annotation+`}}, spec: {automountServiceAccountToken: false, containers: [{name: main, image: none}]}}`, "create", "--dry-run=server")
		return err
	}
	await(t, ctx, "the policy", func() error { // it holds only some time after it was created
		if err := create(`nvshare.com/gpu: "1"`); err == nil || !strings.Contains(err.Error(), "by resources.limits") {
			return fmt.Errorf("a GPU by annotation: %v", err)
		}
		return nil
	})
	for annotation, refused := range map[string]bool{
		"gpu.nvshare.com/container.main: any": true, `gpu.nvshare.com: "1"`: true, "gpu-core-request.nvshare.com/pod: 5%": true,
		"nvshare.com/gpu: none": false, `nvshare.com/gpu-weight: "5"`: false, "other: x": false,
	} {
		if err := create(annotation); (err != nil) != refused {
			t.Errorf("%s: %v", annotation, err)
		}
	}
	kubectl(t, ctx, "delete", "-f", policy)
}

// The plugin's token can change its own node's resources, and nothing else.
func nodePolicy(t *testing.T) {
	ctx := within(t)
	server := kubectl(t, ctx, "config", "view", "--raw", "-o", "jsonpath={.clusters[0].cluster.server}")
	pod := pluginPod(t, ctx)
	bound := strings.TrimSpace(kubectl(t, ctx, "create", "token", "nvshare", "-n", "nvshare-system", "--bound-object-kind=Pod", "--bound-object-name="+pod))
	unbound := strings.TrimSpace(kubectl(t, ctx, "create", "token", "nvshare", "-n", "nvshare-system"))
	_, err := cluster.Apply(ctx, `{apiVersion: v1, kind: Node, metadata: {name: other}}`, "create")
	check(t, err)
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	send := func(name, token, patch string) string { // kubectl would need the right to get nodes
		r, err := http.NewRequestWithContext(ctx, http.MethodPatch, server+"/api/v1/nodes/"+name+"/status?dryRun=All", strings.NewReader(patch))
		check(t, err)
		r.Header = http.Header{"Content-Type": {"application/merge-patch+json"}, "Authorization": {"Bearer " + token}}
		answer, err := client.Do(r)
		check(t, err)
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		check(t, err)
		if answer.StatusCode == http.StatusOK {
			return ""
		}
		return string(text)
	}
	ours := `{"status":{"capacity":{"nvshare.com/gpu-memory":"7"},"allocatable":{"nvshare.com/gpu-memory":null}}}`
	for _, c := range []struct{ name, token, patch, says string }{
		{node.KubeNode, bound, ours, ""},
		{"other", bound, ours, "may not change the status of node 'other'"},
		{node.KubeNode, unbound, ours, "the plugin of node ''"},
		{node.KubeNode, bound, `{"status":{"capacity":{"cpu":"100"}}}`, "no other resource"},
		{node.KubeNode, bound, `{"status":{"allocatable":{"nvidia.com/gpu":"1"}}}`, "no other resource"},
		{node.KubeNode, bound, `{"status":{"allocatable":{"memory":null}}}`, "no other resource"},
		{node.KubeNode, bound, `{"status":{"conditions":null}}`, "and nothing else"},
		{node.KubeNode, bound, `{"status":{"addresses":null}}`, "and nothing else"},
		{node.KubeNode, bound, `{"metadata":{"labels":{"a":"b"}}}`, "and nothing else"},
	} {
		if got := send(c.name, c.token, c.patch); (got == "") != (c.says == "") || !strings.Contains(got, c.says) {
			t.Errorf("%s %s: %s, want %q", c.name, c.patch, got, c.says)
		}
	}
	kubectl(t, ctx, "delete", "node", "other")
}

// While the plugin is away no pod is placed here; those that run do not notice, also when the kubelet
// restarts meanwhile. The next plugin advertises the same.
func restartAdvertised(t *testing.T) {
	ctx := within(t)
	before := containers(t, ctx, "first", "third")
	kubectl(t, ctx, "delete", "-n", "nvshare-system", "daemonset/nvshare", "--cascade=foreground", "--timeout="+patience.String())
	capacity(t, ctx, "")
	counted(t, ctx, "small", 1, 1, "512")
	unschedulable(t, ctx, "small", "nvshare.com/gpu-memory")
	check(t, cluster.StopKubelet())
	check(t, cluster.StartKubelet(ctx))
	kubectl(t, ctx, "apply", "-k", "simgpu-advertise")
	rolledOut(t, ctx)
	areReady(t, ctx, "first", "third", "small")
	if after := containers(t, ctx, "first", "third"); after != before {
		t.Errorf("containers were %s, are %s", before, after)
	}
	for pod, want := range map[string]uint64{"first": 24 << 30, "third": 16 << 30} {
		if memory, _, err := known(ctx, pod); err != nil || memory != want {
			t.Errorf("%s has %d bytes, %v", pod, memory, err)
		}
	}
	kubectl(t, ctx, "delete", "pod", "small", "--timeout="+patience.String())
	capacity(t, ctx, fmt.Sprint(24+16+16, " ", 25+10+90))
}
