// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"net"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
