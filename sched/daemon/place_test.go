// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"os/exec"
	"slices"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// A container that may begin on any GPU begins where there is what it asks for, and on the
// GPU with the fewest tenants. Its programs are told that GPU, over a restart too.
func TestChooseGPU(t *testing.T) {
	dir := t.TempDir()
	s := newSharing(t, dir)
	begin := func(first *exec.Cmd, id string, request uint32) (string, error) {
		t.Helper()
		r, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{
			Pid: uint32(first.Process.Pid), Choose: true, Container: &api.Container{
				Id: whole(id), Name: id, Engine: "podman", Share: &api.Share{CoreRequest: request, Migratable: true},
				Gpus: []string{gpuA.UUID}, Reach: []string{gpuA.UUID, gpuB.UUID}}})
		if err != nil {
			return "", err
		}
		if len(r.New.Gpus) != 1 {
			t.Fatalf("%s: %v", id, r.New)
		}
		return r.New.Gpus[0], nil
	}
	expect := func(first *exec.Cmd, id string, request uint32, on string) {
		t.Helper()
		if got, err := begin(first, id, request); got != on {
			t.Errorf("%s begins on %s, %v; want %s", id, got, err, on)
		}
	}
	a := firstOf(t, whole("a"))
	expect(a, "a", 0, gpuA.UUID)
	expect(firstOf(t, whole("b")), "b", 60, gpuB.UUID)
	expect(firstOf(t, whole("c")), "c", 0, gpuA.UUID)  // as many on both, and nothing reserved: the first
	expect(firstOf(t, whole("d")), "d", 60, gpuA.UUID) // the other one has fewer, and not that much
	drainGPU(t, s.scheduler, &api.DrainRequest{Gpu: "0"})
	if got, err := begin(firstOf(t, whole("e")), "e", 60); status.Code(err) == codes.OK {
		t.Errorf("e begins on %s, where there is not so much", got)
	}
	expect(firstOf(t, whole("f")), "f", 10, gpuB.UUID)
	drainGPU(t, s.scheduler, &api.DrainRequest{Gpu: "0", Undrain: true})
	expect(a, "a", 0, gpuA.UUID) // told once more

	places := func() (all []wire.UUID) {
		got := make(chan []wire.UUID, 1)
		s.Do(func() {
			got <- []wire.UUID{s.tenants.PlaceOf(peer.ContainerAccount + whole("a")), s.tenants.PlaceOf(peer.ContainerAccount + whole("b")), s.tenants.PlaceOf(peer.ContainerAccount + whole("x")), s.tenants.PlaceOf("1000")}
		})
		return <-got
	}
	want := []wire.UUID{uuidOf(gpuA), uuidOf(gpuB), {}, {}}
	if got := places(); !slices.Equal(got, want) {
		t.Errorf("programs are told %v, want %v", got, want)
	}
	s.stop()
	s = newSharing(t, dir)
	if got := places(); !slices.Equal(got, want) {
		t.Errorf("after a restart programs are told %v, want %v", got, want)
	}
}

// Who asks for the place of a user's processes, or of a container that the scheduler does not
// know, is told nothing.
func TestAsksForItsPlace(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	c := newProc(t, s.dir, 0).connect().register(0)
	for _, began := range []wire.UUID{uuidOf(gpuA), {}} { // which may not be known
		c.send(wire.Frame{Type: wire.TypeAttach, Code: wire.AttachObserve | wire.AttachPlace, Attach: wire.Attach{UUID: began}})
		if f := c.expect(wire.TypeAttached); f.Code != wire.OK || f.Attached.UUID != (wire.UUID{}) {
			t.Errorf("began on %v: answered %+v", began, f)
		}
	}
}
