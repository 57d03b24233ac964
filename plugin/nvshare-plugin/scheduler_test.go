// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/containerd/ttrpc"
	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/plugin"
	sched "github.com/nvshare/nvshare/sched/api"
)

// serveControl serves a scheduler's control socket, as long as the test runs.
func serveControl(t *testing.T, dir string, s sched.ControlService) {
	t.Helper()
	l, err := net.Listen("unix", sched.SocketPath(dir))
	if err != nil {
		t.Fatal(err)
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	sched.RegisterControlService(server, s)
	go server.Serve(context.Background(), l)
	t.Cleanup(func() { server.Close() })
}

// migs is a scheduler that knows a MIG device by its UUID.
type migs struct {
	sched.ControlService
	gpus *[]*sched.GPU
	told chan []string
}

func (m migs) Status(context.Context, *sched.StatusRequest) (*sched.StatusResponse, error) {
	return &sched.StatusResponse{Gpus: *m.gpus}, nil
}

func (m migs) DescribeContainer(_ context.Context, r *sched.DescribeContainerRequest) (*sched.DescribeContainerResponse, error) {
	m.told <- r.Container.Gpus
	return &sched.DescribeContainerResponse{}, nil
}

// In a pod the plugin knows MIG devices by the driver's numbers, and the scheduler by UUIDs.
func TestMIGDevicesHaveTwoNames(t *testing.T) {
	const uuid, numbers = "MIG-11111111-2222-3333-4444-555555555555", "MIG-GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52:9:0"
	gpu := &sched.GPU{Uuid: uuid, Mig: numbers, MemoryBytes: 10 << 30, Drained: true, Promises: []*sched.Promise{{Uid: 7, CoreRequest: 40}}}
	m := migs{gpus: &[]*sched.GPU{gpu}, told: make(chan []string, 1)}
	dir := t.TempDir()
	serveControl(t, dir, m)
	s, err := dialScheduler(t.Context(), dir, quiet(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	state, err := s.State(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{uuid, numbers} {
		promised := slices.ContainsFunc(state.Promises, func(p plugin.Promise) bool { return p.UUID == name && p.Percent == 40 })
		if g := state.GPUs[name]; g.Memory != 10<<30 || !g.Drained || !promised {
			t.Errorf("%s: %+v, promised %v", name, g, promised)
		}
		if err := s.Describe(t.Context(), plugin.Container{ID: "a", GPUs: []string{name}}); err != nil {
			t.Fatal(err)
		}
		if got := <-m.told; !slices.Equal(got, []string{uuid}) {
			t.Errorf("of a container on %s the scheduler is told %v", name, got)
		}
	}
	*m.gpus = nil // what was said of containers may be wrong now
	if _, err := s.State(t.Context()); err == nil {
		t.Error("the device is gone, and nobody notices")
	}
}

// crowded is a scheduler without room for descriptions, until it has some.
type crowded struct {
	sched.ControlService
	room *atomic.Bool
}

func (c crowded) DescribeContainer(context.Context, *sched.DescribeContainerRequest) (*sched.DescribeContainerResponse, error) {
	if !c.room.Load() {
		return nil, status.Error(codes.ResourceExhausted, "4096 are described already")
	}
	return &sched.DescribeContainerResponse{}, nil
}

// A container for which the scheduler has no room was not told: it is tried again, and said once.
func TestNoRoomIsNotTold(t *testing.T) {
	dir, room := t.TempDir(), &atomic.Bool{}
	serveControl(t, dir, crowded{room: room})
	log := logrus.New()
	log.SetOutput(t.Output())
	lines := test.NewLocal(log)
	s, err := dialScheduler(t.Context(), dir, log, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c := plugin.Container{ID: "a"}
	for range 3 {
		if err := s.Describe(t.Context(), c); !errors.Is(err, plugin.ErrFull) {
			t.Errorf("without room: %v", err)
		}
	}
	if n := len(lines.AllEntries()); n != 1 {
		t.Errorf("it is said %d times", n)
	}
	room.Store(true)
	if err := s.Describe(t.Context(), c); err != nil {
		t.Errorf("with room: %v", err)
	}
}

// What the host can spare now is no promise: it changes all the time, and so would what claims may ask for.
func TestSpareHostMemoryIsNotPromised(t *testing.T) {
	s := &scheduler{sliced: map[string]bool{}}
	for auto, want := range map[bool]uint64{false: 1 << 30, true: 0} {
		g := &sched.GPU{Swap: &sched.Swap{ArenaLimitBytes: 1 << 30, ArenaAuto: auto}}
		if got := s.stateOf(g); got.Host != want || !got.Swap {
			t.Errorf("auto %v: %+v", auto, got)
		}
	}
}
