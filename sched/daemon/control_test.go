// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/wire"
)

func dial(t *testing.T, s *scheduler) *api.Conn {
	t.Helper()
	c, err := api.Dial(context.Background(), s.dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestStatus(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p, a, e := newHolder(t, s)
	_, b := newClient(t, s)
	b.request()
	a.send(wire.Frame{Type: wire.TypeStats, Stats: wire.Stats{Calls: 5, Waits: 1, WaitNs: 2, MemBytes: 3, MemPeak: 4}})
	r := s.await("both clients are seen", func(r *api.StatusResponse) bool {
		return stateOf(r, b.id) == api.ClientState_CLIENT_STATE_WAITING && r.Gpus[0].Clients[0].Calls == 5
	})
	if len(r.Gpus) != 2 || r.Gpus[0].Uuid != gpuA.UUID || r.Gpus[0].Name != gpuA.Name || r.Gpus[0].MemoryBytes != gpuA.MemoryBytes ||
		r.Gpus[0].Epoch != e || r.Gpus[0].Grants != 1 || r.Clients != 2 || r.Connections != 2 || r.Version != "test" || len(r.Problems) != 0 {
		t.Errorf("status %v", r)
	}
	c := r.Gpus[0].Clients[0]
	want := &api.Client{
		Id: a.id, Pid: uint32(p.cmd.Process.Pid), Uid: uint32(os.Getuid()), State: api.ClientState_CLIENT_STATE_HOLDING,
		Epoch: e, Connected: true, Grants: 1, Calls: 5, Waits: 1, WaitNs: 2, MemoryBytes: 3, MemoryPeakBytes: 4,
		Interposed: 3, ShimVersion: "0.1.0",
		Command: c.Command, Container: c.Container, SinceNs: c.SinceNs, HeldNs: c.HeldNs, WaitMaxNs: c.WaitMaxNs,
	}
	if !proto.Equal(c, want) || c.Command == "" || c.SinceNs <= 0 || c.HeldNs <= 0 {
		t.Errorf("holder %v, want %v", c, want)
	}
	if w := r.Gpus[0].Clients[1]; w.SinceNs <= 0 || w.WaitMaxNs <= 0 {
		t.Errorf("waiter %v", w)
	}
}

// A client whose self-proof failed is a problem, and says who it is.
func TestBypassIsReported(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	c := newProc(t, s.dir, 0).connect()
	f := registerFrame()
	f.Register.Bypassed = 2
	c.send(f)
	c.expect(wire.TypeWelcome)
	c.attach(0, gpuA, 0, 0)
	r := s.status()
	if len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "2 entry points") || api.CodeOf(r, 0) != api.ProblemCode_PROBLEM_CODE_BYPASS {
		t.Errorf("problems %q, %v", r.Problems, r.ProblemCodes)
	}
}

func TestSet(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	c := dial(t, s)
	ctx := context.Background()
	_, a, _ := newHolder(t, s)
	_, b := newClient(t, s)
	b.request()

	// A shorter quantum counts for the grant that runs.
	r, err := c.Set(ctx, &api.SetRequest{Gpu: "0", QuantumNs: int64(sched.MinQuantum)})
	if err != nil || len(r.Changes) != 3 || r.Changes[0].Uuid != gpuA.UUID || r.Changes[0].Name != api.TurnLengthSetting ||
		r.Changes[0].Old != sched.MaxQuantum.String() || r.Changes[0].New != sched.MinQuantum.String() {
		t.Errorf("set one GPU: %v, %v", r, err)
	}
	a.expect(wire.TypeRevoke)

	r, err = c.Set(ctx, &api.SetRequest{QuantumNs: int64(time.Second), Mode: api.Mode_MODE_CONCURRENT})
	if err != nil || len(r.Changes) != 9 {
		t.Errorf("set all: %v, %v", r, err)
	}
	for _, g := range s.status().Gpus {
		if g.QuantumNs != int64(time.Second) || g.Mode != api.Mode_MODE_CONCURRENT {
			t.Errorf("GPU %d: %v", g.Index, g)
		}
	}
	for name, tc := range map[string]struct {
		req  *api.SetRequest
		code codes.Code
	}{
		"no such GPU":    {&api.SetRequest{Gpu: "7", QuantumNs: 1e9}, codes.NotFound},
		"too short":      {&api.SetRequest{QuantumNs: 1}, codes.InvalidArgument},
		"negative":       {&api.SetRequest{QuantumNs: -1e9}, codes.InvalidArgument},
		"too long":       {&api.SetRequest{QuantumNs: int64(sched.MaxQuantum) + 1}, codes.InvalidArgument},
		"unknown mode":   {&api.SetRequest{Mode: 9}, codes.InvalidArgument},
		"one good value": {&api.SetRequest{QuantumNs: 2e9, Mode: 9}, codes.InvalidArgument},
	} {
		if _, err := c.Set(ctx, tc.req); status.Code(err) != tc.code {
			t.Errorf("%s: %v, want %v", name, err, tc.code)
		}
	}
	if g := s.status().Gpus[0]; g.QuantumNs != int64(time.Second) {
		t.Errorf("a refused Set changed the quantum to %v", time.Duration(g.QuantumNs))
	}
}

func TestContainers(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	c := dial(t, s)
	ctx := context.Background()
	names := &api.Container{Id: "abc", Name: "main", Namespace: "ml", Pod: "train", PodUid: "u"}
	if _, err := c.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: names}); err != nil {
		t.Fatal(err)
	}
	_, a := newClient(t, s)
	if err := s.Ask(ctx, func() { s.Clients[base.ClientID(a.id)].Container = "abc" }); err != nil { // the cgroup is a machine's own
		t.Fatal(err)
	}
	r := s.status()
	if len(r.Containers) != 1 || !proto.Equal(r.Containers[0], names) || !proto.Equal(r.Gpus[0].Clients[0].Container, names) {
		t.Errorf("described as %v and %v", r.Containers, r.Gpus[0].Clients[0].Container)
	}
	for range 2 {
		if _, err := c.ForgetContainer(ctx, &api.ForgetContainerRequest{Id: "abc"}); err != nil {
			t.Error(err)
		}
	}
	if r := s.status(); len(r.Containers) != 0 {
		t.Errorf("not forgotten: %v", r.Containers)
	}
	for name, tc := range map[string]struct {
		c    *api.Container
		code codes.Code
	}{
		"nil":       {nil, codes.InvalidArgument},
		"no id":     {&api.Container{Name: "x"}, codes.InvalidArgument},
		"long name": {&api.Container{Id: "x", Name: strings.Repeat("x", maxName+1)}, codes.InvalidArgument},
	} {
		if _, err := c.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: tc.c}); status.Code(err) != tc.code {
			t.Errorf("%s: %v, want %v", name, err, tc.code)
		}
	}
}

