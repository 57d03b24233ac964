// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
)

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

// setting is how a GPU is shared. A part that is zero is not set.
type setting struct {
	Quantum   time.Duration `json:"quantum_ns,omitempty"`
	Mode      string        `json:"mode,omitempty"` // as sched.Mode has it
	SwapShare swapShare     `json:"swap_share,omitzero"`
}

// swapShare is the percentage of the time that moving memory may take; 0: turns are as long as the
// time quantum. In the record it is a number.
type swapShare struct {
	said    bool
	percent int
}

func percent(n int) swapShare { return swapShare{true, n} }

func (s swapShare) String() string               { return api.FormatPercent(uint32(s.percent)) }
func (s swapShare) MarshalJSON() ([]byte, error) { return json.Marshal(s.percent) }

func (s *swapShare) UnmarshalJSON(text []byte) error {
	s.said = true
	return json.Unmarshal(text, &s.percent)
}

func (s setting) or(other setting) setting {
	return setting{cmp.Or(s.Quantum, other.Quantum), cmp.Or(s.Mode, other.Mode), cmp.Or(s.SwapShare, other.SwapShare)}
}

// without returns s without the parts that change says.
func (s setting) without(change setting) setting {
	if change.Quantum != 0 {
		s.Quantum = 0
	}
	if change.Mode != "" {
		s.Mode = ""
	}
	if change.SwapShare.said {
		s.SwapShare = swapShare{}
	}
	return s
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
		if _, err := parseUUID(uuid); err != nil {
			return err
		}
	}
	for _, uuid := range s.Drained {
		if _, err := parseUUID(uuid); err != nil {
			return err
		}
	}
	return nil
}

// with returns s with a change by Set. A change for all GPUs also replaces the
// settings of single ones.
func (s settings) with(uuid string, change setting) settings {
	gpus := map[string]setting{}
	if uuid == "" {
		s.All = change.or(s.All)
		for u, g := range s.GPUs {
			if g = g.without(change); g != (setting{}) {
				gpus[u] = g
			}
		}
	} else {
		maps.Copy(gpus, s.GPUs)
		gpus[uuid] = change.or(gpus[uuid])
	}
	s.GPUs = gpus
	return s
}

func (d *Daemon) settingsPath() string { return filepath.Join(d.opts.RunDir, "settings.json") }

// restoreSettings puts earlier settings in force again, except those that another
// command line replaces.
func (d *Daemon) restoreSettings() error {
	given := setting{Quantum: d.opts.Quantum, Mode: d.opts.Mode.String(), SwapShare: percent(d.opts.SwapShare)}
	d.settings, d.settingsErr = state.ReadRecord[settings](d.settingsPath(), settingsVersion)
	if errors.Is(d.settingsErr, state.ErrNewer) {
		return d.settingsErr
	}
	d.settings.Version = settingsVersion
	d.dropHeld(d.hasEnded)
	if d.settingsErr != nil {
		d.log.WithError(d.settingsErr).Error("the settings of time quantum, mode and swap share are lost: set them again")
	}
	was, all := d.settings.Given, &d.settings.All
	d.settings.Given = given
	before := *all
	replace(d.log, "time quantum %v", &all.Quantum, was.Quantum, given.Quantum)
	replace(d.log, "mode %v", &all.Mode, was.Mode, given.Mode)
	replace(d.log, "swap share %v", &all.SwapShare, was.SwapShare, given.SwapShare)
	if *all != before {
		// Recorded, or the next start with the earlier command line would bring
		// the setting back.
		d.keepSettings()
	}
	if now := all.or(given); now != given {
		d.log.Infof("settings from before: time quantum %v, mode %s, swap share %v; the command line says %v, %s, %v",
			now.Quantum, now.Mode, now.SwapShare, given.Quantum, given.Mode, given.SwapShare)
	}
	d.opts.Quantum, d.opts.Mode = all.or(given).values()
	return nil
}

// replace drops a setting for all GPUs if the command line has changed since it
// was set. What the command line was is zero if an older scheduler did not record
// it: the setting then stays.
func replace[T comparable](log *logrus.Entry, format string, set *T, was, given T) {
	var none T
	if *set == none || was == none || was == given {
		return
	}
	log.Infof(format+", as the command line says now; it was set to %v before", given, *set)
	*set = none
}

func (s setting) values() (time.Duration, sched.Mode) {
	m, _ := modeNamed(s.Mode)
	return s.Quantum, m
}

// settingOf returns the time quantum and the mode of a GPU.
func (d *Daemon) settingOf(uuid string) (time.Duration, sched.Mode) {
	return d.settings.GPUs[uuid].or(d.settings.All).or(d.settings.Given).values()
}

// swapShareOf returns the percentage of the time that moving memory may take on a GPU.
func (d *Daemon) swapShareOf(uuid string) int {
	return d.settings.GPUs[uuid].or(d.settings.All).or(d.settings.Given).SwapShare.percent
}

// changeSettings records other settings and puts them in force. If the record fails nothing changes.
func (d *Daemon) changeSettings(next settings) error {
	if err := state.WriteRecord(d.settingsPath(), next); err != nil {
		d.log.WithError(err).Error("record the settings")
		return status.Errorf(codes.Unavailable, "record the settings: %v", err)
	}
	d.settings, d.settingsErr = next, nil
	return nil
}

// keepSettings records what is in force, and tries again until that is done.
func (d *Daemon) keepSettings() {
	again := d.unsettled
	err := state.WriteRecord(d.settingsPath(), d.settings)
	switch {
	case err != nil:
		if !again {
			d.log.WithError(fmt.Errorf("record the settings: %w", err)).Errorf("the next scheduler would not know them; trying again every %v", recordRetry)
		}
		d.reset.Set(now().Add(recordRetry))
	case again:
		d.log.Info("the settings are recorded again")
	}
	d.unsettled = err != nil
}
