// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
)

func TestAuditWords(t *testing.T) {
	for s, good := range map[Audit]bool{"report": true, "stop": true, "": false, "Stop": false, "kill": false} {
		if err := s.Check(); (err == nil) != good {
			t.Errorf("%q: %v", s, err)
		}
	}
}

// Pods made while no plugin was there are found when one comes, whether it was
// never there or had lost its connection.
func TestAuditFindsWhoRunsWithout(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	asking := pod(map[string]string{Annotation: "nvshare.com/gpu=0"})
	one := pod(map[string]string{"gpu.nvshare.com/container.train": "nvshare.com/gpu=99"})
	one.Id, one.Name, one.Uid = "pod1", "train-b", "uid1"
	plain := pod(nil)
	plain.Id = "pod2"
	part := pod(map[string]string{CoreRequestAnnotation: "40", "gpu.nvshare.com/container.side": "none"})
	part.Id = "pod3"
	r.pods = []*api.PodSandbox{asking, one, plain, part}
	running := api.ContainerState_CONTAINER_RUNNING
	r.ctrs = []*api.Container{
		{Id: "missed", PodSandboxId: "pod0", Name: "main", State: running},
		{Id: "mounted", PodSandboxId: "pod0", Name: "a", State: running, Mounts: []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}},
		{Id: "preloaded", PodSandboxId: "pod0", Name: "b", State: running, Env: []string{"LD_PRELOAD=/x.so:" + cdi.ShimPath}}, // by itself
		{Id: "recorded", PodSandboxId: "pod0", Name: "d", State: running, Annotations: map[string]string{PlacementAnnotation: known[2]}},
		{Id: "ended", PodSandboxId: "pod0", Name: "c", State: api.ContainerState_CONTAINER_STOPPED},
		{Id: "bad", PodSandboxId: "pod1", Name: "train", State: running}, // no plugin would have let it in
		{Id: "sidecar", PodSandboxId: "pod1", Name: "sidecar", State: running},
		{Id: "plain", PodSandboxId: "pod2", Name: "main", State: running},
		{Id: "part", PodSandboxId: "pod3", Name: "main", State: running},
		{Id: "side", PodSandboxId: "pod3", Name: "side", State: running},
	}
	r.start()
	defer r.stop()
	found := make(chan Unmanaged, 100)
	p := New(quiet(), NewContainers(quiet()))
	p.Audit, p.Report = AuditReport, func(u Unmanaged) { found <- u }
	runPlugin(t, r, p)
	await(t, r.synced, "the registration")
	expect := func(ids ...string) {
		t.Helper()
		var got []string
		for range ids {
			u := await(t, found, "the audit")
			got = append(got, u.ID)
			if u.ID == "bad" && (u.String() != `pod ml/train-b, container "train"` || u.PodUID != "uid1" || u.Asked != `gpu.nvshare.com/container.train="nvshare.com/gpu=99"`) {
				t.Errorf("found %+v", u)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, ids) {
			t.Errorf("found %v, want %v", got, ids)
		}
	}
	expect("bad", "missed", "part", "preloaded")

	// As after a request that took too long: the runtime drops the plugin and
	// makes the container without it.
	r.ctrs = []*api.Container{{Id: "dropped", PodSandboxId: "pod0", Name: "main", State: running}}
	r.cut()
	await(t, r.synced, "registration after a lost connection")
	expect("dropped")
}

// NVIDIA's plugin names CDI devices in its answer, which this plugin is not shown. The container
// is seen once it has started.
func TestGPUByAnotherPlugin(t *testing.T) {
	p := New(quiet(), NewContainers(quiet()))
	p.SetInventory(inventory(t))
	pod, ctr := podOf("main", "0123456789", says("gpu-memory-limit=1Gi", "gpu-core-limit=10"))
	if adjust, _, err := p.CreateContainer(t.Context(), pod, ctr); adjust != nil || err != nil || p.containers.knows(ctr.GetId()) {
		t.Fatalf("a container that asks for nothing: %v, %v", adjust, err)
	}
	ctr.State = api.ContainerState_CONTAINER_RUNNING
	ctr.Mounts = []*api.Mount{{Source: cdi.DefaultPaths.ShimDir, Destination: cdi.ShimDir}}
	for range 2 {
		if err := p.PostStartContainer(t.Context(), pod, ctr); err != nil {
			t.Fatal(err)
		}
		want, _ := p.containers.snapshot()
		if c := want[ctr.GetId()]; c.Pod != "main" || len(c.GPUs) != 0 || c.Terms.MemoryLimit != 1<<30 || c.Terms.CoreLimit != 10 {
			t.Errorf("the scheduler is told %+v", c)
		}
	}
}

