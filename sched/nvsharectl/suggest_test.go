// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
)

// strict is a scheduler that knows no tenant by the name that it is given.
type strict struct {
	fake
	asked *api.SuspendRequest
}

func (s *strict) SetShare(context.Context, *api.SetShareRequest) (*api.SetShareResponse, error) {
	return nil, status.Error(codes.NotFound, "container: none has this name")
}

func (s *strict) Suspend(_ context.Context, req *api.SuspendRequest) (*api.SuspendResponse, error) {
	if s.asked = req; req.Uid != nil {
		return &api.SuspendResponse{Uid: *req.Uid}, nil
	}
	return nil, status.Error(codes.NotFound, "container: none has this name")
}

func (s *strict) Migrate(context.Context, *api.MigrateRequest) (*api.MigrateResponse, error) {
	return nil, status.Error(codes.NotFound, "container: none has this name")
}

// A name with a typo is answered with the tenant that was meant, if one is like it.
func TestLikeTenant(t *testing.T) {
	s := &strict{fake: fake{status: sample()}}
	dir := serve(t, s)
	for _, args := range []string{"set ml/trian-a/main --core-limit 25", "set --container ml/trian-a/main --core-limit 25", "suspend ml/trian-a/main", "migrate ml/trian-a/main"} {
		code, _, errs := ctl(append(strings.Fields(args), "--run-dir", dir)...)
		if want := "nvsharectl: container: none has this name (did you mean ml/train-a/main?)\n"; code != exitFailed || errs != want {
			t.Errorf("%s: exit %d, %q, want %q", args, code, errs, want)
		}
	}
	code, _, errs := ctl("suspend", "other", "--run-dir", dir)
	if want := "nvsharectl: container: none has this name\n"; code != exitFailed || errs != want {
		t.Errorf("exit %d, %q, want %q", code, errs, want)
	}
}

// noGPU is a scheduler that has no GPU 9.
type noGPU struct{ fake }

func (*noGPU) SetShare(context.Context, *api.SetShareRequest) (*api.SetShareResponse, error) {
	return nil, status.Error(codes.NotFound, `GPU "9": none`)
}

// It is the GPU that is not there: a tenant's name is no answer.
func TestLikeNoGPU(t *testing.T) {
	dir := serve(t, &noGPU{fake{status: sample()}})
	for _, tenant := range []string{"ml/train-a/main", "aaaa", "ml/trian-a/main"} {
		if _, _, errs := ctl("set", tenant, "--gpu", "9", "--core-limit", "25", "--run-dir", dir); errs != "nvsharectl: GPU \"9\": none\n" {
			t.Errorf("%s: %q", tenant, errs)
		}
	}
}

// A user is named by number, or as the status shows the user.
func TestUserAsTenant(t *testing.T) {
	s := &strict{fake: fake{status: sample()}}
	dir := serve(t, s)
	for _, name := range []string{"1000", "user 1000"} {
		if code, _, errs := ctl("suspend", name, "--run-dir", dir); code != exitOK || s.asked.GetUid() != 1000 {
			t.Errorf("%q: exit %d, %s, request %v", name, code, errs, s.asked)
		}
	}
}
