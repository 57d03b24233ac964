// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/nvshare/nvshare/tests/judge"
)

const (
	swapRatio = 1.1 // of a switch to what the link allows
	swapLink  = 0.9 // of the link, while moving

	// hostPart is how much of the free host memory the tenants' arenas may take.
	hostPart = 0.7

	vmmMiB = 20 // a handle of PyTorch's expandable segments for large allocations

	firstSwitches = 2 // that are not counted: the arena may not be ready
)

// linkLimit is what link-limit printed: GB/s.
type linkLimit struct {
	MiB      int     `json:"mib"`
	OutAlone float64 `json:"out_alone"`
	InAlone  float64 `json:"in_alone"`
	OutBoth  float64 `json:"out_both"`
	InBoth   float64 `json:"in_both"`
	// When two bare processes exchange memory of the GPU, which the driver clears.
	OutExchange float64 `json:"out_exchange"`
	InExchange  float64 `json:"in_exchange"`
	Touch       float64 `json:"touch_s"`
	Register    float64 `json:"register_s"`
}

// seconds is how long it takes to move so much out and in at the same time.
func (l linkLimit) seconds(out, in float64) float64 {
	return max(out/l.OutBoth, in/l.InBoth) / 1e9
}

// exchange is how long two bare processes take that exchange so much; 0: unknown.
func (l linkLimit) exchange(out, in float64) float64 {
	if l.OutExchange <= 0 || l.InExchange <= 0 {
		return 0
	}
	return max(out/l.OutExchange, in/l.InExchange) / 1e9
}

// A switchOver is a moment when another tenant got the GPU.
type switchOver struct {
	At  int64   `json:"at_ns"` // end of the last kernel, the GPU's clock
	Gap float64 `json:"gap_s"` // until the first kernel of the other
	// From the revoke before it until that kernel.
	FromRevoke float64 `json:"from_revoke_s,omitempty"`
	Out        float64 `json:"out_bytes"`
	In         float64 `json:"in_bytes"`
	Limit      float64 `json:"limit_s"`              // by the link
	Exchange   float64 `json:"exchange_s,omitempty"` // by two bare processes
}

type swapCase struct {
	Name      string        `json:"name"`
	TenantMiB int           `json:"tenant_mib"`
	VMMMiB    int           `json:"vmm_mib,omitempty"` // of each handle, where tenants use the VMM themselves
	GPUMiB    int           `json:"gpu_mib"`
	Args      []string      `json:"scheduler"`
	Link      linkLimit     `json:"link"`
	Told      [][]loadEvent `json:"tenants"`
	// From the last tenant's start until the arena grew no more.
	ArenaReady  float64      `json:"arena_ready_s"`
	ArenaBytes  uint64       `json:"arena_bytes"`
	Switches    []switchOver `json:"switches"`
	Overlaps    int          `json:"overlaps"`
	Gap         *spread      `json:"gap,omitempty"`
	FromRevoke  *spread      `json:"from_revoke,omitempty"`
	OfLimit     *spread      `json:"of_limit,omitempty"`
	OfExchange  *spread      `json:"of_exchange,omitempty"`
	LinkUsed    *spread      `json:"link_used,omitempty"`
	OutRate     *spread      `json:"out_gb_per_s,omitempty"` // by the scheduler's events
	InRate      *spread      `json:"in_gb_per_s,omitempty"`
	Timeline    *timeline    `json:"timeline"`
	Problems    []string     `json:"problems,omitempty"`
	RealToClock int64        `json:"time_of_day_minus_gpu_clock_ns"`
}

