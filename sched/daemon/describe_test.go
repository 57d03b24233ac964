// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/moves"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// Pods' annotations change while containers run: what cannot be known of them
// stays as it was said before, also before a restart, and the answer tells what
// has changed and what is in force.
func TestDescribeAgain(t *testing.T) {
	dir := t.TempDir()
	s := newSharing(t, dir)
	account := peer.ContainerAccount + whole("a")
	describe := func(memory uint64, share *api.Share, keep *api.Keep) *api.DescribeContainerResponse {
		t.Helper()
		r, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{Keep: keep, Container: &api.Container{
			Id: whole("a"), Namespace: "ml", Pod: "a", Name: "main", MemoryLimitBytes: memory, Share: share, Gpus: []string{gpuB.UUID}}})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	everything := &api.Keep{MemoryLimit: true, CoreLimit: true, CoreRequest: true, Weight: true, Priority: true, Gang: true}
	full := &api.Share{CoreLimit: 50, CoreRequest: 20, Weight: 300, Priority: latency, Gang: "ring"}
	told := sched.Share{Limit: 50, Request: 20, Weight: 300, Priority: sched.Latency, Gang: "gang ml/ring"}

	if r := describe(gib, full, everything); r.Old != nil || r.New.MemoryLimitBytes != gib || !proto.Equal(r.New.Share, full) {
		t.Errorf("described first: %v", r)
	}
	if r := describe(0, nil, everything); r.Old.MemoryLimitBytes != gib || r.New.MemoryLimitBytes != gib || !proto.Equal(r.New.Share, full) || s.told(1, account) != told {
		t.Errorf("with nothing known: %v, in force %v", r, s.told(1, account))
	}
	s.stop()
	s = newSharing(t, dir)
	if r := describe(0, nil, everything); r.New.MemoryLimitBytes != gib || !proto.Equal(r.New.Share, full) || s.told(1, account) != told {
		t.Errorf("after a restart: %v, in force %v", r, s.told(1, account))
	}
	// Each part by itself.
	r := describe(2*gib, &api.Share{CoreLimit: 60, CoreRequest: 30, Weight: 7, Priority: batch}, &api.Keep{CoreRequest: true, Gang: true})
	want := &api.Share{CoreLimit: 60, CoreRequest: 20, Weight: 7, Priority: batch, Gang: "ring"}
	if r.New.MemoryLimitBytes != 2*gib || !proto.Equal(r.New.Share, want) {
		t.Errorf("in part: %v", r.New)
	}
	// In force on the GPU that it has; the operator's word goes before.
	if _, err := s.SetShare(context.Background(), &api.SetShareRequest{Container: whole("a"), MemoryBytes: proto.Uint64(gib)}); err != nil {
		t.Fatal(err)
	}
	r = describe(3*gib, &api.Share{CoreLimit: 70}, nil)
	if len(r.Changes) != 1 || r.Old.MemoryLimitBytes != 2*gib || r.New.MemoryLimitBytes != 3*gib {
		t.Fatalf("overruled: %v", r)
	}
	if c := r.Changes[0]; c.Uuid != gpuB.UUID || c.Index != 1 || c.Old.CoreLimit != 60 || c.New.CoreLimit != 70 || c.New.Gang != "" ||
		c.OldMemoryBytes != gib || c.NewMemoryBytes != gib {
		t.Errorf("overruled: %v", c)
	}
	// Removed: nothing is left.
	if describe(0, nil, nil); s.told(1, account) != (sched.Share{}) {
		t.Errorf("after removal: %v", s.told(1, account))
	}
}

