// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
	sched "github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/manual"
)

const patience = 5 * time.Minute

func quiet() logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func information(uuid string, minor int) string {
	return fmt.Sprintf("Model: \t X\nGPU UUID: \t %s\nDevice Minor: \t %d\n", uuid, minor)
}

// host makes the root of a host with n GPUs and an NVIDIA CDI spec for two, so
// that no driver is looked for, and the flags to work on it.
func host(t *testing.T, n int) (root string, args []string) {
	t.Helper()
	root = t.TempDir()
	for i := range n {
		write(t, fmt.Sprintf("%s/proc/driver/nvidia/gpus/0000:0%d:00.0/information", root, i), information(fmt.Sprintf("GPU-%d", i), i))
	}
	write(t, root+"/etc/cdi/nvidia.yaml", `cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
  - {name: "0", containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}}
  - {name: "1", containerEdits: {deviceNodes: [{path: /dev/nvidia1}]}}
`)
	if err := os.MkdirAll(root+"/run", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(root+"/var", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/run", root+"/var/run"); err != nil {
		t.Fatal(err)
	}
	built := t.TempDir()
	write(t, built+"/libnvshare.so", "shim")
	write(t, built+"/hook", "hook")
	return root, []string{"--host-root", root, "--no-nri", "--lib", built + "/libnvshare.so", "--hook", built + "/hook"}
}

// nodeOn returns the node that these flags describe, which looks for changes all the
// time.
func nodeOn(t *testing.T, root string, args []string) *node {
	t.Helper()
	placed, err := newPlaced(flags{
		hostRoot: root, lib: args[4], hook: args[6], libDir: cdi.DefaultLibDir, binDir: cdi.DefaultBinDir, runDir: cdi.DefaultRunDir,
	}, quiet())
	if err != nil {
		t.Fatal(err)
	}
	return &node{
		log: quiet(), options: cdi.Options{HostRoot: root}, paths: cdi.DefaultPaths, placed: placed, health: &plugin.Health{},
		cdiDir: root + "/run/cdi", every: time.Millisecond, generate: cdi.Generate, again: func() <-chan time.Time { return nil },
	}
}

// look is the node's first look.
func look(n *node) *plugin.Inventory {
	inv, err := n.refresh(context.Background(), true)
	if err != nil {
		return plugin.Unavailable(err)
	}
	return inv
}

func execute(args ...string) error {
	cmd := command(new(int), quiet())
	cmd.SetArgs(args)
	return cmd.Execute()
}

func specFiles(t *testing.T, dir string) []string {
	t.Helper()
	files, err := filepath.Glob(dir + "/*")
	if err != nil {
		t.Fatal(err)
	}
	for i := range files {
		files[i] = filepath.Base(files[i])
	}
	return files
}

var bothSpecs = []string{cdi.FileName(cdi.KindNRI), cdi.FileName(cdi.Kind)}

func TestPlacesAndWrites(t *testing.T) {
	t.Setenv("NVSHARE_SIMGPU", "")
	t.Setenv("NVSHARE_RUN_DIR", "")
	root, args := host(t, 2)
	if err := execute(args...); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{"lib/current/libnvshare.so": "shim", "bin/nvshare-cdi-hook": "hook"} {
		if got, err := os.ReadFile(root + "/var/lib/nvshare/" + file); err != nil || string(got) != want {
			t.Errorf("%s holds %q, %v", file, got, err)
		}
	}
	if info, err := os.Stat(root + "/run/nvshare/tenant"); err != nil || !info.IsDir() {
		t.Errorf("the directory for containers: %v", err)
	}
	if got := specFiles(t, root+"/run/cdi"); !slices.Equal(got, bothSpecs) {
		t.Errorf("specs are %v", got)
	}
	text, err := os.ReadFile(root + "/run/cdi/" + cdi.FileName(cdi.Kind))
	if err != nil || strings.Contains(string(text), root) || !strings.Contains(string(text), "/var/lib/nvshare/lib/current") {
		t.Errorf("the spec must have the host's own paths: %v\n%s", err, text)
	}

	// The GPUs go: so do the specs.
	if err := os.RemoveAll(root + "/proc/driver/nvidia/gpus"); err != nil {
		t.Fatal(err)
	}
	if err := execute(args...); err != nil {
		t.Fatal(err)
	}
	if got := specFiles(t, root+"/run/cdi"); len(got) != 0 {
		t.Errorf("without GPU the specs are %v", got)
	}
}

func TestStartFails(t *testing.T) {
	t.Setenv("NVSHARE_SIMGPU", "")
	t.Setenv("NVSHARE_RUN_DIR", "")
	root, args := host(t, 1)
	foreign := root + "/run/cdi/" + cdi.FileName(cdi.Kind)
	write(t, foreign, "kind: vendor.com/net\n")
	if err := execute(args...); err == nil || !strings.Contains(err.Error(), foreign) {
		t.Errorf("foreign spec: %v", err)
	}
	if err := execute(append(args, "--lib", root+"/none")...); err == nil || !strings.Contains(err.Error(), "libnvshare.so") {
		t.Errorf("no shim: %v", err)
	}
	write(t, root+"/file", "")
	for _, flag := range []string{"--lib-dir", "--bin-dir", "--run-dir", "--cdi-dir"} {
		if err := execute(append(args, flag, "/file/x")...); err == nil || !strings.Contains(err.Error(), root+"/file") {
			t.Errorf("%s is not usable: %v", flag, err)
		}
	}
	for says, more := range map[string][]string{
		"--dra: Kubernetes API: not in a Kubernetes pod":       {"--dra", "--no-nri=false", "--kubeconfig="},
		"--advertise: Kubernetes API: not in a Kubernetes pod": {"--advertise", "--no-nri=false", "--kubeconfig="},
	} {
		if err := execute(slices.Concat(args, []string{"--cdi-dir", "/run/claims"}, more)...); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v: %v; want %q", more, err, says)
		}
		// It would write into a directory that the caller may have removed. Its goroutine may be at its last step.
		writes := func() string {
			stacks := make([]byte, 1<<20)
			return string(stacks[:runtime.Stack(stacks, true)])
		}
		for until := time.Now().Add(10 * time.Second); strings.Contains(writes(), "nvshare-plugin.publish"); runtime.Gosched() {
			if time.Now().After(until) {
				t.Fatalf("%v: the state of a service that failed is still written:\n%s", more, writes())
			}
		}
	}
}

