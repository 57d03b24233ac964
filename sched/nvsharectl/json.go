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

// The types below are what -o json prints. Fields are only ever added. Times
// are seconds, sizes bytes; numbers that may exceed 2^53 are strings.

type statusJSON struct {
	Version        string      `json:"version"`
	UptimeSeconds  float64     `json:"uptime_seconds"`
	Healthy        bool        `json:"healthy"`
	Problems       []string    `json:"problems"`
	ProblemCodes   []string    `json:"problem_codes"` // of each of the problems: fenced, bypass
	Clients        uint32      `json:"clients"`
	Connections    uint32      `json:"connections"`
	Refused        uint64      `json:"refused"`
	ProtocolErrors uint64      `json:"protocol_errors"`
	GPUs           []gpuJSON   `json:"gpus"`
	Containers     []container `json:"containers"`
	// How GPUs are shared; absent: to users.
	Config []configJSON `json:"config,omitempty"`
	// View says whose answer this is; absent: root's, which has everything.
	View *viewJSON `json:"view,omitempty"`
}

// viewJSON names the tenant that an answer of the status socket is for.
type viewJSON struct {
	Container container `json:"container"`
	UID       uint32    `json:"uid"`
	Problems  uint32    `json:"problems"` // that concern others or the scheduler
}

// othersJSON adds up what the tenants have that an answer of the status socket does not
// name.
type othersJSON struct {
	Tenants     uint32  `json:"tenants"`
	Clients     uint32  `json:"clients"`
	Holding     uint32  `json:"holding"`
	Waiting     uint32  `json:"waiting"`
	Got         float64 `json:"got"`          // part of the latest five seconds
	CoreRequest uint32  `json:"core_request"` // percent, promised
	MemoryBytes uint64  `json:"memory_bytes"`
}

type gpuJSON struct {
	Index         uint32       `json:"index"`
	UUID          string       `json:"uuid"`
	Name          string       `json:"name"`
	MemoryBytes   uint64       `json:"memory_bytes"`
	AntiThrash    string       `json:"anti_thrash"`       // as it is set: on, off, auto
	Way           string       `json:"way"`               // how programs share it now: turns, slices, driver
	WayCode       string       `json:"way_code"`          // why that way
	WayReason     string       `json:"way_reason"`        // the same, for people
	Refused       []refusal    `json:"refused,omitempty"` // why no better way
	TQSeconds     float64      `json:"tq_seconds"`
	GraceSeconds  float64      `json:"grace_seconds"`
	Epoch         string       `json:"epoch"`
	Grants        uint64       `json:"grants"`
	Revokes       uint64       `json:"revokes"`
	Fences        uint64       `json:"fences"`
	Reclaims      uint64       `json:"reclaims"`
	StaleReleases uint64       `json:"stale_releases"`
	Preemptions   uint64       `json:"preemptions"`          // grants that ended with work left, whose channels are off until the next grant
	Drained       bool         `json:"drained,omitempty"`    // no new tenants are admitted
	Fault         string       `json:"fault,omitempty"`      // what ended all work on the GPU
	Held          uint32       `json:"held,omitempty"`       // clients that wait because the GPU is drained
	Migrations    uint64       `json:"migrations,omitempty"` // of tenants to this GPU, since the scheduler's start
	Holders       []string     `json:"holders"`              // ids of clients with the GPU
	Waiting       []string     `json:"waiting"`
	Clients       []clientJSON `json:"clients"`
	Tenants       []tenantJSON `json:"tenants"`
	Memory        []memoryJSON `json:"memory"` // of containers and users with a limit, or with something reserved
	// Core requests and memory limits of the tenants that may use it, the greatest first.
	Promises []promiseJSON `json:"promises"`
	Swap     *swapJSON     `json:"swap,omitempty"`   // nothing is swapped without it
	Others   *othersJSON   `json:"others,omitempty"` // only with a view
	// Since the scheduler's start.
	Drains    *spreadJSON `json:"drains,omitempty"`     // from a revoke to the release
	HandOvers *spreadJSON `json:"hand_overs,omitempty"` // from a release to the grant of who waited for it
	Waits     *spreadJSON `json:"waits,omitempty"`      // from a client's request to its grant
}

// refusal says why programs do not share a GPU in a way that would be better.
type refusal struct {
	Way    string `json:"way"` // slices, cohort, driver
	Code   string `json:"code"`
	Reason string `json:"reason"` // for people
}

