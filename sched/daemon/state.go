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
	"github.com/nvshare/nvshare/sched/daemon/peer"
)

// stateVersion changes when an older scheduler would misread the file.
// Version 1, of one holder for each GPU, is read too: an upgrade happens while
// tenants hold.
const stateVersion = 2

// Bounds of what a file can say. An epoch of maxEpoch takes a grant a nanosecond
// for a century; above it the next ones would overflow.
const (
	maxEpoch    = 1 << 62
	maxRecorded = 64 // holders of a GPU; the core hands out fewer
)

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
	Epoch      sched.Epoch   `json:"epoch"`
	Holders    []holderState `json:"holders,omitempty"`
	Unrecorded bool          `json:"unrecorded,omitempty"` // there may be more holders
}

type holderState struct {
	PID       int32       `json:"pid"`
	StartTime uint64      `json:"starttime"` // clock ticks since boot
	Epoch     sched.Epoch `json:"epoch"`
}

// state1 is version 1 of the file. Its holder has the GPU's epoch.
type state1 struct {
	BootID string `json:"boot_id"`
	GPUs   map[string]*struct {
		Epoch      sched.Epoch  `json:"epoch"`
		Holder     *holderState `json:"holder"`
		Concurrent bool         `json:"concurrent"` // holders are not recorded
	} `json:"gpus"`
}

// loadState reads the file. Missing, it is an empty state. Unreadable, damaged
// or of a newer version, it is an empty state and an error; epochs and holders
// of before are then unknown. Of another boot, the holders are dropped and the
// epochs kept.
func loadState(path, bootID string) (*state, error) {
	s := &state{}
	text, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	case err == nil:
		if s, err = decodeState(text); err != nil {
			s, err = &state{}, fmt.Errorf("%s: %w", path, err)
		}
	}
	if s.GPUs == nil {
		s.GPUs = map[string]*gpuState{}
	}
	if s.BootID != bootID {
		for _, g := range s.GPUs {
			g.Holders, g.Unrecorded = nil, false
		}
	}
	s.Version, s.BootID = stateVersion, bootID
	return s, err
}

// decodeState returns nothing that a core could not be started with.
func decodeState(text []byte) (*state, error) {
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		return nil, fmt.Errorf("damaged: %w", err)
	}
	var s state
	var err error
	switch {
	case head.Version == 1:
		s, err = decodeState1(text)
	case head.Version == stateVersion:
		err = json.Unmarshal(text, &s)
	case head.Version > stateVersion:
		return nil, fmt.Errorf("a newer nvshare-scheduler wrote it: version %d, this one reads up to %d", head.Version, stateVersion)
	default:
		return nil, fmt.Errorf("damaged: version %d", head.Version)
	}
	if err != nil {
		return nil, fmt.Errorf("damaged: %w", err)
	}
	if s.BootID == "" {
		return nil, errors.New("damaged: no boot id")
	}
	for uuid, g := range s.GPUs {
		if err := g.check(); err != nil {
			return nil, fmt.Errorf("damaged: GPU %.64q: %w", uuid, err)
		}
	}
	return &s, nil
}

func decodeState1(text []byte) (s state, err error) {
	var old state1
	if err := json.Unmarshal(text, &old); err != nil {
		return s, err
	}
	s.BootID, s.GPUs = old.BootID, map[string]*gpuState{}
	for uuid, g := range old.GPUs {
		if g == nil {
			s.GPUs[uuid] = nil // as damaged as in version 2
			continue
		}
		now := &gpuState{Epoch: g.Epoch, Unrecorded: g.Concurrent}
		if g.Holder != nil {
			g.Holder.Epoch = g.Epoch
			now.Holders = []holderState{*g.Holder}
		}
		s.GPUs[uuid] = now
	}
	return s, nil
}

func (g *gpuState) check() error {
	switch {
	case g == nil:
		return errors.New("null")
	case g.Epoch > maxEpoch:
		return fmt.Errorf("epoch %d", g.Epoch)
	case len(g.Holders) > maxRecorded:
		return fmt.Errorf("%d holders", len(g.Holders))
	}
	seen := map[peer.Process]bool{}
	for _, h := range g.Holders {
		p := peer.Process{PID: h.PID, Start: h.StartTime}
		if h.PID <= 0 || h.Epoch == 0 || h.Epoch > g.Epoch || seen[p] {
			return fmt.Errorf("holder %+v", h)
		}
		seen[p] = true
	}
	return nil
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
