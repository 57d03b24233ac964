//go:build k8s

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

const draDir = "/var/lib/kubelet/plugins/nvshare.com"

// TestDRA installs nvshare with resource claims, uses it, disturbs it and removes it.
// Each step needs the steps before it.
func TestDRA(t *testing.T) {
	runSteps(t, []step{
		{"deploy", draDeploy},
		{"chart-test", func(t *testing.T) { chartTest(t, "dra.enabled=true") }},
		{"extended-resource", draExtendedResource},
		{"claim-metrics", draMetrics},
		{"fractions", draFractions},
		{"live-change", draLiveChange},
		{"drain", draDrain},
		{"restart", draRestart},
		{"kill", draKill},
		{"upgrade", draUpgrade},
		{"forced", draForced},
		{"surge", draSurge},
		{"gang", draGang},
		{"shared-claim", draSharedClaim},
		{"forms", draForms},
		{"reboot", draReboot},
		{"churn", draChurn},
		{"admission", draAdmission},
		{"annotations", draAnnotations},
		{"uninstall", draUninstall},
	})
}

func draDeploy(t *testing.T) {
	ctx := within(t)
	before := shared.PluginAccepts()
	kubectl(t, ctx, "apply", "-k", "simgpu-dra")
	rolledOut(t, ctx)
	accepted(t, ctx, before)
	await(t, ctx, "the attributes of a device", func() error {
		out, err := get(ctx, slicesPath, `{.items[0].spec.devices[1].attributes}`)
		for _, want := range []string{
			`"architecture":{"string":"Hopper"}`, `"cudaComputeCapability":{"version":"9.0.0"}`, `"cudaDriverVersion":{"version":"13.0.0"}`, `"driverVersion":{"version":"580.0.0"}`,
			`"sharing":{"string":"turns"}`, `"swap":{"bool":`, `"productName":{"string":"NVIDIA SimGPU"}`, `"index":{"int":1}`, `"memorySize":{"int":34359738368}`,
		} {
			if err == nil && !strings.Contains(out, want) {
				err = fmt.Errorf("%s lacks %s", out, want)
			}
		}
		return err
	})
	await(t, ctx, "two devices in the slice of the node", func() error {
		out, err := get(ctx, slicesPath, `{range .items[*].spec.devices[*]}{.name} {.capacity.memory.value}{"\n"}{end}`)
		if err == nil && out != "gpu-51600000-0000-4000-8000-000000000000 32Gi\ngpu-51600000-0000-4000-8000-000000000001 32Gi\n" {
			err = fmt.Errorf("they are\n%s", out)
		}
		return err
	})
}

// holding is what the scheduler knows of a pod's container.
type holding struct {
	gpus   []string // their last digits
	core   uint32
	limit  uint32
	memory uint64
}

func holds(ctx context.Context, pod string) (h holding, err error) {
	s, err := shared.Status(ctx)
	if err != nil {
		return h, err
	}
	for _, c := range s.Containers {
		if c.Pod != pod {
			continue
		}
		for _, g := range c.Gpus {
			h.gpus = append(h.gpus, g[len(g)-1:])
		}
		return holding{h.gpus, c.Share.GetCoreRequest(), c.Share.GetCoreLimit(), c.MemoryLimitBytes}, nil
	}
	return h, fmt.Errorf("the scheduler does not know pod %s", pod)
}

// awaitHolding waits until the scheduler was told this of a pod; without GPUs in want,
// those are not looked at.
func awaitHolding(t *testing.T, ctx context.Context, pod string, want holding) (h holding) {
	t.Helper()
	await(t, ctx, fmt.Sprintf("the scheduler to know %+v of pod %s", want, pod), func() (err error) {
		if h, err = holds(ctx, pod); err != nil {
			return err
		}
		if h.core != want.core || h.limit != want.limit || h.memory != want.memory || want.gpus != nil && !slices.Equal(h.gpus, want.gpus) {
			return fmt.Errorf("it knows %+v", h)
		}
		return nil
	})
	return h
}

func draManifest(name string) string { return manifest("dra/" + name) }