// What is wrong on the command line is said before anything is placed, and is no failure of
// the host.
func TestUsage(t *testing.T) {
	root, args := host(t, 1)
	for wrong, want := range map[string]string{
		"surplus":            "surplus",
		"--indes 10":         "--indes",
		"--index 1":          "--index",
		"--index xx":         "--index",
		"--promise-memory 0": "--promise-memory",
		"--promise-memory x": "--promise-memory",
		"--dra":              "--dra needs NRI",
		"--advertise":        "--advertise needs NRI",
		"--advertise --dra":  "leave one out",
		"--slots 4":          "--slots is for resource claims",
		"--metrics-addr :1":  "--metrics-addr is for resource claims",
		"--dra --no-nri=false --metrics-addr 9403": "give host:port",
	} {
		status := exitUsage
		cmd := command(&status, quiet())
		cmd.SetArgs(append(slices.Clone(args), strings.Fields(wrong)...))
		if err := cmd.Execute(); err == nil || status != exitUsage || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: status %d, %v, want %q", wrong, status, err, want)
		}
	}
	if _, err := os.Stat(root + "/var/lib/nvshare"); err == nil {
		t.Error("a wrong command line has placed files")
	}
	status := exitUsage
	cmd := command(&status, quiet())
	cmd.SetArgs(append(args, "--lib", root+"/none"))
	if err := cmd.Execute(); err == nil || status != exitFailed {
		t.Errorf("no shim: status %d, %v", status, err)
	}
}

