// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func statusCommand(f *rootFlags, io streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show who has which GPU, who waits, and what each gets",
		Long: `status shows whether all is well, each GPU, and each tenant: a container, or
the processes of one user outside containers.

STATE   what the tenant does, and for how long: holding, waiting, throttled
        (its core limit keeps it from the GPU), moving (its memory), idle, gone
GETS    the part of the GPU's time that it had in the latest five seconds, and
        of which core limit
WAITED  the part of the same five seconds in which it wanted the GPU and had no
        grant
MEMORY  what it has reserved of the GPU's memory, and of which limit

With -o wide also, for each GPU, how many drains, hand-overs and waits for a
grant there were, their median and 99th percentile; and

SET BY HAND   settings that somebody has changed (nvsharectl config), who and
              when
WAIT p50/p99  how long half of its waits for a grant, and 99 of 100, lasted at
              most in the latest minute
DEBT          the time that it used above its core limit and has to make up for
LONGEST WAIT  its longest wait for a grant in the latest minute
OOM           reservations of memory that its memory limit refused
FIXED, AWAY   where memory is swapped: what cannot be moved off the GPU, and
              what is in host memory or was never used; WHY FIXED says why
              nothing of a process can be moved
ENFORCED BY   what the library, the kernel and the hardware hold tenants to,
              and which processes are known to bypass scheduling now

"promised" adds up core requests, the parts of the GPU's time that tenants get
whenever they want them. Core requests and memory limits, also of tenants that
do not use the GPU now, decide where pods are placed. Exit status 1: there is a
problem, also one that only root may read; "healthy" is false then.

Users who may not use the control socket, and containers, see their own tenant,
and of all others numbers.`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return showStatus(cmd.Context(), f, io)
		},
	}
	outputFlag(cmd, f)
	cmd.Flags().StringVar(&f.set.gpu, "gpu", "", "show only the GPU with this `index or UUID`")
	return cmd
}

func outputFlag(cmd *cobra.Command, f *rootFlags) {
	addForm(cmd, &f.output, "wide: every column, and every process", "table", "wide", "json", "yaml")
}

// showStatus prints the status. It returns errUnhealthy if the scheduler reports
// problems.
func showStatus(ctx context.Context, f *rootFlags, io streams) error {
	r, err := askStatus(ctx, f.runDir)
	if err != nil {
		return err
	}
	if err := restrict(r, f.set.gpu); err != nil {
		return err
	}
	switch f.output {
	case "json", "yaml":
		if err := encode(io, f.output, plainStatus(r)); err != nil {
			return err
		}
	case "wide":
		printWide(io, r)
	default:
		printStatus(io, r)
	}
	if problems(r) > 0 {
		return errUnhealthy
	}
	return nil
}

// isGPU tells whether a GPU has this index or UUID.
func isGPU(g *api.GPU, name string) bool {
	return strings.EqualFold(g.Uuid, name) || strconv.Itoa(int(g.Index)) == name
}

// restrict removes all GPUs but one, named by index or UUID; "" removes none.
func restrict(r *api.StatusResponse, gpu string) error {
	if gpu == "" {
		return nil
	}
	for _, g := range r.Gpus {
		if isGPU(g, gpu) {
			r.Gpus = []*api.GPU{g}
			return nil
		}
	}
	if len(r.Gpus) == 0 {
		return fmt.Errorf("GPU %q: the scheduler has no GPU (nvsharectl doctor says why)", gpu)
	}
	return fmt.Errorf("GPU %q: no such index or UUID (nvsharectl status lists them)", gpu)
}

// askAll asks the control socket, which knows all tenants.
func askAll(ctx context.Context, runDir string) (*api.StatusResponse, error) {
	return ask(ctx, runDir, (*api.Conn).Status, &api.StatusRequest{})
}

// askStatus is askAll. Users who may not use the control socket, and containers, which do
// not have it, get the answer of the status socket: their own tenant, and numbers.
func askStatus(ctx context.Context, runDir string) (*api.StatusResponse, error) {
	r, err := askAll(ctx, runDir)
	if !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrNotExist) {
		return r, err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, viewErr := api.AskView(ctx, runDir)
	if errors.Is(viewErr, fs.ErrNotExist) { // no scheduler, or an older one
		return nil, err
	}
	return r, viewErr
}

