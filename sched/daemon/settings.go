// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/timer"
	"github.com/nvshare/nvshare/sched/wire"
)

// settingsStore has the settings, and their file.
type settingsStore struct {
	path  func() string
	log   *logrus.Entry
	now   func() sched.Time
	again *timer.Timer // write the file, which could not be written

	set       settings
	err       error // settings were lost
	unsettled bool  // they could not be recorded
}

func newSettings(path func() string, log *logrus.Entry, timers *timer.List, now func() sched.Time) *settingsStore {
	st := &settingsStore{path: path, log: log, now: now}
	st.again = timers.New(st.keepSettings)
	return st
}

// settingsVersion changes when an older scheduler would misread the file.
const settingsVersion = 1

// settings are the time quanta, modes and swap shares that Set has changed. The
// latest word holds: a setting outlives the scheduler until it is set again, or
// until the scheduler is started with another value of the same flag.
type settings struct {
	Version int                `json:"version"`
	Given   setting            `json:"given"`             // by the command line, when the file was written
	All     setting            `json:"all"`               // by Set for all GPUs
	GPUs    map[string]setting `json:"gpus,omitempty"`    // by Set for one, by UUID
	Drained []string           `json:"drained,omitempty"` // UUIDs of GPUs that admit no new tenants
	// Held are the processes that wait for such a GPU, by UUID.
	Held map[string][]peer.Process `json:"held,omitempty"`
	// Faults are what has ended all work on GPUs, by UUID.
	Faults map[string]fault `json:"faults,omitempty"`
}

// fault is what has ended all work on a GPU, which nobody has said to be well since. A start of
// the machine resets GPUs.
type fault struct {
	BootID string `json:"boot_id"`
	Text   string `json:"text"`
}

// setting is how a GPU is shared. A part that is zero is not said. Authors are of what was set by
// hand; an earlier scheduler did not record them.
type setting struct {
	Quantum   time.Duration `json:"quantum_ns,omitempty"`
	Mode      string        `json:"mode,omitempty"` // as sched.Mode has it
	SwapShare swapShare     `json:"swap_share,omitzero"`

	QuantumBy   author `json:"quantum_by,omitzero"`
	ModeBy      author `json:"mode_by,omitzero"`
	SwapShareBy author `json:"swap_share_by,omitzero"`
}

// author is who has set something by hand, and when.
type author struct {
	UID  uint32 `json:"uid"`
	Unix int64  `json:"unix_time"`
}

// swapShare is the percentage of the time that moving memory may take; 0: turns are as long as the
// time quantum. In the record it is a number.
type swapShare struct {
	said    bool
	percent int
}

func percent(n int) swapShare { return swapShare{true, n} }

func (s swapShare) MarshalJSON() ([]byte, error) { return json.Marshal(s.percent) }

func (s *swapShare) UnmarshalJSON(text []byte) error {
	s.said = true
	return json.Unmarshal(text, &s.percent)
}

// part is one of the settings that a setting may say.
type part struct {
	name string
	text func(setting) string // for people; "": it does not say it
	by   func(setting) author
	copy func(to *setting, from setting)
}

var settingParts = []part{
	{
		api.TurnLengthSetting,
		func(s setting) string {
			if s.Quantum == 0 {
				return ""
			}
			return s.Quantum.String()
		},
		func(s setting) author { return s.QuantumBy },
		func(to *setting, from setting) { to.Quantum, to.QuantumBy = from.Quantum, from.QuantumBy },
	},
	{
		api.AntiThrashSetting,
		func(s setting) string {
			mode, ok := modeNamed(s.Mode)
			if !ok {
				return ""
			}
			return api.AntiThrash(apiMode(mode))
		},
		func(s setting) author { return s.ModeBy },
		func(to *setting, from setting) { to.Mode, to.ModeBy = from.Mode, from.ModeBy },
	},
	{
		api.SwapShareSetting,
		func(s setting) string {
			if !s.SwapShare.said {
				return ""
			}
			return api.FormatPercent(uint32(s.SwapShare.percent))
		},
		func(s setting) author { return s.SwapShareBy },
		func(to *setting, from setting) { to.SwapShare, to.SwapShareBy = from.SwapShare, from.SwapShareBy },
	},
}

// or returns s with what it does not say from other.
func (s setting) or(other setting) setting {
	for _, p := range settingParts {
		if p.text(s) == "" {
			p.copy(&s, other)
		}
	}
	return s
}

// without returns s without the parts of these names.
func (s setting) without(names []string) setting {
	for _, p := range settingParts {
		if slices.Contains(names, p.name) {
			p.copy(&s, setting{})
		}
	}
	return s
}

// unlike returns of s what other says differently, or not at all.
func (s setting) unlike(other setting) setting {
	for _, p := range settingParts {
		if p.text(s) == p.text(other) {
			p.copy(&s, setting{})
		}
	}
	return s
}

// says returns the names of what s says.
func (s setting) says() (names []string) {
	for _, p := range settingParts {
		if p.text(s) != "" {
			names = append(names, p.name)
		}
	}
	return names
}