// nudged is try, for await, which annotates pods while it fails: each is a name, or they are a label's. A
// kubelet that could not have a claim prepared tries again after 60 to 90 s, and at once when the pod changes.
// That happens where the driver is away, and on a busy machine also where the kubelet sees a pod before the API
// server lets the kubelet read the pod's claim.
func nudged(ctx context.Context, try func() error, pods ...string) func() error {
	tries, last := 0, time.Now()
	return func() error {
		err := try()
		if err != nil && time.Since(last) > 2*time.Second {
			tries, last = tries+1, time.Now()
			_, failed := cluster.Kubectl(ctx, slices.Concat([]string{"annotate", "--overwrite", "pods"}, pods, []string{fmt.Sprintf("test/try=%d", tries)})...)
			err = errors.Join(err, failed)
		}
		return err
	}
}

// ready waits until pods are ready.
func ready(t *testing.T, ctx context.Context, pods ...string) {
	t.Helper()
	for _, p := range pods {
		await(t, ctx, "pod "+p+" to be ready", nudged(ctx, func() error {
			out, err := get(ctx, podsPath+"/"+p, `{.status.conditions[?(@.type=="Ready")].status}`)
			if err == nil && out != "True" {
				err = errors.New("it is not")
			}
			return err
		}, p))
	}
}

// A pod with limits nvshare.com/gpu gets a default share, and its program the shim.
func draExtendedResource(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	kubectl(t, ctx, "apply", "-f", draManifest("share"), "-f", draManifest("two-gpus"))
	ready(t, ctx, "dra-share", "dra-two-gpus")
	const tenth = (32 << 30) / 10 / (64 << 20) * (64 << 20)
	awaitHolding(t, ctx, "dra-share", holding{core: 10, memory: tenth})
	two := awaitHolding(t, ctx, "dra-two-gpus", holding{core: 10, memory: tenth})
	if slices.Sort(two.gpus); !slices.Equal(two.gpus, []string{"0", "1"}) {
		t.Errorf("two GPUs are %v", two.gpus)
	}
	awaitTurns(t, ctx, from, 1, "dra-share", "dra-two-gpus")
	await(t, ctx, "clients with the shim", func() error {
		s, err := shared.Status(ctx)
		if err != nil {
			return err
		}
		for _, g := range s.Gpus {
			for _, c := range g.Clients {
				if c.Container.GetPod() == "dra-share" && c.Bypassed == 0 && c.Interposed > 0 {
					return nil
				}
			}
		}
		return errors.New("dra-share is no client")
	})
	kubectl(t, ctx, "delete", "-f", draManifest("share"), "-f", draManifest("two-gpus"), "--timeout="+patience.String())
	noClaims(t, ctx)
}

// noClaims waits until nothing of claims is left in the cluster and on the node, and the
// scheduler has forgotten their containers and what they were promised.
func noClaims(t *testing.T, ctx context.Context) {
	t.Helper()
	await(t, ctx, "no claims", func() error {
		out, err := get(ctx, claimsPath, names)
		if err != nil || strings.TrimSpace(out) != "" {
			return fmt.Errorf("there are %s (%v)", out, err)
		}
		for _, pattern := range []string{draDir + "/claims/*", "/run/cdi/*claim*"} {
			if left, err := filepath.Glob(pattern); err != nil || len(left) > 0 {
				return fmt.Errorf("left behind: %v (%v)", left, err)
			}
		}
		s, err := shared.Status(ctx)
		if err == nil && len(s.Containers) > 0 {
			err = fmt.Errorf("the scheduler knows %d containers", len(s.Containers))
		}
		return err
	})
}

// part is a pod that asks for a part of a GPU by a template of its own.
func part(name, cores, config string) string {
	text := fmt.Sprintf(`apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: %[1]s}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: nvshare.com, capacity: {requests: {cores: "%[2]s", memory: 4Gi}}}}]%[3]s}}}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  resourceClaims: [{name: gpu, resourceClaimTemplateName: %[1]s}]
  containers:
  - name: main
    image: localhost/nvshare-workload:1
    args: [/usr/bin/cuda-busy, --tenant, %[1]s, --mem-mib, "512", --kernel-us, "500"]
    resources: {claims: [{name: gpu}]}
`, name, cores, config)
	return text
}