// child starts a shell that says when it runs.
func child(t *testing.T, script string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sh", "-c", script+"echo ready; while :; do sleep 1; done")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
	return cmd
}

func TestEndProcess(t *testing.T) {
	for script, want := range map[string]bool{"": false, "trap '' TERM; ": true} {
		fd, err := unix.PidfdOpen(child(t, script).Process.Pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		grace := patience
		if want {
			grace = 0
		}
		forced, err := endProcess(fd, grace)
		if err != nil || forced != want {
			t.Errorf("%q: forced %v, %v", script, forced, err)
		}
		if !ended(fd, patience) {
			t.Errorf("%q: it has not ended", script)
		}
		unix.Close(fd)
	}
}

// A process is ended only if it is the container's: here it is not.
func TestStopProcessKnowsWhom(t *testing.T) {
	cmd := child(t, "")
	pid := cmd.Process.Pid
	for name, c := range map[string]struct {
		pid  int
		id   string
		part string
	}{
		"another's":  {pid, strings.Repeat("e", 64), strconv.Itoa(pid)},
		"short":      {pid, "cpu", "too short"},
		"not told":   {0, strings.Repeat("e", 64), "no process"},
		"impossible": {1 << 30, strings.Repeat("e", 64), "no such process"},
	} {
		if _, err := stopProcess(c.pid, c.id, 0); err == nil || !strings.Contains(err.Error(), c.part) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := cmd.Process.Signal(unix.Signal(0)); err != nil {
		t.Errorf("the process is gone: %v", err)
	}
	// One that is recognised, by whatever its cgroup is called here.
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	if id := strings.TrimSpace(string(text)); len(id) >= 8 {
		fd, err := openProcess(pid, id)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
}

// A container that is created and not started when the plugin comes has no process yet. It is
// ended when it starts.
func TestAuditOfWhatStartsLater(t *testing.T) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	id := strings.TrimSpace(string(text)) // of the child too: the audit takes it for the container's process
	if len(id) < 8 {
		t.Skipf("the cgroup here is called %q", id)
	}
	r := newRuntime(t, "v2.4.2")
	asking, plain := pod(map[string]string{Annotation: "nvshare.com/gpu=0"}), pod(nil)
	plain.Id = "pod1"
	missed := &api.Container{Id: id, PodSandboxId: "pod0", Name: "missed", State: api.ContainerState_CONTAINER_CREATED}
	placed := &api.Container{Id: "placed", PodSandboxId: "pod0", Name: "placed", Annotations: map[string]string{PlacementAnnotation: known[2]}}
	other := &api.Container{Id: "other", PodSandboxId: "pod1", Name: "other"}
	r.pods, r.ctrs = []*api.PodSandbox{asking, plain}, []*api.Container{missed}
	r.start()
	defer r.stop()
	found := make(chan Unmanaged, 10)
	p := New(quiet(), NewContainers(quiet()))
	p.Audit, p.Report = AuditStop, func(u Unmanaged) { found <- u }
	runPlugin(t, r, p)
	await(t, r.synced, "the registration")

	cmd := child(t, "")
	fd, err := unix.PidfdOpen(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	started := &api.Container{Id: id, PodSandboxId: "pod0", Name: "missed", State: api.ContainerState_CONTAINER_RUNNING, Pid: uint32(cmd.Process.Pid)}
	for ctr, pod := range map[*api.Container]*api.PodSandbox{placed: asking, other: plain, started: asking} {
		if err := r.nri.PostStartContainer(context.Background(), &api.PostStartContainerRequest{Pod: pod, Container: ctr}); err != nil {
			t.Fatal(err)
		}
	}
	if u := await(t, found, "a report"); u.Name != "missed" || u.PID != cmd.Process.Pid {
		t.Errorf("reported: %+v", u)
	}
	if !ended(fd, patience) {
		t.Error("it was not ended")
	}
	if len(found) > 0 {
		t.Errorf("also reported: %+v", <-found)
	}
}
