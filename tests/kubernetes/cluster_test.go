//go:build k8s

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

const (
	small1, small2 = "nvshare-matmul-small-pod-1", "nvshare-matmul-small-pod-2"
	pod1, pod2     = "nvshare-matmul-small-1", "nvshare-matmul-small-2"
	// Tenants' names in the simulated GPU's record.
	tenant1, tenant2 = "matmul-small-1", "matmul-small-2"
)

// TestCluster installs nvshare in a cluster, uses it, disturbs it and removes it. Each
// step needs the steps before it.
func TestCluster(t *testing.T) {
	runSteps(t, []step{
		{"deploy", deploy},
		{"chart-test", func(t *testing.T) { chartTest(t, "dra.enabled=false") }},
		{"no-privileges", noPrivileges},
		{"share", share},
		{"metrics", metrics},
		{"memory-limit", memoryLimit},
		{"core-limits", coreLimits},
		{"live-limits", liveLimits},
		{"refusal", refusal},
		{"musl", musl},
		{"restart-containerd", restartContainerd},
		{"restart-scheduler", restartScheduler},
		{"rolling-update", rollingUpdate},
		{"driver-upgrade", driverUpgrade},
		{"churn", churn},
		{"one-plugin", onePlugin},
		{"required", required},
		{"bound", bound},
		{"overlap-groups", overlapGroups},
		{"reboot", reboot}, // ends the tenants of the steps before
		{"startup-taint", startupTaint},
		{"uninstall", uninstall},
	})
}

// accepted waits until containerd has accepted a plugin more often than before.
func accepted(t *testing.T, ctx context.Context, before int) {
	t.Helper()
	await(t, ctx, "containerd to accept the plugin", func() error {
		if shared.PluginAccepts() <= before {
			return errors.New("its log does not say so")
		}
		return nil
	})
}

func rolledOut(t *testing.T, ctx context.Context) {
	t.Helper()
	kubectl(t, ctx, "rollout", "status", "-n", "nvshare-system", "daemonset/nvshare", "--timeout="+patience.String())
}

func deploy(t *testing.T) {
	ctx := within(t)
	before := shared.PluginAccepts()
	kubectl(t, ctx, "apply", "-k", "simgpu")
	rolledOut(t, ctx)
	accepted(t, ctx, before)
	for _, file := range []string{"/var/lib/nvshare/lib/current/libnvshare.so", "/var/lib/nvshare/bin/nvshare-cdi-hook", "/run/cdi/nvshare.com-gpu.yaml"} {
		if _, err := os.Stat(file); err != nil {
			t.Error(err)
		}
	}
}

// The pod of helm test gets a GPU as the release gives it, and ends well.
func chartTest(t *testing.T, values string) {
	ctx := within(t)
	pod, err := helm("template", "nvshare", chart, "--namespace", "nvshare-system", "--show-only", "templates/tests/gpu.yaml", "--set", values)
	check(t, err)
	_, err = cluster.Apply(ctx, pod, "apply")
	check(t, err)
	in := []string{"-n", "nvshare-system", "pod/nvshare-test"}
	if out, err := cluster.Kubectl(ctx, append([]string{"wait", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=" + patience.String()}, in...)...); err != nil {
		t.Errorf("%v %s\n%s", err, out, kubectl(t, ctx, append([]string{"describe"}, in...)...))
	}
	kubectl(t, ctx, append([]string{"delete"}, in...)...)
}

// ours finds the first processes of the DaemonSet's containers, and no probes of these.
func ours(t *testing.T, program string) (pids []int) {
	t.Helper()
	dirs, err := filepath.Glob("/proc/[0-9]*")
	check(t, err)
	for _, dir := range dirs {
		exe, err := os.Readlink(dir + "/exe")
		line, _ := os.ReadFile(dir + "/cmdline") // empty: it has ended
		if err == nil && exe == "/usr/bin/"+program && len(line) > 0 && !bytes.Contains(line, []byte("\x00--ready\x00")) {
			pid, _ := strconv.Atoi(filepath.Base(dir))
			pids = append(pids, pid)
		}
	}
	return pids
}

// Neither process has a capability, but the plugin that to end containers (CAP_KILL), a way to get one,
// or a writable root file system. The scheduler is no root either.
func noPrivileges(t *testing.T) {
	for program, c := range map[string]struct{ user, caps string }{"nvshare-plugin": {"0", "0000000000000020"}, "nvshare-scheduler": {"65529", "0000000000000000"}} {
		pids := ours(t, program)
		if len(pids) != 1 {
			t.Fatalf("%s runs as %v, want one process", program, pids)
		}
		dir := "/proc/" + strconv.Itoa(pids[0])
		text, err := os.ReadFile(dir + "/status")
		check(t, err)
		for _, want := range []string{"CapEff:\t" + c.caps, "CapBnd:\t" + c.caps, "NoNewPrivs:\t1", "Seccomp:\t2", "Uid:\t" + c.user + "\t" + c.user + "\t" + c.user} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s: its status lacks %q", program, want)
			}
		}
		if err := os.WriteFile(dir+"/root/usr/bin/x", nil, 0o644); !errors.Is(err, unix.EROFS) {
			t.Errorf("%s: writing to its root: %v", program, err)
		}
	}
}

