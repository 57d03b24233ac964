// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"fmt"
	"maps"
	"path/filepath"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/daemon/state"
)

// settingsVersion changes when an older scheduler would misread the file.
const settingsVersion = 1

// settings are the time quanta and modes that Set has changed. The latest word
// holds: they outlive the scheduler until they are set again, or until it is
// started with another command line than the one they were set under.
type settings struct {
	Version int                `json:"version"`
	Given   setting            `json:"given"`          // by the command line, when All was set
	All     setting            `json:"all"`            // by Set for all GPUs
	GPUs    map[string]setting `json:"gpus,omitempty"` // by Set for one, by UUID
}

// setting is what is said of a GPU; what is zero is not said.
type setting struct {
	Quantum time.Duration `json:"quantum_ns,omitempty"`
	Mode    string        `json:"mode,omitempty"` // as sched.Mode has it
	// SwapShare is the percentage of the time that moving memory may take.
	SwapShare int `json:"swap_share,omitempty"`
}

func (s setting) or(other setting) setting {
	return setting{cmp.Or(s.Quantum, other.Quantum), cmp.Or(s.Mode, other.Mode), cmp.Or(s.SwapShare, other.SwapShare)}
}

func (s setting) check() error {
	if s.Quantum != 0 && (s.Quantum < sched.MinQuantum || s.Quantum > sched.MaxQuantum) {
		return fmt.Errorf("a time quantum of %v", s.Quantum)
	}
	if _, ok := modeNamed(s.Mode); s.Mode != "" && !ok {
		return fmt.Errorf("a mode %.64q", s.Mode)
	}
	if s.SwapShare < 0 || s.SwapShare > MaxSwapShare {
		return fmt.Errorf("a swap share of %d %%", s.SwapShare)
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

func (s settings) check() error {
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
	return nil
}

// with returns s with what Set changes. For all GPUs it replaces what was said
// of single ones.
func (s settings) with(uuid string, change setting) settings {
	gpus := map[string]setting{}
	if uuid == "" {
		s.All = change.or(s.All)
		for u, g := range s.GPUs {
			if change.Quantum != 0 {
				g.Quantum = 0
			}
			if change.Mode != "" {
				g.Mode = ""
			}
			if change.SwapShare != 0 {
				g.SwapShare = 0
			}
			if g != (setting{}) {
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

// restoreSettings has what was set before hold again.
func (d *Daemon) restoreSettings() {
	given := setting{Quantum: d.opts.Quantum, Mode: d.opts.Mode.String()}
	d.settings, d.settingsErr = state.ReadRecord[settings](d.settingsPath(), settingsVersion)
	if err := d.settings.check(); err != nil {
		d.settings, d.settingsErr = settings{}, fmt.Errorf("%s: %w", d.settingsPath(), err)
	}
	d.settings.Version = settingsVersion
	if d.settingsErr != nil {
		d.log.WithError(d.settingsErr).Error("time quanta and modes that were set are lost: set them again")
	}
	was := d.settings.Given
	if d.settings.All.Quantum != 0 && was.Quantum != given.Quantum {
		d.log.Infof("time quantum %v, as the command line says now; it was set to %v before", given.Quantum, d.settings.All.Quantum)
		d.settings.All.Quantum = 0
	}
	if d.settings.All.Mode != "" && was.Mode != given.Mode {
		d.log.Infof("mode %s, as the command line says now; it was set to %s before", given.Mode, d.settings.All.Mode)
		d.settings.All.Mode = ""
	}
	d.settings.Given = given
	all := d.settings.All.or(given)
	if all != given {
		d.log.Infof("time quantum %v, mode %s, as it was set before; the command line says %v, %s", all.Quantum, all.Mode, given.Quantum, given.Mode)
	}
	d.opts.Quantum, d.opts.Mode = all.values()
}

func (s setting) values() (time.Duration, sched.Mode) {
	m, _ := modeNamed(s.Mode)
	return s.Quantum, m
}

// settingOf returns what holds for a GPU.
func (d *Daemon) settingOf(uuid string) (time.Duration, sched.Mode) {
	return d.settings.GPUs[uuid].or(d.settings.All).or(d.settings.Given).values()
}

// MaxSwapShare is the greatest swap share, percent.
const MaxSwapShare = 50

// swapShareOf returns the percentage of the time that moving memory may take on a
// GPU. A quantum that somebody fixed is kept, 0, unless the share was set as well.
func (d *Daemon) swapShareOf(uuid string) int {
	s := d.settings.GPUs[uuid].or(d.settings.All)
	switch {
	case s.SwapShare != 0:
		return s.SwapShare
	case s.Quantum != 0 || d.opts.QuantumFixed:
		return 0
	}
	return d.opts.SwapShare
}

// changeSettings records what Set changes; nothing is changed if that fails.
func (d *Daemon) changeSettings(uuid string, change setting) error {
	next := d.settings.with(uuid, change)
	if err := state.WriteRecord(d.settingsPath(), next); err != nil {
		err = fmt.Errorf("record the settings: %w", err)
		d.log.Error(err)
		return err
	}
	d.settings, d.settingsErr = next, nil
	return nil
}