// spreadJSON says how long something took. Percentiles are up to an eighth too long.
type spreadJSON struct {
	Count      uint64  `json:"count"`
	P50Seconds float64 `json:"p50_seconds"`
	P99Seconds float64 `json:"p99_seconds"`
}

func newSpread(s *api.Spread) *spreadJSON {
	if s == nil {
		return nil
	}
	return &spreadJSON{s.Count, seconds(s.P50Ns), seconds(s.P99Ns)}
}

// promiseJSON is a container's promised part of a GPU. With an empty id it is that of a
// user's processes outside containers.
type promiseJSON struct {
	Container   container `json:"container"`
	UID         uint32    `json:"uid"`
	CoreRequest uint32    `json:"core_request"` // percent; 0: none
	MemoryBytes uint64    `json:"memory_bytes"` // its memory limit; 0: none
}

// memoryJSON is a container's part of a GPU's memory. With an empty id it is that of a
// user's processes outside containers.
type memoryJSON struct {
	Container  container `json:"container"`
	UID        uint32    `json:"uid"`
	LimitBytes uint64    `json:"limit_bytes"` // in force; 0: none
	UsedBytes  uint64    `json:"used_bytes"`
}

// tenantJSON is a container's part of a GPU's time. With an empty id it is that of a
// user's processes outside containers.
type tenantJSON struct {
	Container        container `json:"container"`
	UID              uint32    `json:"uid"`
	State            string    `json:"state"`    // of its client in the most urgent state; gone: it has none
	Share            shareJSON `json:"share"`    // in force
	Promised         float64   `json:"promised"` // part of the GPU's time that it gets in the long run if it wants it beside those that want the GPU now, 0 to 1
	Got              float64   `json:"got"`      // part of the latest five seconds
	Waited           float64   `json:"waited"`   // part of the latest five seconds: it wanted the GPU and had no grant
	UsedSeconds      float64   `json:"used_seconds"`
	DebtSeconds      float64   `json:"debt_seconds"`
	ThrottledSeconds float64   `json:"throttled_seconds"` // until its limit lets it go on
	Grants           uint64    `json:"grants"`
	WaitMaxSeconds   float64   `json:"wait_max_seconds"`        // since the scheduler knows it
	WaitMaxLately    float64   `json:"wait_max_lately_seconds"` // in the latest minute
	OutOfMemory      uint64    `json:"out_of_memory"`           // reservations that its memory limit refused
	Clients          int       `json:"clients"`
	MovedSeconds     float64   `json:"moved_seconds,omitempty"` // moving memory onto the GPU, which is not in used_seconds
	// For its grants of the latest minute.
	Waits *spreadJSON `json:"waits,omitempty"`
}

// shareJSON has 0 and "" for terms that are not said. Its fields are those of
// api.Terms, which are converted to it.
type shareJSON struct {
	MemoryLimit uint64         `json:"-"`                     // a field of its own beside each share
	CoreLimit   uint32         `json:"core_limit"`            // percent
	CoreRequest uint32         `json:"core_request"`          // percent
	Weight      uint32         `json:"weight"`                //
	Priority    api.Priority   `json:"priority"`              // batch, latency
	Gang        string         `json:"gang"`                  // "true": of its own processes
	MemoryMode  api.MemoryMode `json:"memory_mode,omitempty"` // swap, resident, managed
	Overlap     string         `json:"overlap,omitempty"`     // <namespace>/<uid>/<name>
	Migratable  bool           `json:"migratable,omitempty"`
	// Seconds; 4294967295: never.
	SuspendAfter uint32 `json:"suspend_after,omitempty"`
}