// Two pods share a GPU in turns, by the GPU's own record.
func share(t *testing.T) {
	ctx := within(t)
	// Whether these tenants leave gaps, and so would not take turns, is not the question here.
	kubectl(t, ctx, "exec", "-n", "nvshare-system", "ds/nvshare", "-c", "scheduler", "--", "nvsharectl", "-S", "on")
	runPods(t, ctx, small1, small2)
	takeTurns(t, ctx, 5, tenant1, tenant2)
	await(t, ctx, "nvsharectl to know both", func() error {
		out, err := cluster.Kubectl(ctx, "exec", "-n", "nvshare-system", "ds/nvshare", "-c", "scheduler", "--", "nvsharectl")
		for _, want := range []string{"default/" + pod1 + "/main", "default/" + pod2 + "/main"} {
			if err == nil && !strings.Contains(out, want) {
				err = fmt.Errorf("no %s in\n%s", want, out)
			}
		}
		return err
	})
}

// takeTurns waits until the tenants are with the scheduler, and checks that they then have so many turns
// each, and no two at once. A tenant that a busy machine has kept from the scheduler for some seconds,
// at its start or later, runs without turns until then.
func takeTurns(t *testing.T, ctx context.Context, n int, tenants ...string) {
	t.Helper()
	await(t, ctx, "all to be with the scheduler", func() error {
		s, err := shared.Status(ctx)
		if err != nil {
			return err
		}
		if n := len(s.Gpus[0].Clients); n != len(tenants) {
			return fmt.Errorf("the GPU has %d clients", n)
		}
		return nil
	})
	awaitTurns(t, ctx, judge.Now(), 2, tenants...)
	noOverlap(t, awaitTurns(t, ctx, judge.Now(), n, tenants...))
}

// The image's programs can load NVML, which is the simulated one here.
func metrics(t *testing.T) {
	ctx := within(t)
	pod := pluginPod(t, ctx)
	await(t, ctx, "metrics with NVML's part", func() error {
		out, err := get(ctx, systemPodsPath+"/"+pod+":9402/proxy/metrics", "")
		if err != nil {
			return err
		}
		for _, want := range []string{"nvshare_nvml_up 1", pod1} {
			if !strings.Contains(out, want) {
				return fmt.Errorf("no %q in %s", want, tail(out, 40))
			}
		}
		return nil
	})
}

func memoryLimit(t *testing.T) {
	ctx := within(t)
	const pod = "nvshare-memlimit-test"
	kubectl(t, ctx, "apply", "-f", manifest(pod))
	kubectl(t, ctx, "wait", "--for=jsonpath={.status.phase}=Failed", "pod/"+pod, "--timeout="+patience.String())
	if out := kubectl(t, ctx, "logs", pod); !strings.Contains(out, "OUT_OF_MEMORY") {
		t.Errorf("the pod did not fail for lack of memory: %s", out)
	}
	deletePods(t, ctx, pod)
}

