// SPDX-License-Identifier: Apache-2.0

// Package settings has how GPUs are shared: time quanta, modes, swap shares, which GPUs are drained,
// and their faults, in settings.json.
//
// What it guarantees:
//
//   - The latest word holds: what was set by hand outlives the scheduler, until the scheduler is
//     started with another value of the same flag. What was set for one GPU stays until it is reset.
//   - Change puts in force what is recorded, or nothing. Record.Keep is for what nobody would say
//     again: it is tried until it is recorded.
//   - What nobody could have set is not read.
package settings

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/wire"
)

// Store has the settings, and their file.
type Store struct {
	path   string
	log    *logrus.Entry
	Record *state.Keeper

	Set Set
	Err error // settings were lost
}

// New returns a store without settings, which are in the file path: call Restore.
func New(path string, log *logrus.Entry, timers *timer.List) *Store {
	st := &Store{path: path, log: log}
	st.Record = state.NewKeeper(timers, log, path, "the settings", func() any { return st.Set })
	return st
}

// SettingsVersion changes when an older scheduler would misread the file.
const SettingsVersion = 1

// Set are the time quanta, modes and swap shares that Set has changed. The
// latest word holds: a setting outlives the scheduler until it is set again, or
// until the scheduler is started with another value of the same flag. What was set
// for one GPU stays until it is reset.
type Set struct {
	Version int                `json:"version"`
	Given   Setting            `json:"given"`             // by the command line, when the file was written
	All     Setting            `json:"all"`               // by Set for all GPUs
	GPUs    map[string]Setting `json:"gpus,omitempty"`    // by Set for one, by UUID
	Drained []string           `json:"drained,omitempty"` // UUIDs of GPUs that admit no new tenants
	// Held are the processes that wait for such a GPU, by UUID.
	Held map[string][]peer.Process `json:"held,omitempty"`
	// Faults are what has ended all work on GPUs, by UUID.
	Faults map[string]Fault `json:"faults,omitempty"`
}

// Fault is what has ended all work on a GPU, which nobody has said to be well since. A start of
// the machine resets GPUs.
type Fault struct {
	BootID string `json:"boot_id"`
	Text   string `json:"text"`
}

// Setting is how a GPU is shared. A part that is zero is not said. Authors are of what was set by
// hand; an earlier scheduler did not record them.
type Setting struct {
	Quantum   time.Duration `json:"quantum_ns,omitempty"`
	Mode      string        `json:"mode,omitempty"` // as sched.Mode has it
	SwapShare swapShare     `json:"swap_share,omitzero"`

	QuantumBy   Author `json:"quantum_by,omitzero"`
	ModeBy      Author `json:"mode_by,omitzero"`
	SwapShareBy Author `json:"swap_share_by,omitzero"`
}

// Author is who has set something by hand, and when.
type Author struct {
	UID  uint32 `json:"uid"`
	Unix int64  `json:"unix_time"`
}

// swapShare is the percentage of the time that moving memory may take; 0: turns are as long as the
// time quantum. In the record it is a number.
type swapShare struct {
	said    bool
	Percent int
}

// Percent is a swap share that is said.
func Percent(n int) swapShare { return swapShare{true, n} }

func (s swapShare) MarshalJSON() ([]byte, error) { return json.Marshal(s.Percent) }

func (s *swapShare) UnmarshalJSON(text []byte) error {
	s.said = true
	return json.Unmarshal(text, &s.Percent)
}

// Part is one of the settings that a setting may say.
type Part struct {
	Name string
	Text func(Setting) string // for people; "": it does not say it
	By   func(Setting) Author
	copy func(to *Setting, from Setting)
}

