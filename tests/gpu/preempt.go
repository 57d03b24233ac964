// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	preemptLimit     = 30   // percent
	handOverTarget   = 2.5  // ms, p99
	requestsTarget   = 1.15 // of alone, p99
	limitErrorTarget = 1.0  // points
)

// longKernels are the lengths of the holder's kernels.
var longKernels = []time.Duration{50 * time.Millisecond, time.Second}

// A preemptCell is a tenant with kernels of one length, and others beside it.
type preemptCell struct {
	KernelMS  int64 `json:"kernel_ms"`
	HandOvers int   `json:"handovers"`
	Preempted int   `json:"preempted"` // of these
	// From the revoke of the long kernels' tenant to the grant of the other, ms.
	P50 float64 `json:"handover_p50_ms"`
	P99 float64 `json:"handover_p99_ms"`
	Max float64 `json:"handover_max_ms"`
	// Those of 20 ms and more: what else the host did then may be the reason.
	Slow []slowHandOver `json:"slow_handovers,omitempty"`

	Requests requests `json:"requests"` // of a latency tenant
	OfAlone  float64  `json:"requests_p99_of_alone"`
	// What the tenant used, alone with a core limit, percent of the time.
	Limited float64 `json:"used_percent_with_limit"`
}

type slowHandOver struct {
	At time.Time `json:"at"` // of the revoke
	MS float64   `json:"ms"`
}

type preemptResult struct {
	LimitPercent int           `json:"limit_percent"`
	Alone        requests      `json:"requests_alone"`
	Cells        []preemptCell `json:"cells"`
}

// preemptStep measures what kernels that outlast turns do to others: they are taken off
// the GPU in the middle.
func (b *bench) preemptStep(ctx context.Context, _ string) error {
	length := 24 * time.Second // some 200 hand-overs, for their 99th percentile
	if b.cells.quick || b.simulated {
		length = 5 * time.Second
	}
	s, err := b.scheduler(ctx, "preempt", "--tq", "50ms")
	if err != nil {
		return err
	}
	defer s.stop()
	if err := s.set(ctx, 2, "--priority", "latency"); err != nil {
		return err
	}
	r := preemptResult{LimitPercent: preemptLimit}
	if r.Alone, err = s.shortRequests(ctx, 2, length/2); err != nil {
		return err
	}
	held := true
	for _, kernel := range longKernels {
		c := preemptCell{KernelMS: kernel.Milliseconds()}
		if err := s.preemptCell(ctx, &c, kernel, length); err != nil {
			return err
		}
		if r.Alone.P99 > 0 {
			c.OfAlone = c.Requests.P99 / r.Alone.P99
		}
		r.Cells = append(r.Cells, c)
		held = held && c.P99 <= handOverTarget && c.OfAlone <= requestsTarget && max(c.Limited-preemptLimit, preemptLimit-c.Limited) <= limitErrorTarget
		fmt.Printf("  kernels of %4d ms: hand-over p50 %.2f  p99 %.2f  max %.2f ms (%d, %d of them preempted); requests p99 %.2f ms, %.2f of alone; with a limit of %d %%: %.2f %%\n",
			c.KernelMS, c.P50, c.P99, c.Max, c.HandOvers, c.Preempted, c.Requests.P99, c.OfAlone, preemptLimit, c.Limited)
	}
	fmt.Printf("  preempt: hand-over p99 at most %.1f ms, requests at most %.2f of alone (%.2f ms), limit within %.0f point: %s\n",
		handOverTarget, requestsTarget, r.Alone.P99, limitErrorTarget, holds(held))
	return b.saveJSON("preempt.json", r)
}

func (s *scheduler) preemptCell(ctx context.Context, c *preemptCell, kernel, length time.Duration) error {
	long, err := s.busy(ctx, 0, kernel)
	if err != nil {
		return err
	}
	defer long.end()
	if err := s.handOvers(ctx, c, long, length); err != nil {
		return err
	}
	if c.Requests, err = s.shortRequests(ctx, 2, length); err != nil {
		return err
	}
	if err := s.set(ctx, 0, "--core-limit", strconv.Itoa(preemptLimit)); err != nil {
		return err
	}
	time.Sleep(time.Second) // what it used before is not part of it
	from, began, err := s.used(ctx, 0)
	if err != nil {
		return err
	}
	time.Sleep(length)
	to, ended, err := s.used(ctx, 0)
	if err != nil {
		return err
	}
	c.Limited = 100 * (to - from).Seconds() / ended.Sub(began).Seconds()
	return s.set(ctx, 0, "--core-limit", "none")
}

