// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/wire"
)

// suspendSelf suspends the user whose processes the test has, and resumeSelf resumes it.
func suspendSelf(t *testing.T, s *scheduler) (*api.SuspendResponse, error) {
	t.Helper()
	return moveSelf(t, s, (*api.Conn).Suspend)
}

func resumeSelf(t *testing.T, s *scheduler) (*api.SuspendResponse, error) {
	t.Helper()
	return moveSelf(t, s, (*api.Conn).Resume)
}

func moveSelf(t *testing.T, s *scheduler, move func(*api.Conn, context.Context, *api.SuspendRequest) (*api.SuspendResponse, error)) (*api.SuspendResponse, error) {
	t.Helper()
	c, err := api.Dial(context.Background(), s.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	uid := uint32(os.Getuid())
	return move(c, context.Background(), &api.SuspendRequest{Uid: &uid})
}

// gives256Back releases the grant, and moves 256 MiB out once there is host memory for them.
func (w *swapper) gives256Back(s *scheduler, e uint64) {
	w.release(e)
	w.awaitLess(s, 1) // 0 would mean that nothing is swapped
	s.await("host memory", func(*api.StatusResponse) bool { return w.status(s).ArenaBytes >= 256*mib })
	w.out()
}

// A tenant that is suspended while it holds the GPU is asked for the grant, gets host
// memory and no room, although all memory fits, and comes back at its next request.
func TestSuspend(t *testing.T) {
	s := start(t, t.TempDir(), swapping)
	if _, err := suspendSelf(t, s); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("without a process: %v", err)
	}
	a := newSwapper(t, s)
	a.allocates(256 * mib)
	a.request()
	e := a.granted()
	a.in(e)
	s.await("it has its memory", func(*api.StatusResponse) bool { return a.status(s).ResidentBytes == 256*mib })
	r, err := suspendSelf(t, s)
	if err != nil || len(r.Gpus) != 1 || r.Gpus[0].Bytes != 256*mib || r.Gpus[0].Uuid != gpuA.UUID {
		t.Fatalf("%v, %v", r, err)
	}
	if f := a.want(wire.TypeRevoke); f.Epoch != e {
		t.Fatalf("%+v", f)
	}
	a.gives256Back(s, e)
	s.await("it is suspended", func(*api.StatusResponse) bool {
		c := a.status(s)
		return c.Suspended && c.ResidentBytes <= 1 && c.AwayBytes >= 256*mib-1
	})
	a.request()
	e = a.granted()
	if a.page.Room(0) != 256*mib {
		t.Errorf("room for %d MiB at its next grant", a.page.Room(0)>>20)
	}
	a.in(e)
	s.await("it is back", func(*api.StatusResponse) bool {
		c := a.status(s)
		return !c.Suspended && c.ResidentBytes == 256*mib && !c.Moving
	})
}

// A suspended tenant that is resumed gets a grant that it did not ask for, with room for
// its memory. Resuming it once more meanwhile is no error, and afterwards there is nothing
// to resume.
func TestResume(t *testing.T) {
	s := start(t, t.TempDir(), swapping)
	a := newSwapper(t, s)
	a.allocates(256 * mib)
	a.request()
	e := a.granted()
	a.in(e)
	s.await("it has its memory", func(*api.StatusResponse) bool { return a.status(s).ResidentBytes == 256*mib })
	nothing := func(when string) {
		t.Helper()
		if _, err := resumeSelf(t, s); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "GPU 0: ") || !strings.Contains(err.Error(), "is not suspended") {
			t.Errorf("%s, on a node with another GPU: %v", when, err)
		}
	}
	nothing("before it is suspended")
	if _, err := suspendSelf(t, s); err != nil {
		t.Fatal(err)
	}
	a.want(wire.TypeRevoke)
	a.gives256Back(s, e)
	s.await("it is suspended", func(*api.StatusResponse) bool { return a.status(s).Suspended && a.status(s).AwayBytes >= 256*mib-1 })
	for range 2 {
		r, err := resumeSelf(t, s)
		if err != nil || len(r.Gpus) != 1 || r.Gpus[0].Bytes < 256*mib-1 || r.Gpus[0].Context {
			t.Fatalf("%v, %v", r, err)
		}
	}
	e = a.granted()
	if a.page.Room(0) != 256*mib {
		t.Errorf("room for %d MiB at the grant", a.page.Room(0)>>20)
	}
	a.in(e)
	s.await("it is back", func(*api.StatusResponse) bool {
		c := a.status(s)
		return !c.Suspended && c.ResidentBytes == 256*mib && !c.Moving
	})
	nothing("when it is back")
}

// A process that makes no calls is told to leave though nobody waits, and is suspended when
// it has been without a grant for the time. Its next request brings it back.
func TestSuspendAfter(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.SuspendAfter = residency.MinSuspendAfter })
	a := newSwapper(t, s)
	a.allocates(256 * mib)
	a.request()
	e := a.granted()
	a.in(e)
	s.await("it is told to leave", func(*api.StatusResponse) bool {
		waiters, _ := a.page.Hints(0)
		return waiters > 0
	})
	a.gives256Back(s, e)
	s.await("it is suspended", func(r *api.StatusResponse) bool {
		c, swap := a.status(s), r.Gpus[0].Swap
		return c.Suspended && c.AwayBytes >= 256*mib-1 && swap.Suspended == 1 && swap.Suspends == 1
	})
	a.request()
	a.in(a.granted())
	s.await("it is back", func(r *api.StatusResponse) bool {
		return a.status(s).ResidentBytes == 256*mib && r.Gpus[0].Swap.Suspended == 0
	})
}

// Without swapping, or with less host memory than that needs, it says so and nothing changes.
func TestSuspendRefused(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { swapping(o); o.SwapMemory = 128 * mib })
	a := newSwapper(t, s)
	a.allocates(256 * mib)
	a.request()
	a.in(a.granted())
	if _, err := suspendSelf(t, s); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("with 128 MiB of host memory: %v", err)
	}
	if c := a.status(s); c.Suspended {
		t.Error("it is suspended all the same")
	}
	s = start(t, t.TempDir(), nil)
	newSwapper(t, s)
	if _, err := suspendSelf(t, s); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("without swapping: %v", err)
	}
}

// Before the first GPU is found nothing can be suspended, and the answer says why.
func TestSuspendWithoutGPU(t *testing.T) {
	s := begin(t, t.TempDir(), func(o *Options) {
		swapping(o)
		o.List = func(context.Context) ([]node.Found, error) { return nil, nil }
	})
	if _, err := suspendSelf(t, s); status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "no GPU") {
		t.Error(err)
	}
}

// What a process says of its context has all clients looked at, and costs its account as much.
func TestSuspendedIsCharged(t *testing.T) {
	s := start(t, t.TempDir(), swapping)
	_, c := newClient(t, s)
	const others, first = 1000, base.ClientID(1 << 32)
	if err := s.Ask(context.Background(), func() {
		for i := range others {
			s.Clients[first+base.ClientID(i)] = &node.Client{}
		}
		before := s.work()
		s.frame(s.Clients[base.ClientID(c.id)].Conn, &wire.Frame{Type: wire.TypeSuspended, Code: wire.SuspendedWake})
		if cost := s.work() - before; cost < others/node.ClientsPerWork {
			t.Errorf("it costs %d frames beside %d clients", cost, others)
		}
		for i := range others {
			delete(s.Clients, first+base.ClientID(i))
		}
	}); err != nil {
		t.Fatal(err)
	}
}