// swapStep measures how long it takes to give the GPU to a tenant whose memory is
// away, against what the link allows in the same run.
func (b *bench) swapStep(ctx context.Context, _ string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	sizes, window, linkMiB := []int{16 << 10, 60 << 10}, 15*time.Second, 2048
	switch {
	case b.simulated:
		sizes, window, linkMiB = []int{192}, 5*time.Second, 64
	case b.cells.quick:
		sizes, window = []int{16 << 10}, 8*time.Second
	}
	if b.tenantMiB > 0 {
		sizes = []int{b.tenantMiB}
	}
	room, err := hostRoom()
	if err != nil {
		return err
	}
	var all []*swapCase
	var errs []error
	for i, mib := range append(sizes, sizes[0]) {
		vmm, stays := 0, 0
		if i == len(sizes) { // once more, with memory in PyTorch's way
			vmm = vmmMiB
		}
		if most := int(room*hostPart/2/mib20) / 1024 * 1024; most < mib && !b.simulated {
			fmt.Printf("  %d GiB of each do not fit host memory (%.0f GiB free): %d GiB change hands\n", mib>>10, room/mib20/1024, most>>10)
			stays = mib - most
		}
		if len(all) > 0 && mib-stays <= all[0].TenantMiB && vmm == 0 || mib-stays < 64 {
			continue
		}
		link, err := b.linkLimit(ctx, linkMiB)
		if err != nil {
			return errors.Join(append(errs, err)...)
		}
		fmt.Printf("  the link: out %.1f GB/s, in %.1f; at the same time %.1f and %.1f, exchanged by two bare processes %.1f and %.1f; 1 GiB of host memory takes %.2f s to touch, %.2f s to register\n",
			link.OutAlone, link.InAlone, link.OutBoth, link.InBoth, link.OutExchange, link.InExchange, link.Touch*1024/float64(link.MiB), link.Register*1024/float64(link.MiB))
		name := fmt.Sprintf("swap-%d", mib)
		if vmm > 0 {
			name += "-vmm"
		}
		c := &swapCase{Name: name, VMMMiB: vmm, TenantMiB: mib, GPUMiB: mib + stays + max(64, min(512, mib/16)), Link: link}
		if err := b.swapOne(ctx, c, window); err != nil {
			c.Problems = append(c.Problems, err.Error())
			errs = append(errs, fmt.Errorf("%s: %w", c.Name, err))
		}
		c.report()
		all = append(all, c)
		data, err := json.Marshal(all)
		if err == nil {
			err = b.save("swap.json", string(data)+"\n") // whatever the next one does
		}
		if err != nil {
			return err
		}
		if err := b.save(c.Name+".svg", plotSwap(c)); err != nil {
			return err
		}
	}
	return errors.Join(errs...)
}

const mib20 = 1 << 20

// hostRoom is how many bytes of host memory can be had.
func hostRoom() (float64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	room := -1.0
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "MemAvailable:" {
			if kib, err := strconv.ParseFloat(f[1], 64); err == nil {
				room = kib * 1024
			}
		}
	}
	if room < 0 {
		return 0, errors.New("/proc/meminfo does not say MemAvailable")
	}
	// A container's limit, where its group is seen as the root or by its path.
	group := ""
	if data, err := os.ReadFile("/proc/self/cgroup"); err == nil {
		group = strings.TrimPrefix(strings.TrimSpace(string(data)), "0::")
	}
	number := func(file string) float64 {
		data, err := os.ReadFile(file)
		if err != nil {
			return -1
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(string(data)), 64)
		if err != nil {
			return -1 // max
		}
		return v
	}
	for dir := filepath.Join("/sys/fs/cgroup", group); len(dir) >= len("/sys/fs/cgroup"); dir = filepath.Dir(dir) {
		if most, used := number(dir+"/memory.max"), number(dir+"/memory.current"); most >= 0 && used >= 0 {
			room = min(room, most-used)
		}
	}
	return room, nil
}

func (b *bench) linkLimit(ctx context.Context, mib int) (linkLimit, error) {
	var l linkLimit
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.node.Bin("link-limit"), strconv.Itoa(mib), "1.5")
	cmd.Env = append(os.Environ(), b.tenantEnv(native, "")...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return l, fmt.Errorf("link-limit: %w", err)
	}
	return l, json.Unmarshal(out, &l)
}