var SettingParts = []Part{
	{
		api.TurnLengthSetting,
		func(s Setting) string {
			if s.Quantum == 0 {
				return ""
			}
			return s.Quantum.String()
		},
		func(s Setting) Author { return s.QuantumBy },
		func(to *Setting, from Setting) { to.Quantum, to.QuantumBy = from.Quantum, from.QuantumBy },
	},
	{
		api.AntiThrashSetting,
		func(s Setting) string {
			mode, ok := ModeNamed(s.Mode)
			if !ok {
				return ""
			}
			return api.AntiThrash(APIMode(mode))
		},
		func(s Setting) Author { return s.ModeBy },
		func(to *Setting, from Setting) { to.Mode, to.ModeBy = from.Mode, from.ModeBy },
	},
	{
		api.SwapShareSetting,
		func(s Setting) string {
			if !s.SwapShare.said {
				return ""
			}
			return api.FormatPercent(uint32(s.SwapShare.Percent))
		},
		func(s Setting) Author { return s.SwapShareBy },
		func(to *Setting, from Setting) { to.SwapShare, to.SwapShareBy = from.SwapShare, from.SwapShareBy },
	},
}

// or returns s with what it does not say from other.
func (s Setting) or(other Setting) Setting {
	for _, p := range SettingParts {
		if p.Text(s) == "" {
			p.copy(&s, other)
		}
	}
	return s
}

// without returns s without the parts of these names.
func (s Setting) without(names []string) Setting {
	for _, p := range SettingParts {
		if slices.Contains(names, p.Name) {
			p.copy(&s, Setting{})
		}
	}
	return s
}

// unlike returns of s what other says differently, or not at all.
func (s Setting) unlike(other Setting) Setting {
	for _, p := range SettingParts {
		if p.Text(s) == p.Text(other) {
			p.copy(&s, Setting{})
		}
	}
	return s
}

// says returns the names of what s says.
func (s Setting) says() (names []string) {
	for _, p := range SettingParts {
		if p.Text(s) != "" {
			names = append(names, p.Name)
		}
	}
	return names
}

// Check says what nobody could have set; nil: nothing.
func (s Setting) Check() error {
	if s.Quantum != 0 {
		if err := CheckQuantum(s.Quantum); err != nil {
			return err
		}
	}
	if _, ok := ModeNamed(s.Mode); s.Mode != "" && !ok {
		return fmt.Errorf("mode %.64q is unknown", s.Mode)
	}
	return checkSwapShare(s.SwapShare.Percent)
}

// CheckQuantum returns an error for a time quantum that the scheduler does not
// accept.
func CheckQuantum(q time.Duration) error {
	return inRange("time quantum", q, sched.MinQuantum, sched.MaxQuantum)
}

// CheckGrace returns an error for a grace time that the scheduler does not accept.
func CheckGrace(grace time.Duration) error {
	return inRange("grace time", grace, sched.MinGrace, sched.MaxGrace)
}

func inRange(name string, d, least, most time.Duration) error {
	switch {
	case d < least:
		return fmt.Errorf("%s %v is below %v: give a time from %v to %v", name, d, least, least, most)
	case d > most:
		return fmt.Errorf("%s %v is above %v: give a time from %v to %v", name, d, most, least, most)
	}
	return nil
}

func checkSwapShare(percent int) error {
	if percent < 0 || percent > api.MaxSwapShare {
		return fmt.Errorf("swap share %d %% is out of range: give a percentage from 1 to %d, or none", percent, api.MaxSwapShare)
	}
	return nil
}

// ModeNamed returns the mode of a name; false: there is none.
func ModeNamed(name string) (sched.Mode, bool) {
	for _, m := range []sched.Mode{sched.Exclusive, sched.Concurrent, sched.Auto} {
		if m.String() == name {
			return m, true
		}
	}
	return 0, false
}

// Check says what nobody could have set; nil: nothing.
func (s Set) Check() error {
	if err := s.All.Check(); err != nil {
		return err
	}
	for uuid, g := range s.GPUs {
		if err := g.Check(); err != nil {
			return fmt.Errorf("GPU %.64q: %w", uuid, err)
		}
		if _, err := wire.ParseUUID(uuid); err != nil {
			return err
		}
	}
	for _, uuid := range s.Drained {
		if _, err := wire.ParseUUID(uuid); err != nil {
			return err
		}
	}
	return nil
}