// known returns what the scheduler knows of a pod's container.
func known(ctx context.Context, pod string) (memory uint64, coreLimit uint32, err error) {
	s, err := shared.Status(ctx)
	if err != nil {
		return 0, 0, err
	}
	for _, c := range s.Containers {
		if c.Pod == pod {
			return c.MemoryLimitBytes, c.Share.GetCoreLimit(), nil
		}
	}
	return 0, 0, fmt.Errorf("the scheduler does not know pod %s", pod)
}

// TestCoreLimits of tests/e2e measures the parts that such limits give.
func coreLimits(t *testing.T) {
	ctx := within(t)
	runPods(t, ctx, "nvshare-corelimit-pod-1", "nvshare-corelimit-pod-2")
	for pod, want := range map[string]uint32{"nvshare-corelimit-1": 25, "nvshare-corelimit-2": 75} {
		if _, got, err := known(ctx, pod); err != nil || got != want {
			t.Errorf("%s: limit %d, %v, want %d", pod, got, err, want)
		}
	}
	deletePods(t, ctx, "nvshare-corelimit-pod-1", "nvshare-corelimit-pod-2")
}

// kubectl annotate changes the limits of a running tenant, and removing an annotation
// removes its limit.
func liveLimits(t *testing.T) {
	ctx := within(t)
	limits := func(memory uint64, core uint32) func() error {
		return func() error {
			m, c, err := known(ctx, pod1)
			if err == nil && (m != memory || c != core) {
				err = fmt.Errorf("the limits are %d bytes and %d %%", m, c)
			}
			return err
		}
	}
	begin := time.Now()
	kubectl(t, ctx, "annotate", "pod", pod1, "nvshare.com/gpu-memory-limit=8Gi", "nvshare.com/gpu-core-limit=40", "--overwrite")
	await(t, ctx, "the limits", limits(8<<30, 40))
	t.Logf("%v after kubectl annotate began", time.Since(begin))
	awaitEvent(t, ctx, pod1, "8Gi")
	kubectl(t, ctx, "annotate", "pod", pod1, "nvshare.com/gpu-memory-limit-", "nvshare.com/gpu-core-limit-")
	await(t, ctx, "no limits", limits(0, 0))
}

// A pod that asks for a GPU that does not exist gets an error.
func refusal(t *testing.T) {
	ctx := within(t)
	text, err := os.ReadFile(manifest(small1))
	check(t, err)
	pod := strings.NewReplacer("name: "+pod1, "name: refused", "gpu=0", "gpu=99").Replace(string(text))
	_, err = cluster.Apply(ctx, pod, "apply")
	check(t, err)
	awaitEvent(t, ctx, "refused", "nvshare.com/gpu=99")
	kubectl(t, ctx, "delete", "pod", "refused", "--timeout="+patience.String())
}

