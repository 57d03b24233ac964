// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func statusCommand(f *rootFlags, io streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show who holds which GPU, who waits, and what each is promised and gets",
		Long: `status shows each GPU and each tenant: a container, or the processes of one
user outside containers.

PROMISED is the part of the GPU's time that a tenant gets if it wants it, while
the same tenants want the GPU as now; GETS is what it got in the last five seconds.
DEBT is the time that it used above its core limit and has to make up for. FOR is
how long it has held the GPU, or waited for it. Where memory is swapped, a table
says which memory is on the GPU, which part of that cannot be moved (FIXED), and
which memory is in host memory or was never used (AWAY). The lines "promised are"
add up core requests and memory limits, also of tenants that do not use the GPU
now: these decide whether and where pods are placed. Exit status 1: there is a
problem.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return showStatus(cmd.Context(), f, io)
		},
	}
	outputFlag(cmd, f)
	cmd.Flags().StringVar(&f.set.gpu, "gpu", "", "show only the GPU with this `index or UUID`")
	return cmd
}

func outputFlag(cmd *cobra.Command, f *rootFlags) {
	cmd.Flags().StringVarP(&f.output, "output", "o", "table", "`table|wide|json`; wide: every process as well")
}

// showStatus prints the status. It returns errUnhealthy if the scheduler reports
// problems.
func showStatus(ctx context.Context, f *rootFlags, io streams) error {
	if err := oneOf("--output", f.output, "table", "wide", "json"); err != nil {
		return err
	}
	var r *api.StatusResponse
	if err := call(ctx, f.runDir, func(ctx context.Context, c *api.Conn) (err error) {
		r, err = c.Status(ctx, &api.StatusRequest{})
		return err
	}); err != nil {
		return err
	}
	if err := restrict(r, f.set.gpu); err != nil {
		return err
	}
	if f.output == "json" {
		enc := json.NewEncoder(io.out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(newStatusJSON(r)); err != nil {
			return fmt.Errorf("print the status: %w", err)
		}
	} else {
		printStatus(io, r, f.output == "wide")
	}
	if len(r.Problems) > 0 {
		return errUnhealthy
	}
	return nil
}

// oneOf returns a usage error for a flag with another value than these.
func oneOf(flag, value string, values ...string) error {
	if slices.Contains(values, value) {
		return nil
	}
	return usageError{fmt.Errorf("%s: %q is none of %s", flag, value, strings.Join(values, ", "))}
}

// restrict removes all GPUs but one, named by index or UUID; "" removes none.
func restrict(r *api.StatusResponse, gpu string) error {
	if gpu == "" {
		return nil
	}
	for _, g := range r.Gpus {
		if strings.EqualFold(g.Uuid, gpu) || strconv.Itoa(int(g.Index)) == gpu {
			r.Gpus = []*api.GPU{g}
			return nil
		}
	}
	return fmt.Errorf("GPU %q: no such index or UUID (nvsharectl status lists them)", gpu)
}

// printStatus prints who has which GPU, and what is wrong. It fits on one screen,
// unless every process is shown.
func printStatus(io streams, r *api.StatusResponse, wide bool) {
	gpus := table{head: []string{"GPU", "NAME", "HOLDER", "FOR", "WAITING", "LONGEST", "TQ", "ANTI-THRASH", "MEMORY", "GRANTS", "FENCED"}}
	tenants := table{head: []string{"GPU", "TENANT", "STATE", "FOR", "PROMISED", "GETS", "DEBT", "SHARE", "LONGEST WAIT", "MEMORY", "PROCESSES"}}
	clients := table{head: []string{"GPU", "STATE", "CLIENT", "PID", "FOR", "GRANTS", "HELD", "LONGEST WAIT", "CALLS", "MEMORY", "BYPASSED", "SLICES"}}
	swaps, places := swapTable(), placeTable()
	var reasons, promises []string
	for _, g := range r.Gpus {
		addSwap(&swaps, g)
		name := g.Name
		if wide {
			name += " " + g.Uuid
		}
		holder, held := holderOf(g)
		fenced := count(g, api.ClientState_CLIENT_STATE_FENCED)
		gpus.add(map[int]string{10: alarm(fenced > 0)},
			fmt.Sprint(g.Index), name, holder, held,
			fmt.Sprint(count(g, api.ClientState_CLIENT_STATE_WAITING)), longestWaiting(g),
			time.Duration(g.QuantumNs).String(), antiThrash(g), size(reserved(g))+"/"+size(g.MemoryBytes),
			fmt.Sprint(g.Grants), fmt.Sprint(fenced))
		overridden := g.EffectiveMode != api.Mode_MODE_UNSPECIFIED && g.EffectiveMode != g.Mode
		if (g.Mode == api.Mode_MODE_AUTO || g.Swap != nil && overridden) && g.ModeReason != "" {
			reasons = append(reasons, wayOf(g))
		}
		if text := promisedOf(g, wide); text != "" {
			promises = append(promises, fmt.Sprintf("GPU %d: promised are %s", g.Index, text))
		}
		for _, t := range tenantsOf(g) {
			addTenant(&tenants, g, t)
		}
		for _, c := range g.Clients {
			since := "-"
			if c.SinceNs != 0 {
				since = short(c.SinceNs)
			}
			addPlace(&places, g, c)
			clients.add(map[int]string{1: stateColour[c.State], 10: alarm(c.Bypassed > 0)},
				fmt.Sprint(g.Index), doing(c), api.Who(c), fmt.Sprint(c.Pid), since, fmt.Sprint(c.Grants), short(c.HeldNs),
				short(c.WaitMaxNs), fmt.Sprint(c.Calls), size(c.MemoryBytes), fmt.Sprint(c.Bypassed), slicesOf(c))
		}
	}
	tables := []table{gpus, tenants, swaps}
	if wide {
		tables = append(tables, clients, places)
	}
	for i, t := range tables {
		if len(t.rows) > 0 {
			t.print(io)
			if i == 0 {
				for _, reason := range append(reasons, promises...) {
					fmt.Fprintln(io.out, printable(reason))
				}
			}
			fmt.Fprintln(io.out)
		}
	}
	for _, p := range r.Problems {
		fmt.Fprintln(io.out, io.paint(red, "PROBLEM: ")+printable(p))
	}
	fmt.Fprintf(io.out, "%s\n", summary(io, r))
}

// wayOf says how clients share a GPU, and why.
func wayOf(g *api.GPU) string {
	switch g.Way {
	case "": // an older scheduler
		return fmt.Sprintf("GPU %d: anti-thrash is %s: %s", g.Index, api.AntiThrash(g.EffectiveMode), g.ModeReason)
	case "driver":
		return fmt.Sprintf("GPU %d: way: all at the same time (%s)", g.Index, g.WayReason)
	}
	return fmt.Sprintf("GPU %d: way: %s (%s)", g.Index, g.Way, g.WayReason)
}

// slicesOf says whether the client's time slice can be set, and its length.
func slicesOf(c *api.Client) string {
	if c.Controls == nil {
		return "-"
	}
	text := c.Controls.Slices
	if text == "works" && !c.Controls.Listed {
		text = "tried"
	}
	if c.SliceNs != 0 {
		text += " " + time.Duration(c.SliceNs).String()
	}
	return text
}

// maxPromises is how many tenants a line names.
const maxPromises = 8

// promisedOf returns what was promised of a GPU, and to whom, also to tenants that do
// not use it; "" if nothing was. A pod that is refused is told the same.
func promisedOf(g *api.GPU, wide bool) string {
	write := func(core uint32, memory uint64) string {
		var parts []string
		if core != 0 {
			parts = append(parts, fmt.Sprintf("%d%%", core))
		}
		if memory != 0 {
			parts = append(parts, size(memory))
		}
		return strings.Join(parts, " and ")
	}
	all := api.Promised(g)
	var core uint32
	var memory uint64
	var to []string
	for i, p := range all {
		core += p.CoreRequest
		memory += p.MemoryBytes
		if wide || i < maxPromises {
			to = append(to, write(p.CoreRequest, p.MemoryBytes)+" to "+api.Tenant(p.Container, p.Uid))
		}
	}
	if len(all) == 0 {
		return ""
	}
	text := write(core, memory)
	if memory != 0 {
		text += " of " + size(g.MemoryBytes)
	}
	if more := len(all) - len(to); more > 0 {
		to = append(to, fmt.Sprintf("the rest to %d more", more))
	}
	return text + ": " + strings.Join(to, ", ")
}

func addTenant(t *table, g *api.GPU, who *tenant) {
	state, since, colour := who.state()
	memory, memoryColour := who.ofLimit()
	t.add(map[int]string{2: colour, 9: memoryColour},
		fmt.Sprint(g.Index), who.name(), state, since, who.promised(), who.got(),
		who.debt(), who.share(), short(who.longestWait()), memory, fmt.Sprint(len(who.clients)))
}

// summary returns the last line, which says whether the scheduler is healthy.
func summary(io streams, r *api.StatusResponse) string {
	health := io.paint(green, "OK")
	if n := len(r.Problems); n > 0 {
		health = io.paint(red, fmt.Sprintf("%d problems, see above", n))
		if n == 1 {
			health = io.paint(red, "1 problem, see above")
		}
	}
	return fmt.Sprintf("scheduler %s, up %v, %d clients. Health: %s",
		r.Version, time.Duration(r.UptimeNs).Round(time.Second), r.Clients, health)
}

// antiThrash returns how a GPU is shared; with auto, also the mode in effect.
func antiThrash(g *api.GPU) string {
	text := api.AntiThrash(g.Mode)
	if g.EffectiveMode != api.Mode_MODE_UNSPECIFIED && g.EffectiveMode != g.Mode {
		text += " (" + api.AntiThrash(g.EffectiveMode) + ")"
	}
	return text
}

func longestWaiting(g *api.GPU) string {
	var longest int64
	for _, c := range g.Clients {
		if c.State == api.ClientState_CLIENT_STATE_WAITING {
			longest = max(longest, c.SinceNs)
		}
	}
	if longest == 0 {
		return "-"
	}
	return short(longest)
}

func reserved(g *api.GPU) (n uint64) {
	for _, m := range g.Memory {
		n += m.UsedBytes
	}
	return n
}

func alarm(yes bool) string {
	if yes {
		return red
	}
	return ""
}

func isHolder(c *api.Client) bool {
	switch c.State {
	case api.ClientState_CLIENT_STATE_HOLDING, api.ClientState_CLIENT_STATE_DRAINING, api.ClientState_CLIENT_STATE_LOST:
		return true
	}
	return false
}

// holderOf returns who has the GPU, and for how long.
func holderOf(g *api.GPU) (holder, held string) {
	holder, held = "-", "-"
	n := 0
	for _, c := range g.Clients {
		if isHolder(c) {
			n++
			holder, held = api.Who(c), short(c.SinceNs)
		}
	}
	if n > 1 {
		return fmt.Sprintf("%d clients", n), "-"
	}
	return holder, held
}

func count(g *api.GPU, s api.ClientState) (n int) {
	for _, c := range g.Clients {
		if c.State == s {
			n++
		}
	}
	return n
}

func stateName(c *api.Client) string {
	return strings.ToLower(strings.TrimPrefix(c.State.String(), "CLIENT_STATE_"))
}

var stateColour = map[api.ClientState]string{
	api.ClientState_CLIENT_STATE_HOLDING:  green,
	api.ClientState_CLIENT_STATE_WAITING:  yellow,
	api.ClientState_CLIENT_STATE_DRAINING: yellow,
	api.ClientState_CLIENT_STATE_LOST:     red,
	api.ClientState_CLIENT_STATE_FENCED:   red,
}

// short prints nanoseconds with about three digits.
func short(ns int64) string {
	d := time.Duration(ns)
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

func size(n uint64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%dGi", n>>30)
	case n >= 1<<30:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(n)/(1<<30)), ".0") + "Gi"
	case n >= 1<<20:
		return fmt.Sprintf("%dMi", n>>20)
	}
	return fmt.Sprint(n)
}
