// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
)

// overlapSite is a scheduler with the MPS programs of the simulated GPU.
func overlapSite(t *testing.T, change func(*Options)) sharing {
	t.Helper()
	sim := os.Getenv("NVSHARE_TEST_SIMGPU")
	if sim == "" {
		t.Skip("NVSHARE_TEST_SIMGPU is not set: no simulated MPS")
	}
	dir, err := os.MkdirTemp("", "ov") // a short name: sockets are made in it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var left []int // pids of groups of a test that failed, which outlive a scheduler
	t.Cleanup(func() {
		for _, pid := range left {
			if pid != 0 {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	s := start(t, dir, func(o *Options) {
		o.MPSControl = func() (string, error) { return filepath.Join(sim, "bin", "nvidia-cuda-mps-control"), nil }
		o.OverlapStarter = []string{"/usr/bin/env", roleEnv + "=overlap", self}
		if change != nil {
			change(o)
		}
	})
	t.Cleanup(func() {
		if s.overlap == nil {
			return
		}
		for _, group := range s.overlap.States() {
			left = append(left, group.Daemon, group.Server)
		}
	})
	return sharing{s, dial(t, s)}
}

// awaitNoGroups waits until the last group and its directory are gone.
func (s sharing) awaitNoGroups(dir string) {
	s.t.Helper()
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(dir); os.IsNotExist(err) && len(s.overlap.States()) == 0 {
			return
		}
		if time.Now().After(end) {
			s.t.Fatalf("left after the last member: %+v", s.overlap.States())
		}
	}
}

// The programs of a group are one tenant of their GPU, with the shares of all. Its MPS daemon
// runs when the first program starts, and leaves nothing when the last one has ended.
func TestOverlapGroup(t *testing.T) {
	s := overlapSite(t, nil)
	ctx := context.Background()
	a, b := firstOf(t, whole("a")), firstOf(t, whole("b"))
	run := func(pid int, id string, terms api.Terms, gpus ...string) error {
		c := &api.Container{Id: whole(id), Name: id, Engine: node.RunEngine, Gpus: gpus}
		c.SetTerms(terms)
		_, err := s.DescribeContainer(ctx, &api.DescribeContainerRequest{Pid: uint32(pid), Container: c})
		return err
	}
	if err := run(a.Process.Pid, "a", api.Terms{Overlap: "g", CoreRequest: 20, CoreLimit: 50}); status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "exactly one GPU") {
		t.Errorf("on two GPUs: %v", err)
	}
	if err := run(a.Process.Pid, "a", api.Terms{Overlap: "g", CoreRequest: 20, CoreLimit: 50}, gpuA.UUID); err != nil {
		t.Fatal(err)
	}
	states := s.overlap.States()
	if len(states) != 1 || !states[0].Running {
		t.Fatalf("described, and the group is %+v", states)
	}
	if err := run(b.Process.Pid, "b", api.Terms{Overlap: "g", CoreRequest: 10, Weight: 300}, gpuA.UUID); err != nil {
		t.Fatal(err)
	}
	name := tenants.OverlapTenant + api.OverlapIn("", uint32(os.Getuid()), "g")
	for _, id := range []string{"a", "b"} {
		if got, want := s.told(0, peer.ContainerAccount+whole(id)), (sched.Share{Overlap: name, Request: 30, Weight: 300}); got != want {
			t.Errorf("%s has %+v, want %+v: a member's limit is not the group's", id, got, want)
		}
	}
	none := ""
	if _, err := s.SetShare(ctx, &api.SetShareRequest{Container: whole("a"), Overlap: &none}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("taken out of the group while it runs: %v", err)
	}
	_ = a.Process.Kill()
	_ = b.Process.Kill()
	s.awaitNoGroups(states[0].Group.Dir)
	s.await("the events of its life", func(*api.StatusResponse) bool { // the last one is told after the group is gone
		var said []string
		for _, e := range events(t, s.Conn, &api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_OVERLAP}}).Events {
			said = append(said, e.Reason)
		}
		text := strings.Join(said, "|")
		return strings.Contains(text, fmt.Sprintf("overlap group g of user %d: runs", os.Getuid())) && strings.Contains(text, ": ended")
	})
}

// A program whose group cannot be is refused with the reason.
func TestNoOverlapGroup(t *testing.T) {
	for want, change := range map[string]func(*Options){
		"ended at its start":     func(o *Options) { o.MPSControl = func() (string, error) { return "/bin/false", nil } },
		"not possible with this": func(o *Options) { o.MPSControl = nil },
	} {
		s := overlapSite(t, change)
		id := map[string]string{"ended at its start": "d", "not possible with this": "e"}[want]
		first := firstOf(t, whole(id))
		c := &api.Container{Id: whole(id), Name: "a", Engine: node.RunEngine, Gpus: []string{gpuA.UUID}, Share: &api.Share{Overlap: "g"}}
		_, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{Pid: uint32(first.Process.Pid), Container: c})
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), `program "a": `) || strings.Contains(err.Error(), "container") {
			t.Errorf("%v, want %q, of a program that is in no container", err, want)
		}
		if group := fmt.Sprintf("overlap group g of user %d: ", os.Getuid()); id == "d" && !strings.Contains(err.Error(), group) {
			t.Errorf("%v, want %q", err, group)
		}
		s.stop()
	}
}

