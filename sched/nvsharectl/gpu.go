// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// wayOf says how clients share a GPU, and why; "": as its setting says, or nobody uses it.
func wayOf(g *api.GPU) string {
	if unused(g) || g.Mode != api.Mode_MODE_AUTO && (g.Swap == nil || !overridden(g)) {
		return ""
	}
	return fmt.Sprintf("way: %s (%s)", shortWay(g), wayReason(g))
}

// wayReason says why clients share a GPU as they do, without the way itself; in turns also why
// no tenants have theirs together.
func wayReason(g *api.GPU) string {
	reason := strings.TrimPrefix(g.WayReason, slicesBefore)
	for _, r := range g.Refused {
		if r.Way == "cohort" && r.Code != g.WayCode {
			reason += "; no tenants have their turn together: " + r.Reason
		}
	}
	return reason
}

const slicesBefore = "by time slices: "

// shortWay names the way in which clients share a GPU.
func shortWay(g *api.GPU) string {
	if g.Way == "driver" {
		return "all at once"
	}
	return g.Way
}

// overridden says whether a GPU is not shared as is set.
func overridden(g *api.GPU) bool { return g.EffectiveMode != g.Mode }

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

// promisedOf says which parts of a GPU's time are promised, and to whom, also to
// tenants that do not use the GPU; "": none.
func promisedOf(g *api.GPU) string {
	var sum uint32
	var to []string
	for _, p := range api.Promised(g) {
		if p.CoreRequest != 0 {
			sum += p.CoreRequest
			to = append(to, fmt.Sprintf("%d%% to %s", p.CoreRequest, api.Tenant(p.Container, p.Uid)))
		}
	}
	if sum == 0 {
		return ""
	}
	return fmt.Sprintf("%d%% of its time is promised: %s", sum, strings.Join(to, ", "))
}

// limitsOf adds up the memory limits on a GPU, also of tenants that do not use the GPU;
// "": there are none.
func limitsOf(g *api.GPU) string {
	var sum uint64
	var of []string
	for _, p := range api.Promised(g) {
		if p.MemoryBytes != 0 {
			sum += p.MemoryBytes
			of = append(of, fmt.Sprintf("%s of %s", size(p.MemoryBytes), api.Tenant(p.Container, p.Uid)))
		}
	}
	if sum == 0 {
		return ""
	}
	total := ""
	if g.MemoryBytes != 0 {
		total = " of its " + size(g.MemoryBytes)
	}
	return fmt.Sprintf("memory limits add up to %s%s: %s", size(sum), total, strings.Join(of, ", "))
}

// wayAndSetting returns how a GPU is shared, and the setting where that leaves it open or is
// overridden.
func wayAndSetting(g *api.GPU) string {
	if g.Mode == api.Mode_MODE_AUTO || overridden(g) {
		return shortWay(g) + " (" + api.AntiThrash(g.Mode) + ")"
	}
	return shortWay(g)
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

// memoryOf is what is reserved on a GPU, and its size where the scheduler knows that.
func memoryOf(g *api.GPU, of string) string {
	if g.MemoryBytes == 0 {
		return size(reserved(g))
	}
	return size(reserved(g)) + of + size(g.MemoryBytes)
}

func reserved(g *api.GPU) (n uint64) {
	n = g.Others.GetMemoryBytes()
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
		return fmt.Sprintf("%d processes", n), "-"
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

// halfAndMost prints how long half of something, and 99 of 100, took at most.
func halfAndMost(s *api.Spread) string {
	if s.GetCount() == 0 {
		return "-"
	}
	return brief(s.P50Ns) + "/" + brief(s.P99Ns)
}

// brief prints nanoseconds in at most five characters.
func brief(ns int64) string {
	units := []struct {
		of   int64
		name string
	}{{int64(time.Hour), "h"}, {int64(time.Minute), "m"}, {int64(time.Second), "s"}, {int64(time.Millisecond), "ms"}, {int64(time.Microsecond), "µs"}}
	for _, u := range units {
		switch {
		case ns >= 10*u.of:
			return strconv.FormatInt(ns/u.of, 10) + u.name
		case ns >= u.of:
			tenths := ns * 10 / u.of
			return strconv.FormatInt(tenths/10, 10) + "." + strconv.FormatInt(tenths%10, 10) + u.name
		}
	}
	return "0"
}
