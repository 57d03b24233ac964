// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// moving is a scheduler whose moves take too long: the scheduler says so before the command
// sees the end of its time, or the command is interrupted.
type moving struct {
	fake
	interrupt context.CancelFunc
}

func (m *moving) Migrate(ctx context.Context, _ *api.MigrateRequest) (*api.MigrateResponse, error) {
	if m.interrupt != nil {
		m.interrupt()
		<-ctx.Done() // the command hangs up
	}
	return nil, context.DeadlineExceeded
}

// A move that takes too long for the command goes on, and so does the scheduler: the error says
// so, and how to see the end.
func TestMigratePastItsLimit(t *testing.T) {
	uid := uint32(1000)
	for want, req := range map[string]*api.MigrateRequest{
		`nvsharectl events -f --since 10m --type migrate --tenant "ml/train-a"`: {Container: "ml/train-a"},
		`nvsharectl events -f --since 10m --type migrate --tenant "user 1000"`:  {Uid: &uid},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		for _, m := range []*moving{{}, {interrupt: cancel}} {
			err := migrate(ctx, &rootFlags{runDir: serve(t, m)}, streams{}, req)
			var unreachable *api.UnreachableError
			if err == nil || errors.As(err, &unreachable) || !strings.Contains(err.Error(), "goes on") || !strings.Contains(err.Error(), want) {
				t.Errorf("interrupted %v: %v", m.interrupt != nil, err)
			}
		}
		cancel()
	}
}

func (m *moving) Drain(context.Context, *api.DrainRequest) (*api.DrainResponse, error) {
	return &api.DrainResponse{Uuid: "GPU-1", Index: 1, Tenants: []string{"a", "b"}, Uses: []*api.DrainTenant{{Container: &api.Container{Id: "a"}}, {Container: &api.Container{Id: "b"}}}}, nil
}

// Who ends a drain hears what goes on, and what stays, and not that no scheduler answers.
func TestDrainIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out, errs bytes.Buffer
	code := run(ctx, []string{"drain", "--gpu", "1", "--run-dir", serve(t, &moving{interrupt: cancel})}, streams{out: &out, err: &errs})
	if moves := strings.Count(out.String(), "has not arrived yet"); code != exitFailed || moves != 1 || !strings.Contains(errs.String(), "GPU 1 stays drained") || strings.Contains(out.String()+errs.String(), "connect") {
		t.Errorf("exit %d\n%s%s", code, &out, &errs)
	}
}