type clientJSON struct {
	ID              string    `json:"id"`
	PID             uint32    `json:"pid"`
	UID             uint32    `json:"uid"`
	Command         string    `json:"command"`
	Container       container `json:"container"`
	State           string    `json:"state"` // idle, waiting, holding, draining, lost, fenced
	ForSeconds      float64   `json:"for_seconds"`
	Epoch           string    `json:"epoch"`
	Connected       bool      `json:"connected"`
	Device          uint32    `json:"device"`
	Grants          uint64    `json:"grants"`
	HeldSeconds     float64   `json:"held_seconds"`
	WaitMaxSeconds  float64   `json:"wait_max_seconds"`
	Calls           uint64    `json:"calls"`
	GateWaits       uint64    `json:"gate_waits"`
	GateWaitSeconds float64   `json:"gate_wait_seconds"`
	MemoryBytes     uint64    `json:"memory_bytes"`
	MemoryPeakBytes uint64    `json:"memory_peak_bytes"`
	Interposed      uint32    `json:"interposed"`
	Bypassed        uint32    `json:"bypassed"`
	ShimVersion     string    `json:"shim_version"`
	ReservedBytes   uint64    `json:"reserved_bytes"`

	SliceSeconds float64       `json:"slice_seconds"`      // the GPU's own time slice that it was told; 0: the driver's
	HeldBy       string        `json:"held,omitempty"`     // from outside, by nvshare-warden: how
	Preemptions  uint64        `json:"preemptions"`        // of its grants, those that ended with work left
	Controls     *controlsJSON `json:"controls,omitempty"` // absent: its shim has not said yet

	Swap *clientSwapJSON `json:"swap,omitempty"` // where its memory is, if it is swapped
}

// controlsJSON says what the GPU's own scheduler lets a process do: "works", or what went
// wrong when the shim tried it.
type controlsJSON struct {
	Slices   string `json:"slices"`   // its time slice
	Channels string `json:"channels"` // its channels off the GPU, and on again
	Groups   uint32 `json:"groups"`   // of channels, that were seen
	Bare     uint32 `json:"bare"`     // channels in no group that was seen
	Driver   string `json:"driver"`   // version
	Listed   bool   `json:"listed"`   // slices were seen to work, by their effect, with that version
}

func newControls(c *api.Controls) *controlsJSON {
	if c == nil {
		return nil
	}
	return &controlsJSON{c.Slices, c.Channels, c.Groups, c.Bare, c.Driver, c.Listed}
}

type container struct {
	ID        string `json:"id"`
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	PodUID    string `json:"pod_uid"`
	// By the pod's annotations.
	MemoryLimitBytes uint64    `json:"memory_limit_bytes"`
	Share            shareJSON `json:"share"`
	GPUs             []string  `json:"gpus"` // UUIDs of those it was given; none: not known
}

func seconds(ns int64) float64 { return time.Duration(ns).Seconds() }

func newContainer(c *api.Container) container {
	return container{c.GetId(), c.GetName(), c.GetNamespace(), c.GetPod(), c.GetPodUid(),
		c.GetMemoryLimitBytes(), newShare(c.GetShare()), append([]string{}, c.GetGpus()...)}
}

func newShare(s *api.Share) shareJSON { return shareJSON(api.TermsOf(s, 0)) }

// problemCodes names the codes of a status's problems, one each.
func problemCodes(r *api.StatusResponse) []string {
	names := make([]string, len(r.Problems))
	for i := range names {
		if code := api.CodeOf(r, i); code != api.ProblemCode_PROBLEM_CODE_UNSPECIFIED {
			names[i] = strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(code.String(), "PROBLEM_CODE_")), "_", "-")
		}
	}
	return names
}

func newStatusJSON(r *api.StatusResponse) statusJSON {
	s := statusJSON{
		Version: r.Version, UptimeSeconds: seconds(r.UptimeNs),
		Healthy: problems(r) == 0, Problems: append([]string{}, r.Problems...), ProblemCodes: problemCodes(r),
		Clients: r.Clients, Connections: r.Connections, Refused: r.Refused, ProtocolErrors: r.ProtocolErrors,
		GPUs: []gpuJSON{}, Containers: []container{},
	}
	for _, g := range r.Gpus {
		s.GPUs = append(s.GPUs, newGPUJSON(g))
	}
	for _, c := range r.Containers {
		s.Containers = append(s.Containers, newContainer(c))
	}
	s.Config = newConfigJSON(r)
	if v := r.View; v != nil {
		s.View = &viewJSON{newContainer(v.Container), v.Uid, v.Problems}
	}
	return s
}

