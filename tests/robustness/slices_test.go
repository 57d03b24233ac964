// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// awaitWay waits until the GPU is shared in a way for a reason.
func (s *site) awaitWay(way, reason string) *api.GPU {
	s.t.Helper()
	var found *api.GPU
	s.until("the GPU is shared by "+way, func() error {
		r, err := s.status()
		if err != nil {
			return err
		}
		found = r.Gpus[0]
		if found.Way != way || !strings.Contains(found.WayReason, reason) {
			return fmt.Errorf("it is shared by %s: %s; clients: %v", found.Way, found.WayReason, found.Clients)
		}
		return nil
	})
	return found
}

// Two tenants prove their time slices, share the GPU by these, and go on to when the
// scheduler is killed and started again: their slices grow again. Nobody ends, and both work
// all the time.
func TestSlicesOutliveTheScheduler(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.startScheduler("--anti-thrash", "auto")
	s.startTenant("a")
	s.startTenant("b")
	s.awaitAttached(2)
	for range 2 {
		s.awaitWay("slices", "by time slices")
		// The slices grow: these tenants keep the GPU busy.
		s.until("both have longer slices than the driver's", func() error {
			r, err := s.status()
			if err != nil {
				return err
			}
			for _, c := range r.Gpus[0].Clients {
				if c.SliceNs < 4_000_000 {
					return fmt.Errorf("client %d has %d ns", c.Id, c.SliceNs)
				}
				if p := c.Controls; p.GetSlices() != "works" || p.GetChannels() != "works" || p.GetDriver() != "580.159.04" {
					return fmt.Errorf("client %d says of its controls: %v", c.Id, p)
				}
			}
			return nil
		})
		s.endScheduler(syscall.SIGKILL)
		s.startScheduler("--anti-thrash", "auto")
	}
	s.awaitWay("slices", "by time slices")
	s.expectAlive()
}

// A tenant whose driver refuses, or fakes, the control of time slices has turns, as has
// everybody beside it, and the status says whose driver that is.
func TestDriversThatCannotSlice(t *testing.T) {
	for driver, why := range map[string]string{"refused": "driver refused", "faked": "driver fakes it", "absent": "driver refused", "hidden": "no channel groups seen"} {
		t.Run(driver, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			s.startScheduler("--anti-thrash", "auto")
			s.startTenant("a")
			s.startTenant("b", func(c *exec.Cmd) { c.Env = append(c.Env, "NVSHARE_SIMGPU_RM="+driver) })
			s.awaitAttached(2)
			s.awaitWay("turns", "cannot be sliced: time slices: "+why)
			s.expectAlive()
		})
	}
}

// Where no process may open the driver's control device, nobody can be sliced, and all
// works as ever.
func TestNoControlDevice(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.check(os.Mkdir(filepath.Join(s.dir, "sim", "run", "nvidiactl"), 0o755)) // no file that can be opened
	s.startScheduler("--anti-thrash", "auto")
	s.startTenant("a")
	s.startTenant("b")
	s.awaitAttached(2)
	s.awaitWay("turns", "no channel groups seen")
	s.expectAlive()
}
