// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/metrics"
)

// users says which part of GPU A processes had.
type users struct {
	mu   sync.Mutex
	busy map[uint32]float64
}

func (u *users) set(busy map[uint32]float64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.busy = busy
}

func (u *users) sample(context.Context) ([]metrics.GPUSample, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return []metrics.GPUSample{{UUID: gpuA.UUID, Busy: u.busy}}, nil
}

// A client that the driver shows working while it has no grant is named, in the status and
// the log, as long as that is so. A holder is not, nor is anybody where the driver says of
// all processes that they have the whole GPU.
func TestUseOutsideOfGrantsIsNamed(t *testing.T) {
	var nvml users
	s := start(t, t.TempDir(), func(o *Options) { o.Sample = nvml.sample }, func(d *Daemon) { d.watch.LookPause = time.Millisecond })
	holds, _, _ := newHolder(t, s)
	hostile, _ := newClient(t, s)
	h, x := uint32(holds.cmd.Process.Pid), uint32(hostile.cmd.Process.Pid)
	nvml.set(map[uint32]float64{h: 0.5, x: 0.4})
	r := s.await("it is named", func(r *api.StatusResponse) bool { return hasProblem(r, "had no grant") })
	for _, p := range r.Problems {
		if strings.Contains(p, "had no grant") && !strings.Contains(p, fmt.Sprintf("(pid %d) used 40 %%", x)) {
			t.Errorf("problem %q", p)
		}
	}
	nvml.set(map[uint32]float64{h: 1, x: 1})
	s.await("that is taken back only by what the driver says of it", func(r *api.StatusResponse) bool { return hasProblem(r, "used 40 %") })
	nvml.set(map[uint32]float64{h: 1})
	s.await("it is named no more", func(r *api.StatusResponse) bool { return !hasProblem(r, "had no grant") })
}
