// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

// barWidth is how many characters a whole GPU's time takes.
const barWidth = 5

type topFlags struct {
	gpu, output string
	interval    time.Duration
	rounds      int
	once        bool
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
	addForm(cmd, &f.output, "json: one object a round and line", "text", "json")
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
	if io.size != nil && f.rounds == 0 && f.output == "text" {
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
		if f.output == "json" {
			line, err := safely(json.Marshal(newTopJSON(last, r)))
			if err != nil {
				return fmt.Errorf("print a round: %w", err)
			}
			fmt.Fprintf(io.out, "%s\n", line)
		} else {
			if i > 0 {
				fmt.Fprintln(io.out)
			}
			printTop(io, last, r)
		}
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
	all, _ := ratesOf(old, r)
	for _, g := range all {
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
	part   float64 // of the GPU's time, 0 to 1
	grants float64 // per second
	moved  float64 // bytes per second between GPU and host
}

// ratesOf compares two answers. It returns what lies between them, by GPU.
func ratesOf(old, r *api.StatusResponse) (all []gpuRates, interval time.Duration) {
	interval = time.Duration(r.UptimeNs - old.UptimeNs)
	if interval <= 0 { // another scheduler: all it has done
		old, interval = &api.StatusResponse{}, max(time.Duration(r.UptimeNs), 1)
	}
	for _, g := range r.Gpus {
		was := map[string]*tenant{}
		for _, o := range old.Gpus {
			if o.Uuid == g.Uuid {
				for _, t := range tenantsOf(o) {
					was[t.key()] = t
				}
			}
		}
		rates := gpuRates{gpu: g}
		for _, t := range tenantsOf(g) {
			o := was[t.key()]
			if o == nil {
				o = &tenant{&api.GPUTenant{Use: &api.TenantUse{}}}
			}
			used := time.Duration(max(t.Use.UsedNs-o.Use.UsedNs, 0))
			rates.tenants = append(rates.tenants, tenantRates{tenant: t, part: used.Seconds() / interval.Seconds(),
				grants: perSecond(t.grants(), o.grants(), interval), moved: perSecond(t.moved(o), 0, interval)})
		}
		all = append(all, rates)
	}
	return all, interval
}

func (t *tenant) grants() (n uint64) {
	for _, c := range t.Clients {
		n += c.Grants
	}
	return max(n, t.Use.Grants)
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

// perSecond is the rate of a counter; one that fell began anew.
func perSecond(now, before uint64, interval time.Duration) float64 {
	if now < before {
		before = 0
	}
	return float64(now-before) / interval.Seconds()
}

type topJSON struct {
	Seconds float64      `json:"seconds"` // that the rates are of
	Healthy bool         `json:"healthy"`
	GPUs    []topGPUJSON `json:"gpus"`
}

type topGPUJSON struct {
	Index   uint32          `json:"index"`
	UUID    string          `json:"uuid"`
	Tenants []topTenantJSON `json:"tenants"`
}

type topTenantJSON struct {
	Tenant      string  `json:"tenant"`
	State       string  `json:"state"`
	Gets        float64 `json:"gets"`   // part of the GPU's time, in these seconds
	Waited      float64 `json:"waited"` // part of the latest five seconds
	Grants      float64 `json:"grants_per_second"`
	MemoryBytes uint64  `json:"memory_bytes"`
	LimitBytes  uint64  `json:"limit_bytes"`

	Due           float64  `json:"due"` // part of the GPU's time that it gets now if it wants it
	ResidentBytes uint64   `json:"resident_bytes"`
	AwayBytes     uint64   `json:"away_bytes"`
	Moved         float64  `json:"moved_bytes_per_second"`
	WaitP50       *float64 `json:"wait_p50_seconds,omitempty"` // of the latest minute; absent: no grants
	WaitP99       *float64 `json:"wait_p99_seconds,omitempty"`
}

func newTopJSON(old, r *api.StatusResponse) topJSON {
	all, interval := ratesOf(old, r)
	out := topJSON{Seconds: interval.Seconds(), Healthy: problems(r) == 0, GPUs: []topGPUJSON{}}
	for _, g := range all {
		one := topGPUJSON{g.gpu.Index, g.gpu.Uuid, []topTenantJSON{}}
		for _, t := range g.tenants {
			state, _, _ := t.state()
			line := topTenantJSON{Tenant: t.name(), State: state, Gets: t.part, Waited: float64(t.Use.WaitedPermille) / 1000, Grants: t.grants,
				MemoryBytes: t.Memory.UsedBytes, LimitBytes: t.Memory.LimitBytes, Due: float64(t.Use.PromisedPermille) / 1000,
				ResidentBytes: t.resident(g.gpu), AwayBytes: t.away(), Moved: t.moved}
			if s := t.Use.Waits; s.GetCount() > 0 {
				p50, p99 := seconds(s.P50Ns), seconds(s.P99Ns)
				line.WaitP50, line.WaitP99 = &p50, &p99
			}
			one.Tenants = append(one.Tenants, line)
		}
		out.GPUs = append(out.GPUs, one)
	}
	return out
}