// viewOf says for whom an answer of the status socket is; "": it is of the control socket.
func viewOf(r *api.StatusResponse) string {
	v := r.View
	if v == nil {
		return ""
	}
	all := "root sees all (sudo nvsharectl)"
	if v.Container.GetId() != "" {
		all = "root of the host sees all"
	}
	text := "only " + api.Tenant(v.Container, v.Uid) + " is named here; " + all
	if v.Problems > 0 {
		text = numbered(int(v.Problems), "problem", "problems") + " that only root may read; " + text
	}
	return text
}

// othersOf says what the tenants of a GPU have that an answer does not name; "": the
// answer names all, or there are none.
func othersOf(g *api.GPU) string {
	o := g.Others
	if o == nil || o.Tenants+o.Clients == 0 && o.MemoryBytes == 0 {
		return ""
	}
	parts := []string{fmt.Sprintf("others: %s with %s, %d holding, %d waiting", numbered(int(o.Tenants), "tenant", "tenants"), numbered(int(o.Clients), "process", "processes"), o.Holding, o.Waiting),
		strings.TrimSuffix(fmt.Sprintf("%.1f", float64(o.GotPermille)/10), ".0") + "% of the time", size(o.MemoryBytes) + " reserved"}
	if o.CoreRequest > 0 {
		parts = append(parts, fmt.Sprintf("%d%% promised", o.CoreRequest))
	}
	return strings.Join(parts, ", ")
}

// printWide prints every column, every process, where memory is, and what enforces the rules.
func printWide(io streams, r *api.StatusResponse) {
	printHealth(io, r, math.MaxInt)
	gpus := table{head: []string{"GPU", "NAME", "UUID", "HOLDER", "FOR", "WAITING", "LONGEST", "TQ", "WAY", "MEMORY", "GRANTS", "FENCED"}}
	tenants := table{head: []string{"GPU", "TENANT", "STATE", "FOR", "GETS", "WAITED", "WAIT p50/p99", "LONGEST WAIT", "DEBT", "SHARE", "MEMORY", "OOM", "PROCESSES"}}
	clients := table{head: []string{"GPU", "STATE", "PROCESS", "PID", "FOR", "GRANTS", "HELD", "CALLS", "MEMORY", "BYPASSED", "SLICES", "PREEMPTED"}}
	swaps := swapTable()
	swapping := slices.ContainsFunc(r.Gpus, func(g *api.GPU) bool { return g.Swap != nil })
	if swapping {
		clients.head = append(clients.head, placeHead...)
	}
	var notes []string
	for _, g := range r.Gpus {
		addSwap(&swaps, g)
		holder, held := holderOf(g)
		fenced := count(g, api.ClientState_CLIENT_STATE_FENCED)
		gpus.add(map[int]string{11: alarm(fenced > 0)},
			fmt.Sprint(g.Index), g.Name, g.Uuid, holder, held,
			fmt.Sprint(count(g, api.ClientState_CLIENT_STATE_WAITING)), longestWaiting(g),
			time.Duration(g.QuantumNs).String(), wayAndSetting(g), memoryOf(g, "/"),
			fmt.Sprint(g.Grants), fmt.Sprint(fenced))
		for _, text := range []string{drainedOf(g), wayOf(g), tookOf(g), promisedOf(g), limitsOf(g), notSwapped(g), othersOf(g)} {
			if text != "" {
				notes = append(notes, fmt.Sprintf("GPU %d: %s", g.Index, text))
			}
		}
		for _, t := range tenantsOf(g) {
			t.addWide(&tenants, g)
		}
		for _, c := range g.Clients {
			since := "-"
			if c.SinceNs != 0 {
				since = short(c.SinceNs)
			}
			colours := map[int]string{1: stateColour[c.State], 9: alarm(c.Bypassed > 0)}
			cells := []string{fmt.Sprint(g.Index), api.Doing(c), api.Who(c), fmt.Sprint(c.Pid), since, fmt.Sprint(c.Grants), short(c.HeldNs),
				fmt.Sprint(c.Calls), size(c.MemoryBytes), fmt.Sprint(c.Bypassed), slicesOf(c), fmt.Sprint(c.Preemptions)}
			if swapping {
				cells = addPlace(cells, colours, g, c)
			}
			clients.add(colours, cells...)
		}
	}
	for i, t := range []table{gpus, handTable(r), tenants, swaps, clients, enforcement(r)} {
		if len(t.rows) == 0 {
			continue
		}
		fmt.Fprintln(io.out)
		t.print(io)
		if i == 0 {
			for _, note := range notes {
				fmt.Fprintln(io.out, printable(note))
			}
		}
	}
}