func newGPUJSON(g *api.GPU) gpuJSON {
	out := gpuJSON{
		Index: g.Index, UUID: g.Uuid, Name: g.Name, MemoryBytes: g.MemoryBytes,
		AntiThrash: api.AntiThrash(g.Mode), TQSeconds: seconds(g.QuantumNs), GraceSeconds: seconds(g.GraceNs),
		Epoch:  strconv.FormatUint(g.Epoch, 10),
		Grants: g.Grants, Revokes: g.Revokes, Fences: g.Fences, Reclaims: g.Reclaims, StaleReleases: g.StaleReleases, Preemptions: g.Preemptions,
		Holders: []string{}, Waiting: []string{}, Tenants: []tenantJSON{}, Clients: []clientJSON{}, Memory: []memoryJSON{}, Promises: []promiseJSON{},
		Way: g.Way, WayCode: g.WayCode, WayReason: g.WayReason,
		Drained: g.Drained, Fault: g.Fault, Held: g.Held, Migrations: g.Migrations,
	}
	for _, r := range g.Refused {
		out.Refused = append(out.Refused, refusal{r.Way, r.Code, r.Reason})
	}
	out.Swap = newSwapJSON(g.Swap)
	out.Drains, out.HandOvers, out.Waits = newSpread(g.Drains), newSpread(g.HandOvers), newSpread(g.Waits)
	if o := g.Others; o != nil {
		out.Others = &othersJSON{o.Tenants, o.Clients, o.Holding, o.Waiting, float64(o.GotPermille) / 1000, o.CoreRequest, o.MemoryBytes}
	}
	for _, t := range tenantsOf(g) {
		u := t.Use
		state, _, _ := t.state()
		out.Tenants = append(out.Tenants, tenantJSON{
			Container: newContainer(t.Container), UID: t.Uid, State: state, Share: newShare(u.Share),
			Promised: float64(u.PromisedPermille) / 1000, Got: float64(u.GotPermille) / 1000, Waited: float64(u.WaitedPermille) / 1000,
			UsedSeconds: seconds(u.UsedNs), DebtSeconds: seconds(u.DebtNs), ThrottledSeconds: seconds(u.ThrottledNs),
			Grants: u.Grants, WaitMaxSeconds: seconds(t.waitMax()), WaitMaxLately: seconds(t.longestWait()), OutOfMemory: u.OutOfMemory, Clients: len(t.Clients), MovedSeconds: seconds(u.MovedNs),
			Waits: newSpread(u.Waits),
		})
	}
	for _, c := range g.Clients {
		id := strconv.FormatUint(c.Id, 10)
		if isHolder(c) {
			out.Holders = append(out.Holders, id)
		}
		if c.State == api.ClientState_CLIENT_STATE_WAITING {
			out.Waiting = append(out.Waiting, id)
		}
		out.Clients = append(out.Clients, clientJSON{
			ID: id, PID: c.Pid, UID: c.Uid, Command: c.Command, Container: newContainer(c.Container),
			State: api.StateName(c), ForSeconds: seconds(c.SinceNs), Epoch: strconv.FormatUint(c.Epoch, 10), Connected: c.Connected,
			Device: c.Device, Grants: c.Grants, HeldSeconds: seconds(c.HeldNs), WaitMaxSeconds: seconds(c.WaitMaxNs),
			Calls: c.Calls, GateWaits: c.Waits, GateWaitSeconds: seconds(c.WaitNs),
			MemoryBytes: c.MemoryBytes, MemoryPeakBytes: c.MemoryPeakBytes,
			Interposed: c.Interposed, Bypassed: c.Bypassed, ShimVersion: c.ShimVersion,
			ReservedBytes: c.ReservedBytes, SliceSeconds: seconds(c.SliceNs), HeldBy: c.Held, Preemptions: c.Preemptions, Controls: newControls(c.Controls), Swap: newClientSwapJSON(g, c),
		})
	}
	for _, m := range g.Memory {
		out.Memory = append(out.Memory, memoryJSON{newContainer(m.Container), m.Uid, m.LimitBytes, m.UsedBytes})
	}
	for _, p := range api.Promised(g) {
		out.Promises = append(out.Promises, promiseJSON{newContainer(p.Container), p.Uid, p.CoreRequest, p.MemoryBytes})
	}
	return out
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

type swapJSON struct {
	CapacityBytes     uint64  `json:"capacity_bytes"` // what clients may have on the GPU, together
	PromisedBytes     uint64  `json:"promised_bytes"`
	ResidentBytes     uint64  `json:"resident_bytes"`
	FixedBytes        uint64  `json:"fixed_bytes"` // of these, what cannot be moved
	AwayBytes         uint64  `json:"away_bytes"`  // in host memory, or never used
	ArenaBytes        uint64  `json:"arena_bytes"` // host memory that this GPU's clients were given
	ArenaLimitBytes   uint64  `json:"arena_limit_bytes"`
	ArenaUsedBytes    uint64  `json:"arena_used_bytes"`  // of all GPUs
	ArenaReadyBytes   uint64  `json:"arena_ready_bytes"` // kept ready besides, for all GPUs
	ArenaFileBytes    uint64  `json:"arena_file_bytes"`  // in files instead of host memory, of all GPUs
	OutBytes          uint64  `json:"out_bytes"`
	InBytes           uint64  `json:"in_bytes"`
	OutSeconds        float64 `json:"out_seconds"`
	InSeconds         float64 `json:"in_seconds"`
	Outs              uint64  `json:"outs"`
	Ins               uint64  `json:"ins"`
	OutBytesPerSecond uint64  `json:"out_bytes_per_second"` // the latest time
	InBytesPerSecond  uint64  `json:"in_bytes_per_second"`
	Refused           uint64  `json:"refused"`
	SwapShare         uint32  `json:"swap_share"` // percent; 0: turns are as long as the time quantum says
	Suspends          uint64  `json:"suspends"`   // of processes, by order or because they were idle
	Suspended         uint32  `json:"suspended"`  // processes that are now
}

func newSwapJSON(s *api.Swap) *swapJSON {
	if s == nil {
		return nil
	}
	return &swapJSON{
		s.CapacityBytes, s.PromisedBytes, s.ResidentBytes, s.FixedBytes, s.AwayBytes, s.ArenaBytes, s.ArenaLimitBytes, s.ArenaUsedBytes, s.ArenaReadyBytes, s.ArenaFileBytes,
		s.OutBytes, s.InBytes, seconds(s.OutNs), seconds(s.InNs), s.Outs, s.Ins, s.OutBytesPerSecond, s.InBytesPerSecond, s.Refused, s.SharePercent, s.Suspends, s.Suspended,
	}
}

type clientSwapJSON struct {
	MemoryMode    string `json:"memory_mode"` // "" : its shim cannot move memory
	ResidentBytes uint64 `json:"resident_bytes"`
	FixedBytes    uint64 `json:"fixed_bytes"`
	FixedReason   string `json:"fixed_reason,omitempty"` // why nothing of it can be moved
	AwayBytes     uint64 `json:"away_bytes"`
	RoomBytes     uint64 `json:"room_bytes"`  // that it may have on the GPU
	LacksBytes    uint64 `json:"lacks_bytes"` // that it needs more, and does not get yet
	ArenaBytes    uint64 `json:"arena_bytes"`
	FileBytes     uint64 `json:"file_bytes"` // in a file instead of host memory
	OutBytes      uint64 `json:"out_bytes"`
	InBytes       uint64 `json:"in_bytes"`
	Moving        bool   `json:"moving"`    // has the GPU, and moves memory onto it
	Stalled       bool   `json:"stalled"`   // does not move off the GPU as it was told to
	Suspended     bool   `json:"suspended"` // its memory has left, or is leaving, until it has the GPU again

	Context        string  `json:"context,omitempty"`         // leaving, away, returning; "": it is on the GPU
	ContextProblem string  `json:"context_problem,omitempty"` // why it stays there, or does not come back
	RestoreSeconds float64 `json:"restore_seconds,omitempty"` // what its latest return took
}

// contextOf says where the context of a process is; "": on the GPU.
func contextOf(c *api.Client) string {
	if c.Context == api.ContextState_CONTEXT_STATE_PRESENT {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(c.Context.String(), "CONTEXT_STATE_"))
}

func newClientSwapJSON(g *api.GPU, c *api.Client) *clientSwapJSON {
	if g.Swap == nil {
		return nil
	}
	mode := ""
	if c.MemoryMode != api.MemoryMode_MEMORY_MODE_UNSPECIFIED {
		mode = api.FormatMemoryMode(c.MemoryMode)
	}
	return &clientSwapJSON{mode, c.ResidentBytes, c.FixedBytes, c.FixedReason, c.AwayBytes, c.RoomBytes, c.LacksBytes, c.ArenaBytes, c.FileBytes,
		c.SwappedOutBytes, c.SwappedInBytes, c.Moving, c.Stalled, c.Suspended, contextOf(c), c.ContextProblem, seconds(c.RestoreNs)}
}
