// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// moving is a scheduler whose moves take for ever.
type moving struct{ fake }

func (m *moving) Migrate(ctx context.Context, _ *api.MigrateRequest) (*api.MigrateResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// A move that takes too long for the command goes on, and so does the scheduler: the error says
// so, and how to see the end.
func TestMigratePastItsLimit(t *testing.T) {
	root := &rootFlags{runDir: serve(t, &moving{})}
	uid := uint32(1000)
	for want, req := range map[string]*api.MigrateRequest{
		`nvsharectl events -f --type migrate --tenant "ml/train-a"`: {Container: "ml/train-a"},
		`nvsharectl events -f --type migrate --tenant "user 1000"`:  {Uid: &uid},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		err := migrate(ctx, root, streams{}, req)
		cancel()
		var unreachable *api.UnreachableError
		if err == nil || errors.As(err, &unreachable) || !strings.Contains(err.Error(), "goes on") || !strings.Contains(err.Error(), want) {
			t.Errorf("%v", err)
		}
	}
}
