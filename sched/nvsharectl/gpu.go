// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// wayOf is api.Sharing; "": as its setting says, or nobody uses it.
func wayOf(g *api.GPU) string {
	if api.Unused(g) || g.Mode != api.Mode_MODE_AUTO && (g.Swap == nil || !overridden(g)) {
		return ""
	}
	return api.Sharing(g)
}

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
	case d < 10*time.Millisecond:
		return d.Round(100 * time.Microsecond).String()
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
	return short(s.P50Ns) + "/" + short(s.P99Ns)
}

// tenant is one as people are shown it.
type tenant struct{ *api.GPUTenant }

// tenantsOf returns the tenants of a GPU, with those that hold or wait first.
func tenantsOf(g *api.GPU) (all []*tenant) {
	for _, t := range api.TenantsOf(g) {
		all = append(all, &tenant{t})
	}
	slices.SortStableFunc(all, func(a, b *tenant) int {
		_, first := a.Foremost()
		_, second := b.Foremost()
		return cmp.Or(cmp.Compare(first, second), cmp.Compare(a.name(), b.name()))
	})
	return all
}

// state returns what the tenant does, since when, and the colour to show it in.
func (t *tenant) state() (state, since, colour string) {
	state, since = t.State(), "-"
	if c, _ := t.Foremost(); c != nil {
		colour = stateColour[c.State]
		if c.SinceNs != 0 {
			since = short(c.SinceNs)
		}
	}
	return state, since, colour
}

// name names the tenant for people. Processes outside containers have the name of
// their user, and of the program if there is one process.
func (t *tenant) name() string {
	name := api.Tenant(t.Container, t.Uid)
	if t.Container.GetId() == "" && len(t.Clients) == 1 {
		name += " (" + t.Clients[0].Command + ")"
	}
	return name
}

// share returns the terms in which the tenant differs from one without a share.
func (t *tenant) share() string {
	terms := api.TermsOf(t.Use.GetShare(), 0)
	var parts []string
	for _, f := range api.Fields {
		if value := f.Format(terms); value != f.Format(api.Terms{}) {
			parts = append(parts, f.Short+value)
		}
	}
	return strings.Join(parts, ", ")
}

// got and waited are parts of the latest five seconds.
func (t *tenant) got() string    { return t.part(t.Use.GotPermille) }
func (t *tenant) waited() string { return t.part(t.Use.WaitedPermille) }

func (t *tenant) part(permille uint32) string {
	if t.Use.Container == nil { // a member of a gang
		return "-"
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(permille)/10), ".0") + "%"
}

// due is what the tenant gets in the long run; in brackets if it does not want the GPU now, as then
// the others get that, too.
func (t *tenant) due() string {
	if t.Use.Container == nil {
		return "-"
	}
	text := fmt.Sprintf("%d%%", (t.Use.PromisedPermille+5)/10)
	wants := func(c *api.Client) bool {
		return c.State != api.ClientState_CLIENT_STATE_IDLE && c.State != api.ClientState_CLIENT_STATE_FENCED
	}
	if t.Use.ThrottledNs == 0 && !slices.ContainsFunc(t.Clients, wants) {
		text = "(" + text + ")"
	}
	return text
}

// debt returns the time that the tenant has to make up for.
func (t *tenant) debt() string {
	if t.Use.DebtNs == 0 {
		return "-"
	}
	return short(t.Use.DebtNs)
}

// longestWait is the longest wait of the latest minute.
func (t *tenant) longestWait() int64 { return t.Use.WaitMaxLatelyNs }

// ofLimit returns how much memory the tenant has reserved, and its limit after a word.
func (t *tenant) ofLimit(of string) (text, colour string) {
	m := t.Memory
	text = size(m.UsedBytes)
	if m.LimitBytes != 0 {
		text += of + size(m.LimitBytes)
		if m.UsedBytes > m.LimitBytes {
			colour = red
		}
	}
	return text, colour
}

// away returns how much of the tenant's memory is in host memory or was never used.
func (t *tenant) away() (bytes uint64) {
	for _, c := range t.Clients {
		bytes += c.AwayBytes
	}
	return bytes
}

// resident returns how much of the tenant's memory is on the GPU.
func (t *tenant) resident(g *api.GPU) (bytes uint64) {
	if g.Swap == nil { // nothing leaves the GPU
		return t.Memory.UsedBytes
	}
	for _, c := range t.Clients {
		bytes += c.ResidentBytes
	}
	return bytes
}

// notSwapped says why memory stays on the GPU; "": it does not.
func notSwapped(g *api.GPU) string {
	if g.NotSwapped == "" {
		return ""
	}
	return "memory is not swapped: " + g.NotSwapped
}

// swapTable shows how much memory is where, by GPU, if memory is swapped.
func swapTable() table {
	return table{head: []string{"GPU", "ON GPU", "FIXED", "AWAY", "HOST MEMORY", "MOVED OUT", "MOVED IN", "OUT/S", "IN/S", "SWAP SHARE", "REFUSED"}}
}

func addSwap(t *table, g *api.GPU) {
	s := g.Swap
	if s == nil {
		return
	}
	t.add(map[int]string{10: alarm(s.Refused > 0)},
		fmt.Sprint(g.Index), size(s.ResidentBytes)+"/"+size(s.CapacityBytes), size(s.FixedBytes), size(s.AwayBytes),
		size(s.ArenaBytes)+"/"+size(s.ArenaLimitBytes), size(s.OutBytes), size(s.InBytes),
		size(s.OutBytesPerSecond), size(s.InBytesPerSecond), api.FormatPercent(s.SharePercent), fmt.Sprint(s.Refused))
}

// placeHead names what addPlace says of a process.
var placeHead = []string{"KEPT", "ON GPU", "FIXED", "AWAY", "ROOM", "LACKS", "HOST MEMORY", "IN FILE", "MOVED OUT", "MOVED IN", "WHY FIXED"}

// addPlace appends to a process's cells how much of its memory is where.
func addPlace(cells []string, colours map[int]string, g *api.GPU, c *api.Client) []string {
	at := len(cells)
	if g.Swap == nil {
		return append(cells, slices.Repeat([]string{"-"}, len(placeHead))...)
	}
	colours[at], colours[at+slices.Index(placeHead, "LACKS")] = alarm(c.Stalled), alarm(c.LacksBytes > 0)
	return append(cells, kept(c), size(c.ResidentBytes), size(c.FixedBytes), size(c.AwayBytes),
		size(c.RoomBytes), size(c.LacksBytes), size(c.ArenaBytes), size(c.FileBytes), size(c.SwappedOutBytes), size(c.SwappedInBytes),
		cmp.Or(c.FixedReason, "-"))
}

func kept(c *api.Client) string {
	switch {
	case c.Stalled:
		return "stalled"
	case c.MemoryMode == api.MemoryMode_MEMORY_MODE_UNSPECIFIED:
		return "-"
	}
	return api.FormatMemoryMode(c.MemoryMode)
}
