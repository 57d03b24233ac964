// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/nvshare/nvshare/sched"
)

// stateVersion changes when an older scheduler would misread the file.
const stateVersion = 1

// state is what a restarted scheduler must know. The file is replaced by
// rename before each grant, without fsync: it need only survive this process.
// After a crash of the kernel no holder lives on, and the boot id tells the
// next scheduler so, whichever version of the file it finds. On a tmpfs, where
// run directories are, that takes some 30 µs; on ext4 about 1 ms.
type state struct {
	Version int                  `json:"version"`
	BootID  string               `json:"boot_id"`
	GPUs    map[string]*gpuState `json:"gpus"` // by UUID
}

type gpuState struct {
	Epoch      sched.Epoch  `json:"epoch"`
	Holder     *holderState `json:"holder,omitempty"`
	Concurrent bool         `json:"concurrent,omitempty"` // holders are not recorded
}

type holderState struct {
	PID       int32  `json:"pid"`
	StartTime uint64 `json:"starttime"` // clock ticks since boot
}

// loadState reads the file. Missing, it is an empty state. Unreadable or
// damaged, it is an empty state and an error; epochs and holders of before are
// then unknown. Of another boot, the holders are dropped and the epochs kept.
func loadState(path, bootID string) (*state, error) {
	fresh := &state{Version: stateVersion, BootID: bootID, GPUs: map[string]*gpuState{}}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fresh, nil
	}
	if err != nil {
		return fresh, err
	}
	var s state
	if err := json.Unmarshal(text, &s); err != nil {
		return fresh, fmt.Errorf("%s is damaged: %w", path, err)
	}
	if s.Version != stateVersion {
		return fresh, fmt.Errorf("%s has version %d, this scheduler reads %d", path, s.Version, stateVersion)
	}
	if s.GPUs == nil {
		s.GPUs = map[string]*gpuState{}
	}
	for uuid, g := range s.GPUs {
		if g == nil || g.Holder != nil && g.Holder.PID <= 0 {
			return fresh, fmt.Errorf("%s is damaged: GPU %s", path, uuid)
		}
		if s.BootID != bootID {
			g.Holder, g.Concurrent = nil, false
		}
	}
	s.BootID = bootID
	return &s, nil
}

// save replaces the file.
func (s *state) save(path string) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, text, 0o600); err != nil {
		return fmt.Errorf("record a grant: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("record a grant: %w", err)
	}
	return nil
}

func readBootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
}
