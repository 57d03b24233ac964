// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"net"
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

// unmoving is a scheduler that moves nobody.
type unmoving struct {
	sched.ControlService
	why error
}

func (u unmoving) Migrate(context.Context, *sched.MigrateRequest) (*sched.MigrateResponse, error) {
	return nil, u.why
}

// Why a container did not move is said in the error of a pod: in the scheduler's words. A move
// that takes too long for the plugin goes on.
func TestMoverSaysWhy(t *testing.T) {
	for want, why := range map[string]error{
		"ml/a has not moved to GPU 1: it has ended":  status.Error(codes.FailedPrecondition, "ml/a has not moved to GPU 1: it has ended"),
		"it has not arrived yet, and goes on moving": context.DeadlineExceeded,
	} {
		dir := t.TempDir()
		serveControl(t, dir, unmoving{why: why})
		if err := mover(dir)(t.Context(), "a", "GPU-x"); err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
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
