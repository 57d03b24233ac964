// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

// maxBlamed is how many tenants why names, and how many processes without nvshare.
const maxBlamed = 5

type whyFlags struct {
	last   time.Duration
	output string
}

func whyCommand(root *rootFlags, io streams) *cobra.Command {
	f := &whyFlags{last: time.Minute}
	cmd := &cobra.Command{
		Use:   "why TENANT",
		Short: "Show where a tenant's time went, and for whom it waited",
		Long: `why shows for each GPU how a tenant spent the last minute, or what the
scheduler still has events of:

running   it had the GPU
draining  of that: it was asked to release the GPU and finished its work
moving    its memory was moved onto the GPU
limited   it wanted the GPU, and its core limit kept it away, whoever had the
          GPU
waiting   it wanted the GPU otherwise, and others had it or it changed hands
idle      it wanted nothing

What several of its processes do at the same time counts once, and as waiting
or limited only while none of them has the GPU. It names those that the tenant
waited for, whoever took long to release the GPU, what its memory limit
refused, which of its processes are suspended, were, or could not leave the
GPU, and which processes use the GPU without nvshare.` + tenantHelp,
		Example: `  nvsharectl why ml/train-a/main
  nvsharectl why 1000             the processes of user 1000 outside containers`,
		Args: oneTenant,
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.run(cmd.Context(), root.runDir, io, args[0])
		},
	}
	fs := cmd.Flags()
	fs.Var((*durationFlag)(&f.last), "last", "look at this `time`, in seconds or with a unit")
	addForm(cmd, &f.output, "", "text", "json", "yaml")
	return cmd
}

func (f *whyFlags) run(ctx context.Context, runDir string, io streams, want string) error {
	var r *api.StatusResponse
	var events []*api.Event
	if err := call(ctx, runDir, func(ctx context.Context, c *api.Conn) (err error) {
		if events, err = allEvents(ctx, c); err != nil {
			return err
		}
		r, err = c.Status(ctx, &api.StatusRequest{})
		return err
	}); err != nil {
		return err
	}
	now := time.Now().UnixNano()
	known := tenants{}
	known.addStatus(r)
	whose := known.meant(want)
	var all []*account
	for _, g := range r.Gpus {
		for _, t := range tenantsOf(g) {
			if whose(t.Container, t.Uid) {
				a := accountOf(g, t, events, now-int64(f.last), now)
				a.Unmanaged = unmanagedOn(g, r.Unmanaged)
				all = append(all, a)
			}
		}
	}
	if len(all) == 0 {
		return fmt.Errorf("tenant %q: no tenant on a GPU has this name%s (nvsharectl status lists them)", want, suggestion(want, tenantNames(r)))
	}
	if f.output != "text" {
		return encode(io, f.output, all)
	}
	for i, a := range all {
		if i > 0 {
			fmt.Fprintln(io.out)
		}
		a.print(io)
	}
	return nil
}

// allEvents returns the events that the scheduler remembers. Where turns are short, some come
// during each call: it does not go on after those.
func allEvents(ctx context.Context, c *api.Conn) (all []*api.Event, err error) {
	req, began := &api.EventsRequest{}, time.Now().UnixNano()
	for {
		resp, err := c.Events(ctx, req)
		if err != nil {
			return nil, err
		}
		all = append(all, resp.Events...)
		if n := len(resp.Events); n == 0 || resp.Next == req.Since || cameSince(resp.Events[n-1], began) {
			return all, nil
		}
		req.Since, req.Run = resp.Next, resp.Run
	}
}

// cameSince says whether an event came after a time of this command. One from before the clock was
// set back may have a time that is still to come.
func cameSince(e *api.Event, began int64) bool {
	return e.TimeNs >= began && e.TimeNs <= time.Now().UnixNano()
}

