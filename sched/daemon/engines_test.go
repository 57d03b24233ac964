// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// firstOf starts a process in a cgroup that has the name of a container, as engines do.
func firstOf(t *testing.T, id string) *exec.Cmd {
	t.Helper()
	finder, err := peer.NewFinder()
	if err != nil {
		t.Fatal(err)
	}
	unified, _ := filepath.Glob("/sys/fs/cgroup/cgroup.procs")
	mounts, _ := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	for _, procs := range append(unified, mounts...) {
		dir := filepath.Join(filepath.Dir(procs), "docker-"+id+".scope")
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() { // the kernel takes a moment after the process's end
			for end := time.Now().Add(patience); os.Remove(dir) != nil && time.Now().Before(end); time.Sleep(time.Millisecond) {
			}
		})
		cmd := exec.Command("sleep", "1000000")
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
		if os.WriteFile(dir+"/cgroup.procs", []byte(strconv.Itoa(cmd.Process.Pid)), 0) != nil {
			continue // cpuset of v1 wants more
		}
		if p, err := finder.FindPID(int32(cmd.Process.Pid)); err == nil {
			p.Close()
			if p.Container == id {
				return cmd
			}
		}
	}
	t.Skip("no cgroup can be made here")
	return nil
}

// What an OCI hook says of a container holds until the container's first process is
// dead, also over a restart of the scheduler.
func TestContainerOfAnEngine(t *testing.T) {
	dir := t.TempDir()
	s := newSharing(t, dir)
	a, b := firstOf(t, whole("a")), firstOf(t, whole("b"))
	describe := func(first *exec.Cmd, id, name string, request uint32, warnings ...string) error {
		_, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{
			Pid: uint32(first.Process.Pid), Warnings: warnings, Container: &api.Container{
				Id: whole(id), Name: name, Engine: "podman", MemoryLimitBytes: gib, Share: &api.Share{CoreRequest: request}, Gpus: []string{gpuA.UUID}}})
		return err
	}
	if err := describe(a, "a", "train", 60, "annotations without effect: x"); err != nil {
		t.Fatal(err)
	}
	account := peer.ContainerAccount + whole("a")
	if got := s.told(0, account); got != (sched.Share{Request: 60}) {
		t.Errorf("in force: %v", got)
	}
	if err := describe(b, "b", "serve", 50); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "60 % are already, to 1 tenant (") || strings.Contains(err.Error(), "train") {
		t.Errorf("110 %% are promised: %v", err)
	}
	if err := describe(b, "c", "poser", 1); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "count to container b0") {
		t.Errorf("another container's process: %v", err)
	}
	drainGPU(t, s.scheduler, &api.DrainRequest{Gpu: "0"})
	if err := describe(b, "b", "serve", 40); status.Code(err) != codes.Aborted || !strings.Contains(err.Error(), "GPU 0 is drained") {
		t.Errorf("on a drained GPU: %v", err)
	}
	drainGPU(t, s.scheduler, &api.DrainRequest{Gpu: "0", Undrain: true})
	if err := describe(b, "b", "serve", 40); err != nil {
		t.Error(err)
	}
	found, refused := false, 0
	events, err := s.Events(context.Background(), &api.EventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range events.Events {
		found = found || e.Type == api.EventType_EVENT_TYPE_WARNING && e.Container.GetName() == "train" && e.Reason == "annotations without effect: x"
	}
	if !found {
		t.Errorf("the warning is no event: %v", events)
	}
	// crun keeps for itself what a hook says.
	for _, says := range []string{"60 % are already", "count to container b0", "GPU 0 is drained"} {
		for _, e := range events.Events {
			if e.Type == api.EventType_EVENT_TYPE_WARNING && strings.HasPrefix(e.Reason, "refused: ") && strings.Contains(e.Reason, says) {
				refused++
			}
		}
	}
	if refused != 3 {
		t.Errorf("%d of 3 refusals are events: %v", refused, events)
	}
	// By its name, as its user knows the container.
	weight := uint32(300)
	if _, err := s.SetShare(context.Background(), &api.SetShareRequest{Container: "train", Weight: &weight}); err != nil {
		t.Error(err)
	}

	s.stop()
	_ = b.Process.Kill()
	_ = b.Wait()
	s = newSharing(t, dir)
	if got := s.told(0, account); got != (sched.Share{Request: 60, Weight: 300}) {
		t.Errorf("in force after a restart: %v", got)
	}
	r := s.await("the other container is forgotten", func(r *api.StatusResponse) bool { return len(r.Containers) == 1 })
	if c := r.Containers[0]; c.Name != "train" || c.Engine != "podman" || c.MemoryLimitBytes != gib {
		t.Errorf("restored: %v", c)
	}
	_ = a.Process.Kill()
	_ = a.Wait()
	s.await("the container is forgotten", func(r *api.StatusResponse) bool { return len(r.Containers) == 0 })
	if got := s.told(0, account); got != (sched.Share{}) {
		t.Errorf("in force after its end: %v", got)
	}
}

// What a batch system says of a job holds from before its first process until the batch system says
// that it has ended, also over a restart.
func TestJobOfABatchSystem(t *testing.T) {
	dir := t.TempDir()
	s := newSharing(t, dir)
	account := peer.ContainerAccount + "job_71"
	if _, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{Container: &api.Container{
		Id: "job_71", Name: "job_71", Engine: "slurm", MemoryLimitBytes: gib, Share: &api.Share{CoreRequest: 25}, Gpus: []string{gpuA.UUID}}}); err != nil {
		t.Fatal(err)
	}
	for _, when := range []string{"now", "after a restart"} {
		if got := s.told(0, account); got != (sched.Share{Request: 25}) {
			t.Errorf("%s in force: %v", when, got)
		}
		s.await("it is known", func(r *api.StatusResponse) bool {
			return len(r.Containers) == 1 && r.Containers[0].Engine == "slurm" && r.Containers[0].MemoryLimitBytes == gib
		})
		if when == "now" {
			s.stop()
			s = newSharing(t, dir)
		}
	}
	if _, err := s.ForgetContainer(context.Background(), &api.ForgetContainerRequest{Id: "job_71"}); err != nil {
		t.Fatal(err)
	}
	s.await("it is forgotten", func(r *api.StatusResponse) bool { return len(r.Containers) == 0 })
	if got := s.told(0, account); got != (sched.Share{}) {
		t.Errorf("in force after its end: %v", got)
	}
}
