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
	f := &topFlags{interval: 2 * time.Second}
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show what each tenant uses, again and again",
		Long: `top shows for each interval the part of the GPU's time that each tenant had
(GETS) and, of the latest five seconds, the part in which it waited. Without a
terminal, and with -n or --once, it prints one table after the other. Exit
status 1: the last table counted a problem, also one that only root may read.

On a terminal each tenant has a strip of what it had over the last minute. Keys
select, sort and filter, and show processes; ? lists them.`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd.Context(), root.runDir, io)
		},
	}
	fs := cmd.Flags()
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
	switch {
	case f.interval < 10*time.Millisecond:
		return usageError{fmt.Errorf("--delay: %v is too short: give at least 10ms", f.interval)}
	case f.rounds < 0:
		return usageError{fmt.Errorf("--rounds: %d is below 0: give how many tables to print, or 0 to go on", f.rounds)}
	}
	last, err := f.ask(ctx, runDir)
	if err != nil {
		return err
	}
	if io.size != nil && f.rounds == 0 {
		return f.screen(ctx, runDir, io, last)
	}
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
		if i > 0 {
			fmt.Fprintln(io.out)
		}
		printTop(io, last, r)
		last = r
	}
	if problems(last) > 0 {
		return errUnhealthy
	}
	return nil
}

func (f *topFlags) ask(ctx context.Context, runDir string) (r *api.StatusResponse, err error) {
	if r, err = askStatus(ctx, runDir); err != nil {
		return nil, err
	}
	return r, restrict(r, f.gpu)
}

// printTop prints what has happened between two answers.
func printTop(io streams, old, r *api.StatusResponse) {
	printHealth(io, r, io.width())
	fmt.Fprintln(io.out)
	tenants := topTable()
	for _, g := range ratesOf(old, r) {
		for _, line := range wrap(printable(describeGPU(g.gpu)), io.width(), "       ") {
			fmt.Fprintln(io.out, line)
		}
		for _, t := range g.tenants {
			t.addTo(&tenants, fmt.Sprint(g.gpu.Index))
		}
	}
	if len(tenants.rows) > 0 {
		fmt.Fprintln(io.out)
		tenants.print(io)
	}
}

func topTable() table {
	return table{names: 1, head: []string{"GPU", "TENANT", "STATE", "GETS", "", "WAITED", "MEMORY"}}
}

func (t tenantRates) addTo(to *table, gpu string) {
	state, since, colour := t.state()
	if since != "-" {
		state += " " + since
	}
	memory, memoryColour := t.ofLimit("/")
	to.add(map[int]string{2: colour, 6: memoryColour},
		gpu, t.name(), state, bar(t.part), percent(t.part), t.waited(), memory)
}

func bar(part float64) string {
	n := min(int(part*barWidth+0.5), barWidth)
	return strings.Repeat("█", n) + strings.Repeat("·", barWidth-n)
}

func percent(part float64) string { return fmt.Sprintf("%.1f%%", 100*part) }

// gpuRates is what has happened on a GPU between two answers of the scheduler.
type gpuRates struct {
	gpu     *api.GPU
	tenants []tenantRates
}

type tenantRates struct {
	*tenant
	part  float64 // of the GPU's time, 0 to 1
	moved float64 // bytes per second between GPU and host
}

// ratesOf compares two answers. It returns what lies between them, by GPU.
func ratesOf(old, r *api.StatusResponse) (all []gpuRates) {
	interval := time.Duration(r.UptimeNs - old.UptimeNs)
	if interval <= 0 { // another scheduler: all it has done
		old, interval = &api.StatusResponse{}, max(time.Duration(r.UptimeNs), 1)
	}
	for _, g := range r.Gpus {
		was := map[string]*tenant{}
		for _, o := range old.Gpus {
			if o.Uuid == g.Uuid {
				for _, t := range tenantsOf(o) {
					was[t.Key()] = t
				}
			}
		}
		rates := gpuRates{gpu: g}
		for _, t := range tenantsOf(g) {
			o := was[t.Key()]
			if o == nil {
				o = &tenant{&api.GPUTenant{Use: &api.TenantUse{}}}
			}
			used := time.Duration(max(t.Use.UsedNs-o.Use.UsedNs, 0))
			rates.tenants = append(rates.tenants, tenantRates{tenant: t, part: used.Seconds() / interval.Seconds(), moved: float64(t.moved(o)) / interval.Seconds()})
		}
		all = append(all, rates)
	}
	return all
}

// moved returns how many bytes the tenant's processes moved since an earlier answer.
func (t *tenant) moved(since *tenant) (bytes uint64) {
	before := map[uint64]uint64{}
	for _, c := range since.Clients {
		before[c.Id] = c.SwappedOutBytes + c.SwappedInBytes
	}
	for _, c := range t.Clients {
		if old, there := before[c.Id]; there { // a process that came moved nothing in a known time
			bytes += max(c.SwappedOutBytes+c.SwappedInBytes, old) - old
		}
	}
	return bytes
}