// With as many containers as there can be, and the longest names, the status is
// larger than a message.
func TestStatusIsLarge(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	c := dial(t, s)
	ctx := context.Background()
	name := func(i int) string { return fmt.Sprintf("%04d%s", i, strings.Repeat("x", maxName-4)) }
	for i := range maxContainers {
		if _, err := c.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: &api.Container{
			Id: name(i), Name: name(0), Namespace: name(0), Pod: name(0), PodUid: name(0),
		}}); err != nil {
			t.Fatal(err)
		}
	}
	ask := func() {
		r, err := c.Status(ctx, &api.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if n := proto.Size(r); len(r.Containers) != maxContainers || r.Containers[maxContainers-1].Id != name(maxContainers-1) || n <= 4<<20 {
			t.Errorf("%d containers in %d bytes", len(r.Containers), n)
		}
	}
	ask()

	if r, err := c.ControlService.Status(ctx, &api.StatusRequest{}); err != nil || len(r.Packed) == 0 || proto.Size(r) > maxAnswer {
		t.Errorf("it is not packed: %d bytes, %v", proto.Size(r), err)
	}
}

// What the plugin reports is a problem until it reports something else, or no more.
func TestPluginReports(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	c := dial(t, s)
	report := func(problems ...string) error {
		_, err := c.ReportPlugin(context.Background(), &api.ReportPluginRequest{Problems: problems})
		return err
	}
	if err := report("the disk is full"); err != nil {
		t.Fatal(err)
	}
	s.await("the problem", func(r *api.StatusResponse) bool {
		return len(r.Problems) == 1 && strings.Contains(r.Problems[0], "nvshare-plugin: the disk is full")
	})
	if err := report(); err != nil {
		t.Fatal(err)
	}
	s.await("no problem", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
	if err := report("again"); err != nil {
		t.Fatal(err)
	}
	if err := s.Ask(context.Background(), func() { s.pluginAt -= base.Time(reportLife) }); err != nil { // time passes
		t.Fatal(err)
	}
	if r := s.status(); len(r.Problems) != 0 {
		t.Errorf("the plugin is gone, its problems are %q", r.Problems)
	}
	if err := report(make([]string, maxReported+1)...); status.Code(err) != codes.InvalidArgument {
		t.Errorf("too many: %v", err)
	}
}

// All who ask within a moment have one answer, except who has changed something meanwhile: a
// command is followed by the status that it has led to.
func TestOneOverviewForAll(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	ctl := dial(t, s)
	if err := s.Ask(t.Context(), func() { s.overview().until = loop.Now().Add(patience) }); err != nil {
		t.Fatal(err)
	}
	at := s.status().UptimeNs
	newClient(t, s)
	snapshot, err := metricsSource{s.Daemon}.Snapshot(t.Context())
	page, pageErr := pageSource{s.Daemon}.Status(t.Context())
	if err := errors.Join(err, pageErr); err != nil || snapshot.Own != 0 {
		t.Fatal(snapshot, err)
	}
	for who, r := range map[string]*api.StatusResponse{"control": s.status(), "view": s.view(), "metrics": snapshot.Status, "page": page} {
		if r.UptimeNs != at || r.Clients != 0 {
			t.Errorf("%s: made at %d with %d clients, want that of %d, which has none", who, r.UptimeNs, r.Clients, at)
		}
	}
	if _, err := ctl.Set(t.Context(), &api.SetRequest{QuantumNs: int64(time.Second)}); err != nil {
		t.Fatal(err)
	}
	if r := s.status(); r.Gpus[0].QuantumNs != int64(time.Second) || r.Clients != 1 {
		t.Errorf("after a change: %v", r)
	}
}

// One answer lasts so long that those who ask have a small part of the loop's time.
func TestOverviewIsBounded(t *testing.T) {
	s := start(t, t.TempDir(), nil, func(d *Daemon) { d.overviewPart = overviewPart })
	for range 10 {
		if err := s.Ask(t.Context(), func() {
			s.latest = nil
			began := loop.Now()
			o := s.overview()
			made := loop.Now()
			if life := o.until.Sub(made); life > min(overviewPart*made.Sub(began), maxOverviewAge) || s.overview() != o && loop.Now() < o.until {
				t.Errorf("made in %v, used for %v", made.Sub(began), life)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
}
