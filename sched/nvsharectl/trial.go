// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	// trialLimit is the core limit of one of the two programs, percent, and trialMemory
	// its memory limit, bytes.
	trialLimit  = 25
	trialMemory = 256 << 20
	// maxTrialSwap is the largest GPU whose memory doctor test fills to see it swapped,
	// bytes.
	maxTrialSwap = 8 << 30
	// trialPatience is how long a pair of programs may take beyond the time of the test.
	trialPatience = 3 * time.Minute
)

// trial runs two programs on a GPU, and judges what they got.
type trial struct {
	self   string // nvsharectl
	runDir string
	simGPU string
	shim   string
	gpu    string
	time   time.Duration
	// patience is how long the programs may take beyond that.
	patience time.Duration
}

func trialCommand(root *rootFlags, f *doctorFlags, io streams) *cobra.Command {
	t := &trial{time: 5 * time.Second, patience: trialPatience}
	var output string
	cmd := &cobra.Command{
		Use:   "test",
		Short: "Run two small programs, and check shim, share, limits and swapping",
		Long: `test runs two tenants at the same time for five seconds (--time). One has a
core limit of 25 % and a memory limit of 256Mi, the other none. The programs
themselves say what they got, and the scheduler what their shims hold, and
whether the driver lets them set time slices and cut kernels. Where memory may
be swapped, and the GPU has at most 8Gi (see --gpu-memory of
nvshare-scheduler), two more programs want more memory than the GPU has. Their
memory has to move at each turn while they fill and read it, so this part may
take minutes; the test gives up on a pair of programs 3 minutes after their
time.

It needs root, the shim, and a GPU with little other work: what others use is
missing in the shares.`,
		Example: `  sudo nvsharectl doctor test
  sudo nvsharectl doctor test --gpu 1 -o json`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			t.runDir, t.simGPU, t.shim = root.runDir, f.simGPU, f.shim
			var err error
			if t.self, err = os.Executable(); err != nil {
				return err
			}
			all, err := t.run(cmd.Context())
			if err != nil {
				return err
			}
			return conclude(io, output, all)
		},
	}
	addForm(cmd, &output, "", "text", "json", "yaml")
	cmd.Flags().StringVar(&t.gpu, "gpu", "0", "the GPU with this `index or UUID`")
	cmd.Flags().Var((*durationFlag)(&t.time), "time", "how long the programs run, in seconds or with a unit")
	return cmd
}

func (t *trial) run(ctx context.Context) ([]finding, error) {
	r, err := t.status(ctx)
	if err != nil {
		return nil, err
	}
	g := r.Gpus[0]
	t.gpu = g.Uuid
	free, limited, err := t.pair(ctx, 0, trialMemory+probePiece,
		"--core-limit", fmt.Sprint(trialLimit), "--memory-limit", fmt.Sprintf("%dMi", trialMemory>>20))
	if err != nil {
		return []finding{{Check: "programs", Level: fail, Text: err.Error(), Fix: "nvsharectl doctor"}}, nil
	}
	all := append([]finding{judgeShims(free, limited)}, judgeControls(g, free, limited)...)
	all = append(all, judgeShares(free.probed, limited.probed)...)
	all = append(all, judgeMemory(limited.probed))
	return append(all, t.swapping(ctx, g)), nil
}

// status is what the scheduler says of the GPU.
func (t *trial) status(ctx context.Context) (*api.StatusResponse, error) {
	r, err := askAll(ctx, t.runDir)
	if err != nil {
		return nil, err
	}
	return r, restrict(r, t.gpu)
}

// part is how much of the time the program had the GPU.
func (p probed) part() float64 {
	if p.Seconds == 0 {
		return 0
	}
	return float64(p.Kernels) * probeKernel.Seconds() / p.Seconds
}

func judgeShares(free, limited probed) []finding {
	share := finding{Check: "share", Level: pass, Text: fmt.Sprintf("two programs at once had %s and %s of the GPU's time", percent(free.part()), percent(limited.part()))}
	switch sum := free.part() + limited.part(); {
	case free.part() < 0.05 || limited.part() < 0.05:
		share.Level, share.Fix = fail, "nvsharectl events"
		share.Text += ": one of them starves"
	case sum > 1.05:
		share.Level, share.Fix = fail, "nvsharectl doctor"
		share.Text += ": more than there is, so they were not scheduled"
	case sum < 0.75:
		share.Level, share.Fix = warn, "nvsharectl top"
		share.Text += ": the rest is lost, or others have it"
	}
	limit := finding{Check: "limit", Level: pass, Text: fmt.Sprintf("a core limit of %d%% gave %s", trialLimit, percent(limited.part()))}
	if limited.part() > 1.15*trialLimit/100 {
		limit.Level, limit.Fix = fail, "nvsharectl doctor"
	}
	return []finding{share, limit}
}

func judgeMemory(p probed) finding {
	f := finding{Check: "memory", Level: pass, Text: fmt.Sprintf("with a memory limit of %s a program saw a GPU of %s, got %s, and then out of memory", size(trialMemory), size(p.Total), size(p.Got))}
	if !p.Full || p.Got > trialMemory || p.Total != trialMemory {
		f.Level, f.Fix = fail, "nvsharectl doctor"
		f.Text = fmt.Sprintf("with a memory limit of %s a program saw a GPU of %s and got %s, out of memory: %v", size(trialMemory), size(p.Total), size(p.Got), p.Full)
	}
	return f
}