// Without a usable driver the plugin serves on, refuses who asks and says why,
// and gives GPUs as soon as it can.
func TestServesWithoutADriver(t *testing.T) {
	root, args := host(t, 1)
	if err := os.Remove(root + "/etc/cdi/nvidia.yaml"); err != nil {
		t.Fatal(err)
	}
	n := nodeOn(t, root, args)
	p := plugin.New(quiet(), plugin.NewContainers(quiet()))
	create := func() error {
		_, _, err := p.CreateContainer(context.Background(), &api.PodSandbox{Name: "train", Namespace: "ml",
			Annotations: map[string]string{plugin.Annotation: "nvshare.com/gpu=0"}}, &api.Container{Name: "main"})
		return err
	}
	p.SetInventory(look(n))
	if err := create(); err == nil || !strings.Contains(err.Error(), "libcuda.so") || !strings.Contains(err.Error(), "ml/train") {
		t.Errorf("refused with %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	found, done := make(chan *plugin.Inventory, 100), make(chan struct{})
	go func() {
		n.watch(ctx, true, func(inv *plugin.Inventory) { found <- inv }, func() {})
		close(done)
	}()
	write(t, root+"/etc/cdi/.nvidia", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: '0', containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}}]\n")
	if err := os.Rename(root+"/etc/cdi/.nvidia", root+"/etc/cdi/nvidia.yaml"); err != nil {
		t.Fatal(err)
	}
	// The first look may be older than the driver.
	for end, err := time.After(patience), errors.New("no look"); err != nil; {
		select {
		case inv := <-found:
			p.SetInventory(inv)
			err = create()
		case <-end:
			t.Fatalf("the driver was not noticed: %v", err)
		}
	}
	cancel()
	<-done
}

// A plugin that serves beside an earlier one looks again until it knows the GPUs, and then when
// something changes. It writes nothing.
func TestPeeksUntilItLeads(t *testing.T) {
	root, args := host(t, 1)
	hidden := root + "/nvidia.yaml"
	if err := os.Rename(root+"/etc/cdi/nvidia.yaml", hidden); err != nil {
		t.Fatal(err)
	}
	n := nodeOn(t, root, args)
	ctx, cancel := context.WithCancel(context.Background())
	found, looked, ended := make(chan *plugin.Inventory, 100), make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(ended)
		n.watch(ctx, false, func(inv *plugin.Inventory) { found <- inv }, func() {
			select {
			case looked <- struct{}{}:
			default:
			}
		})
	}()
	next := func(what string) *plugin.Inventory {
		t.Helper()
		select {
		case inv := <-found:
			return inv
		case <-time.After(patience):
			t.Fatalf("waited in vain for %s", what)
			return nil
		}
	}
	<-looked
	if inv := next("the first look"); inv.Problem() == nil || len(n.health.NotReady()) != 1 {
		t.Errorf("without a driver: %v, not ready for %q", inv.Problem(), n.health.NotReady())
	}
	if err := os.Rename(hidden, root+"/etc/cdi/nvidia.yaml"); err != nil {
		t.Fatal(err)
	}
	if inv := next("a look that succeeds"); inv.Problem() != nil || len(inv.GPUs()) != 1 || len(n.health.NotReady()) != 0 {
		t.Errorf("with the driver: %d GPUs, %v, not ready for %q", len(inv.GPUs()), inv.Problem(), n.health.NotReady())
	}
	write(t, root+"/new/information", information("GPU-1", 1))
	if err := os.Rename(root+"/new", root+"/proc/driver/nvidia/gpus/0000:01:00.0"); err != nil {
		t.Fatal(err)
	}
	// A look in the middle of a change is repeated after the change.
	for len(next("a second GPU").GPUs()) != 2 {
	}
	cancel()
	<-ended
	if files := specFiles(t, root+"/run/cdi"); len(files) > 0 {
		t.Errorf("wrote %v", files)
	}
}

