//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// evidence is what the simulated GPU recorded in a window of time.
type evidence struct {
	trace  judge.Trace
	report judge.Report
}

// observe reads the record from a time until now; 0 is the record's beginning.
func observe(t *testing.T, from int64) *evidence {
	t.Helper()
	return observeIn(t, node.SimGPU, from)
}

func observeIn(t *testing.T, simGPU string, from int64) *evidence {
	t.Helper()
	trace := must(judge.ReadLogSince(filepath.Join(simGPU, "run", "log"), from))(t)
	if trace.Lost > 0 {
		t.Fatalf("the log has lost %d records: it is too small for this suite", trace.Lost)
	}
	return &evidence{trace, judge.Judge(trace, judge.Options{Since: from, Until: judge.Now()})}
}

// tenant returns a tenant's usage of the first GPU; zero if the tenant did not use it.
func (e *evidence) tenant(name string) judge.Usage {
	for _, gpu := range e.report.GPUs {
		for _, u := range gpu.Tenants {
			if u.Tenant == name {
				return u
			}
		}
	}
	return judge.Usage{}
}

// hasTurns is an error until the tenant has had n turns.
func (e *evidence) hasTurns(tenant string, n int) error {
	if got := e.tenant(tenant).Turns; got < n {
		return fmt.Errorf("%s has had %d turns", tenant, got)
	}
	return nil
}

func (e *evidence) noOverlap(t *testing.T) {
	t.Helper()
	for _, gpu := range e.report.GPUs {
		if o := gpu.Overlaps; o.Count > 0 {
			t.Errorf("%s: %d overlaps, %v in all, the first: %+v", gpu.GPU, o.Count, time.Duration(o.Total), *o.First)
		}
	}
}

// noOverlapWithout is noOverlap for all tenants except one.
func (e *evidence) noOverlapWithout(t *testing.T, tenant string, from, until int64) {
	t.Helper()
	var rest judge.Trace
	for _, iv := range e.trace.Intervals {
		if iv.Process.Tenant != tenant {
			rest.Intervals = append(rest.Intervals, iv)
		}
	}
	rest.Lives = e.trace.Lives
	(&evidence{rest, judge.Judge(rest, judge.Options{Since: from, Until: until})}).noOverlap(t)
}

// awaitTurns waits until the tenant has had n turns since from.
func awaitTurns(t *testing.T, ctx context.Context, tenant string, from int64, n int) {
	t.Helper()
	awaitEvidence(t, ctx, tenant+" to take turns", from, func(e *evidence) error { return e.hasTurns(tenant, n) })
}

// readEvery is the pace at which the log is read, which takes CPU time.
const readEvery = 100 * time.Millisecond

func awaitEvidence(t *testing.T, ctx context.Context, what string, from int64, ok func(*evidence) error) {
	t.Helper()
	check(t, node.UntilEvery(ctx, readEvery, what, func() error { return ok(observe(t, from)) }))
}