// swapping has two programs that want more memory together than the GPU has.
func (t *trial) swapping(ctx context.Context, g *api.GPU) finding {
	f := finding{Check: "swap", Level: pass}
	s := g.Swap
	if s == nil {
		f.Text = "not tried, as it is off: " + cmp.Or(g.NotSwapped, "nvshare-scheduler --swap-memory")
		return f
	}
	each := s.CapacityBytes * 6 / 10 / probePiece * probePiece
	switch {
	case s.CapacityBytes > maxTrialSwap:
		f.Text = fmt.Sprintf("not tried: it would move up to %s (nvshare-scheduler --gpu-memory 4Gi makes a small GPU)", size(each))
		return f
	case s.PromisedBytes > s.CapacityBytes/10, s.ArenaLimitBytes-min(s.ArenaUsedBytes, s.ArenaLimitBytes) < each:
		f.Level, f.Text = warn, "not tried: other tenants have memory, or there is less host memory than what has to move"
		return f
	}
	a, b, err := t.pair(ctx, each, each)
	switch {
	case err != nil:
		f.Level, f.Text, f.Fix = fail, err.Error(), "nvsharectl events --since 5m --type swap-in,swap-out,stall,warning"
	case a.Full || b.Full || a.Got+b.Got <= s.CapacityBytes:
		f.Level, f.Fix = fail, "nvsharectl events"
		f.Text = fmt.Sprintf("two programs got %s and %s: not more than the GPU's %s", size(a.Got), size(b.Got), size(s.CapacityBytes))
	case a.Wrong+b.Wrong > 0:
		f.Level, f.Fix = fail, "nvsharectl doctor bundle, for a bug report"
		f.Text = fmt.Sprintf("%d words of memory are not as they were written", a.Wrong+b.Wrong)
	case a.Kernels == 0 || b.Kernels == 0:
		f.Level, f.Text, f.Fix = fail, "one of the programs did nothing", "nvsharectl events"
	default:
		f.Text = fmt.Sprintf("two programs had %s and %s of a GPU of %s, and each word is as it was written", size(a.Got), size(b.Got), size(s.CapacityBytes))
	}
	return f
}

// pair runs two programs at the same time, which want so much memory; the terms are the
// second one's.
func (t *trial) pair(ctx context.Context, first, second uint64, terms ...string) (a, b *program, err error) {
	ctx, cancel := context.WithTimeout(ctx, t.time+t.patience)
	defer cancel()
	began := time.Now()
	late := func(err error, doing string) error {
		if ctx.Err() == nil {
			return err
		}
		return fmt.Errorf("the programs did not finish in %v, when they had to %s", time.Since(began).Round(time.Second), doing)
	}
	if a, err = t.start(ctx, "doctor-a", first); err != nil {
		return nil, nil, late(err, "start")
	}
	defer a.end()
	if b, err = t.start(ctx, "doctor-b", second, terms...); err != nil {
		return nil, nil, late(err, "start")
	}
	defer b.end()
	both := []*program{a, b}
	for _, p := range both {
		if err := p.report(); err != nil {
			return nil, nil, late(err, "take their memory")
		}
	}
	// Both are ready, so their times are the same.
	for _, p := range both {
		if _, err := p.in.Write([]byte("\n")); err != nil {
			return nil, nil, late(err, "begin to work")
		}
	}
	if err := t.look(ctx, time.Now().Add(t.time*3/4), both...); err != nil {
		return nil, nil, late(err, "work")
	}
	for _, p := range both {
		if err := p.report(); err != nil {
			return nil, nil, late(err, "work and read their memory")
		}
	}
	return a, b, nil
}

// program is a probe that runs as a tenant of its own.
type program struct {
	name string
	probed
	known  known
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	stderr bytes.Buffer
}

func (t *trial) start(ctx context.Context, name string, want uint64, terms ...string) (*program, error) {
	args := []string{"run", "--run-dir", t.runDir, "--gpu", t.gpu, "--name", name}
	if t.shim != "" {
		args = append(args, "--shim", t.shim)
	}
	args = append(args, terms...)
	args = append(args, "--", t.self, "doctor", "probe", "--time", t.time.String(), "--bytes", fmt.Sprint(want))
	p := &program{name: name, cmd: exec.CommandContext(ctx, t.self, args...)}
	p.cmd.Env = os.Environ()
	if t.simGPU != "" {
		p.cmd.Env = append(p.cmd.Env, "NVSHARE_SIMGPU_DIR="+filepath.Join(t.simGPU, "run"), "LD_LIBRARY_PATH="+filepath.Join(t.simGPU, "lib"))
	}
	p.cmd.Stderr = &p.stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) } // run ends its program
	p.cmd.WaitDelay = callTimeout
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	return p, p.cmd.Start()
}

func (p *program) report() error {
	var said probed
	line, err := p.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &said)
	}
	if errors.Is(err, io.EOF) { // it has ended: its exit status or signal says more
		err = cmp.Or(p.cmd.Wait(), err)
	}
	if err != nil {
		text, ours := strings.CutPrefix(strings.TrimSpace(p.stderr.String()), "nvsharectl: ")
		switch {
		case ours: // it says what has failed
			err = errors.New(text)
		case text != "":
			err = fmt.Errorf("%w: %s", err, text)
		}
		return fmt.Errorf("a program of the test has failed: %w", err)
	}
	if said.Error != "" {
		return errors.New(said.Error)
	}
	p.probed = said
	return nil
}

func (p *program) end() {
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	_ = p.in.Close()
	_ = p.cmd.Wait()
}