// handOvers has another tenant take turns with the long kernels.
func (s *scheduler) handOvers(ctx context.Context, c *preemptCell, long *busyTenant, length time.Duration) error {
	log := s.watch(ctx, time.Second)
	other, err := s.busy(ctx, 1, 100*time.Microsecond)
	if err == nil {
		time.Sleep(length)
		other.end()
	}
	log.stop()
	if err := errors.Join(err, ctx.Err()); err != nil {
		return err
	}
	var took []float64
	revoked := int64(0)
	pid := uint32(long.cmd.Process.Pid)
	for _, e := range log.Events {
		switch {
		case e.PID == pid && e.Type == "revoke":
			revoked = e.At
		case e.PID == pid && e.Reason == "preempted":
			c.Preempted++
		case e.PID != pid && e.Type == "grant" && revoked != 0:
			ms := float64(e.At-revoked) / 1e6
			if ms >= 20 {
				c.Slow = append(c.Slow, slowHandOver{time.Unix(0, revoked).UTC(), round(ms, 1)})
			}
			took = append(took, ms)
			revoked = 0
		}
	}
	if len(took) == 0 {
		return fmt.Errorf("kernels of %d ms: no hand-over in %v (%d events)", c.KernelMS, length, len(log.Events))
	}
	slices.Sort(took)
	at := func(p int) float64 { return round(took[min(len(took)-1, len(took)*p/100)], 3) }
	c.HandOvers, c.P50, c.P99, c.Max = len(took), at(50), at(99), at(100)
	return nil
}

// A busyTenant launches kernels of one length without a pause.
type busyTenant struct{ cmd *exec.Cmd }

func (t *busyTenant) end() {
	_ = t.cmd.Process.Kill()
	_ = t.cmd.Wait()
}

// command makes user i run one of the programs in swapDir.
func (s *scheduler) command(ctx context.Context, i int, program string, args ...string) (*exec.Cmd, error) {
	env, home, who, err := s.b.asUser(i, s)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(swapDir, program), args...)
	cmd.Env, cmd.Dir = append(cmd.Environ(), env...), home
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: who}
	return cmd, nil
}

// busy starts a tenant and waits for its first grant.
func (s *scheduler) busy(ctx context.Context, user int, kernel time.Duration) (*busyTenant, error) {
	cmd, err := s.command(ctx, user, "cuda-busy", "--kernel-us", strconv.FormatInt(kernel.Microseconds(), 10), "--depth", "1", "--report-ms", "0")
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	t := &busyTenant{cmd}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		r, err := s.status(ctx)
		if err == nil && len(r.Gpus) > 0 && slices.ContainsFunc(r.Gpus[0].Clients, func(c *api.Client) bool { return int(c.Pid) == cmd.Process.Pid && c.Grants > 0 }) {
			return t, nil
		}
		if err == nil && time.Now().After(end) {
			err = errors.New("it was granted nothing")
		}
		if err != nil {
			t.end()
			return nil, fmt.Errorf("%v: %w", cmd.Args, err)
		}
	}
}

func (s *scheduler) shortRequests(ctx context.Context, user int, length time.Duration) (r requests, err error) {
	cmd, err := s.command(ctx, user, "short-request", requestArgs(0, length.Seconds())...)
	if err != nil {
		return r, err
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return r, fmt.Errorf("short-request: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return r, json.Unmarshal(out, &r)
}

func (s *scheduler) set(ctx context.Context, user int, flags ...string) error {
	return s.ctl(ctx, append([]string{"set", "--user", strconv.Itoa(firstUser + user)}, flags...)...)
}

func (s *scheduler) ctl(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, s.b.node.Bin("nvsharectl"), args...)
	cmd.Env = append(cmd.Environ(), "NVSHARE_RUN_DIR="+s.dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", cmd.Args, err, bytes.TrimSpace(out))
	}
	return nil
}

// used returns what a user was billed of GPU 0, and when the scheduler said so.
func (s *scheduler) used(ctx context.Context, user int) (time.Duration, time.Time, error) {
	r, err := s.status(ctx)
	if err != nil {
		return 0, time.Time{}, err
	}
	for _, t := range r.Gpus[0].Tenants {
		if int(t.Uid) == firstUser+user {
			return time.Duration(t.UsedNs), time.Now(), nil
		}
	}
	return 0, time.Time{}, fmt.Errorf("user %d is no tenant", firstUser+user)
}
