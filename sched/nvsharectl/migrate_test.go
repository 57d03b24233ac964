// SPDX-License-Identifier: Apache-2.0

package main

import (
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
		`nvsharectl events -f --type migrate --tenant "ml/train-a"`: {Container: "ml/train-a"},
		`nvsharectl events -f --type migrate --tenant "user 1000"`:  {Uid: &uid},
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
