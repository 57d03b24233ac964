// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
)

// stateVersion changes when an older scheduler would misread the file.
const stateVersion = 1

// state is what a restarted scheduler must know. The file is replaced as a whole
// before each grant, without fsync: it need only survive this process.
// After a crash of the kernel no holder lives on, and the boot id tells the
// next scheduler so, whichever version of the file it finds.
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

// stateBlock is what the file's length is a multiple of, so that writing it
// again rarely changes its length.
const stateBlock = 4096

// save replaces the file. Two files change places, because replacing one by a
// fresh one makes ext4 write the data out at once, which takes a millisecond.
// Whatever the other one holds, it is overwritten before that.
func (s *state) save(path string) error { return s.saveBy(path, exchange) }

// saveBy is save; exchange may fail where a file system has no such thing.
func (s *state) saveBy(path string, exchange func(a, b string) error) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	size := (len(text) + stateBlock) / stateBlock * stateBlock
	text = append(text, bytes.Repeat([]byte{' '}, size-len(text)-1)...)
	text = append(text, '\n')
	tmp := path + ".tmp"
	if err := overwrite(tmp, text); err != nil {
		return fmt.Errorf("record a grant: %w", err)
	}
	if exchange(tmp, path) == nil {
		return nil
	}
	// The first time, or a file system that cannot.
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("record a grant: %w", err)
	}
	return nil
}

// exchange makes two files change places at one stroke.
func exchange(a, b string) error {
	return unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE)
}

// overwrite makes a file's content text, without truncating it first. It
// neither follows a link nor waits for the reader of a pipe: the run directory
// may be one that others write to.
func overwrite(path string, text []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file; remove it", path)
	}
	if _, err := f.WriteAt(text, 0); err != nil || info.Size() <= int64(len(text)) {
		return err
	}
	return f.Truncate(int64(len(text)))
}

func readBootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
}
