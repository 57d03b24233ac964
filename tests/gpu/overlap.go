// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/node"
)

// Ways in which small tenants share the GPU.
const (
	plainMPS = "mps"   // one MPS daemon that this program starts, without the shim
	inGroup  = "group" // members of an overlap group
)

var overlapWays = []string{native, plainMPS, inGroup}

const (
	overlapTarget  = 0.97 // of plain MPS
	smallTarget    = 3.5  // times one alone natively: four of 20 blocks
	groupPartError = 3.0  // points
	limitPercent   = 25
	mostDecoders   = 6
)

// An overlapCell is so many processes that do the same, one way.
type overlapCell struct {
	Load    string    `json:"load"`
	Way     string    `json:"way"`
	N       int       `json:"n"`
	Rates   []float64 `json:"rates"` // kernels or steps per second
	Sum     float64   `json:"sum"`
	Rounds  []float64 `json:"rounds,omitempty"` // the sums of each window; then Sum is their median
	User    float64   `json:"user_s,omitempty"` // CPU time of the first process in all windows
	System  float64   `json:"system_s,omitempty"`
	OfAlone float64   `json:"of_one_alone_natively"`
	OfMPS   float64   `json:"of_plain_mps,omitempty"`
	Error   string    `json:"error,omitempty"`
}

type besideCell struct {
	Way      string    `json:"way"`
	What     string    `json:"what"`
	Members  []float64 `json:"members"`
	Other    float64   `json:"other"`
	OfAlone  []float64 `json:"of_alone"`                     // the members, then the other
	Sum      float64   `json:"sum_of_alone,omitempty"`       // the median of the windows
	Rounds   []float64 `json:"rounds,omitempty"`             // the sums of each window
	Group    float64   `json:"group_part_percent,omitempty"` // of the GPU's time, as it was billed
	Outsider float64   `json:"outsider_part_percent,omitempty"`
	Requests *requests `json:"requests,omitempty"` // the other is short requests
	Error    string    `json:"error,omitempty"`
}

type overlapResult struct {
	Control string            `json:"mps_control"`
	Cells   []overlapCell     `json:"cells"`
	Beside  []besideCell      `json:"beside"`
	Limits  []overlapCell     `json:"limits"`
	Facts   map[string]string `json:"facts"`
}

// overlapBench is the step's own scheduler, and plain MPS beside it.
type overlapBench struct {
	*bench
	s       *scheduler
	control string
	pipe    string // of plain MPS
	mps     *exec.Cmd
	length  time.Duration
	r       overlapResult
}

// overlapStep measures small kernels of several processes: by the driver's time slices, under
// plain MPS, and in an overlap group.
func (b *bench) overlapStep(ctx context.Context, _ string) error {
	o := &overlapBench{bench: b, length: 5 * time.Second, r: overlapResult{Facts: map[string]string{}}}
	sim := ""
	if b.simulated {
		sim = node.SimGPU
	}
	if b.cells.quick || b.simulated {
		o.length = 2 * time.Second
	}
	var err error
	if o.control, err = cdi.FindMPSControl(cdi.Options{SimDir: sim}); err != nil {
		return err
	}
	o.r.Control = o.control
	if o.s, err = b.scheduler(ctx, "overlap", "--anti-thrash", "auto", "--tq", "100ms"); err != nil {
		return err
	}
	defer o.s.stop()
	var errs []error
	for _, part := range []struct {
		name string
		run  func(context.Context) error
	}{{"small kernels", o.smallKernels}, {"limits", o.limits}, {"memory limit", o.memory}, {"beside an outsider", o.outsider}, {"beside priority and a limit", o.outsiderShares}, {"faults", o.faults}, {"decoders", o.decoders}, {besideTraining, o.outsideTraining}, {besideGEMM, o.mixed}} {
		if strings.HasPrefix(part.name, "decoder") && b.simulated || part.name != besideGEMM && !o.chosen(part.name) {
			continue
		}
		if err := part.run(ctx); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", part.name, err))
			fmt.Printf("  %s: %v\n", part.name, err)
		}
		errs = append(errs, b.saveJSON("overlap.json", o.r))
	}
	return errors.Join(errs...)
}

