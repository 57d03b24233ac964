// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"flag"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"

	"github.com/nvshare/nvshare/sched/api"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// fake is a scheduler that answers what it was told to.
type fake struct {
	api.ControlService // other calls panic
	status             *api.StatusResponse
	set                *api.SetRequest
	changes            []*api.Change
	setShare           *api.SetShareRequest
	share              *api.SetShareResponse
	events             func(*api.EventsRequest) *api.EventsResponse
	later              []*api.StatusResponse // the answers after status
	asked              int
	err                error
}

func (f *fake) Status(context.Context, *api.StatusRequest) (*api.StatusResponse, error) {
	f.asked++
	if f.asked > 1 && len(f.later) > 0 {
		return f.later[min(f.asked-2, len(f.later)-1)], f.err
	}
	return f.status, f.err
}

func (f *fake) Events(_ context.Context, req *api.EventsRequest) (*api.EventsResponse, error) {
	if f.err != nil {
		return nil, f.err
	}
	if f.events == nil {
		return &api.EventsResponse{Next: req.Since, Run: req.Run}, nil
	}
	return f.events(req), nil
}

func (f *fake) Set(_ context.Context, req *api.SetRequest) (*api.SetResponse, error) {
	f.set = req
	return &api.SetResponse{Changes: f.changes}, f.err
}

func (f *fake) SetShare(_ context.Context, req *api.SetShareRequest) (*api.SetShareResponse, error) {
	f.setShare = req
	return f.share, f.err
}

// serve returns the fake's run directory.
func serve(t *testing.T, f api.ControlService) string {
	t.Helper()
	dir := t.TempDir()
	l, err := net.Listen("unix", api.SocketPath(dir))
	if err != nil {
		t.Fatal(err)
	}
	s, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	api.RegisterControlService(s, f)
	go func() { _ = s.Serve(context.Background(), l) }()
	t.Cleanup(func() { s.Close() })
	return dir
}

func ctl(args ...string) (code int, stdout, stderr string) {
	var out, err bytes.Buffer
	code = run(context.Background(), args, streams{out: &out, err: &err})
	return code, out.String(), err.String()
}

func client(id uint64, state api.ClientState, c *api.Container) *api.Client {
	return &api.Client{
		Id: id, Pid: 1000 + uint32(id), Uid: 1000, Command: "python3", Container: c, State: state, Connected: true,
		Grants: 12, HeldNs: 61_234_567_890, WaitMaxNs: 101_500_000, Calls: 123_456,
		Waits: 7, WaitNs: 500_000_000, MemoryBytes: 3 << 29, MemoryPeakBytes: 2 << 30,
		Interposed: 42, ShimVersion: "0.1.0",
	}
}

