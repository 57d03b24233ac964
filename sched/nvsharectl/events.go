// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

const (
	// followWait bounds how long one call waits for an event. It is less than callTimeout.
	followWait = 5 * time.Second
	// followRetry is the pause before connecting again after the scheduler has ended.
	followRetry = 500 * time.Millisecond
)

type eventsFlags struct {
	follow      bool
	last        int // how many of the kept events to show; -1: all
	output, gpu string
	filter      eventFilter

	began int64        // ns since 1970
	held  bool         // until it is known which are the last
	past  []*api.Event // that are held
}

func eventsCommand(root *rootFlags, io streams) *cobra.Command {
	f := &eventsFlags{}
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Show what has happened, and why",
		Long: `events shows the events that the scheduler still remembers: turns of GPUs
(grant, revoke, release), processes that came and went, settings that were
changed, and errors. With -f it shows the events that come from now on, also
after a restart of the scheduler, and of the past what --since or --last asks
for, but of turns none: --type turn shows them. Times are those of this
machine's time zone.` + tenantHelp,
		Example: `  nvsharectl events -f
  nvsharectl events -f -n 20
  nvsharectl events --since 10m --tenant ml/train-a/main
  nvsharectl events --type fence,unfence,out-of-memory,warning`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f.follow && f.filter.since == "" && !cmd.Flags().Changed("last") {
				f.last = 0
			}
			return f.run(cmd.Context(), root.runDir, io)
		},
	}
	fs := cmd.Flags()
	fs.BoolVarP(&f.follow, "follow", "f", false, "show new events as they come")
	fs.IntVarP(&f.last, "last", "n", -1, "of the past events only the last ones, so many (a `number`); -1: all; 0 without -f only asks whether the scheduler answers")
	addForm(cmd, &f.output, "json: one object a line", "text", "json")
	fs.StringVar(&f.gpu, "gpu", "", "only events of the GPU with this `index or UUID`")
	fs.StringVar(&f.filter.tenant, "tenant", "", "only events of the tenant with this `name`")
	fs.StringSliceVar(&f.filter.types, "type", nil, "only events of these `types`, like grant,fence; turn means all of turns")
	fs.StringVar(&f.filter.since, "since", "", "only events since a `time`: how long ago (5m), or when (2006-01-02 15:04:05)")
	return cmd
}

func (f *eventsFlags) run(ctx context.Context, runDir string, io streams) error {
	if err := f.filter.parse(time.Now()); err != nil {
		return err
	}
	if f.last < -1 {
		return usageError{fmt.Errorf("--last: %d is below -1: give how many of the past events, or -1 for all", f.last)}
	}
	if f.follow && f.filter.kinds == nil {
		f.filter.withoutTurns()
	}
	if f.filter.known = (tenants{}); f.filter.tenant != "" {
		if r, err := askAll(ctx, runDir); err == nil { // else those of the events are known
			f.filter.known.addStatus(r)
		}
	}
	f.held = f.last >= 0
	f.began = time.Now().UnixNano()
	return f.show(ctx, runDir, io)
}

// show prints the events that the scheduler remembers, and with -f those that come.
func (f *eventsFlags) show(ctx context.Context, runDir string, io streams) error {
	req := &api.EventsRequest{Gpu: f.gpu}
	answered, away := false, false
	for {
		resp, err := ask(ctx, runDir, (*api.Conn).Events, req)
		var unreachable *api.UnreachableError
		switch {
		case ctx.Err() != nil:
			return nil // the user has seen enough
		case err != nil && f.follow && answered && errors.As(err, &unreachable):
			if !away {
				fmt.Fprintln(io.err, "nvsharectl: the scheduler has ended; waiting for the next one")
			}
			away = true
			select {
			case <-time.After(followRetry):
			case <-ctx.Done():
			}
			continue
		case err != nil:
			return err
		case f.last == 0 && !f.follow:
			return nil // it answers: a probe of a busy node does not wait for all that is kept
		}
		n := len(resp.Events)
		current := n == 0 || cameSince(resp.Events[n-1], f.began)
		next, run := resp.Next, resp.Run
		f.choose(resp, current)
		if err := f.print(io, resp, answered && run == req.Run); err != nil {
			return err
		}
		req.Since, req.Run = next, run
		away, answered = false, true
		switch {
		case f.follow && !f.held:
			req.WaitNs = int64(followWait)
		case current && !f.follow:
			return nil
		}
	}
}

