// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/residency"
	"github.com/nvshare/nvshare/sched/timeslice"
)

// What callers of this package name that its parts have.
type (
	Time     = base.Time
	ClientID = base.ClientID
	Epoch    = base.Epoch

	// Event is something that happened outside the core. The types here, in event.go and in
	// controls.go are all there are.
	Event = base.Event
	// Action is something that the caller must carry out, in the order returned. The
	// types here and in action.go are all there are. Close, Fence, ArenaWanted and
	// those with nothing to carry out may concern a client whose connection is lost; the
	// clients of all other actions have one.
	Action = base.Action

	Memory   = residency.Config
	Keep     = residency.Keep
	Host     = residency.Host
	Standing = residency.Standing
	Report   = residency.Report
	Mover    = residency.Mover

	Reserve         = residency.Reserve
	Moved           = residency.Moved
	SetTenantMemory = residency.SetTenantMemory
	SetGPUMemory    = residency.SetGPUMemory
	ArenaChanged    = residency.ArenaChanged
	RestoreMemory   = residency.RestoreMemory

	Utilization = timeslice.Utilization

	Tuning = account.Tuning
	Spread = account.Spread

	Room          = residency.Room
	Reserved      = residency.Reserved
	LimitsChanged = residency.LimitsChanged
	ArenaWanted   = residency.ArenaWanted
	ArenaFound    = residency.ArenaFound
	Promised      = residency.Promised
	SwapDone      = residency.SwapDone
	SwapStalled   = residency.SwapStalled
	Stranded      = residency.Stranded
	Suspended     = residency.Suspended
)

const (
	DefaultWindow = account.DefaultWindow

	one     = account.One
	minPart = account.MinPart

	DriverSlice    = timeslice.DriverSlice
	SwitchTime     = timeslice.SwitchTime
	LooksPerSecond = timeslice.LooksPerSecond

	Swapped  = residency.Swapped
	Resident = residency.Resident
	Managed  = residency.Managed

	NotRefused  = residency.NotRefused
	OverLimit   = residency.OverLimit
	OverCeiling = residency.OverCeiling
	NoPlace     = residency.NoPlace

	DefaultStallAfter = residency.DefaultStallAfter
	MinSuspendAfter   = residency.MinSuspendAfter
	MaxSuspendAfter   = residency.MaxSuspendAfter
)

// Why a tenant cannot be suspended or resumed on one GPU of several.
var (
	ErrNothingMoves = residency.ErrNothingMoves
	ErrNothingAway  = residency.ErrNothingAway
)

// NextEpoch returns the smallest epoch above e whose low 32 bits can stand in
// a grant page.
func NextEpoch(e Epoch) Epoch { return base.NextEpoch(e) }
