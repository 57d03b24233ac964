//go:build k8s

// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/util/jsonpath"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

const (
	// The log keeps the records of the whole suite.
	simConfig = "gpus=2\nmemory_mib=32768\nlog_records=1048576\n"

	// patience bounds each wait for an event. It does not measure speed.
	patience = 8 * time.Minute
)

var (
	shared   *node.Node
	cluster  *node.Kubernetes
	buildDir string // what make build, simgpu, tools, tools-k8s and image-root made
)

func TestMain(m *testing.M) {
	var err error
	if buildDir, err = filepath.Abs("../../.build"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(node.IsolatedCluster(buildDir, "k8s-", func(dir string) int {
		if err := bringUp(dir); err != nil {
			fmt.Fprintln(os.Stderr, "bring up the cluster:", err)
			return 1
		}
		return m.Run()
	}))
}

func bringUp(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	begin := time.Now()
	other := os.Getenv("NVSHARE_KUBERNETES") // directory of an earlier one
	n, err := node.New(dir, node.Options{Build: buildDir, Simulated: true, SimConfig: simConfig, NRI: node.NRIValidates, Kubernetes: other})
	if err != nil {
		return err
	}
	shared = n
	if cluster, err = n.NewKubernetes(ctx); err != nil {
		return err
	}
	if other != "" { // the kubelet's configuration has what was no default then
		cluster.Args = map[string][]string{"kubelet": {"--feature-gates=KubeletCrashLoopBackOffMax=true"}}
	}
	image := func(ctx context.Context) error {
		files := filepath.Join(buildDir, "image", runtime.GOARCH)
		if !node.HavePodman() {
			return n.ImportDir(ctx, imageName(), filepath.Join(files, "root"), "/usr/bin/nvshare-plugin")
		}
		containerfile, err := filepath.Abs("../../Containerfile")
		if err != nil {
			return err
		}
		return n.PodmanImage(ctx, imageName(), containerfile, files, "--build-arg", "VERSION="+version())
	}
	// The images have no part in the start of the control plane.
	control := make(chan error, 1)
	go func() { control <- cluster.StartControlPlane(ctx) }()
	for _, step := range []func(context.Context) error{
		n.StartContainerd, n.BuildImages, image, func(context.Context) error { return <-control }, cluster.StartKubelet,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	fmt.Printf("the node is ready after %.1f s\n", time.Since(begin).Seconds())
	return nil
}

// version is the newest version in CHANGELOG.md.
func version() string {
	text, err := os.ReadFile("../../CHANGELOG.md")
	if err != nil {
		return err.Error()
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, "## ["); ok && v[0] >= '0' && v[0] <= '9' {
			v, _, _ = strings.Cut(v, "]")
			return v
		}
	}
	return "none"
}

func imageName() string { return "localhost/nvshare:" + version() }

// within returns a context for one step's waits. If the step fails, the logs of the
// node's parts are shown.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		for _, args := range []string{
			"get pods -A -o wide", "get events -A --sort-by=.lastTimestamp",
			"logs -n nvshare-system ds/nvshare --all-containers --tail=30",
		} {
			out, err := cluster.Kubectl(ctx, strings.Fields(args)...)
			t.Logf("kubectl %s: %v\n%s", args, err, tail(out, 60))
		}
		t.Logf("daemons:\n%s", shared.Logs(15))
	})
	return ctx
}

func tail(text string, n int) string {
	lines := strings.Split(text, "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func kubectl(t *testing.T, ctx context.Context, args ...string) string {
	t.Helper()
	out, err := cluster.Kubectl(ctx, args...)
	if err != nil {
		t.Fatalf("%v; it says\n%s", err, out)
	}
	return out
}

// Paths of the API, for get.
const (
	podsPath       = "/api/v1/namespaces/default/pods"
	systemPodsPath = "/api/v1/namespaces/nvshare-system/pods"
	nodesPath      = "/api/v1/nodes"
	eventsPath     = "/api/v1/namespaces/default/events"
	churnPath      = "/apis/batch/v1/namespaces/default/jobs/churn"
	slicesPath     = "/apis/resource.k8s.io/v1/resourceslices"
	rbacPath       = "/apis/rbac.authorization.k8s.io/v1/"
	claimsPath     = "/apis/resource.k8s.io/v1/resourceclaims"
	names          = `{range .items[*]}{.metadata.name}{"\n"}{end}`
)

// get reads a path of the API, and shows of the object what kubectl's -o jsonpath would. "": all of the answer.
func get(ctx context.Context, path, show string) (string, error) {
	text, err := cluster.Get(ctx, path)
	if err != nil || show == "" {
		return string(text), err
	}
	var object any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&object); err != nil {
		return "", err
	}
	query := jsonpath.New(path).AllowMissingKeys(true)
	if err := query.Parse(show); err != nil {
		return "", err
	}
	var out strings.Builder
	err = query.Execute(&out, object)
	return out.String(), err
}

func mustGet(t *testing.T, ctx context.Context, path, show string) string {
	t.Helper()
	out, err := get(ctx, path, show)
	check(t, err)
	return out
}