// The MPS server of a group is on the GPU and no client: it is no stranger either.
func TestServerIsNoStranger(t *testing.T) {
	var nvml driver
	s := overlapSite(t, func(o *Options) { o.Sample = nvml.sample })
	first := firstOf(t, whole("f"))
	c := &api.Container{Id: whole("f"), Name: "a", Engine: node.RunEngine, Gpus: []string{gpuA.UUID}, Share: &api.Share{Overlap: "g"}}
	if _, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{Pid: uint32(first.Process.Pid), Container: c}); err != nil {
		t.Fatal(err)
	}
	member, err := net.Dial("unix", filepath.Join(s.overlap.States()[0].Group.Dir, api.OverlapPipe, "control"))
	if err != nil {
		t.Fatal(err)
	}
	defer member.Close()
	if _, err := member.Write([]byte("member\n")); err != nil {
		t.Fatal(err)
	}
	server := 0
	for end := time.Now().Add(patience); server == 0; time.Sleep(10 * time.Millisecond) {
		if server = s.overlap.States()[0].Server; time.Now().After(end) {
			t.Fatal("no server")
		}
	}
	stranger := uint32(first.Process.Pid)
	nvml.set(nil, map[uint32]uint64{uint32(server): 1 << 20, stranger: 1 << 20})
	if err := s.Ask(context.Background(), func() { s.watch.LookPause = time.Millisecond; s.watch.Look.Set(loop.Now()) }); err != nil {
		t.Fatal(err)
	}
	r := s.await("the stranger is seen", func(r *api.StatusResponse) bool { return len(r.Unmanaged) > 0 })
	if len(r.Unmanaged) != 1 || r.Unmanaged[0].Pid != stranger {
		t.Errorf("strangers %v, want only %d", r.Unmanaged, stranger)
	}
	dir := s.overlap.States()[0].Group.Dir
	_ = first.Process.Kill()
	s.awaitNoGroups(dir) // the daemon would outlive the test
}

// The hook of a container waits for the plugin's description, and gets the directory of a
// group that runs, or the reason.
func TestJoinOverlap(t *testing.T) {
	began := time.Now()
	s := overlapSite(t, func(o *Options) { o.Rules.Overlap = []string{"prod"} })
	ctx := context.Background()
	describe := func(id, namespace string) error {
		c := &api.Container{Id: whole(id), Name: id, Namespace: namespace, Uid: uint32(os.Getuid()), Gpus: []string{gpuA.UUID}, Share: &api.Share{Overlap: "g"}}
		_, err := s.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: c})
		return err
	}
	type answer struct {
		r   *api.JoinOverlapResponse
		err error
	}
	joined := make(chan answer, 1)
	early := dial(t, s.scheduler)
	go func() {
		r, err := early.JoinOverlap(ctx, &api.JoinOverlapRequest{Id: whole("a"), Overlap: "g"})
		joined <- answer{r, err}
	}()
	if err := describe("a", "prod"); err != nil {
		t.Fatal(err)
	}
	a := <-joined
	if a.err != nil {
		t.Fatal(a.err)
	}
	state := s.overlap.States()[0]
	if got := filepath.Join(s.Opts.RunDir, a.r.Dir); !state.Running || got != state.Group.Dir || !state.Group.Own {
		t.Errorf("joined %s, and the group is %+v", got, state)
	}
	if err := describe("b", "dev"); status.Code(err) != codes.InvalidArgument {
		t.Errorf("of a namespace without groups: %v", err)
	}
	for id, want := range map[string]string{"b": "--overlap-namespaces", "a": ""} {
		_, err := s.JoinOverlap(ctx, &api.JoinOverlapRequest{Id: whole(id), Overlap: "g"})
		if want == "" && err != nil || want != "" && (status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), want)) {
			t.Errorf("join %s: %v", id, err)
		}
	}
	// A fault is an event of each member.
	if err := syscall.Kill(state.Daemon, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for seen := false; !seen; {
		r, err := s.Events(ctx, &api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_OVERLAP}})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range r.Events {
			seen = seen || strings.Contains(e.Reason, "daemon ended") && e.Container.GetId() == whole("a") && e.Uuid == gpuA.UUID
		}
		if time.Since(began) > patience {
			t.Fatalf("no event of the member: %v", r.Events)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if _, err := s.ForgetContainer(ctx, &api.ForgetContainerRequest{Id: whole("a")}); err != nil {
		t.Fatal(err)
	}
	s.awaitNoGroups(state.Group.Dir)
}