// Somebody else's file in the way of a spec keeps engines from the devices: pods are
// refused, and told why, until it is gone.
func TestFileInTheWayIsToldToPods(t *testing.T) {
	root, args := host(t, 1)
	n := nodeOn(t, root, args)
	p := plugin.New(quiet(), plugin.NewContainers(quiet()))
	p.SetInventory(look(n))
	file := root + "/run/cdi/" + cdi.FileName(cdi.KindNRI)
	if err := errors.Join(os.Remove(file), os.Mkdir(file, 0o755)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	found, done := make(chan *plugin.Inventory, 100), make(chan struct{})
	go func() {
		n.watch(ctx, true, func(inv *plugin.Inventory) { found <- inv }, func() {})
		close(done)
	}()
	create := func() error {
		select {
		case inv := <-found:
			p.SetInventory(inv)
		case <-time.After(patience):
			t.Fatal("the change was not noticed")
		}
		_, _, err := p.CreateContainer(context.Background(), &api.PodSandbox{Name: "train", Namespace: "ml",
			Annotations: map[string]string{plugin.Annotation: "nvshare.com/gpu=0"}}, &api.Container{Name: "main"})
		return err
	}
	if err := create(); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("created with %v", err)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := create(); err != nil {
		t.Errorf("put right: %v", err)
	}
	cancel()
	<-done
}

// NVML may fail for a GPU, and not the next time. Nothing else tells that.
func TestLooksAgainForWhatNVMLLeftOut(t *testing.T) {
	root, args := host(t, 1)
	n := nodeOn(t, root, args)
	looks, again := 0, make(chan time.Time, 1)
	n.generate = func(ctx context.Context, o cdi.Options, p cdi.Paths) (*cdi.Generated, error) {
		looks++
		g, err := cdi.Generate(ctx, o, p)
		if err == nil && looks <= 4 { // the specs are right after the second one
			g.Partial, g.GPUs = true, nil
		}
		return g, err
	}
	n.again = func() <-chan time.Time { return again }
	look(n)
	ctx, cancel := context.WithCancel(t.Context())
	found, done := make(chan *plugin.Inventory, 100), make(chan struct{})
	go func() {
		n.watch(ctx, true, func(inv *plugin.Inventory) { found <- inv }, func() {})
		close(done)
	}()
	for limit := time.After(patience); ; {
		select {
		case again <- time.Now():
			continue
		case inv := <-found:
			if len(inv.GPUs()) == 0 {
				continue
			}
		case <-limit:
			t.Fatal("waited in vain for the GPU")
		}
		break
	}
	cancel()
	<-done
}

func TestWatchFollowsTheHost(t *testing.T) {
	root, args := host(t, 1)
	n := nodeOn(t, root, args)
	if _, err := n.refresh(context.Background(), true); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	found, done := make(chan *plugin.Inventory, 100), make(chan struct{})
	go func() {
		n.watch(ctx, true, func(inv *plugin.Inventory) { found <- inv }, func() {})
		close(done)
	}()
	await := func(when string, devices int, files []string) {
		t.Helper()
		limit := time.After(patience)
		for {
			select {
			case inv := <-found:
				// An earlier look may still be on its way.
				if len(inv.Devices()) == devices && slices.Equal(specFiles(t, root+"/run/cdi"), files) {
					return
				}
			case <-limit:
				t.Fatalf("%s: waited in vain for %d devices and %v, have %v", when, devices, files, specFiles(t, root+"/run/cdi"))
			}
		}
	}
	second := root + "/proc/driver/nvidia/gpus/0000:01:00.0"
	// At once, as the kernel does it: a GPU without its text is an error.
	write(t, root+"/new/information", information("GPU-1", 1))
	if err := os.Rename(root+"/new", second); err != nil {
		t.Fatal(err)
	}
	await("a second GPU", 5, bothSpecs)
	if err := os.Remove(root + "/run/cdi/" + cdi.FileName(cdi.Kind)); err != nil {
		t.Fatal(err)
	}
	await("a spec was deleted", 5, bothSpecs)
	if err := os.RemoveAll(root + "/proc/driver"); err != nil {
		t.Fatal(err)
	}
	await("no GPU", 0, nil)
	cancel()
	<-done
}

// A file that NVIDIA's spec needs can go away, and come back, with no other change: without
// another look no container would start.
func TestLooksAgainWhenHostFilesChange(t *testing.T) {
	root, args := host(t, 1)
	// The directory that counts most; without the hook the spec of host counts.
	write(t, root+"/run/cdi/nvidia.yaml", `cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices: [{name: "0", containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}}]
containerEdits: {hooks: [{hookName: createContainer, path: /usr/bin/nvidia-cdi-hook}]}
`)
	hook := root + "/usr/bin/nvidia-cdi-hook"
	write(t, hook, "")
	n := nodeOn(t, root, args)
	for _, there := range []bool{true, false, true} {
		for looks := 0; n.fingerprint() != n.seen; looks++ {
			if looks == 3 {
				t.Fatal("it looks again and again")
			}
			if _, err := n.refresh(t.Context(), true); err != nil {
				t.Fatal(err)
			}
		}
		text, err := os.ReadFile(root + "/run/cdi/" + cdi.FileName(cdi.Kind))
		if err != nil || strings.Contains(string(text), "/usr/bin/nvidia-cdi-hook") != there {
			t.Errorf("the hook is there: %v; %v, and the spec is\n%s", there, err, text)
		}
		from, to := hook, hook+".away"
		if !there {
			from, to = to, from
		}
		if err := os.Rename(from, to); err != nil {
			t.Fatal(err)
		}
		if n.fingerprint() == n.seen {
			t.Errorf("the hook is there: %v, and nobody looks", !there)
		}
	}
}

// On a host without NRI the plugin is there for podman and Docker: the specs
// follow NVIDIA's by the kernel's word, for the next look would be ten seconds later.
func TestWithoutNRISpecsAreKeptRight(t *testing.T) {
	t.Setenv("NVSHARE_SIMGPU", "")
	t.Setenv("NVSHARE_RUN_DIR", "")
	root, args := host(t, 1)
	cmd := command(new(int), quiet())
	cmd.SetArgs(slices.DeleteFunc(args, func(a string) bool { return a == "--no-nri" }))
	ctx, cancel := context.WithTimeout(context.Background(), watchInterval/2)
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	spec := root + "/run/cdi/" + cdi.FileName(cdi.Kind)
	await := func(what string) {
		t.Helper()
		for ctx.Err() == nil {
			if text, err := os.ReadFile(spec); err == nil && strings.Contains(string(text), what) {
				return
			}
			time.Sleep(time.Millisecond)
		}
		t.Fatalf("the spec does not say %q in time", what)
	}
	await("/dev/nvidia0")
	write(t, root+"/etc/cdi/.new", "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: '0', containerEdits: {deviceNodes: [{path: /dev/nvidia0}], env: [NEW=driver]}}]\n")
	if err := os.Rename(root+"/etc/cdi/.new", root+"/etc/cdi/nvidia.yaml"); err != nil {
		t.Fatal(err)
	}
	await("NEW=driver")
	cancel()
	if err := <-done; err != nil {
		t.Errorf("at the end: %v", err)
	}
}

// control is the scheduler's side of the control socket.
type control struct {
	sched.ControlService
	described chan *sched.Container
	forgotten chan string
	reported  chan string
}

func (c control) ReportPlugin(_ context.Context, r *sched.ReportPluginRequest) (*sched.ReportPluginResponse, error) {
	select {
	case c.reported <- strings.Join(r.Problems, ";"):
	default: // it repeats
	}
	return &sched.ReportPluginResponse{}, nil
}

func (c control) Status(context.Context, *sched.StatusRequest) (*sched.StatusResponse, error) {
	return &sched.StatusResponse{
		Containers: []*sched.Container{{Id: "ended"}},
		Gpus:       []*sched.GPU{{Uuid: "GPU-x", Promises: []*sched.Promise{{Container: &sched.Container{}, Uid: 7, CoreRequest: 30}, {Container: &sched.Container{Id: "b"}, CoreRequest: 20}}}},
	}, nil
}

func (c control) ForgetContainer(_ context.Context, r *sched.ForgetContainerRequest) (*sched.ForgetContainerResponse, error) {
	c.forgotten <- r.Id
	return &sched.ForgetContainerResponse{}, nil
}

func (c control) DescribeContainer(_ context.Context, r *sched.DescribeContainerRequest) (*sched.DescribeContainerResponse, error) {
	switch r.Container.Name {
	case "refused":
		return nil, status.Error(codes.InvalidArgument, "no")
	case "too many":
		return nil, status.Error(codes.ResourceExhausted, "4096 are described already")
	}
	c.described <- r.Container
	return &sched.DescribeContainerResponse{}, nil
}

func TestSchedulerConnection(t *testing.T) {
	dir, err := os.MkdirTemp("", "run") // short: socket paths are limited
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	dial := func(ctx context.Context) (plugin.Scheduler, error) { return dialScheduler(ctx, dir, quiet(), nil) }
	if _, err := dial(context.Background()); err == nil || !strings.Contains(err.Error(), dir) {
		t.Errorf("no scheduler: %v", err)
	}
	c := control{described: make(chan *sched.Container, 10), forgotten: make(chan string, 10), reported: make(chan string, 1)}
	containers := plugin.NewContainers(quiet())
	terms := sched.Terms{MemoryLimit: 8 << 30, CoreLimit: 50, CoreRequest: 10, Weight: 7, Priority: sched.Priority_PRIORITY_LATENCY,
		Gang: "ring", MemoryMode: sched.MemoryMode_MEMORY_MODE_RESIDENT}
	annotations := map[string]string{}
	for _, f := range sched.Fields {
		annotations[f.Annotation()] = f.Format(terms)
	}
	pod := &api.PodSandbox{Id: "p", Uid: "u", Namespace: "ml", Name: "train", Annotations: annotations}
	container := func(id, name string) *api.Container {
		return &api.Container{Id: id, PodSandboxId: "p", Name: name,
			Annotations: map[string]string{plugin.PlacementAnnotation: "GPU-x,GPU-y"}}
	}
	if _, err := plugin.New(quiet(), containers).Synchronize(context.Background(), []*api.PodSandbox{pod},
		[]*api.Container{container("x", "refused"), container("y", "too many"), container("a", "main")}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		containers.Run(ctx, dial)
		close(done)
	}()
	containers.Health.Problem("node", errors.New("the disk is full"))
	for range 2 { // the second scheduler is told again
		server, err := ttrpc.NewServer()
		if err != nil {
			t.Fatal(err)
		}
		sched.RegisterControlService(server, c)
		l, err := net.Listen("unix", filepath.Join(dir, sched.SocketName))
		if err != nil {
			t.Fatal(err)
		}
		go server.Serve(context.Background(), l)
		select {
		case got := <-c.described:
			if got.Id != "a" || got.Name != "main" || got.Namespace != "ml" || got.Pod != "train" || got.PodUid != "u" {
				t.Errorf("described as %v", got)
			}
			if got.Terms() != terms || !slices.Equal(got.Gpus, []string{"GPU-x", "GPU-y"}) {
				t.Errorf("described with %+v of %q", got.Terms(), got.Gpus)
			}
		case <-time.After(patience):
			t.Fatal("the scheduler was told nothing")
		}
		select {
		case id := <-c.forgotten:
			if id != "ended" {
				t.Errorf("%s was forgotten", id)
			}
		case <-time.After(patience):
			t.Fatal("the ended container was not forgotten")
		}
		select {
		case got := <-c.reported:
			if got != "the disk is full" {
				t.Errorf("reported %q", got)
			}
		case <-time.After(patience):
			t.Fatal("no problem was reported")
		}
		conn, err := dial(ctx)
		if err != nil {
			t.Fatal(err)
		}
		state, err := conn.State(ctx)
		if want := []plugin.Promise{{Who: "user 7", UUID: "GPU-x", Percent: 30}, {ID: "b", Who: "container b", UUID: "GPU-x", Percent: 20}}; err != nil || !slices.Equal(state.Promises, want) || !slices.Equal(state.IDs, []string{"ended"}) {
			t.Errorf("the state is %+v, %v", state, err)
		}
		conn.Close()
		if err := server.Close(); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	<-done
}

// A step before the plugin's own start places the files, whatever the GPUs do.
func TestPlaceOnly(t *testing.T) {
	t.Setenv("NVSHARE_SIMGPU", "")
	t.Setenv("NVSHARE_RUN_DIR", "")
	root, args := host(t, 1)
	args[slices.Index(args, "--no-nri")] = "--place"
	write(t, root+"/proc/driver/nvidia/gpus/0000:00:00.0/information", "broken")
	if err := execute(args...); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"/var/lib/nvshare/lib/current/libnvshare.so", "/run/nvshare/tenant"} {
		if _, err := os.Stat(root + file); err != nil {
			t.Error(err)
		}
	}
	if specs := specFiles(t, root+"/run/cdi"); len(specs) > 0 {
		t.Errorf("wrote %v", specs)
	}
}

// The help of every command fits a terminal of 80 columns, and names what each flag wants, and
// not its type in Go.
func TestHelpFits(t *testing.T) {
	for _, problem := range manual.Unfit(command(new(int), quiet())) {
		t.Error(problem)
	}
}