func sample() *api.StatusResponse {
	pod := func(name string) *api.Container {
		return &api.Container{Id: strings.Repeat(name[len(name)-1:], 64), Name: "main", Namespace: "ml", Pod: name, PodUid: "4d5c1f2e-0c1d-4a3b-9e8f-001122334455"}
	}
	holder := client(1, api.ClientState_CLIENT_STATE_HOLDING, pod("train-a"))
	holder.SinceNs, holder.Epoch = 45_600_000, 1<<60+7
	waiter := client(2, api.ClientState_CLIENT_STATE_WAITING, pod("train-b"))
	waiter.SinceNs = 12_345_678
	idle := client(3, api.ClientState_CLIENT_STATE_IDLE, &api.Container{})
	fenced := client(4, api.ClientState_CLIENT_STATE_FENCED, &api.Container{Id: strings.Repeat("c", 64)})
	fenced.SinceNs, fenced.Epoch, fenced.Connected = 120_000_000_000, 5, false
	fenced.Bypassed = 3
	holder.Preemptions = 5
	fenced.Command = "evil\x1b[2Jname"
	idle.Command = fenced.Command
	holder.ReservedBytes, waiter.ReservedBytes, idle.ReservedBytes = 3<<29, 2<<30, 4<<30
	holder.Container.MemoryLimitBytes = 8 << 30
	return &api.StatusResponse{
		Version: "0.1.0", UptimeNs: 3_723_400_000_000, Clients: 4, Connections: 3, Refused: 1, ProtocolErrors: 2,
		Gpus: []*api.GPU{{
			Index: 0, Uuid: "GPU-51600000-0000-4000-8000-000000000000", Name: "NVIDIA SimGPU", MemoryBytes: 16 << 30,
			Mode: api.Mode_MODE_EXCLUSIVE, QuantumNs: 100_000_000, GraceNs: 10_000_000_000, Epoch: 1<<60 + 7,
			Grants: 1234, Revokes: 1200, Fences: 1, Reclaims: 2, StaleReleases: 3, Preemptions: 9,
			Clients: []*api.Client{holder, waiter, idle},
			Memory: []*api.MemoryAccount{
				{Container: holder.Container, LimitBytes: 8 << 30, UsedBytes: 3328 << 20},
				{Container: waiter.Container, UsedBytes: 2 << 30},
				{Container: &api.Container{}, Uid: 1000, LimitBytes: 3 << 30, UsedBytes: 4 << 30},
			},
			EffectiveMode: api.Mode_MODE_EXCLUSIVE, Way: "turns", WayCode: "as-set", WayReason: "as set",
			Load: &api.Load{BusyPercent: 87, Watts: 312, Celsius: 64},
			Promises: []*api.Promise{
				{Container: pod("not-started"), CoreRequest: 60}, // where a pod was placed, and does not use it yet
				{Container: holder.Container, CoreRequest: 10},
			},
			Tenants: []*api.TenantUse{
				{Container: holder.Container, Clients: 1, PromisedPermille: 250, GotPermille: 251, UsedNs: 61e9, Grants: 12, WaitMaxNs: 101_500_000,
					WaitedPermille: 31, WaitMaxLatelyNs: 80_000_000, OutOfMemory: 2,
					Waits: &api.Spread{Count: 100, P50Ns: 50_000_000, P99Ns: 99_000_000},
					Share: &api.Share{CoreLimit: 25, CoreRequest: 10}},
				{Container: waiter.Container, Clients: 1, PromisedPermille: 500, GotPermille: 497, UsedNs: 122e9, Grants: 24, WaitMaxNs: 90_000_000, WaitedPermille: 503,
					Share: &api.Share{CoreLimit: 50, Weight: 200, Gang: "ml/ring"}, DebtNs: 12_000_000, ThrottledNs: 24_000_000},
				{Container: &api.Container{}, Uid: 1000, Clients: 1, PromisedPermille: 333, Share: &api.Share{Priority: api.Priority_PRIORITY_LATENCY}},
				{Container: &api.Container{Id: strings.Repeat("d", 64)}, DebtNs: 1_500_000_000},
			},
		}, {
			Index: 1, Uuid: "GPU-51600000-0000-4000-8000-000000000001", Name: "NVIDIA SimGPU", MemoryBytes: 16 << 30,
			Mode: api.Mode_MODE_AUTO, EffectiveMode: api.Mode_MODE_CONCURRENT, Way: "driver", WayCode: "gaps", WayReason: "tenants leave the GPU idle in their turns: at the same time they get more done",
			Refused:   []*api.WayRefusal{{Way: "slices", Code: "slices-refused", Reason: "client 4 cannot be sliced: time slices: driver refused"}},
			QuantumNs: 30_000_000_000, GraceNs: 10_000_000_000,
			Clients: []*api.Client{fenced},
		}},
	}
}

// swapped is a scheduler that swaps: the holder moves in what the waiter moves out.
func swapped() *api.StatusResponse {
	r := sample()
	g := r.Gpus[0]
	g.Swap = &api.Swap{
		CapacityBytes: 15 << 30, PromisedBytes: 20 << 30, ResidentBytes: 14 << 30, FixedBytes: 1 << 30, AwayBytes: 6 << 30,
		ArenaBytes: 10 << 30, ArenaLimitBytes: 64 << 30, ArenaUsedBytes: 12 << 30, ArenaReadyBytes: 16 << 30, OutBytes: 900 << 30, InBytes: 905 << 30,
		OutNs: 18e9, InNs: 19e9, Outs: 100, Ins: 101, OutBytesPerSecond: 55 << 30, InBytesPerSecond: 50 << 30, Refused: 1, SharePercent: 10,
	}
	holder, waiter := g.Clients[0], g.Clients[1]
	holder.Moving, holder.MemoryMode, holder.ResidentBytes, holder.AwayBytes, holder.RoomBytes, holder.LacksBytes = true, api.MemoryMode_MEMORY_MODE_SWAP, 8<<30, 2<<30, 8<<30, 2<<30
	waiter.MemoryMode, waiter.ResidentBytes, waiter.FixedBytes, waiter.AwayBytes, waiter.RoomBytes, waiter.Stalled = api.MemoryMode_MEMORY_MODE_SWAP, 6<<30, 1<<30, 4<<30, 4<<30, true
	holder.FixedReason = "OptiX uses it (libnvoptix is mapped)"
	waiter.ArenaBytes, waiter.SwappedOutBytes, waiter.SwappedInBytes = 10<<30, 500<<30, 400<<30
	g.Tenants[0].MovedNs, g.Tenants[1].Share.MemoryMode = 6e9, api.MemoryMode_MEMORY_MODE_RESIDENT
	r.Gpus[1].Swap = &api.Swap{CapacityBytes: 15 << 30, ArenaLimitBytes: 64 << 30}
	return r
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s (rewrite with -update):\n--- got\n%s--- want\n%s", name, got, want)
	}
}
