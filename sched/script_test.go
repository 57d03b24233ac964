// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
)

var update = flag.Bool("update", false, "rewrite what testdata/*.txt expect; commit that only if each change is understood and wanted")

// TestScripts runs testdata/*.txt. A script is lines of events and the actions
// expected after each, indented; # begins a comment. The first line may be
//
//	config [quantum=D] [grace=D] [mode=M] [policy=roundrobin] [last=EPOCH] [way=WAY] [intact] [sample=D] [dropcarry=PERCENT] [droptail=PERCENT] [swapshare=PERCENT] [memory=BYTES] [swap=BYTES] [physical=BYTES] [host=BYTES] [stallafter=D]
//
// an event is
//
//	TIME EVENT   as base.Text writes it; TIME is a duration since 0, or
//	             +duration since the event before
//	next         a tick at the deadline
//
// and two queries print, indented, instead of changing anything:
//
//	clients      each client's state
//	tenants      each tenant's share, and what it has got
//	counters
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts in testdata: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := runScript(t, string(want))
			if got == string(want) {
				return
			}
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
				return
			}
			t.Errorf("%s: first difference in line %s", file, firstDifference(got, string(want)))
		})
	}
}

func firstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	i := 0
	for i < len(g) && i < len(w) && g[i] == w[i] {
		i++
	}
	line := func(s []string) string {
		if i < len(s) {
			return s[i]
		}
		return "(end)"
	}
	return fmt.Sprintf("%d\n got: %s\nwant: %s", i+1, line(g), line(w))
}

// runScript returns the script with what the core really did.
func runScript(t *testing.T, script string) string {
	var out strings.Builder
	var cfg Config
	var c *GPU
	var now base.Time
	replaced := false // turns, by the example of a policy
	for i, line := range strings.Split(strings.TrimSuffix(script, "\n"), "\n") {
		fail := func(err error) {
			if err != nil {
				t.Fatalf("line %d: %s: %v", i+1, line, err)
			}
		}
		if strings.HasPrefix(line, "    ") {
			continue
		}
		fmt.Fprintln(&out, line)
		words := strings.Fields(strings.SplitN(line, "#", 2)[0])
		if len(words) == 0 {
			continue
		}
		if words[0] == "config" {
			replaced = slices.Contains(words, "policy=roundrobin")
			words = slices.DeleteFunc(words[1:], func(w string) bool { return w == "policy=roundrobin" })
			fail(parseConfig(words, &cfg))
			continue
		}
		if c == nil {
			c = New(cfg)
			if replaced {
				c.policies = append([]policy{roundRobin()}, gracePeriods())
			}
		}
		var ev base.Event
		switch words[0] {
		case "clients":
			for _, cl := range c.Snapshot(now).Clients {
				fmt.Fprintf(&out, "    %d %v", cl.ID, cl.State)
				if cl.Epoch != 0 {
					fmt.Fprintf(&out, " epoch=%d", cl.Epoch)
				}
				fmt.Fprintln(&out)
			}
			continue
		case "tenants":
			for _, t := range c.Snapshot(now).Tenants {
				fmt.Fprintf(&out, "    %s promised=%d used=%v debt=%v throttled=%v", t.Tenant, t.Promised, t.Used, t.Debt, t.Throttled)
				if t.Moved != 0 {
					fmt.Fprintf(&out, " moved=%v", t.Moved)
				}
				fmt.Fprintln(&out)
			}
			continue
		case "counters":
			fmt.Fprintf(&out, "    %+v\n", c.Snapshot(now).Counters)
			continue
		case "next":
			at, ok := c.Deadline()
			if !ok {
				fmt.Fprintln(&out, "    no deadline")
				continue
			}
			now, ev = at, Tick{}
			fmt.Fprintf(&out, "    at %v\n", time.Duration(at))
		default:
			at, since := strings.CutPrefix(words[0], "+")
			d, err := time.ParseDuration(at)
			fail(err)
			if since {
				now = now.Add(d)
			} else {
				now = base.Time(d)
			}
			ev, err = parseEvent(words[1:])
			fail(err)
			if base.Text(ev) != strings.Join(words[1:], " ") {
				t.Fatalf("line %d: parsed as %q", i+1, base.Text(ev))
			}
		}
		for _, a := range c.Step(now, ev) {
			fmt.Fprintf(&out, "    %s\n", base.Text(a))
		}
		fail(c.Check())
	}
	return out.String()
}

