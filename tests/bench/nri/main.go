// SPDX-License-Identifier: Apache-2.0

// Command nri measures what nvshare adds to the creation of a container: the CRI's
// CreateContainer on several real containerds in turn, so that other work on the machine
// affects all alike.
//
// The containerds differ in one thing each: no NRI; NRI without a plugin; a plugin that
// handles the same event and does nothing; nvshare-plugin with a pod that does not ask;
// nvshare-plugin with a pod that asks for a GPU; the same with a scheduler that hangs.
// The GPU is simulated and does not affect the result.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/stub"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/nvshare/nvshare/tests/node"
)

// Kinds of runs, in the order of the table. Each is compared with the first.
var kinds = []struct{ Name, What string }{
	{"off", "NRI disabled"},
	{"none", "NRI, no plugin"},
	{"empty", "a plugin that does nothing"},
	{"plain", "nvshare, the pod does not ask"},
	{"gpu", "nvshare, the pod asks: injected"},
	{"hung", "the same, the scheduler hangs"},
}

type report struct {
	Date       string               `json:"date"`
	Commit     string               `json:"commit"`
	Containerd string               `json:"containerd"`
	CPU        string               `json:"cpu"`
	Cores      int                  `json:"cores"`
	Kernel     string               `json:"kernel"`
	Load       string               `json:"load"`
	Rounds     int                  `json:"rounds"`
	Warm       int                  `json:"rounds_not_counted"`
	Ms         map[string][]float64 `json:"create_container_ms"`
}

func main() {
	build := flag.String("build", ".build", "build `directory`")
	results := flag.String("results", "", "`directory` for the table and the raw results")
	rounds := flag.Int("rounds", 300, "containers of each kind")
	flag.Parse()
	dir, err := filepath.Abs(*build)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
	os.Exit(node.Isolated(dir, "bench-nri-", func(work string) int {
		ctx, cancel := context.WithTimeout(context.Background(), 15*time.Minute)
		defer cancel()
		r, err := measure(ctx, dir, work, *rounds)
		if err == nil {
			err = r.publish(*results)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			return 1
		}
		return 0
	}))
}

// target is one kind: a containerd, and the pod in which containers are created.
type target struct {
	runtime cri.RuntimeServiceClient
	pod     *cri.PodSandboxConfig
	podID   string
	made    int
}

const gpu = "nvshare.com/gpu"

// warm is how many rounds are not counted: the first ones create directories and open
// files.
const warm = 10

func measure(ctx context.Context, build, work string, rounds int) (*report, error) {
	nrilog.Set(silent{})
	targets := map[string]*target{}
	add := func(kind string, n *node.Node, annotations map[string]string) error {
		t, err := newTarget(ctx, n, kind, annotations)
		targets[kind] = t
		return err
	}
	start := func(instance string, nri node.NRI) (*node.Node, error) {
		n, err := node.New(work, node.Options{Build: build, Simulated: true, Instance: instance, NRI: nri})
		if err != nil {
			return nil, err
		}
		if err := n.StartContainerd(ctx); err != nil {
			return nil, err
		}
		return n, n.BuildImages(ctx)
	}

	for kind, nri := range map[string]node.NRI{"off": node.NRIOff, "none": node.NRIOn, "empty": node.NRIOn} {
		n, err := start(kind, nri)
		if err != nil {
			return nil, err
		}
		if kind == "empty" {
			s, err := stub.New(empty{}, stub.WithPluginName("empty"), stub.WithPluginIdx("10"), stub.WithSocketPath(n.NRISocket()))
			if err != nil {
				return nil, err
			}
			if err := s.Start(ctx); err != nil {
				return nil, err
			}
			defer s.Stop()
		}
		if err := add(kind, n, map[string]string{gpu: "nvshare.com/gpu=0"}); err != nil {
			return nil, err
		}
	}
	ours, err := start("ours", node.NRIOn)
	if err != nil {
		return nil, err
	}
	if err := ours.StartScheduler(ctx); err != nil {
		return nil, err
	}
	if err := ours.StartPlugin(ctx); err != nil {
		return nil, err
	}
	if err := add("plain", ours, nil); err != nil {
		return nil, err
	}
	if err := add("gpu", ours, map[string]string{gpu: "nvshare.com/gpu=0", "nvshare.com/gpu-memory-limit": "8Gi"}); err != nil {
		return nil, err
	}

	r := describe(ctx, build)
	r.Rounds, r.Ms = rounds, map[string][]float64{}
	order := []string{"off", "none", "empty", "plain", "gpu"}
	if err := r.rounds(ctx, targets, order, rounds); err != nil {
		return nil, err
	}
	// The scheduler hangs: its backlog accepts connections, and it never answers. All
	// containerds share it, so this comes after the other kinds, with "off" again to
	// compare with.
	ours.Scheduler.Signal(unix.SIGSTOP)
	defer ours.Scheduler.Signal(unix.SIGCONT)
	targets["hung"], targets[again] = targets["gpu"], targets["off"]
	return r, r.rounds(ctx, targets, []string{again, "hung"}, rounds)
}

// again is the name of the kind "off" that is measured together with "hung".
const again = "off, again"

func (r *report) rounds(ctx context.Context, targets map[string]*target, order []string, rounds int) error {
	for i := range warm + rounds {
		rand.Shuffle(len(order), func(a, b int) { order[a], order[b] = order[b], order[a] })
		for _, kind := range order {
			ms, err := targets[kind].create(ctx)
			if err != nil {
				return fmt.Errorf("%s: %w", kind, err)
			}
			if i >= warm {
				r.Ms[kind] = append(r.Ms[kind], ms)
			}
		}
	}
	return nil
}

