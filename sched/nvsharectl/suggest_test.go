// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
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

func (s *strict) Suspend(_ context.Context, req *api.SuspendRequest) (*api.SuspendResponse, error) {
	if s.asked = req; req.Uid != nil {
		return &api.SuspendResponse{Uid: *req.Uid}, nil
	}
	return nil, status.Error(codes.NotFound, "container: none has this name")
}

func (s *strict) Migrate(context.Context, *api.MigrateRequest) (*api.MigrateResponse, error) {
	return nil, status.Error(codes.NotFound, "container: none has this name")
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