func parseConfig(words []string, cfg *Config) (err error) {
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "quantum":
			cfg.Quantum, err = time.ParseDuration(value)
		case "way":
			err = cfg.Way.UnmarshalText([]byte(value))
		case "intact":
			cfg.Intact = true
		case "sample":
			cfg.Tuning.Sample, err = time.ParseDuration(value)
		case "dropcarry":
			cfg.Tuning.DropCarry, err = strconv.Atoi(value)
		case "droptail":
			cfg.Tuning.DropTail, err = strconv.Atoi(value)
		case "grace":
			cfg.Grace, err = time.ParseDuration(value)
		case "mode":
			cfg.Mode, err = parseMode(value)
		case "swapshare":
			cfg.SwapShare, err = strconv.Atoi(value)
		case "suspendafter":
			cfg.Memory.SuspendAfter, err = time.ParseDuration(value)
		case "stallafter":
			cfg.Memory.StallAfter, err = time.ParseDuration(value)
		case "swap":
			cfg.Memory.Swap = true
			cfg.Memory.Capacity, err = strconv.ParseUint(value, 10, 64)
		case "physical":
			cfg.Memory.Physical, err = strconv.ParseUint(value, 10, 64)
		case "host":
			var n uint64
			n, err = strconv.ParseUint(value, 10, 64)
			cfg.Node = NewNode()
			cfg.Node.Arenas.Bound(n, 0)
		case "last":
			var n uint64
			n, err = strconv.ParseUint(value, 0, 64)
			cfg.LastEpoch = base.Epoch(n)
		default:
			err = fmt.Errorf("unknown setting %q", key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func parseMode(s string) (Mode, error) {
	for _, m := range []Mode{Exclusive, Concurrent, Auto} {
		if m.String() == s {
			return m, nil
		}
	}
	return 0, fmt.Errorf("unknown mode %q", s)
}

// parseEvent is the inverse of base.Text.
func parseEvent(words []string) (base.Event, error) {
	if len(words) == 0 {
		return nil, fmt.Errorf("no event")
	}
	switch words[0] {
	case "set":
		return parseSetting(words[1:])
	case "suspend":
		tenant, _, _, err := parseShare(words[1:])
		return Suspend{tenant}, err
	case "resume":
		tenant, _, _, err := parseShare(words[1:])
		return ResumeTenant{tenant}, err
	}
	var id base.ClientID
	var rest []string
	if words[0] == "restore" && len(words) == 3 && words[1] == "unknown" {
		var ev RestoreUnknown
		_, err := fmt.Sscanf(words[2], "epoch=%d", &ev.Epoch)
		return ev, err
	}
	if len(words) > 1 {
		n, _ := strconv.ParseUint(words[1], 10, 64)
		id, rest = base.ClientID(n), words[2:]
	}
	var epoch base.Epoch
	var is = map[string]bool{}
	bytes := map[string]uint64{}
	var reason Reason
	var late time.Duration
	tenant, share, rest, err := parseShare(rest)
	if err != nil {
		return nil, err
	}
	for _, w := range rest {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "epoch", "held":
			n, err := strconv.ParseUint(value, 10, 64)
			if err != nil {
				return nil, err
			}
			epoch = base.Epoch(n)
		case "want", "canmove", "again", "cut", "force", "ready", "stuck", "nomemory", "noarena", "preempted", "shared", "off", "exits":
			is[key] = true
		case "total", "least", "serial", "resident", "fixed", "away", "arena", "out", "in", "bytes":
			if bytes[key], err = strconv.ParseUint(value, 10, 64); err != nil {
				return nil, err
			}
		case "late":
			if late, err = time.ParseDuration(value); err != nil {
				return nil, err
			}
		case "revoked":
			reason = Revoked
		case "idle":
			reason = Idle
		case "exit":
			reason = Exit
		default:
			return nil, fmt.Errorf("unknown word %q", w)
		}
	}
	switch words[0] {
	case "attach":
		return Attach{id, tenant, share, epoch, is["want"], is["canmove"], is["again"], is["cut"]}, nil
	case "request":
		return Request{id}, nil
	case "release":
		return Release{Client: id, Epoch: epoch, Reason: reason, Preempted: is["preempted"]}, nil
	case "called":
		return Called{id}, nil
	case "withdraw":
		return Withdraw{id, is["exits"]}, nil
	case "lost":
		return Lost{id}, nil
	case "reserve":
		return residency.Reserve{Client: id, Total: bytes["total"], Least: bytes["least"], Force: is["force"], Serial: bytes["serial"]}, nil
	case "moved":
		r := residency.Report{Resident: bytes["resident"], Fixed: bytes["fixed"], Away: bytes["away"], Arena: bytes["arena"], Out: bytes["out"], In: bytes["in"]}
		return residency.Moved{Client: id, Epoch: epoch, Report: r, Ready: is["ready"], Stuck: is["stuck"], NoMemory: is["nomemory"], NoArena: is["noarena"]}, nil
	case "held":
		return HeldOff{id, is["off"]}, nil
	case "on":
		return HeldOn{id, late}, nil
	case "exec":
		return Exec{id}, nil
	case "restorememory":
		return residency.RestoreMemory{Client: id, Tenant: tenant, Gang: share.Gang, CanMove: is["canmove"], Bytes: bytes["bytes"], Suspended: is["suspended"]}, nil
	case "gone":
		return Gone{id}, nil
	case "restore":
		return Restore{id, epoch, tenant, share.Gang, share.Overlap, is["shared"]}, nil
	case "tick":
		return Tick{}, nil
	}
	return nil, fmt.Errorf("unknown event %q", words[0])
}

// parseShare takes a tenant and a share out of an event's words, and returns
// the rest.
func parseShare(words []string) (tenant string, s Share, rest []string, err error) {
	for _, w := range words {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "tenant":
			tenant = value
		case "gang":
			s.Gang = value
		case "overlap":
			s.Overlap = value
		case "limit":
			s.Limit, err = strconv.Atoi(value)
		case "request":
			s.Request, err = strconv.Atoi(value)
		case "weight":
			s.Weight, err = strconv.Atoi(value)
		case "priority":
			if value != Latency.String() {
				err = fmt.Errorf("unknown priority %q", value)
			}
			s.Priority = Latency
		default:
			rest = append(rest, w)
		}
		if err != nil {
			return "", Share{}, nil, err
		}
	}
	return tenant, s, rest, nil
}

// parseSetting reads what follows the word "set".
func parseSetting(words []string) (ev base.Event, err error) {
	tenant, share, rest, err := parseShare(words)
	if tenant != "" || err != nil {
		return SetShare{tenant, share}, err
	}
	for _, w := range rest {
		key, value, _ := strings.Cut(w, "=")
		switch key {
		case "mode":
			var m Mode
			m, err = parseMode(value)
			ev = SetMode{m}
		case "quantum":
			var d time.Duration
			d, err = time.ParseDuration(value)
			ev = SetQuantum{d}
		case "swapshare":
			var n int
			n, err = strconv.Atoi(value)
			ev = SetSwapShare{n}
		default:
			err = fmt.Errorf("unknown setting %q", w)
		}
		if err != nil {
			return nil, err
		}
	}
	return ev, nil
}