// Three times 40 % fill one GPU and a part of the other; what is too much waits, and
// says why.
func draFractions(t *testing.T) {
	ctx := within(t)
	from := judge.Now()
	on := map[string]int{}
	for _, name := range []string{"part-1", "part-2", "part-3"} {
		_, err := cluster.Apply(ctx, part(name, "40", ""), "apply")
		check(t, err)
		ready(t, ctx, name)
		on[awaitHolding(t, ctx, name, holding{core: 40, memory: 4 << 30}).gpus[0]]++
	}
	if on["0"] != 2 || on["1"] != 1 {
		t.Errorf("pods on the GPUs: %v", on)
	}
	_, err := cluster.Apply(ctx, part("too-much", "70", ""), "apply")
	check(t, err)
	awaitEvent(t, ctx, "too-much", "cannot allocate all claims")
	awaitTurns(t, ctx, from, 1, "part-1", "part-2", "part-3")
	// It starts as soon as there is room.
	kubectl(t, ctx, "delete", "pod", "part-3", "--timeout="+patience.String())
	ready(t, ctx, "too-much")
	awaitHolding(t, ctx, "too-much", holding{gpus: []string{"1"}, core: 70, memory: 4 << 30})
	kubectl(t, ctx, "delete", "pod", "too-much", "--timeout="+patience.String())
}

// Annotations change what the claim leaves open, and lower what it has.
func draLiveChange(t *testing.T) {
	ctx := within(t)
	kubectl(t, ctx, "annotate", "pod", "part-1", "nvshare.com/gpu-core-limit=50", "nvshare.com/gpu-memory-limit=2Gi")
	awaitHolding(t, ctx, "part-1", holding{core: 40, limit: 50, memory: 2 << 30})
	kubectl(t, ctx, "annotate", "--overwrite", "pod", "part-1", "nvshare.com/gpu-memory-limit=20Gi")
	awaitHolding(t, ctx, "part-1", holding{core: 40, limit: 50, memory: 4 << 30})
	awaitEvent(t, ctx, "part-1", "memory limit 20Gi is more than")
}

// taints returns the taints of a device, by its last digit.
func taints(t *testing.T, ctx context.Context, gpu int) string {
	return mustGet(t, ctx, slicesPath, fmt.Sprintf("{.items[0].spec.devices[%d].taints[*].key}", gpu))
}

