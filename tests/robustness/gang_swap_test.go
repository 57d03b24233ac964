// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
)

// Each of two jobs fills 75 % of each of two GPUs: 62 MiB with what small pieces take, and 64 MiB are reserved at
// a time. Of each rank another one has 4 MiB open.
const (
	gangGPUMiB   = 84
	gangRankMiB  = 58
	gangSwitches = 200
)

// makeGang has the processes of a user be a gang.
func (s *site) makeGang(uid uint32) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := api.Dial(ctx, filepath.Join(s.dir, "run"))
	s.check(err)
	defer conn.Close()
	_, err = conn.SetShare(ctx, &api.SetShareRequest{Uid: proto.Uint32(uid), Gang: proto.String(api.GangOfItself)})
	s.check(err)
}

// startJob starts gang-job with a rank on each of two GPUs.
func (s *site) startJob(name string, seed int, change ...func(*exec.Cmd)) *swapTenant {
	s.t.Helper()
	env := s.env("LD_PRELOAD="+filepath.Join(s.build, "lib", "libnvshare.so"), "NVSHARE_SIMGPU_TENANT="+name,
		"NVSHARE_SCHEDULER_LOSS=closed", "GANG_JOB_WORK_MS=1")
	return &swapTenant{talker: s.startTalker(name, env, change, "gang-job", "2", strconv.Itoa(gangRankMiB), strconv.Itoa(seed)), mib: gangRankMiB}
}

// A gangWatch is what the status said of two jobs.
type gangWatch struct {
	least map[uint32]float64 // by process: the least part of its memory that was on the GPU
	ins   [2]uint64          // by GPU: how often memory was moved in
}

// look adds what the status says now.
func (w *gangWatch) look(s *site) error {
	r, err := s.status()
	if err != nil {
		return err
	}
	for _, g := range r.Gpus {
		if g.Swap.ResidentBytes > gangGPUMiB<<20 {
			s.t.Fatalf("GPU %d: %v", g.Index, g.Swap)
		}
		w.ins[g.Index] = g.Swap.Ins
		for _, c := range g.Clients {
			if c.FixedReason != "" || c.Stalled {
				s.t.Fatalf("GPU %d: %v", g.Index, c)
			}
			if of, ok := w.least[c.Pid]; c.MemoryBytes > 0 && (!ok || part(c) < of) {
				w.least[c.Pid] = part(c)
			}
		}
	}
	return nil
}

func part(c *api.Client) float64 { return float64(c.ResidentBytes) / float64(c.MemoryBytes) }

// Two jobs whose ranks have memory open in each other, as NCCL's, and wait for each other in their streams
// take turns on two GPUs on which they do not fit together. All memory leaves but what is open elsewhere, each word
// keeps its value, and nobody hangs.
func TestGangsSwap(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("needs root to be two users")
	}
	s := newSite(t)
	s.configure(fmt.Sprintf("gpus=2\nmemory_mib=%d\n", gangGPUMiB))
	const other = 1000
	theirs := s.openTo(other)
	s.buildTenant("gang-job")
	s.startScheduler("--swap-memory", "1Gi", "--swap-headroom", "0", "--swap-share", "none")
	s.until("the scheduler swaps", func() error { // memory that was allocated earlier is not moved
		r, err := s.status()
		if err == nil && (len(r.Gpus) < 2 || r.Gpus[0].Swap == nil || r.Gpus[1].Swap == nil) {
			err = errors.New("not yet")
		}
		return err
	})
	s.makeGang(0)
	s.makeGang(other)
	moveAll := func(cmd *exec.Cmd) { cmd.Env = append(cmd.Env, "NVSHARE_MOVE_ALL=1") } // the simulated GPU looks slowly
	a, b := s.startJob("a", 1000), s.startJob("b", 1000000, moveAll, theirs)
	for _, x := range []*swapTenant{a, b} {
		if !x.fills() {
			t.Fatalf("%s has no memory: %s", x.name, s.log())
		}
	}
	w := gangWatch{least: map[uint32]float64{}}
	for want := uint64(5); want <= gangSwitches; want += 5 { // each is awaited for itself
		s.until(fmt.Sprintf("memory has moved in %d times on both GPUs", want), func() error {
			if err := w.look(s); err != nil {
				return err
			}
			if min(w.ins[0], w.ins[1]) < want {
				return fmt.Errorf("now %v", w.ins)
			}
			return nil
		})
	}
	va, vb := a.finish(s), b.finish(s)
	t.Logf("moved in %v times, %d and %d rounds, least part on the GPU %v", w.ins, va.Rounds, vb.Rounds, w.least)
}