func tenantNames(r *api.StatusResponse) (names []string) {
	for _, g := range r.Gpus {
		for _, t := range tenantsOf(g) {
			if name := api.Tenant(t.Container, t.Uid); !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// account is where a tenant's time on a GPU went. Times are seconds.
type account struct {
	GPU         uint32  `json:"gpu"`
	Tenant      string  `json:"tenant"`
	State       string  `json:"state"`
	Known       float64 `json:"known_seconds"` // what the scheduler remembers of the time asked for, since the tenant came
	Running     float64 `json:"running_seconds"`
	Draining    float64 `json:"draining_seconds"` // of running
	Moving      float64 `json:"moving_seconds"`   // of running
	Waiting     float64 `json:"waiting_seconds"`
	Limited     float64 `json:"limited_seconds"`
	Idle        float64 `json:"idle_seconds"`
	Turns       int     `json:"turns"`
	OutOfMemory uint64  `json:"out_of_memory"` // since its processes came
	For         []blame `json:"waited_for"`
	// Suspended says which of its processes are off the GPU, were, or cannot leave.
	Suspended []string `json:"suspended,omitempty"`
	// Unmanaged are processes that use the GPU without nvshare, whoever's turn it is.
	Unmanaged []string `json:"unmanaged,omitempty"`

	sharing, share string
	came           bool // the tenant came in the time asked for
}

// blame is a tenant that had the GPU while another waited.
type blame struct {
	Tenant   string  `json:"tenant"`
	Seconds  float64 `json:"seconds"`
	Draining float64 `json:"draining_seconds"` // of that: it was asked to release the GPU
	Fenced   bool    `json:"fenced,omitempty"`
	Held     string  `json:"-"` // by nvshare-warden: what is said of that
}

// span is a time, ns since 1970.
type span struct{ from, to int64 }

// within returns how much of s is in other, ns.
func (s span) within(other span) int64 { return max(min(s.to, other.to)-max(s.from, other.from), 0) }

// spans are times of several processes.
type spans []span

// once returns the same times in order, each moment once.
func (s spans) once() (all spans) {
	s = slices.Clone(s)
	slices.SortFunc(s, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	for _, one := range s {
		switch last := len(all) - 1; {
		case one.from >= one.to:
		case last >= 0 && one.from <= all[last].to:
			all[last].to = max(all[last].to, one.to)
		default:
			all = append(all, one)
		}
	}
	return all
}

// without returns what is left of s, which has each moment once as other has.
func (s spans) without(other spans) (left spans) {
	for _, one := range s {
		for _, o := range other {
			if o.from >= one.to || o.to <= one.from {
				continue
			}
			if o.from > one.from {
				left = append(left, span{one.from, o.from})
			}
			one.from = o.to
		}
		if one.from < one.to {
			left = append(left, one)
		}
	}
	return left
}

// within returns how much of s is in other, ns.
func (s spans) within(other span) (sum int64) {
	for _, one := range s {
		sum += one.within(other)
	}
	return sum
}

// held is a time in which a tenant had the GPU.
type held struct {
	who  string // its key
	name string
	span
	drain span // the end of it; empty: it was not told to release the GPU
}

// accountOf works out a tenant's account from the events between two times.
func accountOf(g *api.GPU, t *tenant, events []*api.Event, from, to int64) *account {
	who := t.Key()
	state, since, _ := t.state()
	if since != "-" {
		state += " for " + since
	}
	a := &account{GPU: g.Index, Tenant: api.Tenant(t.Container, t.Uid), State: state, OutOfMemory: t.Use.OutOfMemory, sharing: api.Sharing(g), share: t.share()}
	if len(events) > 0 {
		from = max(from, events[0].TimeNs)
	}
	if came := cameAt(t, events); came > from {
		from, a.came = min(came, to), true
	}
	window := span{from, to}
	a.Known = seconds(window.within(window))

	turns, waits := readTurns(g, events, to)
	for _, c := range t.Clients { // what has begun and not ended is no event yet
		if c.State == api.ClientState_CLIENT_STATE_WAITING {
			w := wait{who: who, span: span{to - c.SinceNs, to}}
			if t.Use.ThrottledNs > 0 {
				w.limited = w.span
			}
			waits = append(waits, w)
		}
	}
	var running, draining, waiting, limited spans // of all its processes
	for _, h := range turns {
		if h.who == who && h.within(window) > 0 {
			a.Turns++
			running, draining = append(running, h.span), append(draining, h.drain)
		}
	}
	for _, w := range waits {
		if w.who == who {
			waiting, limited = append(waiting, w.span), append(limited, w.limited)
		}
	}
	running = running.once()
	limited = limited.once().without(running)
	waiting = waiting.once().without(running).without(limited)
	a.Running, a.Draining = seconds(running.within(window)), seconds(draining.once().within(window))
	a.Waiting, a.Limited = seconds(waiting.within(window)), seconds(limited.within(window))
	a.For = blamedFor(g, turns, who, waiting, window)
	var moving spans
	for _, e := range events {
		if e.Uuid == g.Uuid && e.Type == api.EventType_EVENT_TYPE_SWAP_IN && t.Is(e.Container, e.Uid) {
			moving = append(moving, span{e.TimeNs - e.TookNs, e.TimeNs})
		}
	}
	a.Moving = seconds(moving.once().within(window))
	a.Idle = max(a.Known-a.Running-a.Waiting-a.Limited, 0)
	a.Suspended = suspensions(t)
	return a
}

// suspensions says which processes of a tenant are suspended, were, or cannot leave the GPU.
func suspensions(t *tenant) (all []string) {
	for _, c := range t.Clients {
		if text := suspension(c); text != "" {
			all = append(all, fmt.Sprintf("process %d %s", c.Pid, text))
		}
		if c.FixedReason != "" {
			all = append(all, fmt.Sprintf("process %d cannot leave the GPU: %s", c.Pid, c.FixedReason))
		}
	}
	return all
}

// blamedFor says who had a GPU while a tenant waited for it, for how long, the longest first.
func blamedFor(g *api.GPU, turns []held, who string, waiting spans, window span) (all []blame) {
	type had struct {
		name          string
		turns, drains spans
	}
	others, fenced, outside := map[string]had{}, map[string]bool{}, map[string]string{}
	for _, h := range turns {
		if h.who != who {
			o := others[h.who]
			others[h.who] = had{h.name, append(o.turns, h.span), append(o.drains, h.drain)}
		}
	}
	for _, c := range g.Clients {
		if c.State == api.ClientState_CLIENT_STATE_FENCED {
			key := api.TenantKey(c.Container, c.Uid)
			if fenced[key] = true; api.IsHeld(c.Held) {
				outside[key] = ", and is held from outside"
			}
		}
	}
	for other, h := range others {
		b := blame{Tenant: h.name, Fenced: fenced[other], Held: outside[other]}
		turns, drains := h.turns.once(), h.drains.once()
		for _, w := range waiting {
			mine := span{max(w.from, window.from), min(w.to, window.to)}
			b.Seconds += seconds(turns.within(mine))
			b.Draining += seconds(drains.within(mine))
		}
		if b.Seconds > 0 {
			all = append(all, b)
		}
	}
	slices.SortFunc(all, func(x, y blame) int {
		return cmp.Or(cmp.Compare(y.Seconds, x.Seconds), cmp.Compare(x.Tenant, y.Tenant))
	})
	return all
}

// cameAt returns when the tenant's first process registered, ns since 1970; 0: before the
// first event that is remembered.
func cameAt(t *tenant, events []*api.Event) (at int64) {
	registered := map[uint64]bool{}
	for _, e := range events {
		if e.Container == nil || !t.Is(e.Container, e.Uid) {
			continue
		}
		if e.Type == api.EventType_EVENT_TYPE_REGISTER {
			registered[e.Client] = true
		} else if at == 0 {
			return 0 // it was here before
		}
		if at == 0 {
			at = e.TimeNs
		}
	}
	for _, c := range t.Clients {
		if !registered[c.Id] {
			return 0
		}
	}
	return at
}

// suspension says that a process is suspended, what its latest return took, or why it
// keeps its context; "": nothing of that.
func suspension(c *api.Client) string {
	text := ""
	switch {
	case c.Context == api.ContextState_CONTEXT_STATE_AWAY:
		text = "is suspended: nothing of it is on the GPU until its next CUDA call"
	case c.Context == api.ContextState_CONTEXT_STATE_LEAVING:
		text = "is suspended: its memory has left the GPU, and its context is leaving"
	case c.Context == api.ContextState_CONTEXT_STATE_RETURNING:
		text = "is coming back to the GPU"
	case c.Suspended:
		text = "is suspended: its memory has left the GPU, or is leaving; its context stays"
	case c.RestoreNs > 0:
		text = "was suspended: it took " + short(c.RestoreNs) + " to bring its context back"
	}
	if c.ContextProblem != "" {
		text = strings.TrimPrefix(text+": "+c.ContextProblem, ": ")
	}
	return text
}

// unmanagedOn names the processes on a GPU that nobody arbitrates.
func unmanagedOn(g *api.GPU, all []*api.Unmanaged) (names []string) {
	for _, u := range all {
		if u.Uuid == g.Uuid {
			names = append(names, fmt.Sprintf("%s (pid %d, %s)", api.Tenant(u.Container, u.Uid), u.Pid, u.Command))
		}
	}
	return names
}

type wait struct {
	who string // the tenant's key
	span
	limited span // the beginning of it; empty: no core limit kept it away
}

// readTurns returns who had a GPU when, and who waited when, as events and the present
// tell.
func readTurns(g *api.GPU, events []*api.Event, now int64) (turns []held, waits []wait) {
	for _, e := range events {
		if e.Uuid != g.Uuid {
			continue
		}
		who := api.TenantKey(e.Container, e.Uid)
		switch e.Type {
		case api.EventType_EVENT_TYPE_GRANT:
			if e.WaitedNs > 0 {
				from := e.TimeNs - e.WaitedNs
				waits = append(waits, wait{who, span{from, e.TimeNs}, span{from, from + e.LimitedNs}})
			}
		case api.EventType_EVENT_TYPE_RELEASE, api.EventType_EVENT_TYPE_RECLAIM:
			h := held{who: who, name: api.Tenant(e.Container, e.Uid), span: span{e.TimeNs - e.HeldNs, e.TimeNs}}
			if e.DrainedNs > 0 {
				h.drain = span{e.TimeNs - e.DrainedNs, e.TimeNs}
			}
			turns = append(turns, h)
		}
	}
	for _, c := range g.Clients {
		if c.Epoch != 0 {
			turns = append(turns, held{who: api.TenantKey(c.Container, c.Uid), name: api.Tenant(c.Container, c.Uid), span: span{now - c.SinceNs, now}})
		}
	}
	return turns, waits
}

func (a *account) print(io streams) {
	fmt.Fprintln(io.out, printable(fmt.Sprintf("%s on GPU %d: %s; %s", a.Tenant, a.GPU, a.State, a.sharing)))
	if a.share != "" {
		fmt.Fprintln(io.out, printable("its share: "+a.share))
	}
	for _, text := range a.Suspended {
		fmt.Fprintln(io.out, printable(text))
	}
	since := ""
	if a.came {
		since = ", since it came"
	}
	fmt.Fprintf(io.out, "\nIn the last %s%s:\n", short(int64(a.Known*1e9)), since)
	row := func(name string, s float64, note string) {
		part := 0.0
		if a.Known > 0 {
			part = s / a.Known
		}
		fmt.Fprintln(io.out, strings.TrimRight(fmt.Sprintf("  %-9s %7s  %s", name, percent(part), printable(note)), " -"))
	}
	note := fmt.Sprintf("%d turns", a.Turns)
	if a.Draining > 0 {
		note += fmt.Sprintf("; draining %s", short(int64(a.Draining*1e9)))
	}
	if a.Moving > 0 {
		note += fmt.Sprintf("; moving memory %s", short(int64(a.Moving*1e9)))
	}
	row("running", a.Running, note)
	var who []string
	for _, b := range a.For {
		text := fmt.Sprintf("%s %s", b.Tenant, short(int64(b.Seconds*1e9)))
		switch {
		case b.Fenced:
			text += " (fenced: it does not release the GPU" + b.Held + ")"
		case b.Draining > b.Seconds/4:
			text += fmt.Sprintf(" (%s of that to finish its work after it was asked to release the GPU)", short(int64(b.Draining*1e9)))
		}
		who = append(who, text)
	}
	note = ""
	if len(who) > 0 {
		note = "for " + strings.Join(first(who, maxBlamed), ", ")
	}
	row("waiting", a.Waiting, note)
	note = ""
	if a.Limited > 0 {
		note = "by its core limit, whoever had the GPU"
	}
	row("limited", a.Limited, note)
	row("idle", a.Idle, "")
	if len(a.Unmanaged) > 0 {
		fmt.Fprintf(io.out, "\nAlso on the GPU, without nvshare, whoever's turn it is: %s.\n", printable(strings.Join(first(a.Unmanaged, maxBlamed), ", ")))
	}
	if a.OutOfMemory > 0 {
		fmt.Fprintf(io.out, "\nIts memory limit refused %d reservations: raise it with nvsharectl set --memory-limit.\n", a.OutOfMemory)
	}
}