// swapOne has two tenants take turns for a while.
func (b *bench) swapOne(ctx context.Context, c *swapCase, window time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, window+2*time.Minute)
	defer cancel()
	c.Args = []string{"--tq", "500ms", "--swap-share", "none", "--gpu-memory", fmt.Sprintf("%dMi", c.GPUMiB), "--swap-headroom", "0",
		"--swap-memory", fmt.Sprintf("%dMi", 2*(2*c.TenantMiB-c.GPUMiB+2048))}
	s, err := b.scheduler(ctx, c.Name, c.Args...)
	if err != nil {
		return err
	}
	defer s.stop()
	t := s.watch(ctx, 20*time.Millisecond)
	stopped := false
	stop := func() {
		if !stopped {
			stopped = true
			t.stop()
			c.Timeline = t
		}
	}
	defer stop()
	var loads []*swapLoad
	var files []string
	defer func() {
		killAll(loads)
		for _, l := range loads {
			c.Told = append(c.Told, l.Told)
		}
	}()
	began := time.Now()
	load := []string{"--mib", strconv.Itoa(c.TenantMiB), "--piece-mib", strconv.Itoa(min(512, c.TenantMiB/4)), "--burst-ms", "10"}
	if c.VMMMiB > 0 { // and what applications that do so may do as well
		load = append(load, "--vmm", strconv.Itoa(c.VMMMiB), "--memop")
	}
	for i := range 2 {
		l, err := b.startSwapLoad(i, s, window+2*time.Minute, load...)
		if err != nil {
			return err
		}
		loads, files = append(loads, l), append(files, l.record)
		ready, err := l.await(ctx, "ready", 90*time.Second)
		if err != nil {
			return err
		}
		if i == 0 {
			c.RealToClock = ready.TimeOfDay - ready.GPUClock
		}
		fmt.Printf("  %s: %d MiB allocated in %.3f s, filled in %.3f s, checked %s\n", l.name, ready.MiB, ready.Alloc, ready.Fill, ready.Checks)
	}
	c.awaitArena(ctx, t, began)
	for _, l := range loads {
		if err := l.begin(); err != nil {
			return err
		}
	}
	select {
	case <-time.After(window):
	case <-ctx.Done():
		return ctx.Err()
	}
	err = each(loads, func(_ int, l *swapLoad) error {
		_, _, err := l.finish(ctx, 30*time.Second)
		return err
	})
	stop()
	trace, readErr := judge.ReadRecords(files...)
	if readErr == nil && len(trace.Intervals) > 0 {
		c.measure(trace)
		if len(c.Switches) <= firstSwitches {
			err = errors.Join(err, fmt.Errorf("only %d switches", len(c.Switches)))
		}
	}
	return errors.Join(err, readErr)
}

// awaitArena waits until the arena has grown no more for a second.
func (c *swapCase) awaitArena(ctx context.Context, t *timeline, began time.Time) {
	grew := time.Now()
	for ctx.Err() == nil && time.Since(grew) < time.Second && time.Since(began) < time.Minute {
		if s := t.latest(); s != nil && s.Arena > c.ArenaBytes {
			c.ArenaBytes, grew = s.Arena, time.Now()
			c.ArenaReady = grew.Sub(began).Seconds()
		}
		time.Sleep(20 * time.Millisecond)
	}
	fmt.Printf("  the arena: %d MiB, %.1f s after the tenants' start\n", c.ArenaBytes>>20, c.ArenaReady)
}