// choose leaves those events in an answer that are to be shown now. current: those after it have
// come since the command began.
func (f *eventsFlags) choose(resp *api.EventsResponse, current bool) {
	f.filter.learn(resp.Events)
	if !f.held {
		resp.Events = f.filter.of(resp.Events)
		return
	}
	f.past = append(f.past, resp.Events...)
	resp.Events, resp.Lost = nil, 0 // only the last are asked for
	if !current {
		return
	}
	shown := f.filter.of(f.past)
	past := slices.IndexFunc(shown, func(e *api.Event) bool { return f.follow && cameSince(e, f.began) })
	if past < 0 {
		past = len(shown)
	}
	shown = shown[max(0, past-f.last):]
	resp.Events, f.past, f.held = shown, nil, false
}

func (f *eventsFlags) print(io streams, resp *api.EventsResponse, behind bool) error {
	if resp.Lost > 0 {
		text := fmt.Sprintf("%d earlier events are no longer kept", resp.Lost)
		if behind {
			text = fmt.Sprintf("%d events are lost: they came faster than they could be shown", resp.Lost)
		}
		fmt.Fprintln(io.err, "nvsharectl: "+text)
	}
	for _, e := range resp.Events {
		text := describeEvent(io, e)
		if f.output == "json" {
			line, err := safely(json.Marshal(plain(e.ProtoReflect())))
			if err != nil {
				return fmt.Errorf("print an event: %w", err)
			}
			text = string(line)
		}
		if _, err := fmt.Fprintln(io.out, text); err != nil {
			return fmt.Errorf("print an event: %w", err)
		}
	}
	return nil
}

var eventColour = map[api.EventType]string{
	api.EventType_EVENT_TYPE_GRANT:   green,
	api.EventType_EVENT_TYPE_REVOKE:  yellow,
	api.EventType_EVENT_TYPE_FENCE:   red,
	api.EventType_EVENT_TYPE_NO_ROOM: red,
	api.EventType_EVENT_TYPE_STALL:   red,
	api.EventType_EVENT_TYPE_BYPASS:  red,
	api.EventType_EVENT_TYPE_RECLAIM: red,
	api.EventType_EVENT_TYPE_UNFENCE: green,

	api.EventType_EVENT_TYPE_WARNING:       yellow,
	api.EventType_EVENT_TYPE_OUT_OF_MEMORY: red,
	api.EventType_EVENT_TYPE_OOM_KILL:      red,
}

// describeEvent returns an event as one line: when, where, what, who, why.
func describeEvent(io streams, e *api.Event) string {
	gpu := "-"
	if e.Uuid != "" {
		gpu = fmt.Sprintf("GPU %d", e.Index)
	}
	kind := fmt.Sprintf("%-13s", word(e.Type))
	return fmt.Sprintf("%s  %-5s  %s  %s", time.Unix(0, e.TimeNs).Format("2006-01-02 15:04:05.000000 MST"), gpu, io.paint(eventColour[e.Type], kind), printable(eventText(e)))
}

// eventText returns who an event is about, and why it came.
func eventText(e *api.Event) string {
	who := ""
	if e.Client != 0 || e.Pid != 0 {
		who = fmt.Sprintf("%s (pid %d): ", api.Tenant(e.Container, e.Uid), e.Pid)
	} else if e.Container != nil {
		who = api.Tenant(e.Container, e.Uid) + ": "
	}
	return who + strings.Join(append(turnText(e), otherText(e)...), ", ")
}