// With returns s with a change by Set: what has these names is again as the command line says, and
// the change is in force. What would change nothing is not recorded. A change for all GPUs also
// replaces the settings of single ones.
func (s Set) With(uuid string, unset []string, change Setting) Set {
	gpus := maps.Clone(s.GPUs)
	if gpus == nil {
		gpus = map[string]Setting{}
	}
	if uuid == "" {
		for u, g := range s.GPUs {
			gpus[u] = g.without(slices.Concat(unset, change.says()))
		}
		s.All = s.All.without(unset)
		s.All = change.unlike(s.All.or(s.Given)).or(s.All)
	} else {
		own := s.GPUs[uuid].without(unset)
		gpus[uuid] = change.unlike(own.or(s.All).or(s.Given)).or(own)
	}
	maps.DeleteFunc(gpus, func(_ string, g Setting) bool { return g == Setting{} })
	s.GPUs = gpus
	return s
}

// Of returns what is in force on a GPU; "": on one that has no settings of its own.
func (s Set) Of(uuid string) Setting { return s.GPUs[uuid].or(s.All).or(s.Given) }

// Restore puts earlier settings in force again, except those that another command line (given)
// replaces. ended says which processes have ended.
func (st *Store) Restore(given Setting, ended func(peer.Process) bool) error {
	var err error
	if st.Set, st.Err, err = state.Restore[Set](st.log, st.path, SettingsVersion, "the settings of time quantum, mode and swap share are lost: set them again"); err != nil {
		return err
	}
	st.Set.Version = SettingsVersion
	st.DropHeld(ended)
	replaced := st.replaced(given)
	st.Set.Given = given
	if st.Set.All = st.Set.All.without(replaced); len(replaced) > 0 {
		// Recorded, or the next start with the earlier command line would bring
		// the setting back.
		st.Record.Keep()
	}
	for _, p := range SettingParts {
		if set := p.Text(st.Set.All); set != "" {
			st.log.Infof("%s %s, as it was set before; the command line says %s", p.Name, set, p.Text(given))
		}
	}
	return nil
}

// replaced returns the settings that the command line replaces, because it has changed since they
// were set. An older scheduler did not record what the command line was: then they stay.
func (st *Store) replaced(given Setting) (names []string) {
	for _, p := range SettingParts {
		set, was, is := p.Text(st.Set.All), p.Text(st.Set.Given), p.Text(given)
		if set != "" && was != "" && was != is {
			st.log.Infof("%s %s, as the command line says now; it was set to %s before", p.Name, is, set)
			names = append(names, p.Name)
		}
	}
	return names
}

// Of returns the time quantum and the mode of a GPU.
func (st *Store) Of(uuid string) (time.Duration, sched.Mode) {
	s := st.Set.Of(uuid)
	mode, _ := ModeNamed(s.Mode)
	return s.Quantum, mode
}

// SwapShare returns the percentage of the time that moving memory may take on a GPU.
func (st *Store) SwapShare(uuid string) int { return st.Set.Of(uuid).SwapShare.Percent }

// Change records other settings and puts them in force. If the record fails nothing changes.
func (st *Store) Change(next Set) error {
	if err := state.WriteRecord(st.path, next); err != nil {
		st.log.WithError(err).Error("record the settings")
		return status.Errorf(codes.Unavailable, "record the settings: %v", err)
	}
	st.Set, st.Err = next, nil
	return nil
}

// DropHeld forgets that those wait who have ended. The next record says so.
func (st *Store) DropHeld(ended func(peer.Process) bool) {
	for uuid, held := range st.Set.Held {
		st.Set.Held[uuid] = slices.DeleteFunc(held, ended)
	}
}

// SchedModes are the modes of the API.
var SchedModes = map[api.Mode]sched.Mode{
	api.Mode_MODE_EXCLUSIVE:  sched.Exclusive,
	api.Mode_MODE_CONCURRENT: sched.Concurrent,
	api.Mode_MODE_AUTO:       sched.Auto,
}

// APIMode is a mode as the API has it.
func APIMode(m sched.Mode) api.Mode {
	for a, s := range SchedModes {
		if s == m {
			return a
		}
	}
	return api.Mode_MODE_UNSPECIFIED
}