// startMPS starts plain MPS, of this program's user.
func (o *overlapBench) startMPS(ctx context.Context) error {
	o.pipe = filepath.Join(swapDir, "plain-mps")
	for _, dir := range []string{o.pipe, o.pipe + "-log"} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	o.mps = exec.Command(o.control, "-f")
	o.mps.Env = append(os.Environ(), api.MPSPipeEnv+"="+o.pipe, "CUDA_MPS_LOG_DIRECTORY="+o.pipe+"-log")
	o.mps.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := o.mps.Start(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return node.Until(ctx, "the MPS daemon", func() error {
		_, err := os.Lstat(filepath.Join(o.pipe, "control"))
		return err
	})
}

func (o *overlapBench) stopMPS() {
	quit := exec.Command("timeout", "10", o.control)
	quit.Env, quit.Stdin = append(os.Environ(), api.MPSPipeEnv+"="+o.pipe), strings.NewReader("quit -t 1\n")
	_ = quit.Run()
	_ = unix.Kill(-o.mps.Process.Pid, unix.SIGKILL)
	_ = o.mps.Wait()
	_ = os.RemoveAll(o.pipe)
}

// command is a program, one way. Flags are those of nvsharectl run; outside a group they
// mean nothing.
func (o *overlapBench) command(ctx context.Context, way string, flags []string, program ...string) *exec.Cmd {
	env := append(os.Environ(), o.tenantEnv(native, "")...)
	switch way {
	case plainMPS:
		env = append(env, api.MPSPipeEnv+"="+o.pipe)
	case inGroup:
		program = slices.Concat([]string{o.node.Bin("nvsharectl"), "run", "--overlap", "small", "--gpu", "0", "--shim", filepath.Join(swapDir, "libnvshare.so")}, flags, []string{"--"}, program)
		env = append(env, "NVSHARE_RUN_DIR="+o.s.dir)
	case shim1: // a tenant of its own, outside the group
		program = slices.Concat([]string{o.node.Bin("nvsharectl"), "run", "--name", "outsider", "--shim", filepath.Join(swapDir, "libnvshare.so")}, flags, []string{"--"}, program)
		env = append(env, "NVSHARE_RUN_DIR="+o.s.dir)
	}
	cmd := exec.CommandContext(ctx, program[0], program[1:]...)
	cmd.Env = env
	return cmd
}

// busyProgram is cuda-busy for so many seconds.
func busyProgram(blocks, us int, length time.Duration) []string {
	return []string{filepath.Join(swapDir, "cuda-busy"), "--kernel-us", strconv.Itoa(us), "--depth", "50", "--blocks", strconv.Itoa(blocks),
		"--threads", "1024", "--report-ms", "0", "--seconds", fmt.Sprintf("%.1f", length.Seconds())}
}

// rates runs commands at the same time and returns the kernels per second of each.
func rates(cmds []*exec.Cmd) ([]float64, error) {
	outs, errs := make([]bytes.Buffer, len(cmds)), make([]bytes.Buffer, len(cmds))
	var failed []error
	for i, c := range cmds {
		c.Stdout, c.Stderr = &outs[i], &errs[i]
		if err := c.Start(); err != nil {
			failed = append(failed, err)
		}
	}
	all := make([]float64, len(cmds))
	for i, c := range cmds {
		if c.Process == nil {
			continue
		}
		if err := c.Wait(); err != nil {
			failed = append(failed, fmt.Errorf("%v: %w: %s", c.Args, err, strings.TrimSpace(errs[i].String())))
			continue
		}
		lines := strings.Split(strings.TrimSpace(outs[i].String()), "\n")
		var done struct {
			Rate float64 `json:"per_s"`
		}
		if err := json.Unmarshal([]byte(lines[len(lines)-1]), &done); err != nil {
			failed = append(failed, fmt.Errorf("%v: %w: %s", c.Args, err, lines[len(lines)-1]))
		}
		all[i] = done.Rate
	}
	return all, errors.Join(failed...)
}

func sumOf(all []float64) (sum float64) {
	for _, r := range all {
		sum += r
	}
	return sum
}

// inWay runs f where plain MPS is there if the way needs it.
func (o *overlapBench) inWay(ctx context.Context, way string, f func() error) error {
	if way == plainMPS {
		if err := o.startMPS(ctx); err != nil {
			return err
		}
		defer o.stopMPS()
	}
	return f()
}

// cell measures n processes of cuda-busy.
func (o *overlapBench) cell(ctx context.Context, load, way string, n, blocks, us int, flags ...string) overlapCell {
	c := overlapCell{Load: load, Way: way, N: n}
	err := o.inWay(ctx, way, func() (err error) {
		var cmds []*exec.Cmd
		for range n {
			cmds = append(cmds, o.command(ctx, way, flags, busyProgram(blocks, us, o.length)...))
		}
		c.Rates, err = rates(cmds)
		return err
	})
	if c.Sum = round(sumOf(c.Rates), 1); err != nil {
		c.Error = err.Error()
	}
	return c
}

func (o *overlapBench) smallKernels(ctx context.Context) error {
	const load = "20 blocks, 20 µs"
	alone := o.cell(ctx, load, native, 1, 20, 20)
	held := true
	for _, n := range []int{1, 2, 4, 8} {
		mps := 0.0
		for _, way := range overlapWays {
			c := o.cell(ctx, load, way, n, 20, 20)
			c.OfAlone = round(c.Sum/max(alone.Sum, 1), 3)
			switch way {
			case plainMPS:
				mps = c.Sum
			case inGroup:
				c.OfMPS = round(c.Sum/max(mps, 1), 3)
				held = held && c.OfMPS >= overlapTarget && (n != 4 || c.OfAlone >= smallTarget)
			}
			o.r.Cells = append(o.r.Cells, c)
			fmt.Printf("  %d of %s, %-6s %9.0f kernels/s, %.2f of one alone", n, load, way, c.Sum, c.OfAlone)
			if c.OfMPS != 0 {
				fmt.Printf(", %.3f of plain MPS", c.OfMPS)
			}
			fmt.Println(" " + c.Error)
		}
	}
	fmt.Printf("  overlap: at least %.2f of plain MPS, four at least %.1f times one alone: %s\n", overlapTarget, smallTarget, holds(held))
	return nil
}

// limits measures members whose kernels would fill the GPU, each with a part of it.
func (o *overlapBench) limits(ctx context.Context) error {
	full := o.cell(ctx, "132 blocks", inGroup, 1, 132, 20)
	o.r.Limits = append(o.r.Limits, full)
	for _, n := range []int{1, 4} {
		c := o.cell(ctx, fmt.Sprintf("132 blocks, limit %d %%", limitPercent), inGroup, n, 132, 20, "--core-limit", strconv.Itoa(limitPercent))
		c.OfAlone = round(c.Sum/max(full.Sum, 1), 3)
		o.r.Limits = append(o.r.Limits, c)
		fmt.Printf("  %d of %s: %.0f kernels/s, %.3f of one without a limit, each %.3f %s\n", n, c.Load, c.Sum, c.OfAlone, c.OfAlone/float64(n), c.Error)
	}
	return nil
}

// memory holds members to their memory limits.
func (o *overlapBench) memory(ctx context.Context) error {
	run := func(mib string) string {
		cmd := o.command(ctx, inGroup, []string{"--memory-limit", "1Gi"}, append(busyProgram(20, 20, time.Second), "--mem-mib", mib)...)
		out, err := cmd.CombinedOutput()
		if err != nil {
			return strings.TrimSpace(fmt.Sprintf("%v: %s", err, out))
		}
		return "runs"
	}
	within, above := run("512"), run("2048")
	o.r.Facts["memory limit 1Gi, 512 MiB"], o.r.Facts["memory limit 1Gi, 2048 MiB"] = within, above
	held := within == "runs" && strings.Contains(above, "OUT_OF_MEMORY")
	fmt.Printf("  memory limit of 1 GiB: 512 MiB: %s; 2048 MiB: %s: %s\n", within, above, holds(held))
	return nil
}

// outsider has a group of small kernels beside a tenant that fills the GPU.
func (o *overlapBench) outsider(ctx context.Context) error {
	const us = 1000
	alone, err := rates([]*exec.Cmd{o.command(ctx, native, nil, busyProgram(264, us, o.length)...)})
	if err != nil {
		return err
	}
	aloneSmall, err := rates([]*exec.Cmd{o.command(ctx, native, nil, busyProgram(20, 20, o.length)...)})
	if err != nil {
		return err
	}
	for _, row := range []struct {
		way, name       string
		member, outside []string // flags of nvsharectl run
	}{
		{way: native, name: native},
		{way: plainMPS, name: plainMPS},
		{way: inGroup, name: inGroup},
		{inGroup, "group, half requested", []string{"--core-request", "25"}, []string{"--core-request", "50"}},
	} {
		c := besideCell{Way: row.name, What: "2 of 20 blocks beside one of 264 blocks, 1 ms"}
		length := o.length
		if row.way == inGroup {
			length *= 3 // slices are measured before they say what each gets
		}
		if row.member != nil {
			length *= 2 // if slices cannot give what is promised, turns do after some windows
		}
		err := o.inWay(ctx, row.way, func() error {
			small := busyProgram(20, 20, length)
			full := o.command(ctx, row.way, nil, busyProgram(264, us, length)...)
			if row.way == inGroup {
				full = o.command(ctx, shim1, row.outside, busyProgram(264, us, length)...)
			}
			cmds := []*exec.Cmd{o.command(ctx, row.way, row.member, small...), o.command(ctx, row.way, row.member, small...), full}
			parts := make(chan [2]float64, 1)
			go func() { parts <- o.parts(ctx, length) }()
			all, err := rates(cmds)
			p := <-parts
			if row.way == inGroup {
				c.Group, c.Outsider = p[0], p[1]
			}
			c.Members, c.Other = all[:2], all[2]
			for _, r := range all[:2] {
				c.OfAlone = append(c.OfAlone, round(r/max(aloneSmall[0], 1), 3))
			}
			c.OfAlone = append(c.OfAlone, round(all[2]/max(alone[0], 1), 3))
			return err
		})
		if err != nil {
			c.Error = err.Error()
		}
		o.r.Beside = append(o.r.Beside, c)
		fmt.Printf("  %s, %-22s of alone: %.3f", c.What, c.Way, c.OfAlone)
		if row.way == inGroup {
			fmt.Printf("; the group has %.1f %% of the time, the outsider %.1f %%", c.Group, c.Outsider)
		}
		if row.member != nil {
			fmt.Printf(": %s", holds(max(c.Group-50, 50-c.Group) <= groupPartError))
		}
		fmt.Println(" " + c.Error)
	}
	return nil
}

// outsiderShares has two members beside short requests of priority latency, and beside a tenant
// with a core limit that fills the GPU.
func (o *overlapBench) outsiderShares(ctx context.Context) error {
	aloneSmall, err := rates([]*exec.Cmd{o.command(ctx, native, nil, busyProgram(20, 20, o.length)...)})
	if err != nil {
		return err
	}
	request := func(length time.Duration) []string {
		return append([]string{filepath.Join(swapDir, "short-request")}, requestArgs(0, length.Seconds())...)
	}
	for _, row := range []struct {
		way, name, what string
		members         int
		requests        bool     // the outsider makes short requests; else it fills the GPU
		flags           []string // the outsider's, of nvsharectl run
	}{
		{native, native, "short requests alone", 0, true, nil},
		{native, native, "2 of 20 blocks beside short requests", 2, true, nil},
		{inGroup, "priority latency", "2 of 20 blocks beside short requests", 2, true, []string{"--priority", "latency"}},
		{inGroup, "limit 30 %", "2 of 20 blocks beside one of 264 blocks, 1 ms", 2, false, []string{"--core-limit", "30"}},
	} {
		c := besideCell{Way: row.name, What: row.what}
		length := o.length
		if row.way == inGroup {
			length *= 2
		}
		var cmds []*exec.Cmd
		for range row.members {
			cmds = append(cmds, o.command(ctx, row.way, nil, busyProgram(20, 20, length)...))
		}
		program := busyProgram(264, 1000, length)
		if row.requests {
			program = request(length)
		}
		var out, stderr bytes.Buffer
		other := o.command(ctx, native, nil, program...)
		if row.way == inGroup {
			other = o.command(ctx, shim1, row.flags, program...)
		}
		other.Stdout, other.Stderr = &out, &stderr
		parts := make(chan [2]float64, 1)
		go func() { parts <- o.parts(ctx, length) }()
		if err := other.Start(); err != nil {
			return err
		}
		all, err := rates(cmds)
		if failed := other.Wait(); failed != nil {
			err = errors.Join(err, fmt.Errorf("%v: %w: %s", other.Args, failed, strings.TrimSpace(stderr.String())))
		}
		p := <-parts
		if row.way == inGroup {
			c.Group, c.Outsider = p[0], p[1]
		}
		if row.requests && err == nil {
			c.Requests = &requests{}
			err = json.Unmarshal(out.Bytes(), c.Requests)
		}
		c.Members = all
		for _, r := range all {
			c.OfAlone = append(c.OfAlone, round(r/max(aloneSmall[0], 1), 3))
		}
		if err != nil {
			c.Error = err.Error()
		}
		o.r.Beside = append(o.r.Beside, c)
		fmt.Printf("  %s, %s: members %.3f of alone", c.What, c.Way, c.OfAlone)
		if c.Requests != nil {
			fmt.Printf("; requests p50 %.2f, p99 %.2f ms", c.Requests.P50, c.Requests.P99)
		}
		if row.way == inGroup {
			fmt.Printf("; the group has %.1f %% of the time, the outsider %.1f %%", c.Group, c.Outsider)
		}
		fmt.Println(" " + c.Error)
	}
	return nil
}

// parts returns which percentage of the GPU's time the group and the outsider used in the
// last third of what they do together, which takes so long.
func (o *overlapBench) parts(ctx context.Context, length time.Duration) (p [2]float64) {
	used := func() (u [2]float64) {
		r, err := o.s.status(ctx)
		if err != nil || len(r.Gpus) == 0 {
			return u
		}
		for _, t := range r.Gpus[0].Tenants {
			switch {
			case t.Share.GetOverlap() != "":
				u[0] += float64(t.UsedNs)
			case t.Container.GetName() == "outsider":
				u[1] += float64(t.UsedNs)
			}
		}
		return u
	}
	time.Sleep(length * 2 / 3)
	from, began := used(), time.Now()
	time.Sleep(length / 4) // they may have begun later
	to, took := used(), time.Since(began)
	for i := range p {
		p[i] = round(100*(to[i]-from[i])/float64(took), 2)
	}
	return p
}

// faults kills a member, and then the server of those that are left.
func (o *overlapBench) faults(ctx context.Context) error {
	start := func(length time.Duration) *exec.Cmd {
		cmd := o.command(ctx, inGroup, nil, busyProgram(20, 20, length)...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		return cmd
	}
	ended := func(cmd *exec.Cmd) string {
		if err := cmd.Wait(); err != nil {
			return strings.TrimSpace(fmt.Sprintf("%v: %s", err, cmd.Stderr))
		}
		return "ran to its end"
	}
	members := []*exec.Cmd{start(4 * time.Second), start(4 * time.Second)}
	for _, c := range members {
		c.Stderr = &bytes.Buffer{}
		if err := c.Start(); err != nil {
			return err
		}
	}
	time.Sleep(2 * time.Second)
	_ = unix.Kill(-members[0].Process.Pid, unix.SIGKILL)
	_ = members[0].Wait()
	o.r.Facts["a member is killed; another one"] = ended(members[1])

	for _, name := range []string{"nvidia-cuda-mps-server", "nvidia-cuda-mps-control"} {
		c := start(6 * time.Second)
		c.Stderr = &bytes.Buffer{}
		if err := c.Start(); err != nil {
			return err
		}
		time.Sleep(2 * time.Second)
		killed := o.kill(name)
		o.r.Facts[fmt.Sprintf("%s is killed (%d); a member", name, killed)] = ended(c)
		time.Sleep(2 * time.Second) // the pause before a daemon is started again
		after, err := rates([]*exec.Cmd{start(2 * time.Second)})
		o.r.Facts[name+" was killed; the next member"] = fmt.Sprintf("%.0f kernels/s, error %v", sumOf(after), err)
	}
	time.Sleep(8 * time.Second)
	o.r.Facts["processes of MPS left after the last member"] = strconv.Itoa(len(pidsOf("nvidia-cuda-mps-")))
	if left, err := os.ReadDir(filepath.Join(o.s.dir, "overlap")); err == nil {
		o.r.Facts["groups left"] = strconv.Itoa(len(left))
	}
	for _, what := range slices.Sorted(func(yield func(string) bool) {
		for k := range o.r.Facts {
			if !yield(k) {
				return
			}
		}
	}) {
		fmt.Printf("  %s: %s\n", what, o.r.Facts[what])
	}
	return nil
}

func (o *overlapBench) kill(name string) (n int) {
	for _, pid := range pidsOf(name) {
		if unix.Kill(pid, unix.SIGKILL) == nil {
			n++
		}
	}
	return n
}

// pidsOf returns the processes whose program's name begins so. The kernel keeps 15 bytes of
// it, so the command line is read.
func pidsOf(name string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		text, _ := os.ReadFile(f)
		first, _, _ := strings.Cut(string(text), "\x00")
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(f))); err == nil && strings.HasPrefix(filepath.Base(first), name) {
			pids = append(pids, pid)
		}
	}
	return pids
}
