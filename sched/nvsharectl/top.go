// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

// barWidth is how many characters a whole GPU's time takes.
const barWidth = 5

type topFlags struct {
	gpu      string
	interval time.Duration
	rounds   int
	once     bool
}

func topCommand(root *rootFlags, io streams) *cobra.Command {
	f := &topFlags{}
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show what each tenant uses, again and again",
		Long: `top shows for each interval the part of the GPU's time that each tenant used, and
its turns and calls per second. On a terminal it draws in place, otherwise one
table below the other. Exit status 1: the last table showed a problem.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), root.runDir, io)
		},
	}
	fs := cmd.Flags()
	f.interval = 2 * time.Second
	fs.VarP((*durationFlag)(&f.interval), "delay", "d", "`time` between two rounds, in seconds or with a unit")
	fs.IntVarP(&f.rounds, "rounds", "n", 0, "end after this `number`; 0: go on")
	fs.BoolVar(&f.once, "once", false, "like -n 1")
	fs.StringVar(&f.gpu, "gpu", "", "only the GPU with this `index or UUID`")
	return cmd
}

func (f *topFlags) run(ctx context.Context, runDir string, io streams) error {
	if f.once {
		f.rounds = 1
	}
	if f.interval < 10*time.Millisecond || f.rounds < 0 {
		return usageError{fmt.Errorf("top: --delay %v, --rounds %d: at least 10ms and 0", f.interval, f.rounds)}
	}
	last, err := f.ask(ctx, runDir)
	if err != nil {
		return err
	}
	lines := 0 // drawn and to be drawn over
	for i := 0; f.rounds == 0 || i < f.rounds; i++ {
		select {
		case <-time.After(f.interval):
		case <-ctx.Done():
			return nil // the user has seen enough
		}
		r, err := f.ask(ctx, runDir)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		var b strings.Builder
		printTop(streams{out: &b, colour: io.colour, size: io.size}, last, r)
		switch {
		case io.size != nil:
			lines = redraw(io, lines, strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n"))
		case i > 0:
			fmt.Fprint(io.out, "\n"+b.String())
		default:
			fmt.Fprint(io.out, b.String())
		}
		last = r
	}
	if len(last.Problems) > 0 {
		return errUnhealthy
	}
	return nil
}

// redraw puts lines in the place of those drawn before and returns how many
// there are now. What does not fit on the terminal is cut off: it could not be
// drawn over.
func redraw(io streams, before int, lines []string) int {
	const noWrap, wrap, toEnd, below = "\x1b[?7l", "\x1b[?7h", "\x1b[K", "\x1b[J"
	rows, _ := io.size()
	if room := max(rows-1, 1); len(lines) > room {
		lines = append(lines[:room-1:room-1], fmt.Sprintf("… %d lines more", len(lines)-room+1))
	}
	var b strings.Builder
	if before > 0 {
		fmt.Fprintf(&b, "\x1b[%dA\r", before)
	}
	b.WriteString(noWrap)
	for _, line := range lines {
		b.WriteString(line + toEnd + "\n")
	}
	b.WriteString(wrap + below)
	fmt.Fprint(io.out, b.String())
	return len(lines)
}

func (f *topFlags) ask(ctx context.Context, runDir string) (r *api.StatusResponse, err error) {
	if err := call(ctx, runDir, func(ctx context.Context, c *api.Conn) (err error) {
		r, err = c.Status(ctx, &api.StatusRequest{})
		return err
	}); err != nil {
		return nil, err
	}
	return r, restrict(r, f.gpu)
}

// printTop prints what has happened between two answers.
func printTop(io streams, old, r *api.StatusResponse) {
	interval := time.Duration(r.UptimeNs - old.UptimeNs)
	if interval <= 0 { // another scheduler: all it has done
		old, interval = &api.StatusResponse{}, max(time.Duration(r.UptimeNs), 1)
	}
	printHealth(io, r, io.width())
	fmt.Fprintln(io.out)
	tenants := table{names: 1, head: []string{"GPU", "TENANT", "STATE", "GETS", "", "WAITED", "GRANTS/S", "MEMORY"}}
	var gpus []string
	for _, g := range r.Gpus {
		before := &api.GPU{}
		for _, o := range old.Gpus {
			if o.Uuid == g.Uuid {
				before = o
			}
		}
		was := map[string]*tenant{}
		for _, t := range tenantsOf(before) {
			was[t.key()] = t
		}
		for _, t := range tenantsOf(g) {
			o := was[t.key()]
			if o == nil {
				o = &tenant{use: &api.TenantUse{}}
			}
			used := time.Duration(max(t.used()-o.used(), 0))
			state, since, colour := t.state()
			if since != "-" {
				state += " " + since
			}
			memory, memoryColour := t.ofLimit("/")
			part := used.Seconds() / interval.Seconds()
			tenants.add(map[int]string{2: colour, 7: memoryColour},
				fmt.Sprint(g.Index), t.name(), state, bar(part), percent(part), t.waited(),
				perSecond(t.grants(), o.grants(), interval), memory)
		}
		gpus = append(gpus, wrap(printable(describeGPU(g)), io.width(), "       ")...)
	}
	for _, line := range gpus {
		fmt.Fprintln(io.out, line)
	}
	if len(tenants.rows) > 0 {
		fmt.Fprintln(io.out)
		tenants.print(io)
	}
}

// used is the time under grants so far.
func (t *tenant) used() int64 {
	if t.use.Container != nil {
		return t.use.UsedNs
	}
	var n int64
	for _, c := range t.clients { // an older scheduler
		n += c.HeldNs
	}
	return n
}

func (t *tenant) grants() (n uint64) {
	for _, c := range t.clients {
		n += c.Grants
	}
	return max(n, t.use.Grants)
}

func bar(part float64) string {
	n := min(int(part*barWidth+0.5), barWidth)
	return strings.Repeat("█", n) + strings.Repeat("·", barWidth-n)
}

func percent(part float64) string { return fmt.Sprintf("%.1f%%", 100*part) }

// perSecond is the rate of a counter; one that fell began anew.
func perSecond(now, before uint64, interval time.Duration) string {
	if now < before {
		before = 0
	}
	return fmt.Sprintf("%.1f", float64(now-before)/interval.Seconds())
}