// A pod whose image has musl libc is told that nobody arbitrates it.
func musl(t *testing.T) {
	const image = "localhost/nvshare-musl:1"
	ctx := within(t)
	dir := t.TempDir()
	check(t, os.WriteFile(dir+"/main.c", []byte("#include <unistd.h>\nint main(void) { return pause(); }\n"), 0o644))
	if out, err := exec.CommandContext(ctx, "cc", "-static", "-o", dir+"/main", dir+"/main.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	files := map[string]string{"/usr/bin/main": dir + "/main", "/usr/lib/ld-musl-x86_64.so.1": dir + "/main", "/usr/lib/ld-musl-aarch64.so.1": dir + "/main"}
	check(t, shared.AddImage(ctx, image, false, files))
	_, err := cluster.Apply(ctx, `{apiVersion: v1, kind: Pod, metadata: {name: musl, annotations: {nvshare.com/gpu: nvshare.com/gpu=0}},
		spec: {terminationGracePeriodSeconds: 0, containers: [{name: main, image: "`+image+`", command: [/usr/bin/main]}]}}`, "apply")
	check(t, err)
	awaitEvent(t, ctx, "musl", "musl libc")
	kubectl(t, ctx, "delete", "pod", "musl", "--timeout="+patience.String())
}

// untouched runs disturb, and checks that the tenants' processes ran on meanwhile and
// have turns afterwards.
func untouched(t *testing.T, ctx context.Context, disturb func()) {
	t.Helper()
	before := containers(t, ctx, pod1, pod2)
	disturb()
	takeTurns(t, ctx, 3, tenant1, tenant2)
	if after := containers(t, ctx, pod1, pod2); after != before {
		t.Errorf("containers were %s, are %s", before, after)
	}
}

// newTenant checks that a new pod gets the GPU.
func newTenant(t *testing.T, ctx context.Context) {
	t.Helper()
	from := judge.Now()
	runPods(t, ctx, "nvshare-add-small-pod-1")
	awaitTurns(t, ctx, from, 1, "add-small-1")
	deletePods(t, ctx, "nvshare-add-small-pod-1")
}

// TestDRA/restart and TestAdvertise/restart restart the kubelet.
func restartContainerd(t *testing.T) {
	ctx := within(t)
	before := shared.PluginAccepts()
	untouched(t, ctx, func() {
		check(t, shared.Containerd.Stop())
		check(t, shared.StartContainerd(ctx))
		accepted(t, ctx, before)
	})
	newTenant(t, ctx)
}

func restartScheduler(t *testing.T) {
	ctx := within(t)
	untouched(t, ctx, func() {
		for _, pid := range ours(t, "nvshare-scheduler") {
			check(t, unix.Kill(pid, unix.SIGKILL))
		}
		await(t, ctx, "a new scheduler", func() error {
			_, err := shared.Status(ctx)
			return err
		})
	})
	newTenant(t, ctx)
}

func rollingUpdate(t *testing.T) {
	ctx := within(t)
	before := shared.PluginAccepts()
	untouched(t, ctx, func() {
		kubectl(t, ctx, "rollout", "restart", "-n", "nvshare-system", "daemonset/nvshare")
		rolledOut(t, ctx)
		accepted(t, ctx, before)
	})
	newTenant(t, ctx)
}

// While NVIDIA's GPU Operator replaces the driver it says so in labels of the node: nvshare, which has NVML
// open, leaves, and comes back.
func driverUpgrade(t *testing.T) {
	ctx := within(t)
	before := shared.PluginAccepts()
	const label = "nvidia.com/gpu.deploy.operator-validator="
	kubectl(t, ctx, "label", "node", node.KubeNode, label+"paused-for-driver-upgrade")
	await(t, ctx, "nvshare to leave", func() error {
		if pids := append(ours(t, "nvshare-plugin"), ours(t, "nvshare-scheduler")...); len(pids) > 0 {
			return fmt.Errorf("there are the processes %v", pids)
		}
		return nil
	})
	kubectl(t, ctx, "label", "node", node.KubeNode, label+"true", "--overwrite")
	accepted(t, ctx, before)
	rolledOut(t, ctx)
	kubectl(t, ctx, "label", "node", node.KubeNode, strings.TrimSuffix(label, "=")+"-")
	newTenant(t, ctx)
}

// churnPods is how many pods come and go in a job: so many, or NVSHARE_CHURN.
func churnPods(t *testing.T, usually string) string {
	text, set := os.LookupEnv("NVSHARE_CHURN")
	if !set {
		return usually
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("NVSHARE_CHURN=%q is no number of pods", text)
	}
	return text
}

// churnJob takes a number of pods.
const churnJob = `apiVersion: batch/v1
kind: Job
metadata: {name: churn}
spec:
  completions: %s
  parallelism: 12
  backoffLimit: 0
  template:
    metadata: {annotations: {nvshare.com/gpu: nvshare.com/gpu=1}}
    spec:
      restartPolicy: Never
      automountServiceAccountToken: false
      containers:
      - name: main
        image: localhost/nvshare-workload:1
        args: [/usr/bin/cuda-busy, --launches, "8", --depth, "4"]
`

// Pods come and go, and leave nothing behind. Meanwhile nvshare is replaced, twice,
// with the surge overlay: a pod that started without a GPU would fail, and the job with it.
func churn(t *testing.T) {
	ctx, cancel := context.WithTimeout(within(t), patience)
	defer cancel()
	kubectl(t, ctx, "apply", "-k", "simgpu/surge")
	pods := churnPods(t, "16")
	_, err := cluster.Apply(ctx, fmt.Sprintf(churnJob, pods), "apply")
	check(t, err)
	for range 2 {
		kubectl(t, ctx, "rollout", "restart", "-n", "nvshare-system", "daemonset/nvshare")
		rolledOut(t, ctx)
	}
	await(t, ctx, pods+" pods", func() error {
		out, err := get(ctx, churnPath, "{.status.succeeded}/{.status.failed}")
		if _, failed, _ := strings.Cut(out, "/"); err == nil && failed != "" {
			t.Fatalf("%s pods failed: %s", failed, kubectl(t, ctx, "logs", "-l", "job-name=churn", "--prefix", "--tail=3"))
		}
		if err == nil && out != pods+"/" {
			err = fmt.Errorf("%s have come and gone", out)
		}
		return err
	})
	kubectl(t, ctx, "delete", "job", "churn", "--cascade=foreground", "--timeout="+patience.String())
	kubectl(t, ctx, "apply", "-k", "simgpu")
	await(t, ctx, "the scheduler to forget them", func() error {
		s, err := shared.Status(ctx)
		if err == nil && (len(s.Containers) != 2 || len(s.Gpus[1].Clients) != 0) {
			err = fmt.Errorf("the scheduler has %d containers, and %d clients of the second GPU", len(s.Containers), len(s.Gpus[1].Clients))
		}
		return err
	})
	await(t, ctx, "the cgroups of no more than the pods that are left", func() error {
		out, err := get(ctx, "/api/v1/pods", names)
		if err != nil {
			return err
		}
		pods := len(strings.Fields(out))
		if n := podCgroups(t); n != pods {
			return fmt.Errorf("%d cgroups for %d pods", n, pods)
		}
		return nil
	})
}

// podCgroups counts the cgroups of this node's pods. Others on the machine may have some, too.
func podCgroups(t *testing.T) (n int) {
	t.Helper()
	seen := map[string]bool{}
	check(t, filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.HasPrefix(d.Name(), "pod") && strings.Contains(path, shared.Cgroup()+"/kubepods") {
			seen[d.Name()] = true
			return fs.SkipDir
		}
		return nil
	}))
	return len(seen)
}

