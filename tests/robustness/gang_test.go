// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
)

// openTo lets a user other than root use the site, and returns a function that has a tenant
// be that user's. The tree may be in a home directory, which no other user enters.
func (s *site) openTo(uid uint32) func(*exec.Cmd) {
	s.t.Helper()
	s.letAllEnter()
	theirs := filepath.Join(s.dir, "theirs")
	s.check(os.Mkdir(theirs, 0o755))
	for _, file := range []string{"bin/cuda-busy", "lib/libnvshare.so", "simgpu/libcuda.so.1", "simgpu/libnvidia-ml.so.1"} {
		data, err := os.ReadFile(filepath.Join(s.build, file))
		s.check(err)
		s.check(os.WriteFile(filepath.Join(theirs, filepath.Base(file)), data, 0o755))
	}
	return func(cmd *exec.Cmd) {
		if filepath.Base(cmd.Path) == "cuda-busy" {
			cmd.Path = filepath.Join(theirs, "cuda-busy")
		}
		cmd.Env = append(cmd.Env, "LD_PRELOAD="+theirs+"/libnvshare.so", "LD_LIBRARY_PATH="+theirs)
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
}

func onGPU(i int) func(*exec.Cmd) {
	return func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, fmt.Sprintf("CUDA_VISIBLE_DEVICES=%d", i)) }
}

// A job with a rank on each of two GPUs has its turn when the scheduler is killed. It
// keeps the turn under the next scheduler, even if another tenant of one GPU attaches
// first. After that they take turns.
func TestGangOutlivesTheScheduler(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("needs root to be two users")
	}
	s := newSite(t)
	s.configure("gpus=2\n")
	const other = 1000
	theirs := s.openTo(other)
	s.startScheduler("--tq", "1h")
	s.until("there is a scheduler", func() error { _, err := s.status(); return err })
	ctl := func(call func(context.Context, *api.Conn) error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		conn, err := api.Dial(ctx, filepath.Join(s.dir, "run"))
		s.check(err)
		defer conn.Close()
		s.check(call(ctx, conn))
	}
	ctl(func(ctx context.Context, c *api.Conn) error {
		_, err := c.SetShare(ctx, &api.SetShareRequest{Uid: proto.Uint32(0), Gang: proto.String(api.GangOfItself)})
		return err
	})
	began := judge.Now()
	ranks := []*tenant{s.startTenant("rank0", onGPU(0)), s.startTenant("rank1", onGPU(1))}
	expect := func(what string, ok func(rank int, c *api.Client) bool) {
		t.Helper()
		s.until(what, func() error {
			r, err := s.status()
			if err != nil {
				return err
			}
			seen := 0
			for _, g := range r.Gpus {
				for _, c := range g.Clients {
					for i, x := range ranks {
						if x.cmd.Process.Pid == int(c.Pid) && ok(i, c) {
							seen++
						}
					}
				}
			}
			if seen != len(ranks) {
				return fmt.Errorf("for %d ranks: %v", seen, r.Gpus)
			}
			return nil
		})
	}
	holds := func(_ int, c *api.Client) bool { return c.State == api.ClientState_CLIENT_STATE_HOLDING }
	expect("both ranks hold", holds)
	s.startTenant("other", theirs, onGPU(0))
	s.awaitAttached(3)

	s.endScheduler(syscall.SIGKILL)
	time.Sleep(away)
	s.startScheduler("--tq", "1h")
	s.awaitAttached(3)
	// The ranks kept their grants: this scheduler has given none.
	expect("both ranks go on", func(i int, c *api.Client) bool { return holds(i, c) && c.Grants == 0 })

	ctl(func(ctx context.Context, c *api.Conn) error {
		_, err := c.Set(ctx, &api.SetRequest{QuantumNs: int64(20 * time.Millisecond)})
		return err
	})
	expect("the ranks take turns", func(_ int, c *api.Client) bool { return c.Grants >= 2 })
	s.expectAlive()
	s.expectAlone(began)
	s.until("there are no problems", func() error { // a machine that is busy makes some for a moment
		r, err := s.status()
		if err == nil && len(r.Problems) != 0 {
			err = fmt.Errorf("%q", r.Problems)
		}
		return err
	})
}
