// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
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

// tenant is a container, or a user's processes outside containers, on one GPU.
type tenant struct {
	container *api.Container
	uid       uint32
	clients   []*api.Client
	use       *api.TenantUse
	memory    *api.MemoryAccount // zero: no limit, and nothing is reserved
}

func (t *tenant) is(c *api.Container, uid uint32) bool {
	id := t.container.GetId()
	return id == c.GetId() && (id != "" || t.uid == uid)
}

// key tells tenants of a GPU apart.
func (t *tenant) key() string {
	return cmp.Or(t.container.GetId(), "user "+strconv.FormatUint(uint64(t.uid), 10))
}

// tenantsOf groups the clients of a GPU by tenant, with those that hold or wait first.
func tenantsOf(g *api.GPU) []*tenant {
	var all []*tenant
	find := func(c *api.Container, uid uint32) *tenant {
		for _, t := range all {
			if t.is(c, uid) {
				return t
			}
		}
		t := &tenant{container: c, uid: uid, use: &api.TenantUse{}, memory: &api.MemoryAccount{}}
		all = append(all, t)
		return t
	}
	for _, c := range g.Clients {
		t := find(c.Container, c.Uid)
		t.clients = append(t.clients, c)
	}
	for _, u := range g.Tenants {
		find(u.Container, u.Uid).use = u
	}
	for _, m := range g.Memory {
		// A tenant with nothing but a limit is not shown.
		if i := slices.IndexFunc(all, func(t *tenant) bool { return t.is(m.Container, m.Uid) }); i >= 0 {
			all[i].memory = m
		}
	}
	slices.SortStableFunc(all, func(a, b *tenant) int {
		return cmp.Or(cmp.Compare(urgency(a), urgency(b)), cmp.Compare(a.name(), b.name()))
	})
	return all
}

// urgency is the place of a tenant's state in the list.
func urgency(t *tenant) int {
	c := t.foremost()
	if c == nil {
		return len(byUrgency)
	}
	return slices.Index(byUrgency, c.State)
}

var byUrgency = []api.ClientState{
	api.ClientState_CLIENT_STATE_FENCED,
	api.ClientState_CLIENT_STATE_LOST,
	api.ClientState_CLIENT_STATE_DRAINING,
	api.ClientState_CLIENT_STATE_HOLDING,
	api.ClientState_CLIENT_STATE_WAITING,
	api.ClientState_CLIENT_STATE_IDLE,
	api.ClientState_CLIENT_STATE_UNSPECIFIED,
}

// foremost returns the client whose state stands for the tenant's: the one that is
// longest in the most urgent state. Nil: the tenant has no client.
func (t *tenant) foremost() *api.Client {
	if len(t.clients) == 0 {
		return nil
	}
	return slices.MinFunc(t.clients, func(a, b *api.Client) int {
		return cmp.Or(cmp.Compare(slices.Index(byUrgency, a.State), slices.Index(byUrgency, b.State)), cmp.Compare(b.SinceNs, a.SinceNs))
	})
}

// state returns what the tenant does, since when, and the colour to show it in.
func (t *tenant) state() (state, since, colour string) {
	c := t.foremost()
	switch {
	case c == nil && t.use.Clients > 0: // a gang or an overlap group, whose members have lines of their own
		return "group", "-", ""
	case c == nil:
		return "gone", "-", ""
	}
	state, since, colour = doing(c), "-", stateColour[c.State]
	if c.SinceNs != 0 {
		since = short(c.SinceNs)
	}
	if c.State == api.ClientState_CLIENT_STATE_WAITING && t.use.ThrottledNs > 0 {
		state = "throttled"
	}
	return state, since, colour
}

// name names the tenant for people. Processes outside containers have the name of
// their user, and of the program if there is one process.
func (t *tenant) name() string {
	name := api.Tenant(t.container, t.uid)
	if t.container.GetId() == "" && len(t.clients) == 1 {
		name += " (" + t.clients[0].Command + ")"
	}
	return name
}

// share returns the terms in which the tenant differs from one without a share.
func (t *tenant) share() string {
	terms := api.TermsOf(t.use.GetShare(), 0)
	var parts []string
	for _, f := range api.Fields {
		if value := f.Format(terms); value != f.Format(api.Terms{}) {
			parts = append(parts, f.Short+value)
		}
	}
	return strings.Join(parts, ", ")
}

// got and waited are parts of the latest five seconds.
func (t *tenant) got() string    { return t.part(t.use.GotPermille) }
func (t *tenant) waited() string { return t.part(t.use.WaitedPermille) }

func (t *tenant) part(permille uint32) string {
	if t.use.Container == nil { // a member of a gang
		return "-"
	}
	return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(permille)/10), ".0") + "%"
}

// due is what the tenant gets in the long run; in brackets if it does not want the GPU now, as then
// the others get that, too.
func (t *tenant) due() string {
	if t.use.Container == nil {
		return "-"
	}
	text := fmt.Sprintf("%d%%", (t.use.PromisedPermille+5)/10)
	wants := func(c *api.Client) bool {
		return c.State != api.ClientState_CLIENT_STATE_IDLE && c.State != api.ClientState_CLIENT_STATE_FENCED
	}
	if t.use.ThrottledNs == 0 && !slices.ContainsFunc(t.clients, wants) {
		text = "(" + text + ")"
	}
	return text
}

// debt returns the time that the tenant has to make up for.
func (t *tenant) debt() string {
	if t.use.DebtNs == 0 {
		return "-"
	}
	return short(t.use.DebtNs)
}

// waitMax is the longest wait since the scheduler knows the tenant.
func (t *tenant) waitMax() int64 {
	longest := t.use.WaitMaxNs
	for _, c := range t.clients {
		longest = max(longest, c.WaitMaxNs)
	}
	return longest
}

// longestWait is that of the latest minute.
func (t *tenant) longestWait() int64 { return t.use.WaitMaxLatelyNs }

// ofLimit returns how much memory the tenant has reserved, and its limit after a word.
func (t *tenant) ofLimit(of string) (text, colour string) {
	m := t.memory
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
	for _, c := range t.clients {
		bytes += c.AwayBytes
	}
	return bytes
}

// resident returns how much of the tenant's memory is on the GPU.
func (t *tenant) resident(g *api.GPU) (bytes uint64) {
	if g.Swap == nil { // nothing leaves the GPU
		return t.memory.UsedBytes
	}
	for _, c := range t.clients {
		bytes += c.ResidentBytes
	}
	return bytes
}