// tookOf says how long turns take to begin and to end.
func tookOf(g *api.GPU) string {
	var parts []string
	for _, s := range []struct {
		name string
		took *api.Spread
	}{{"drains", g.Drains}, {"hand-overs", g.HandOvers}, {"waits", g.Waits}} {
		if s.took.GetCount() > 0 {
			parts = append(parts, fmt.Sprintf("%d %s p50 %s p99 %s", s.took.Count, s.name, short(s.took.P50Ns), short(s.took.P99Ns)))
		}
	}
	return strings.Join(parts, ", ")
}

func (t *tenant) addWide(to *table, g *api.GPU) {
	state, since, colour := t.state()
	memory, memoryColour := t.ofLimit("/")
	if away := t.away(); away > 0 {
		memory += ", " + size(away) + " away"
	}
	to.add(map[int]string{2: colour, 10: memoryColour, 11: alarm(t.Use.OutOfMemory > 0)},
		fmt.Sprint(g.Index), t.name(), state, since, t.got(), t.waited(), halfAndMost(t.Use.Waits), short(t.longestWait()),
		t.debt(), t.share(), memory, fmt.Sprint(t.Use.OutOfMemory), fmt.Sprint(len(t.Clients)))
}

// enforcement lists what is enforced by what, and who is known to bypass scheduling now.
func enforcement(r *api.StatusResponse) table {
	t := table{head: []string{"ENFORCED BY", "WHAT"}}
	t.add(nil, "library", "turns, core limits, memory limits, swapping; by libnvshare.so in each program")
	t.add(nil, "kernel", "which tenant a process belongs to, that it has ended, which GPUs it can open")
	hardware := "one process does not read another's GPU memory"
	if gpus := gpusInSlices(r); len(gpus) > 0 {
		hardware = "time slices, as the library sets them (GPU " + strings.Join(gpus, ", ") + "); " + hardware
	}
	t.add(nil, "hardware", hardware)
	without := "a program without the library"
	if r.Warden {
		t.add(nil, "driver", "turns, time slices, core limits and memory limits of programs without the library, and fences: nvshare-warden, from outside")
		without = "swapping and suspension of a program without the library"
	} else if r.WardenProblem != "" {
		without += " (cooperative: " + r.WardenProblem + ")"
	}
	t.add(nil, "nobody", without+"; one that starts while there is no scheduler, unless NVSHARE_SCHEDULER_LOSS=closed")
	for _, what := range unarbitrated(r) {
		t.add(map[int]string{1: red}, "nobody", what)
	}
	return t
}

// gpusInSlices names the GPUs that tenants share by the GPU's own time slices.
func gpusInSlices(r *api.StatusResponse) (gpus []string) {
	for _, g := range r.Gpus {
		if g.Way == "slices" {
			gpus = append(gpus, fmt.Sprint(g.Index))
		}
	}
	return gpus
}

// unarbitrated says what the scheduler knows to run without regard to turns.
func unarbitrated(r *api.StatusResponse) (now []string) {
	note := func(g *api.GPU, n int, what string) {
		if n > 0 {
			now = append(now, fmt.Sprintf("now, GPU %d: %d %s", g.Index, n, what))
		}
	}
	for _, g := range r.Gpus {
		unmanaged, bypassing := 0, 0
		for _, u := range r.Unmanaged {
			if u.Uuid == g.Uuid && !api.IsHeld(u.Held) {
				unmanaged++
			}
		}
		fenced := 0
		for _, c := range g.Clients {
			if c.State == api.ClientState_CLIENT_STATE_FENCED && !api.IsHeld(c.Held) {
				fenced++
			}
			if c.Bypassed > 0 {
				bypassing++
			}
		}
		note(g, unmanaged, "without the library")
		note(g, fenced, "fenced, beside the holder")
		note(g, bypassing, "with calls that bypass the library")
	}
	return now
}

// printStatus prints the health, the GPUs and the tenants, within the terminal's width.
func printStatus(io streams, r *api.StatusResponse) {
	printHealth(io, r, io.width())
	tenants := table{names: 1, head: []string{"GPU", "TENANT", "STATE", "GETS", "WAITED", "MEMORY"}}
	if len(r.Gpus) > 0 {
		fmt.Fprintln(io.out)
	}
	for _, g := range r.Gpus {
		for _, line := range wrap(printable(describeGPU(g)), io.width(), "       ") {
			fmt.Fprintln(io.out, line)
		}
		for _, t := range tenantsOf(g) {
			t.addNarrow(&tenants, g)
		}
	}
	if len(tenants.rows) > 0 {
		fmt.Fprintln(io.out)
		tenants.print(io)
	}
}

