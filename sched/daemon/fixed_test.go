// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

// by is the code of a MOVED that says why nothing can be moved.
func by(reason wire.Fixed) uint32 { return uint32(reason) << 24 }

// Why a process's memory cannot be moved is in its status, in one event for each reason, and in
// the answer to migrate. A reason of a newer shim is one, too; an older shim says
// none.
func TestFixedReason(t *testing.T) {
	s := start(t, t.TempDir(), migrating(&carrier{}))
	w, e := newWorking(t, s, wire.RegisterSwap)
	const optix = "OptiX uses it (libnvoptix is mapped)"
	says := func(reason wire.Fixed, want string) {
		t.Helper()
		w.has.Fixed = w.has.Resident
		w.moved(by(reason), e)
		s.await(want, func(*api.StatusResponse) bool { return w.status(s).FixedReason == want })
	}
	if c := w.status(s); c.FixedReason != "" {
		t.Errorf("it has said nothing: %v", c)
	}
	says(wire.FixedOptiX, optix)
	if r := <-migrateSelf(t, s, "1"); status.Code(r.err) != codes.FailedPrecondition || !strings.Contains(r.err.Error(), "cannot be moved: "+optix) {
		t.Errorf("migrate: %v, %v", r.MigrateResponse, r.err)
	}
	says(wire.FixedNot, "")
	says(wire.FixedOptiX, optix) // is known
	says(15, "its shim says so, for a reason that this scheduler does not know (15)")
	var told []string
	for _, e := range s.eventsOf(&api.EventsRequest{Types: []api.EventType{api.EventType_EVENT_TYPE_FIXED}}).Events {
		if e.Pid != uint32(w.status(s).Pid) || e.Uuid != gpuA.UUID {
			t.Errorf("%v", e)
		}
		told = append(told, e.Reason)
	}
	if len(told) != 2 || !strings.Contains(told[0], optix) || !strings.Contains(told[1], "(15)") {
		t.Errorf("events %q", told)
	}
}

// A process with memory that cannot be moved is not suspended with its context, and says why,
// however little memory that is.
func TestKeepsContextForFixedMemory(t *testing.T) {
	c := &carrier{}
	s := start(t, t.TempDir(), migrating(c), func(d *Daemon) { d.away.RestPause = time.Millisecond })
	l := newLeaverOf(t, s, nil, gpuA)
	if _, err := suspendSelf(t, s); err != nil {
		t.Fatal(err)
	}
	l.release(l.want(wire.TypeRevoke).Epoch)
	l.awaitLess(s, 1)
	l.has.Resident, l.has.Fixed, l.has.Away = mib, mib, l.has.Resident-mib
	l.moved(by(wire.FixedEncoder), 0)
	s.await("it keeps its context", func(*api.StatusResponse) bool {
		return strings.Contains(l.status(s).ContextProblem, "cannot be moved: the video encoder NVENC uses it")
	})
	if got := c.told(); len(got) != 0 {
		t.Errorf("calls %q", got)
	}
}

// A process that says on the way that its memory cannot be moved is not taken off its GPU.
func TestMigrateMeetsFixedMemory(t *testing.T) {
	c := &carrier{}
	s := start(t, t.TempDir(), migrating(c))
	w, e := newWorking(t, s, wire.RegisterSwap)
	done := migrateSelf(t, s, "1")
	if f := w.want(wire.TypeRevoke); f.Epoch != e {
		t.Fatalf("%+v", f)
	}
	w.request()
	w.release(e)
	w.has.Fixed = w.has.Resident
	w.moved(by(wire.FixedRDMA), 0)
	if r := <-done; status.Code(r.err) != codes.FailedPrecondition || !strings.Contains(r.err.Error(), "cannot be moved: RDMA uses it") {
		t.Errorf("%v, %v", r.MigrateResponse, r.err)
	}
	if got := c.told(); len(got) != 0 {
		t.Errorf("calls %q", got)
	}
	w.granted()
}