// containers returns the IDs of the containers of pods.
func containers(t *testing.T, ctx context.Context, names ...string) string {
	t.Helper()
	var ids []string
	for _, name := range names {
		ids = append(ids, mustGet(t, ctx, podsPath+"/"+name, "{.status.containerStatuses[*].containerID}"))
	}
	return strings.Join(ids, " ")
}

// pluginPod returns the name of nvshare's pod.
func pluginPod(t *testing.T, ctx context.Context) string {
	t.Helper()
	return mustGet(t, ctx, systemPodsPath+"?labelSelector=app.kubernetes.io/name=nvshare", "{.items[0].metadata.name}")
}

func await(t *testing.T, ctx context.Context, what string, try func() error) {
	t.Helper()
	check(t, node.UntilEvery(ctx, 100*time.Millisecond, what, try))
}

// awaitEvent waits until an Event on a pod says something.
func awaitEvent(t *testing.T, ctx context.Context, pod, says string) {
	t.Helper()
	await(t, ctx, fmt.Sprintf("an Event on pod %s with %q", pod, says), func() error {
		out, err := get(ctx, eventsPath+"?fieldSelector=involvedObject.name="+pod, "{.items[*].message}")
		if err == nil && !strings.Contains(out, says) {
			err = fmt.Errorf("the Events are: %s", out)
		}
		return err
	})
}

func manifest(name string) string { return filepath.Join("manifests", name+".yaml") }

// manifests returns kubectl's arguments for the pods of manifests/.
func manifests(files []string) (args []string) {
	for _, f := range files {
		args = append(args, "-f", manifest(f))
	}
	return args
}

// runPods creates the pods of manifests/ and waits until they run.
func runPods(t *testing.T, ctx context.Context, files ...string) {
	t.Helper()
	kubectl(t, ctx, append([]string{"apply"}, manifests(files)...)...)
	kubectl(t, ctx, append([]string{"wait", "--for=condition=Ready", "--timeout=" + patience.String()}, manifests(files)...)...)
}

func deletePods(t *testing.T, ctx context.Context, files ...string) {
	t.Helper()
	kubectl(t, ctx, append([]string{"delete", "--timeout=" + patience.String()}, manifests(files)...)...)
}

// awaitTurns waits until each tenant has had n turns on a GPU since from, by the GPU's own
// record, and returns the record.
func awaitTurns(t *testing.T, ctx context.Context, from int64, n int, tenants ...string) judge.Report {
	t.Helper()
	var report judge.Report
	await(t, ctx, fmt.Sprintf("%v to take %d turns", tenants, n), func() error {
		trace, err := judge.ReadLog(filepath.Join(node.SimGPU, "run", "log"))
		if err != nil {
			return err
		}
		if trace.Lost > 0 {
			t.Fatalf("the log has lost %d records: it is too small for this suite", trace.Lost)
		}
		report = judge.Judge(trace, judge.Options{Since: from, Until: judge.Now()})
		turns := map[string]int{}
		for _, gpu := range report.GPUs {
			for _, u := range gpu.Tenants {
				turns[u.Tenant] += u.Turns
			}
		}
		for _, tenant := range tenants {
			if turns[tenant] < n {
				return fmt.Errorf("%s has had %d turns", tenant, turns[tenant])
			}
		}
		return nil
	})
	return report
}

// awaitTogether waits until two tenants have been on a GPU at the same time.
func awaitTogether(t *testing.T, ctx context.Context, from int64, a, b string) {
	t.Helper()
	await(t, ctx, a+" and "+b+" to run at the same time", func() error {
		trace, err := judge.ReadLog(filepath.Join(node.SimGPU, "run", "log"))
		if err != nil {
			return err
		}
		trace.Intervals = slices.DeleteFunc(trace.Intervals, func(iv judge.Interval) bool { return iv.Process.Tenant != a && iv.Process.Tenant != b })
		if judge.Judge(trace, judge.Options{Since: from, Until: judge.Now()}).Overlaps() == 0 {
			return errors.New("they do not overlap")
		}
		return nil
	})
}

func noOverlap(t *testing.T, report judge.Report) {
	t.Helper()
	if n := report.Overlaps(); n > 0 {
		t.Errorf("%d overlaps: two tenants were on the GPU at the same time", n)
	}
}

// step is a part of a test that needs the parts before it.
type step struct {
	name string
	run  func(*testing.T)
}

// unfinished is the test whose last steps were left out: they would have removed nvshare.
var unfinished string

// runSteps runs steps one after the other, up to the first that fails.
func runSteps(t *testing.T, steps []step) {
	t.Helper()
	if unfinished != "" {
		t.Skipf("SKIPPED: %s failed, and so nvshare is still in the cluster", unfinished)
	}
	for _, s := range steps {
		begin := time.Now()
		if !t.Run(s.name, s.run) {
			unfinished = t.Name()
			t.Fatalf("step %s failed: the ones after it are left out", s.name)
		}
		t.Logf("%s: %.1f s", s.name, time.Since(begin).Seconds())
	}
}