// measure finds the switches in what the GPU recorded, and what was moved for each
// in what the scheduler said.
func (c *swapCase) measure(trace judge.Trace) {
	c.Overlaps = judge.Judge(trace, judge.Options{}).Overlaps()
	all := byStart(trace)
	for i, next := range all[1:] {
		last := all[i]
		if last.Process == next.Process {
			continue
		}
		s := switchOver{At: last.End, Gap: float64(next.Start-last.End) / 1e9}
		for _, e := range c.Timeline.Events {
			if at := e.At - c.RealToClock; e.Type == "revoke" && at <= next.Start {
				s.FromRevoke = float64(next.Start-at) / 1e9 // the latest
			}
			// An end of a move is told a moment later than the kernel's start.
			if at := e.At - c.RealToClock; at < last.End || at > next.Start+50e6 || e.Bytes == 0 {
				continue
			}
			switch e.Type {
			case "swap_out":
				s.Out += float64(e.Bytes)
			case "swap_in":
				s.In += float64(e.Bytes)
			}
		}
		if c.Link.OutBoth > 0 && c.Link.InBoth > 0 {
			s.Limit, s.Exchange = c.Link.seconds(s.Out, s.In), c.Link.exchange(s.Out, s.In)
		}
		c.Switches = append(c.Switches, s)
	}
	var gaps, revokes, of, exchange, used, out, in []float64
	for _, s := range c.Switches[min(len(c.Switches), firstSwitches):] {
		if s.Limit == 0 || s.Gap <= 0 {
			continue
		}
		gaps, of, revokes = append(gaps, s.Gap), append(of, s.Gap/s.Limit), append(revokes, s.FromRevoke)
		if s.Exchange > 0 {
			exchange = append(exchange, s.Gap/s.Exchange)
		}
		used = append(used, (s.Out+s.In)/1e9/s.Gap/(c.Link.OutBoth+c.Link.InBoth))
	}
	for _, e := range c.Timeline.Events {
		if e.Took == 0 || e.Bytes < uint64(c.TenantMiB)<<18 { // moves of small rests say little
			continue
		}
		switch rate := float64(e.Bytes) / float64(e.Took); e.Type {
		case "swap_out":
			out = append(out, rate)
		case "swap_in":
			in = append(in, rate)
		}
	}
	c.FromRevoke, c.OfExchange = newSpread(revokes), newSpread(exchange)
	c.Gap, c.OfLimit, c.LinkUsed, c.OutRate, c.InRate = newSpread(gaps), newSpread(of), newSpread(used), newSpread(out), newSpread(in)
}

func (c *swapCase) report() {
	fmt.Printf("  two tenants of %d MiB on %d MiB: ", c.TenantMiB, c.GPUMiB)
	if c.Gap == nil {
		fmt.Printf("no switch was measured (%d seen): %s\n", len(c.Switches), holds(false))
		return
	}
	rate := func(s *spread) string {
		if s == nil {
			return "-"
		}
		return fmt.Sprintf("%.1f GB/s", s.Median)
	}
	fmt.Printf("%d switches, from the last kernel to the other's first %.3f s (%.3f to %.3f), from the revoke %.3f s; out %s, in %s, %d overlaps\n",
		c.Gap.N, c.Gap.Median, c.Gap.Q1, c.Gap.Q3, c.FromRevoke.Median, rate(c.OutRate), rate(c.InRate), c.Overlaps)
	fmt.Printf("  at most %.1f times what the link allows: %.3f (%.3f to %.3f): %s\n", swapRatio,
		c.OfLimit.Median, c.OfLimit.Q1, c.OfLimit.Q3, holds(c.OfLimit.Median <= swapRatio))
	if c.OfExchange != nil {
		fmt.Printf("  of what two bare processes take that exchange as much: %.3f times (%.3f to %.3f)\n", c.OfExchange.Median, c.OfExchange.Q1, c.OfExchange.Q3)
	}
	fmt.Printf("  at least %.0f %% of the link while moving: %.1f %%: %s\n", 100*swapLink, 100*c.LinkUsed.Median, holds(c.LinkUsed.Median >= swapLink))
	wrong, words := uint64(0), uint64(0)
	for _, events := range c.Told {
		for _, e := range events {
			wrong, words = wrong+e.Wrong+e.OnTheWay, words+e.Words
		}
	}
	fmt.Printf("  every word is what it was: %d of %d wrong: %s\n", wrong, words, holds(wrong == 0 && words > 0))
}

// medianOf is for lines that say one number of several.
func medianOf(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	return median(v)
}