// A drained GPU, and one that does no more work, get no new pod; those that use the GPU go
// on, and learn of its fault.
func draDrain(t *testing.T) {
	ctx := within(t)
	before := running(t, ctx)
	awaitTaints := func(gpu int, want string) {
		t.Helper()
		await(t, ctx, fmt.Sprintf("the taints %q of GPU %d", want, gpu), func() error {
			if got := taints(t, ctx, gpu); got != want {
				return fmt.Errorf("they are %q", got)
			}
			return nil
		})
	}
	say := func(command, gpu string) {
		t.Helper()
		_, err := shared.Ctl(ctx, command, "--gpu", gpu)
		check(t, err)
	}
	say("drain", "1")
	awaitTaints(1, "nvshare.com/drained")
	_, err := cluster.Apply(ctx, part("waits", "40", ""), "apply")
	check(t, err)
	awaitEvent(t, ctx, "waits", "cannot allocate all claims")
	say("undrain", "1")
	awaitTaints(1, "")
	ready(t, ctx, "waits")
	awaitHolding(t, ctx, "waits", holding{gpus: []string{"1"}, core: 40, memory: 4 << 30})
	kubectl(t, ctx, "delete", "pod", "waits", "--timeout="+patience.String())

	xid, err := os.OpenFile(filepath.Join(node.SimGPU, "run", "xid"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	check(t, err)
	defer xid.Close()
	_, err = xid.WriteString("0 79\n")
	check(t, err)
	awaitTaints(0, "nvshare.com/fault")
	await(t, ctx, "the health of the device in the status of a pod", func() error {
		out, err := get(ctx, podsPath+"/part-1", "{.status.containerStatuses[0].allocatedResourcesStatus}")
		if err == nil && !strings.Contains(out, `"health":"Unhealthy"`) {
			err = fmt.Errorf("it is %s", out)
		}
		return err
	})
	say("undrain", "0")
	awaitTaints(0, "")
	if after := running(t, ctx); after != before {
		t.Errorf("containers were %s, are %s", before, after)
	}
}

// Two pods of a gang, each with a part of a GPU of its own, have their GPUs at the same
// time: while one of them works, nobody outside of the gang works on the other's GPU.
func draGang(t *testing.T) {
	ctx := within(t)
	const config = `, config: [{opaque: {driver: nvshare.com, parameters: {apiVersion: nvshare.com/v1, kind: Share, gang: ring}}}]`
	ring, rivals := []string{"ring-1", "ring-2"}, []string{"rival-1", "rival-2"}
	all := slices.Concat(ring, rivals)
	create := func(cores, config string, names []string) (gpus []string) {
		for _, name := range names {
			_, err := cluster.Apply(ctx, part(name, cores, config), "apply")
			check(t, err)
		}
		ready(t, ctx, names...)
		for _, name := range names {
			gpus = append(gpus, awaitHolding(t, ctx, name, holding{core: map[string]uint32{"60": 60, "40": 40}[cores], memory: 4 << 30}).gpus...)
		}
		if slices.Sort(gpus); !slices.Equal(gpus, []string{"0", "1"}) {
			t.Fatalf("%v are on GPUs %v", names, gpus)
		}
		return gpus
	}
	// Without turns there are no gangs.
	_, err := shared.Ctl(ctx, "-S", "on")
	check(t, err)
	create("60", config, ring)
	create("40", "", rivals)
	// From here on, the scheduler knows all processes.
	awaitTurns(t, ctx, judge.Now(), 1, all...)
	from := judge.Now()
	noOverlap(t, awaitTurns(t, ctx, from, 3, all...))
	trace, err := judge.ReadLog(filepath.Join(node.SimGPU, "run", "log"))
	check(t, err)
	of := func(tenants []string) (since []judge.Interval) { // the log is that of the whole suite
		for _, iv := range trace.Intervals {
			if slices.Contains(tenants, iv.Process.Tenant) && iv.End > from {
				since = append(since, iv)
			}
		}
		return since
	}
	theirs := of(rivals)
	for _, a := range of(ring) {
		for _, b := range theirs {
			if a.GPU != b.GPU && max(a.Submit, b.Submit, from) < min(a.End, b.End) {
				t.Fatalf("%s worked on %s while %s worked on %s, for %v", a.Process.Tenant, a.GPU, b.Process.Tenant, b.GPU,
					time.Duration(min(a.End, b.End)-max(a.Submit, b.Submit, from)))
			}
		}
	}
	kubectl(t, ctx, append([]string{"delete", "pods", "--timeout=" + patience.String()}, all...)...)
	noClaims(t, ctx)
}

// Two pods that use one claim are on one GPU and have its part together.
func draSharedClaim(t *testing.T) {
	ctx := within(t)
	kubectl(t, ctx, "apply", "-f", draManifest("affinity"))
	ready(t, ctx, "dra-affinity-1", "dra-affinity-2")
	one := awaitHolding(t, ctx, "dra-affinity-1", holding{core: 30, memory: memoryOf(t, ctx, "ring") / 2})
	awaitHolding(t, ctx, "dra-affinity-2", holding{gpus: one.gpus, core: 30, memory: memoryOf(t, ctx, "ring") / 2})
	kubectl(t, ctx, "delete", "-f", draManifest("affinity"), "--timeout="+patience.String())
	noClaims(t, ctx)
}

// Each form of a request, as claims.md lists them, gives what it says.
func draForms(t *testing.T) {
	ctx := within(t)
	const tenth = 3264 << 20
	type form struct {
		file, pod string
		want      holding
		gpus      int
	}
	for _, together := range [][]form{ // which fit in each order
		{
			{"part", "dra-part", holding{core: 40, memory: 4 << 30}, 1},
			{"limited", "dra-limited", holding{core: 30, limit: 60, memory: tenth}, 1},
			{"latency", "dra-latency", holding{core: 10, memory: tenth}, 1},
			{"named", "dra-named", holding{core: 20, memory: tenth, gpus: []string{"1"}}, 1},
		},
		{
			{"gang", "dra-gang", holding{core: 50, memory: tenth}, 2},
			{"node", "dra-node", holding{core: 20, memory: tenth}, 1},
			{"anti-affinity", "dra-apart", holding{core: 20, memory: tenth}, 2},
		},
		{
			{"whole", "dra-whole", holding{core: 100, memory: tenth}, 1},
			{"exclusion", "dra-team-a", holding{core: 40, memory: tenth}, 1},
		},
	} {
		var files, pods []string
		for _, c := range together {
			files, pods = append(files, "-f", draManifest(c.file)), append(pods, c.pod)
		}
		kubectl(t, ctx, append([]string{"apply"}, files...)...)
		ready(t, ctx, pods...)
		for _, c := range together {
			if h := awaitHolding(t, ctx, c.pod, c.want); len(slices.Compact(slices.Sorted(slices.Values(h.gpus)))) != c.gpus {
				t.Errorf("%s is on GPUs %v, want %d", c.pod, h.gpus, c.gpus)
			}
		}
		kubectl(t, ctx, append([]string{"delete", "--timeout=" + patience.String()}, files...)...)
	}
	noClaims(t, ctx) // a claim that is going has its part still
	// Two parts fill one GPU, though another one is idle.
	kubectl(t, ctx, "apply", "-f", draManifest("best-fit"))
	ready(t, ctx, "dra-four-tenths", "dra-six-tenths")
	first := awaitHolding(t, ctx, "dra-four-tenths", holding{core: 40, memory: 4 << 30})
	awaitHolding(t, ctx, "dra-six-tenths", holding{gpus: first.gpus, core: 60, memory: 6 << 30})
	kubectl(t, ctx, "delete", "-f", draManifest("best-fit"), "--timeout="+patience.String())
	noClaims(t, ctx)
}

// Pods come and go, and leave nothing behind.
func draChurn(t *testing.T) {
	ctx := within(t)
	job := strings.NewReplacer("    metadata: {annotations: {nvshare.com/gpu: nvshare.com/gpu=1}}\n", "",
		"        args:", "        resources: {limits: {nvshare.com/gpu: 1}}\n        args:").Replace(fmt.Sprintf(churnJob, churnPods(t, "8")))
	_, err := cluster.Apply(ctx, job, "apply")
	check(t, err)
	await(t, ctx, "the job to be complete", nudged(ctx, func() error {
		out, err := get(ctx, churnPath, `{.status.conditions[?(@.type=="Complete")].status}`)
		if err == nil && out != "True" {
			err = errors.New("it is not")
		}
		return err
	}, "--selector=job-name=churn"))
	kubectl(t, ctx, "delete", "job", "churn", "--cascade=foreground", "--timeout="+patience.String())
	noClaims(t, ctx)
	latency(t, ctx)
}

// memoryOf returns what a claim was charged.
func memoryOf(t *testing.T, ctx context.Context, claim string) uint64 {
	t.Helper()
	var c struct {
		Status struct {
			Allocation struct {
				Devices struct {
					Results []struct{ ConsumedCapacity map[string]string }
				}
			}
		}
	}
	check(t, json.Unmarshal([]byte(mustGet(t, ctx, "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/"+claim, "")), &c))
	memory := c.Status.Allocation.Devices.Results[0].ConsumedCapacity["memory"]
	if memory != "3264Mi" { // a tenth of 32 GiB, rounded down to the step
		t.Fatalf("the claim was charged %q", memory)
	}
	return 3264 << 20
}

// Wrong configurations are refused before a pod waits for them, and right ones are not.
func draAdmission(t *testing.T) {
	ctx := within(t)
	config := func(fields string) string {
		return `, config: [{opaque: {driver: nvshare.com, parameters: {apiVersion: nvshare.com/v1, kind: Share` + fields + `}}}]`
	}
	try := func(config string) error {
		_, err := cluster.Apply(ctx, part("try", "40", config), "create", "--dry-run=server")
		return err
	}
	await(t, ctx, "the policy", func() error { // it holds only some time after it was created
		if try(config(", coreLimit: 101")) == nil {
			return errors.New("a limit of 101 % is accepted")
		}
		return nil
	})
	for fields, says := range map[string]string{
		", coreLimit: 0": "whole percentage", ", coreLimit: 0.5": "whole percentage", ", limit: 60": "unknown field", ", weight: 10001": "from 1 to 10000",
		", priority: high": "batch or latency", ", memoryMode: fast": "memoryMode is", ", gang: '-'": "gang is true", ", overlap: a/b": "overlap is a name",
	} {
		if err := try(config(fields)); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v; want %q", fields, err, says)
		}
	}
	if err := try(strings.Replace(config(""), "nvshare.com/v1", "nvshare.com/v0", 1)); err == nil || !strings.Contains(err.Error(), "give apiVersion") {
		t.Errorf("another version: %v", err)
	}
	for _, fields := range []string{"", ", coreLimit: 60, weight: 50, priority: latency, gang: true, memoryMode: resident", ", coreLimit: 60%, gang: ring", ", overlap: small"} {
		if err := try(config(fields)); err != nil {
			t.Errorf("%s: %v", fields, err)
		}
	}
	// The driver may write slices of its own node only.
	slice := `apiVersion: resource.k8s.io/v1
kind: ResourceSlice
metadata: {name: stolen}
spec: {driver: nvshare.com, nodeName: another, pool: {name: another, generation: 1, resourceSliceCount: 1}}
`
	as := []string{"create", "--dry-run=server", "--as=system:serviceaccount:nvshare-system:nvshare"}
	if _, err := cluster.Apply(ctx, slice, append(as, "--as-user-extra=authentication.kubernetes.io/node-name=node1")...); err == nil || !strings.Contains(err.Error(), "may not write a slice") {
		t.Errorf("a slice of another node: %v", err)
	}
	own := strings.ReplaceAll(slice, "another", "node1")
	if _, err := cluster.Apply(ctx, own, append(as, "--as-user-extra=authentication.kubernetes.io/node-name=node1")...); err != nil {
		t.Errorf("a slice of the own node: %v", err)
	}
}

// A pod of the other tier is refused on this node, with a reason.
func draAnnotations(t *testing.T) {
	ctx := within(t)
	kubectl(t, ctx, "apply", "-f", manifest(small1))
	awaitEvent(t, ctx, pod1, "this node gives GPUs by resource claims")
	deletePods(t, ctx, small1)
}

// Pods first, then nvshare, then its files.
func draUninstall(t *testing.T) {
	ctx := within(t)
	kubectl(t, ctx, "delete", "resourceclaimtemplates", "--all")
	kubectl(t, ctx, "delete", "-k", "simgpu-dra", "--timeout="+patience.String())
	// A driver that is away keeps nobody from starting and ending who does not use it.
	_, err := cluster.Apply(ctx, `{apiVersion: v1, kind: Pod, metadata: {name: bystander}, spec: {automountServiceAccountToken: false, terminationGracePeriodSeconds: 1,
		containers: [{name: main, image: "localhost/nvshare-workload:1", command: [/usr/bin/cuda-busy, --help]}], restartPolicy: Never}}`, "apply")
	check(t, err)
	await(t, ctx, "a pod without claims to run", func() error {
		out, err := get(ctx, podsPath+"/bystander", "{.status.containerStatuses[0].state.terminated.containerID}")
		if err == nil && out == "" {
			err = errors.New("it has not")
		}
		return err
	})
	kubectl(t, ctx, "delete", "pod", "bystander", "--timeout="+patience.String())
	const overlay = deployments + "overlays/uninstall"
	kubectl(t, ctx, "apply", "-k", overlay)
	kubectl(t, ctx, "rollout", "status", "-n", "nvshare-system", "daemonset/nvshare-uninstall", "--timeout="+patience.String())
	kubectl(t, ctx, "delete", "-k", overlay, "--timeout="+patience.String())
	for _, dir := range []string{draDir, "/var/lib/nvshare", "/run/nvshare"} {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", dir, err)
		}
	}
	await(t, ctx, "no slice, class, policy or role of nvshare", func() error {
		for _, path := range []string{slicesPath, "/apis/resource.k8s.io/v1/deviceclasses", "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies", rbacPath + "clusterroles"} {
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