// turnText says what an event is about a turn.
func turnText(e *api.Event) (parts []string) {
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	switch e.Type {
	case api.EventType_EVENT_TYPE_GRANT:
		add("waited %s", short(e.WaitedNs))
		if e.LimitedNs != 0 {
			add("%s of that for its core limit", short(e.LimitedNs))
		}
		if e.Concurrent {
			add("at the same time as others")
		}
		if e.Latency {
			add("admitted at once (latency)")
		}
	case api.EventType_EVENT_TYPE_REVOKE:
		add("%s", reasonOf(e))
		if e.Waiters == 1 {
			add("1 process waits")
		} else {
			add("%d processes wait", e.Waiters)
		}
	case api.EventType_EVENT_TYPE_RELEASE, api.EventType_EVENT_TYPE_RECLAIM:
		add("%s", reasonOf(e))
		add("held %s", short(e.HeldNs))
		if e.DrainedNs != 0 {
			add("drained %s of that", short(e.DrainedNs))
		}
		if e.Fenced {
			add("after its fence")
		}
	}
	return parts
}

// otherText says what an event is that is not about a turn.
func otherText(e *api.Event) (parts []string) {
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	switch e.Type {
	case api.EventType_EVENT_TYPE_GRANT, api.EventType_EVENT_TYPE_REVOKE, api.EventType_EVENT_TYPE_RELEASE, api.EventType_EVENT_TYPE_RECLAIM:
	case api.EventType_EVENT_TYPE_REGISTER:
		add("uses GPUs through the shim")
	case api.EventType_EVENT_TYPE_END:
		add("has ended")
	case api.EventType_EVENT_TYPE_ADOPT:
		add("reconnected and keeps its grant")
	case api.EventType_EVENT_TYPE_FENCE:
		add("did not release the GPU in time, may still use it")
	case api.EventType_EVENT_TYPE_MODE:
		reason, slices := strings.CutPrefix(e.Reason, api.BySlices)
		how := "takes turns"
		switch {
		case slices:
			how = "shares by time slices"
		case e.Concurrent:
			how = "runs all at the same time"
		}
		add("%s: %s", how, reason)
	case api.EventType_EVENT_TYPE_SWAP_OUT, api.EventType_EVENT_TYPE_SWAP_IN:
		where := "off the GPU"
		if e.Type == api.EventType_EVENT_TYPE_SWAP_IN {
			where = "onto the GPU"
		}
		add("moved %s %s in %s", size(e.Bytes), where, short(e.TookNs))
		if e.TookNs > 0 {
			add("%s/s", size(uint64(float64(e.Bytes)*1e9/float64(e.TookNs))))
		}
	case api.EventType_EVENT_TYPE_MIGRATE:
		add("%s", e.Reason)
		add("%s reserved", size(e.Bytes))
		add("took %s", short(e.TookNs))
	case api.EventType_EVENT_TYPE_SUSPEND:
		what := "leaves"
		if e.Bytes > 0 {
			what = size(e.Bytes) + " leave"
		}
		add("%s the GPU until it calls CUDA again: %s", what, e.Reason)
	case api.EventType_EVENT_TYPE_NO_ROOM:
		add("refused %s: %s", size(e.Bytes), e.Reason)
	case api.EventType_EVENT_TYPE_UNFENCE:
		add("the fence has ended: %s", reasonOf(e))
		add("held %s", short(e.HeldNs))
	case api.EventType_EVENT_TYPE_SET:
		add("%s %s → %s", e.Setting, e.Old, e.New)
	default:
		add("%s", e.Reason)
	}
	return parts
}

// reasons explain the API's one-word reasons.
var reasons = map[string]string{
	"quantum":  "time quantum over",
	"limit":    "core limit reached",
	"priority": "its latency budget is used up",
	"mode":     "tenants take turns now",
	"gang":     "turn of a gang",
	"memory":   "its memory cannot be moved onto the GPU",
	"suspend":  "its memory is to leave the GPU",
	"revoked":  "as asked",
	"idle":     "nothing to do",
	"exit":     "has exited",
	"death":    "ended while it had the GPU",
	"lost":     "reconnected without its grant",
}

func reasonOf(e *api.Event) string {
	if text := reasons[e.Reason]; text != "" {
		return text
	}
	return e.Reason
}