// A container's shares are no news of the GPUs that it does not have.
func TestEventsOfSharesAreOfItsGPUs(t *testing.T) {
	s := newSharing(t, t.TempDir())
	s.describe("a", &api.Share{CoreRequest: 40}, gpuB.UUID)
	if _, err := s.ForgetContainer(context.Background(), &api.ForgetContainerRequest{Id: whole("a")}); err != nil {
		t.Fatal(err)
	}
	said := 0
	for _, e := range events(t, s.Conn, &api.EventsRequest{}).Events {
		if e.Type != api.EventType_EVENT_TYPE_SET {
			continue
		}
		if said++; e.Uuid != gpuB.UUID {
			t.Errorf("said of another GPU: %v", e)
		}
	}
	if said != 2 {
		t.Errorf("said %d times, want once when the request came and once when it went", said)
	}
}

// A program of nvsharectl run can open all GPUs, but is shown those that it was started with, if any
// were named.
func TestWhatRunReaches(t *testing.T) {
	s := newSharing(t, t.TempDir())
	id := whole("a")
	for _, tc := range []struct {
		engine string
		gpus   []string
		want   string // why it cannot move to the other GPU
	}{
		{node.RunEngine, nil, "GPU 1 has no place for it: nothing is swapped"}, // by this scheduler
		{node.RunEngine, []string{gpuA.UUID}, "GPU 1 is none of those that nvsharectl run --gpu has named"},
		{"podman", []string{gpuA.UUID}, "GPU 1 is none that its container can open: give the container nvshare.com/gpu=any"},
		{"podman", nil, "GPU 1 is none that its container can open: give the container nvshare.com/gpu=any"},
	} {
		why := ""
		if err := s.Ask(context.Background(), func() {
			s.Names[id] = &api.Container{Id: id, Engine: tc.engine, Gpus: tc.gpus}
			_, err := s.moves.Destination(peer.ContainerAccount+id, s.FindGPU(gpuA.UUID), gpuB.UUID)
			_, why, _ = strings.Cut(err.Error(), "cannot move from GPU 0: ")
		}); err != nil || !strings.HasPrefix(why, tc.want) {
			t.Errorf("%s, %v: %q, %v, want %q", tc.engine, tc.gpus, why, err, tc.want)
		}
	}
}

// A tenant does not move to a GPU that has less time left than the tenant is promised. What
// somebody is promised who is on the way there is not left.
func TestMovesWhereTimeIsLeft(t *testing.T) {
	s := newSharing(t, t.TempDir())
	describe := func(id string, request uint32, on node.Found) {
		t.Helper()
		if _, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{Container: &api.Container{
			Id: whole(id), Namespace: "ml", Pod: id, Name: "main", Share: &api.Share{CoreRequest: request, Migratable: true},
			Gpus: []string{on.UUID}, Reach: []string{gpuA.UUID, gpuB.UUID}}}); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(id, want string) {
		t.Helper()
		why := ""
		if err := s.Ask(context.Background(), func() {
			_, err := s.moves.Destination(peer.ContainerAccount+whole(id), s.FindGPU(gpuB.UUID), gpuA.UUID)
			_, why, _ = strings.Cut(err.Error(), "GPU 0 ")
		}); err != nil || !strings.HasPrefix(why, want) {
			t.Errorf("%s: %q, %v, want %q", id, why, err, want)
		}
	}
	const fits = "has no place for it: nothing is swapped" // by this scheduler
	describe("a", 60, gpuA)
	describe("b", 50, gpuB)
	describe("c", 40, gpuB)
	describe("d", 0, gpuB)
	refused("b", "has no place for it: it is promised 50 % of a GPU's time, and 40 % of this one are left")
	refused("c", fits)
	refused("d", fits)
	describe("b", 20, gpuB)
	if err := s.Ask(context.Background(), func() {
		s.moves.Migrations[peer.ContainerAccount+whole("b")] = &moves.Move{From: s.FindGPU(gpuB.UUID), To: s.FindGPU(gpuA.UUID), Phase: moves.Carried}
		s.Leaving[peer.ContainerAccount+whole("b")] = s.FindGPU(gpuA.UUID)
	}); err != nil {
		t.Fatal(err)
	}
	refused("c", "has no place for it: it is promised 40 % of a GPU's time, and 20 % of this one are left")
	refused("d", fits)
}