func newTarget(ctx context.Context, n *node.Node, name string, annotations map[string]string) (*target, error) {
	conn, err := grpc.NewClient("unix://"+n.CRISocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	t := &target{runtime: cri.NewRuntimeServiceClient(conn), pod: &cri.PodSandboxConfig{
		Metadata:    &cri.PodSandboxMetadata{Name: name, Uid: "uid-" + name, Namespace: "default"},
		Annotations: annotations,
		Linux: &cri.LinuxPodSandboxConfig{
			CgroupParent: n.CgroupParent(),
			SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: &cri.NamespaceOption{
				Network: cri.NamespaceMode_NODE, Pid: cri.NamespaceMode_CONTAINER,
			}},
		},
	}}
	rsp, err := t.runtime.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: t.pod})
	if err != nil {
		return nil, fmt.Errorf("pod %s: %w", name, err)
	}
	t.podID = rsp.PodSandboxId
	return t, nil
}

// create creates and removes a container, and returns the time of the creation in ms.
func (t *target) create(ctx context.Context) (ms float64, err error) {
	t.made++
	req := &cri.CreateContainerRequest{PodSandboxId: t.podID, SandboxConfig: t.pod, Config: &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: fmt.Sprintf("c%d", t.made)},
		Image:    &cri.ImageSpec{Image: node.WorkloadImage},
		Command:  []string{"/usr/bin/sleep", "infinity"},
		Linux:    &cri.LinuxContainerConfig{},
	}}
	start := time.Now()
	rsp, err := t.runtime.CreateContainer(ctx, req)
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	_, err = t.runtime.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: rsp.ContainerId})
	return float64(took.Microseconds()) / 1000, err
}

// empty handles the same events as nvshare-plugin, and does nothing.
type empty struct{}

func (empty) Configure(context.Context, string, string, string) (api.EventMask, error) { return 0, nil }
func (empty) Synchronize(context.Context, []*api.PodSandbox, []*api.Container) ([]*api.ContainerUpdate, error) {
	return nil, nil
}
func (empty) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	return nil, nil, nil
}
func (empty) PostStartContainer(context.Context, *api.PodSandbox, *api.Container) error { return nil }
func (empty) StopContainer(context.Context, *api.PodSandbox, *api.Container) ([]*api.ContainerUpdate, error) {
	return nil, nil
}
func (empty) RemoveContainer(context.Context, *api.PodSandbox, *api.Container) error { return nil }

type silent struct{}

func (silent) Debugf(context.Context, string, ...any) {}
func (silent) Infof(context.Context, string, ...any)  {}
func (silent) Warnf(context.Context, string, ...any)  {}
func (silent) Errorf(context.Context, string, ...any) {}

func describe(ctx context.Context, build string) *report {
	read := func(file string) string {
		data, _ := os.ReadFile(file)
		line, _, _ := strings.Cut(string(data), "\n")
		return line
	}
	command := func(argv ...string) string {
		out, _ := exec.CommandContext(ctx, argv[0], argv[1:]...).Output()
		return strings.TrimSpace(string(out))
	}
	r := &report{
		Date: time.Now().UTC().Format(time.RFC3339), Commit: command("git", "describe", "--always", "--dirty"),
		Containerd: command(filepath.Join(build, "tools", "containerd"), "--version"), CPU: "unknown",
		Cores: runtime.NumCPU(), Load: read("/proc/loadavg"), Kernel: read("/proc/sys/kernel/osrelease"), Warm: warm,
	}
	data, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(data)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			r.CPU = strings.TrimSpace(value)
			break
		}
	}
	return r
}

// publish prints the table and keeps it with the raw results.
func (r *report) publish(results string) error {
	var text strings.Builder
	fmt.Fprintf(&text, "%s, commit %s, %s\n%s, %d cores, Linux %s, load %s\n", r.Date, r.Commit, r.Containerd, r.CPU, r.Cores, r.Kernel, r.Load)
	fmt.Fprintf(&text, "CRI CreateContainer in ms, %d of each kind in turn; the last kind after the others.\n", r.Rounds)
	fmt.Fprint(&text, "ADDED: to the same round's with NRI disabled, median of pairs.\n\n")
	t := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "KIND\tp50\tp99\tmax\tADDED")
	for _, k := range kinds {
		ms := slices.Sorted(slices.Values(r.Ms[k.Name]))
		if len(ms) == 0 {
			continue
		}
		added := "-"
		off := r.Ms["off"]
		if k.Name == "hung" {
			off = r.Ms[again]
		}
		if k.Name != "off" {
			var d []float64
			for i, v := range r.Ms[k.Name] {
				d = append(d, v-off[i])
			}
			slices.Sort(d)
			added = fmt.Sprintf("%+.2f", d[len(d)/2])
		}
		fmt.Fprintf(t, "%s\t%.2f\t%.2f\t%.2f\t%s\n", k.What, ms[len(ms)/2], ms[len(ms)*99/100], ms[len(ms)-1], added)
	}
	t.Flush()
	fmt.Print(text.String())
	if results == "" {
		return nil
	}
	if err := os.MkdirAll(results, 0o755); err != nil {
		return err
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	name := filepath.Join(results, "nri-"+strings.NewReplacer(":", "", "-", "").Replace(r.Date))
	if err := os.WriteFile(name+".json", append(data, '\n'), 0o644); err != nil {
		return err
	}
	return os.WriteFile(name+".txt", []byte(text.String()), 0o644)
}