// problems is how many there are, with those that only root may read.
func problems(r *api.StatusResponse) int {
	return len(r.Problems) + int(r.GetView().GetProblems())
}

// numbered is "1 problem", "2 problems".
func numbered(n int, one, several string) string {
	if n != 1 {
		one = several
	}
	return fmt.Sprintf("%d %s", n, one)
}

// printHealth prints whether all is well, and what is not, in lines of a width.
func printHealth(io streams, r *api.StatusResponse, width int) {
	health := io.paint(green, "OK")
	if n := problems(r); n > 0 {
		health = io.paint(red, numbered(n, "problem", "problems"))
	}
	fmt.Fprintf(io.out, "Health: %s. Scheduler %s, up %v, %s\n",
		health, printable(r.Version), time.Duration(r.UptimeNs).Round(time.Second), numbered(int(r.Clients), "process", "processes"))
	if view := viewOf(r); view != "" {
		for _, line := range wrap(printable(view), width, "  ") {
			fmt.Fprintln(io.out, line)
		}
	}
	for _, p := range r.Problems {
		const mark = "PROBLEM: "
		for i, line := range wrap(mark+printable(p), width, "  ") {
			if i == 0 {
				line = io.paint(red, mark) + strings.TrimPrefix(line, mark)
			}
			fmt.Fprintln(io.out, line)
		}
	}
}

// describeGPU says in one sentence what a GPU is and how it is shared.
func describeGPU(g *api.GPU) string {
	parts := []string{fmt.Sprintf("GPU %d  %s, %s reserved", g.Index, g.Name, memoryOf(g, " of ")), api.Sharing(g)}
	if l := g.Load; l != nil {
		parts = append(parts, loadOf(l))
	}
	if others := othersOf(g); others != "" {
		parts = append(parts, others)
	}
	if n := count(g, api.ClientState_CLIENT_STATE_FENCED); n > 0 {
		parts = append(parts, fmt.Sprintf("%d fenced", n))
	}
	if s := g.Swap; s != nil && s.AwayBytes+s.OutBytes+s.Refused > 0 {
		parts = append(parts, fmt.Sprintf("swap: %s away, %s of %s host memory", size(s.AwayBytes), size(s.ArenaBytes), size(s.ArenaLimitBytes)))
	}
	var promised uint32
	for _, p := range api.Promised(g) {
		promised += p.CoreRequest
	}
	if promised > 0 {
		parts = append(parts, fmt.Sprintf("%d%% promised", promised))
	}
	if g.Drained {
		parts = append(parts, "drained")
	}
	return strings.Join(parts, "; ")
}

// loadOf says how busy and warm a GPU is, as the driver does.
func loadOf(l *api.Load) string {
	text := fmt.Sprintf("%d%% busy", l.BusyPercent)
	if l.Watts > 0 {
		text += fmt.Sprintf(", %d W", l.Watts)
	}
	if l.Celsius > 0 {
		text += fmt.Sprintf(", %d °C", l.Celsius)
	}
	return text
}

func (t *tenant) addNarrow(to *table, g *api.GPU) {
	state, since, colour := t.state()
	if since != "-" {
		state += " " + since
	}
	got := t.got()
	if limit := t.Use.GetShare().GetCoreLimit(); limit != 0 && got != "-" {
		got += fmt.Sprintf(" of %d%%", limit)
	}
	memory, memoryColour := t.ofLimit(" of ")
	to.add(map[int]string{2: colour, 5: memoryColour},
		fmt.Sprint(g.Index), t.name(), state, got, t.waited(), memory)
}

// ending shortens a name to its end, which tells the pods of one controller apart.
func ending(name string, width int) string {
	if n := utf8.RuneCountInString(name); n > width {
		return "…" + string([]rune(name)[n-width+1:])
	}
	return name
}

// wrap breaks a line at spaces. Lines after the first begin with indent.
func wrap(text string, width int, indent string) (lines []string) {
	line := ""
	for i, word := range strings.Split(text, " ") {
		switch {
		case i == 0:
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > width:
			lines = append(lines, line)
			line = indent + word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}