// A second installation, of the other tier, ends on the node at once, and kubectl shows why.
// The first one does not notice.
func onePlugin(t *testing.T) {
	ctx := within(t)
	const other = "nvshare-other"
	// What belongs to no namespace would replace that of the first one.
	all, second := objects(t, strings.ReplaceAll(kustomize(t, ctx, "simgpu-dra"), "nvshare-system", other)), []string{}
	for _, kind := range []string{"Namespace", "ResourceQuota", "ServiceAccount", "DaemonSet"} {
		for name, o := range all {
			if strings.HasPrefix(name, kind+" ") {
				second = append(second, pretty(o))
			}
		}
	}
	untouched(t, ctx, func() {
		_, err := cluster.Apply(ctx, strings.Join(second, "\n---\n"), "apply")
		check(t, err)
		await(t, ctx, "the second one to say why it ends", func() error {
			out, err := get(ctx, "/api/v1/namespaces/"+other+"/pods", `{.items[*].status.containerStatuses[?(@.name=="plugin")]}`)
			for _, want := range []string{"another nvshare-plugin runs on this node, that of namespace nvshare-system, and gives GPUs by annotations", "would give them by resource claims"} {
				if err == nil && !strings.Contains(out, want) {
					err = fmt.Errorf("no %q in %s", want, out)
				}
			}
			return err
		})
		if out := mustGet(t, ctx, slicesPath, names); out != "" {
			t.Errorf("published: %s", out)
		}
		_, err = cluster.Apply(ctx, strings.Join(second, "\n---\n"), "delete", "--timeout="+patience.String())
		check(t, err)
	})
	newTenant(t, ctx)
}

