// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/nvshare/nvshare/tests/judge"
)

// maxAhead is how much work one process may have queued on the GPU, however many of its
// threads submit to a stream. A thousand threads that nothing holds back queue seconds.
const maxAhead = 700 * time.Millisecond

// A thousand threads of one process launch kernels as fast as they can, beside another
// tenant, and the driver cannot cut drains. The process leaves the GPU soon after each
// revoke: it is not fenced, and its neighbour has turns.
func TestManyThreads(t *testing.T) {
	t.Parallel()
	for _, stream := range []string{"one", "own"} {
		t.Run(stream, func(t *testing.T) {
			s := newSite(t)
			s.startScheduler()
			neighbour := s.startTenant("neighbour")
			s.awaitAttached(1)
			began := judge.Now()
			many := s.startTenant("many", func(cmd *exec.Cmd) {
				cmd.Path = filepath.Join(s.build, "bin", "many-threads")
				cmd.Args = []string{cmd.Path, "1000", "100", "50", stream}
				cmd.Env = append(cmd.Env, "NVSHARE_SIMGPU_RM=absent")
			})
			s.awaitAttached(2)
			s.expectTurns(30, neighbour, many)
			var ahead time.Duration
			for _, iv := range s.trace().Intervals {
				if iv.Process.Tenant == "many" {
					ahead = max(ahead, time.Duration(iv.End-iv.Submit))
				}
			}
			t.Logf("work ahead of the GPU: at most %v", ahead)
			if ahead > maxAhead {
				t.Errorf("a process with a thousand threads had %v of work queued, more than %v", ahead, maxAhead)
			}
			r, err := s.status()
			s.check(err)
			if n := r.Gpus[0].Fences; n != 0 {
				t.Errorf("there were %d fences", n)
			}
			s.expectAlone(began)
			s.expectAlive()
		})
	}
}
