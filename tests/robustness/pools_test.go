// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/nvshare/nvshare/tests/judge"
)

// Programs with pools of most of the GPU, as JAX's, beside host memory for a part of what they ask for, which is made before
// or while they move. Whoever begins has turns with all its memory, and the status blames nobody; who could have none is
// refused when it asks, as natively.
func TestPools(t *testing.T) {
	t.Parallel()
	const (
		gpuMiB = 160
		ample  = 400 // percent; of so little a GPU host memory comes in pieces of 64 MiB
	)
	for _, pools := range [][]int{{75, 75}, {60, 60, 60}, {95, 8, 8, 8, 8, 8}} { // percent of the GPU
		for _, host := range []struct {
			percent int // of what all ask for
			ready   string
		}{{1, "0"}, {10, "0"}, {50, "0"}, {ample, "0"}, {ample, "100%"}} {
			t.Run(fmt.Sprintf("%v, host memory of %d percent, %s ready", pools, host.percent, host.ready), func(t *testing.T) {
				all := 0
				for _, n := range pools {
					all += gpuMiB * n / 100
				}
				s := newSwapping(t, 1, "--swap-memory", fmt.Sprintf("%dMi", all*host.percent/100), "--swap-ready", host.ready, "--swap-headroom", "0")
				var begun []*swapTenant
				for i, n := range pools {
					if x := s.startSwapTenant(fmt.Sprint("t", i), gpuMiB*n/100, 1000*i); x.fills() {
						begun = append(begun, x)
					}
				}
				if len(begun) == 0 || host.percent == ample && len(begun) < len(pools) {
					t.Fatalf("%d of %d begin", len(begun), len(pools))
				}
				for _, x := range begun[:len(begun)*min(len(begun)-1, 1)] { // who is alone keeps the GPU
					s.expectTurns(1, x.tenant)
				}
				if p := s.blames(); p != "" {
					t.Errorf("all get on, and the status says %s", p)
				}
				for _, x := range begun {
					x.finish(s)
				}
				s.expectKernelsAlone()
			})
		}
	}
}

// The status names a process that was stopped and for whose memory the others wait, until it goes on.
func TestStoppedPoolIsNamed(t *testing.T) {
	t.Parallel()
	s := newSwapping(t, 1, "--grace", "1s")
	a, b := s.startSwapTenant("a", tenantMiB, 1000), s.startSwapTenant("b", tenantMiB, 2000)
	s.awaitSwaps(2)
	s.check(judge.Stop(a.cmd.Process.Pid))
	s.until("it is named", func() error {
		if p := s.blames(); !strings.Contains(p, fmt.Sprint(a.cmd.Process.Pid)) {
			return fmt.Errorf("problems: %q", p)
		}
		return nil
	})
	s.check(a.cmd.Process.Signal(syscall.SIGCONT))
	s.until("nobody is named", func() error {
		if p := s.blames(); p != "" {
			return errors.New(p)
		}
		return nil
	})
	a.finish(s)
	b.finish(s)
}

// blames returns the problems, but for that memory was refused.
func (s *site) blames() (p string) {
	r, err := s.status()
	if err != nil {
		return err.Error()
	}
	for _, text := range r.Problems {
		if !strings.Contains(text, "memory was refused recently") {
			p += text + "\n"
		}
	}
	return p
}