// With the policy, a pod that asks for a GPU does not start without the plugin.
func required(t *testing.T) {
	ctx := within(t)
	kubectl(t, ctx, "apply", "-f", objectsDir+"required/policy.yaml")
	deletePods(t, ctx, small1, small2)
	// A policy holds only some time after it was created.
	await(t, ctx, "the policy", func() error {
		out, err := cluster.Kubectl(ctx, "create", "--dry-run=server", "-f", manifest(small1), "-o", "jsonpath={.metadata.annotations}")
		if err == nil && !strings.Contains(out, "required-plugins") {
			err = fmt.Errorf("annotations are %s", out)
		}
		return err
	})
	for spec, want := range map[string]bool{
		`containers: [{name: main, image: none}]`:                                                                                                                        false,
		`containers: [{name: main, image: none, resources: {limits: {nvshare.com/gpu: 1}}}]`:                                                                             true,
		`containers: [{name: main, image: none, resources: {limits: {nvshare.com/gpu-cores: 9}}}]`:                                                                       true,
		`initContainers: [{name: side, image: none, resources: {limits: {deviceclass.resource.kubernetes.io/nvshare.com: 1}}}], containers: [{name: main, image: none}]`: true,
		`containers: [{name: main, image: none, resources: {limits: {deviceclass.resource.kubernetes.io/other: 1}}}]`:                                                    false,
		// It may be a claim for another driver's devices, on a node without nvshare.
		`containers: [{name: main, image: none}], resourceClaims: [{name: gpu, resourceClaimName: x}]`: false,
	} {
		out, err := cluster.Apply(ctx, "{apiVersion: v1, kind: Pod, metadata: {name: asks}, spec: {"+spec+"}}", "create", "--dry-run=server", "-o", "jsonpath={.metadata.annotations}")
		if err != nil || strings.Contains(out, "required-plugins") != want {
			t.Errorf("a pod with %s: annotations %s, %v", spec, out, err)
		}
	}
	kubectl(t, ctx, "delete", "-n", "nvshare-system", "daemonset/nvshare", "--cascade=foreground", "--timeout="+patience.String())
	kubectl(t, ctx, "apply", "-f", manifest(small1))
	awaitEvent(t, ctx, pod1, "required")
	// The plugin starts, and the kubelet's next attempt succeeds.
	kubectl(t, ctx, "apply", "-k", "simgpu")
	from := judge.Now()
	runPods(t, ctx, small1)
	awaitTurns(t, ctx, from, 1, tenant1)
	deletePods(t, ctx, small1)
	kubectl(t, ctx, "delete", "-f", objectsDir+"required/policy.yaml")
}

// Whoever takes the plugin's token from a node can write events of that node's plugin
// only.
func bound(t *testing.T) {
	ctx := within(t)
	kubectl(t, ctx, "apply", "-f", objectsDir+"bound/policy.yaml")
	server := kubectl(t, ctx, "config", "view", "--raw", "-o", "jsonpath={.clusters[0].cluster.server}")
	pod := pluginPod(t, ctx)
	bound := strings.TrimSpace(kubectl(t, ctx, "create", "token", "nvshare", "-n", "nvshare-system", "--bound-object-kind=Pod", "--bound-object-name="+pod))
	unbound := strings.TrimSpace(kubectl(t, ctx, "create", "token", "nvshare", "-n", "nvshare-system"))
	report := func(token, node, kind string) error {
		_, err := cluster.Apply(ctx, fmt.Sprintf(`{"apiVersion": "events.k8s.io/v1", "kind": "Event",
			"metadata": {"generateName": "bound-", "namespace": "default"}, "eventTime": "2026-01-01T00:00:00.000000Z",
			"reportingController": "nvshare.com/plugin", "reportingInstance": %q, "action": "ShareGPU", "reason": "Test", "type": "Normal",
			"regarding": {"apiVersion": "v1", "kind": %q, "namespace": "default", "name": "x"}}`, node, kind),
			"create", "--dry-run=server", "--validate=false", "--kubeconfig=/dev/null", "--server="+server, "--token="+token, "--insecure-skip-tls-verify")
		return err
	}
	// A policy holds only some time after it was created.
	await(t, ctx, "the policy", func() error {
		if err := report(bound, "another-node", "Pod"); err == nil || !strings.Contains(err.Error(), "reports for node another-node") {
			return fmt.Errorf("an event of another node: %v", err)
		}
		return nil
	})
	if err := report(bound, node.KubeNode, "Pod"); err != nil {
		t.Errorf("an event of its own node: %v", err)
	}
	if err := report(bound, node.KubeNode, "Secret"); err == nil || !strings.Contains(err.Error(), "on pods only") {
		t.Errorf("an event about something else: %v", err)
	}
	if err := report(unbound, node.KubeNode, "Pod"); err == nil || !strings.Contains(err.Error(), "not bound to a node") {
		t.Errorf("with a token of no node: %v", err)
	}
	kubectl(t, ctx, "delete", "-f", objectsDir+"bound/policy.yaml")
}