func (s setting) check() error {
	if s.Quantum != 0 {
		if err := CheckQuantum(s.Quantum); err != nil {
			return err
		}
	}
	if _, ok := modeNamed(s.Mode); s.Mode != "" && !ok {
		return fmt.Errorf("mode %.64q is unknown", s.Mode)
	}
	return checkSwapShare(s.SwapShare.percent)
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

func modeNamed(name string) (sched.Mode, bool) {
	for _, m := range []sched.Mode{sched.Exclusive, sched.Concurrent, sched.Auto} {
		if m.String() == name {
			return m, true
		}
	}
	return 0, false
}

// Check says what nobody could have set; nil: nothing.
func (s settings) Check() error {
	if err := s.All.check(); err != nil {
		return err
	}
	for uuid, g := range s.GPUs {
		if err := g.check(); err != nil {
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

// with returns s with a change by Set: what has these names is again as the command line says, and
// the change is in force. What would change nothing is not recorded. A change for all GPUs also
// replaces the settings of single ones.
func (s settings) with(uuid string, unset []string, change setting) settings {
	gpus := maps.Clone(s.GPUs)
	if gpus == nil {
		gpus = map[string]setting{}
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
	maps.DeleteFunc(gpus, func(_ string, g setting) bool { return g == setting{} })
	s.GPUs = gpus
	return s
}

// of returns what is in force on a GPU; "": on one that has no settings of its own.
func (s settings) of(uuid string) setting { return s.GPUs[uuid].or(s.All).or(s.Given) }

// restore puts earlier settings in force again, except those that another command line (given)
// replaces. ended says which processes have ended.
func (st *settingsStore) restore(given setting, ended func(peer.Process) bool) error {
	st.set, st.err = state.ReadRecord[settings](st.path(), settingsVersion)
	if errors.Is(st.err, state.ErrNewer) {
		return st.err
	}
	st.set.Version = settingsVersion
	st.dropHeld(ended)
	if st.err != nil {
		st.log.WithError(st.err).Error("the settings of time quantum, mode and swap share are lost: set them again")
	}
	replaced := st.replaced(given)
	st.set.Given = given
	if st.set.All = st.set.All.without(replaced); len(replaced) > 0 {
		// Recorded, or the next start with the earlier command line would bring
		// the setting back.
		st.keepSettings()
	}
	for _, p := range settingParts {
		if set := p.text(st.set.All); set != "" {
			st.log.Infof("%s %s, as it was set before; the command line says %s", p.name, set, p.text(given))
		}
	}
	return nil
}

// replaced returns the settings that the command line replaces, because it has changed since they
// were set. An older scheduler did not record what the command line was: then they stay.
func (st *settingsStore) replaced(given setting) (names []string) {
	for _, p := range settingParts {
		set, was, is := p.text(st.set.All), p.text(st.set.Given), p.text(given)
		if set != "" && was != "" && was != is {
			st.log.Infof("%s %s, as the command line says now; it was set to %s before", p.name, is, set)
			names = append(names, p.name)
		}
	}
	return names
}

// settingOf returns the time quantum and the mode of a GPU.
func (st *settingsStore) settingOf(uuid string) (time.Duration, sched.Mode) {
	s := st.set.of(uuid)
	mode, _ := modeNamed(s.Mode)
	return s.Quantum, mode
}

// swapShareOf returns the percentage of the time that moving memory may take on a GPU.
func (st *settingsStore) swapShareOf(uuid string) int { return st.set.of(uuid).SwapShare.percent }

// changeSettings records other settings and puts them in force. If the record fails nothing changes.
func (st *settingsStore) changeSettings(next settings) error {
	if err := state.WriteRecord(st.path(), next); err != nil {
		st.log.WithError(err).Error("record the settings")
		return status.Errorf(codes.Unavailable, "record the settings: %v", err)
	}
	st.set, st.err = next, nil
	return nil
}

// keepSettings records what is in force, and tries again until that is done.
func (st *settingsStore) keepSettings() {
	again := st.unsettled
	err := state.WriteRecord(st.path(), st.set)
	switch {
	case err != nil:
		if !again {
			st.log.WithError(fmt.Errorf("record the settings: %w", err)).Errorf("the next scheduler would not know them; trying again every %v", recordRetry)
		}
		st.again.Set(st.now().Add(recordRetry))
	case again:
		st.log.Info("the settings are recorded again")
	}
	st.unsettled = err != nil
}

// dropHeld forgets that those wait who have ended. The next record says so.
func (st *settingsStore) dropHeld(ended func(peer.Process) bool) {
	for uuid, held := range st.set.Held {
		st.set.Held[uuid] = slices.DeleteFunc(held, ended)
	}
}

// schedModes are the modes of the API.
var schedModes = map[api.Mode]sched.Mode{
	api.Mode_MODE_EXCLUSIVE:  sched.Exclusive,
	api.Mode_MODE_CONCURRENT: sched.Concurrent,
	api.Mode_MODE_AUTO:       sched.Auto,
}

// apiMode is a mode as the API has it.
func apiMode(m sched.Mode) api.Mode {
	for a, s := range schedModes {
		if s == m {
			return a
		}
	}
	return api.Mode_MODE_UNSPECIFIED
}