// A container that has moved stays where it is for whoever describes it again as it began,
// over a restart too.
func TestDescribeAfterAMove(t *testing.T) {
	dir := t.TempDir()
	s := newSharing(t, dir)
	id := whole("a")
	describe := func(gpu string) []string {
		t.Helper()
		r, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{Container: &api.Container{
			Id: id, Namespace: "ml", Pod: "a", Name: "main", Share: &api.Share{Migratable: true}, Gpus: []string{gpu}, Reach: []string{gpuA.UUID, gpuB.UUID}}})
		if err != nil {
			t.Fatal(err)
		}
		return r.New.Gpus
	}
	if got := describe(gpuA.UUID); !slices.Equal(got, []string{gpuA.UUID}) {
		t.Fatalf("it begins on %v", got)
	}
	moved := make(chan bool, 1)
	s.Do(func() {
		a, b := s.FindGPU(gpuA.UUID), s.FindGPU(gpuB.UUID)
		could := slices.Contains(s.moves.PlacementTenant(peer.ContainerAccount+id).Reach, gpuB.UUID)
		s.tenants.HasMoved(id, b, a) // it is not there
		s.tenants.HasMoved(id, a, b)
		moved <- could
	})
	if !<-moved {
		t.Error("it cannot move")
	}
	for range 2 {
		if got := describe(gpuA.UUID); !slices.Equal(got, []string{gpuB.UUID}) {
			t.Errorf("after the move it is on %v", got)
		}
		s.stop()
		s = newSharing(t, dir)
	}
}

// A container that an OCI hook has described, which nobody does again, can move after a restart too,
// and is then on the GPU to which it went.
func TestMovesAfterARestart(t *testing.T) {
	dir := t.TempDir()
	s := newSharing(t, dir)
	id := whole("a")
	first := firstOf(t, id)
	if _, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{
		Pid: uint32(first.Process.Pid), Choose: true, Container: &api.Container{
			Id: id, Name: "a", Engine: "podman", Share: &api.Share{Migratable: true},
			Gpus: []string{gpuA.UUID}, Reach: []string{gpuA.UUID, gpuB.UUID}}}); err != nil {
		t.Fatal(err)
	}
	for _, way := range [][2]wire.UUID{{uuidOf(gpuA), uuidOf(gpuB)}, {uuidOf(gpuB), uuidOf(gpuA)}} {
		s.stop()
		s = newSharing(t, dir)
		var reach []string
		var is wire.UUID
		if err := s.Ask(context.Background(), func() {
			account := peer.ContainerAccount + id
			reach = s.moves.PlacementTenant(account).Reach
			s.tenants.HasMoved(id, s.Gpus[way[0]], s.Gpus[way[1]])
			is = s.tenants.PlaceOf(account)
		}); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(reach, []string{gpuA.UUID, gpuB.UUID}) || is != way[1] {
			t.Errorf("after a restart it reaches %v; it moved to %v, and is booked on %v", reach, way[1].String(), is.String())
		}
	}
}

// A record of shares without the GPUs in reach is read: such a container stays where it is.
func TestReachUnknown(t *testing.T) {
	dir := t.TempDir()
	account := peer.ContainerAccount + whole("a")
	text := fmt.Sprintf(`{"version": 1, "tenants": {%q: {"pod": {"migratable": true}, "has": [%q]}}}`, account, gpuB.UUID)
	if err := os.WriteFile(filepath.Join(dir, "shares.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s := newSharing(t, dir)
	var reach []string
	var is wire.UUID
	if err := s.Ask(context.Background(), func() {
		reach, is = s.moves.PlacementTenant(account).Reach, s.tenants.PlaceOf(account)
	}); err != nil {
		t.Fatal(err)
	}
	if len(reach) > 0 || is != uuidOf(gpuB) {
		t.Errorf("it reaches %v, and is on %v", reach, is.String())
	}
}
