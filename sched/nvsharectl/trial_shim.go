// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// known is what the scheduler knows of a program of the test.
type known struct {
	client    *api.Client // nil: it is no client
	unmanaged bool        // it uses the GPU all the same
}

// lookInterval is how often the scheduler is asked while the programs run.
const lookInterval = 100 * time.Millisecond

// look asks the scheduler for the programs until their shims have tried what the driver lets
// them do, and not longer than until an end.
func (t *trial) look(ctx context.Context, end time.Time, programs ...*program) error {
	for {
		r, err := t.status(ctx)
		if err != nil {
			return fmt.Errorf("while the programs ran: %w", err)
		}
		tried := true
		for _, p := range programs {
			p.known = knownOf(r, p.PID)
			tried = tried && p.known.client.GetControls().GetSlices() != "" && p.known.client.GetControls().GetSlices() != untried
		}
		if tried || time.Now().Add(lookInterval).After(end) {
			return nil
		}
		select {
		case <-time.After(lookInterval):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func knownOf(r *api.StatusResponse, pid uint32) (k known) {
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			if c.Pid == pid && c.Connected {
				k.client = c
			}
		}
	}
	k.unmanaged = slices.ContainsFunc(r.Unmanaged, func(u *api.Unmanaged) bool { return u.Pid == pid })
	return k
}

// judgeShims says whether the shims of the programs hold the driver's entry points; past returns
// the names of those that they do not hold.
func judgeShims(past func() []string, programs ...*program) finding {
	f := finding{Check: "shim", Level: pass}
	var faults []string
	held, bypassed := uint32(0), false
	for _, p := range programs {
		c := p.known.client
		if held = max(held, c.GetInterposed()); c.GetInterposed() > 0 && c.GetBypassed() == 0 {
			continue
		}
		fault := fmt.Sprintf("%s (pid %d): ", p.name, p.PID)
		switch {
		case p.known.unmanaged && c == nil:
			fault += "not known to the scheduler, and uses the GPU without nvshare"
		case c == nil:
			fault += "not known to the scheduler: its shim is not loaded, or does not reach it"
		case c.Bypassed > 0:
			bypassed = true
			fault += fmt.Sprintf("%d of %d entry points lead past the shim", c.Bypassed, c.Bypassed+c.Interposed)
		default:
			fault += "its shim holds no entry point"
		}
		faults = append(faults, fault)
	}
	if len(faults) == 0 {
		f.Text = fmt.Sprintf("in both programs: %d entry points interposed, none bypassed", held)
		return f
	}
	f.Level, f.Fix, f.Text = fail, "nvsharectl doctor", strings.Join(faults, "; ")
	if bypassed {
		f.Fix = "take away what also replaces functions of CUDA in all programs (LD_PRELOAD, /etc/ld.so.preload), or nvsharectl doctor bundle for a bug report"
		if names := past(); len(names) > 0 {
			f.Text += ": " + few(names)
		}
	}
	return f
}

// maxNames is how many names a finding has.
const maxNames = 8

func few(names []string) string {
	text := strings.Join(names[:min(len(names), maxNames)], ", ")
	if more := len(names) - maxNames; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// past runs a program whose shim names the entry points that lead past it, and how.
func (t *trial) past(ctx context.Context) (names []string) {
	ctx, cancel := context.WithTimeout(ctx, t.patience)
	defer cancel()
	loud := *t
	loud.env = []string{"NVSHARE_DEBUG=1"}
	p, err := loud.start(ctx, "doctor-c", 0)
	if err != nil {
		return nil
	}
	_ = p.report()
	p.end()
	for line := range strings.Lines(p.stderr.String()) {
		if _, name, found := strings.Cut(strings.TrimSpace(line), "not interposed: "); found && strings.HasPrefix(line, "nvshare[") {
			names = append(names, name)
		}
	}
	return names
}

// untried is what the scheduler says of a control that a shim has not tried.
const untried = "not tried"

// judgeControls says what the driver lets programs do with the GPU's own scheduler, and what
// follows from that.
func (t *trial) judgeControls(swaps bool, programs ...*program) (all []finding) {
	cut := "a kernel that goes on beyond its turn is cut"
	if swaps {
		cut += ", but not while memory is swapped"
	}
	for _, c := range []struct {
		name                  string
		of                    func(*api.Controls) string
		works, fails, unknown string
	}{
		{"time slices", (*api.Controls).GetSlices, "tenants can share the GPU by its time slices", "tenants take turns", "whether tenants can share the GPU by its time slices is not known"},
		{"channels off and on", (*api.Controls).GetChannels, cut, "a kernel that runs for seconds holds the GPU for seconds", "whether a kernel that goes on beyond its turn can be cut is not known"},
	} {
		f := finding{Check: "controls", Level: info}
		follows, driver := c.unknown, ""
		listed := true
		var values, each []string
		for _, p := range programs {
			if p.known.client == nil {
				continue // said of the shim
			}
			k := p.known.client.Controls
			value := c.of(k)
			switch value {
			case "works":
				listed = listed && k.Listed
				if f.Level == info {
					f.Level, follows = pass, c.works
				}
			case untried, "":
				value = untried
			default:
				f.Level, follows, listed = warn, c.fails, false
			}
			if d := k.GetDriver(); d != "" && (driver == "" || !k.Listed) {
				driver = d
			}
			values, each = append(values, value), append(each, value+" in "+p.name)
		}
		if len(values) == 0 {
			return all
		}
		f.Text = c.name + ": " + values[0]
		if len(slices.Compact(values)) > 1 {
			f.Text = c.name + ": " + strings.Join(each, ", ")
		}
		f.Text += withDriver(f.Level, driver, listed) + ": " + follows
		switch f.Level {
		case warn:
			f.Fix = "another driver: deployments/kubernetes/operations.md says with which it was seen to work"
		case info:
			f.Fix = t.patient().sudo("doctor", "test", "--time", "30")
		}
		all = append(all, f)
	}
	return all
}

// withDriver says with which driver a control works or not; listed: it was seen to work with it.
func withDriver(l level, driver string, listed bool) string {
	switch {
	case driver == "" || l == info:
		return ""
	case l == warn:
		return " (driver " + driver + ")"
	case listed:
		return " (seen with driver " + driver + ")"
	}
	return " (tried with driver " + driver + ")"
}