// Pods of an overlap group run at the same time, with the rights that the overlay gives the
// scheduler, and not without these.
func overlapGroups(t *testing.T) {
	ctx := within(t)
	member := func(name string) string {
		text, err := os.ReadFile(manifest(small1))
		check(t, err)
		return strings.NewReplacer("name: "+pod1, "name: "+name, tenant1, name,
			"nvshare.com/gpu: nvshare.com/gpu=0", "nvshare.com/gpu: nvshare.com/gpu=0\n    nvshare.com/gpu-overlap: small", `"400"`, `"4"`).Replace(string(text))
	}
	_, err := cluster.Apply(ctx, member("refused"), "apply")
	check(t, err)
	awaitEvent(t, ctx, "refused", "overlap")
	kubectl(t, ctx, "delete", "pod", "refused", "--timeout="+patience.String())

	before := shared.PluginAccepts()
	kubectl(t, ctx, "apply", "-k", "simgpu-overlap")
	rolledOut(t, ctx)
	accepted(t, ctx, before)
	from := judge.Now()
	for _, name := range []string{"small-a", "small-b"} {
		_, err := cluster.Apply(ctx, member(name), "apply")
		check(t, err)
	}
	kubectl(t, ctx, "wait", "--for=condition=Ready", "pod/small-a", "pod/small-b", "--timeout="+patience.String())
	awaitTogether(t, ctx, from, "small-a", "small-b")
	kubectl(t, ctx, "delete", "pods", "small-a", "small-b", "--timeout="+patience.String())
	kubectl(t, ctx, "apply", "-k", "simgpu")
	rolledOut(t, ctx)
}

// Deleting leaves files for containers that still use them; the overlay uninstall
// removes these too.
func uninstall(t *testing.T) { uninstallOf(t, "simgpu") }

func uninstallOf(t *testing.T, dir string) {
	t.Helper()
	ctx := within(t)
	kubectl(t, ctx, "delete", "-k", dir, "--ignore-not-found", "--timeout="+patience.String())
	if _, err := os.Stat("/var/lib/nvshare/lib/current/libnvshare.so"); err != nil {
		t.Errorf("deleted with the DaemonSet: %v", err)
	}
	const overlay = deployments + "overlays/uninstall"
	kubectl(t, ctx, "apply", "-k", overlay)
	kubectl(t, ctx, "rollout", "status", "-n", "nvshare-system", "daemonset/nvshare-uninstall", "--timeout="+patience.String())
	kubectl(t, ctx, "delete", "-k", overlay, "--timeout="+patience.String())
	for _, pattern := range []string{"/var/lib/nvshare*", "/run/nvshare*", "/run/cdi/*"} {
		left, err := filepath.Glob(pattern)
		check(t, err)
		if len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	if pids := append(ours(t, "nvshare-plugin"), ours(t, "nvshare-scheduler")...); len(pids) > 0 {
		t.Errorf("processes %v run on", pids)
	}
	await(t, ctx, "nothing of nvshare in the cluster", func() error {
		for _, path := range []string{"/api/v1/namespaces", rbacPath + "clusterroles", rbacPath + "clusterrolebindings"} {
			out, err := get(ctx, path, names)
			if err != nil {
				return err
			}
			if strings.Contains(out, "nvshare") {
				return fmt.Errorf("there are %s", out)
			}
		}
		return nil
	})
}
