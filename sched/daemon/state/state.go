// SPDX-License-Identifier: Apache-2.0

package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/base"
)

// version changes when an older scheduler would misread the file.
const version = 2

// Bounds of what a file can say. An epoch of maxEpoch takes a grant a nanosecond
// for a century; above it the next ones would overflow.
const (
	maxEpoch    = 1 << 62
	maxRecorded = sched.MaxRecorded // holders of a GPU
)

// File is what a restarted scheduler must know.
type File struct {
	Version int             `json:"version"`
	BootID  string          `json:"boot_id"`
	GPUs    map[string]*GPU `json:"gpus"` // by UUID
}

// GPU is what the file says of one GPU.
type GPU struct {
	Epoch      base.Epoch `json:"epoch"` // the latest one that was granted
	Holders    []Holder   `json:"holders,omitempty"`
	Unrecorded bool       `json:"unrecorded,omitempty"` // there may be more holders
	Way        sched.Way  `json:"way,omitempty"`        // in which the holders share the GPU; none: turns
}

// Holder is a process with a grant.
type Holder struct {
	PID       int32      `json:"pid"`
	StartTime uint64     `json:"starttime"` // clock ticks since boot
	Epoch     base.Epoch `json:"epoch"`
	Shared    bool       `json:"shared,omitempty"` // as in sched.Holder
}

// New returns the state of a node on which nothing was ever granted.
func New(bootID string) *File {
	return &File{Version: version, BootID: bootID, GPUs: map[string]*GPU{}}
}

// Load reads the file. Where there is none, it returns what New does. Where the
// file is unreadable, damaged or of a newer version, it returns what New does,
// and an error: earlier epochs and holders are then unknown. Where there is
// something else than a file, the error is ErrNotRegular. In a file of another
// boot the epochs count, and the holders do not.
func Load(path, bootID string) (*File, error) {
	text, err := read(path)
	if errors.Is(err, fs.ErrNotExist) {
		return New(bootID), nil
	}
	if err != nil {
		return New(bootID), err
	}
	s, err := decode(text)
	if err != nil {
		return New(bootID), fmt.Errorf("%s: %w", path, err)
	}
	if s.GPUs == nil {
		s.GPUs = map[string]*GPU{}
	}
	if s.BootID != bootID {
		for _, g := range s.GPUs {
			g.Holders, g.Unrecorded, g.Way = nil, false, sched.WayTurns
		}
	}
	s.Version, s.BootID = version, bootID
	return s, nil
}

// decode returns nothing that a core could not be started with.
func decode(text []byte) (*File, error) {
	var s File
	err := DecodeRecord(text, version, &s)
	if err != nil && !errors.Is(err, ErrNewer) {
		err = fmt.Errorf("damaged: %w", err)
	}
	return &s, err
}

// Check says what nobody could have written.
func (s *File) Check() error {
	if s.BootID == "" {
		return errors.New("no boot id")
	}
	for uuid, g := range s.GPUs {
		if err := g.check(); err != nil {
			return fmt.Errorf("GPU %.64q: %w", uuid, err)
		}
	}
	return nil
}

func (g *GPU) check() error {
	switch {
	case g == nil:
		return errors.New("null")
	case g.Epoch > maxEpoch:
		return fmt.Errorf("epoch %d", g.Epoch)
	case len(g.Holders) > maxRecorded:
		return fmt.Errorf("%d holders", len(g.Holders))
	}
	type process struct {
		pid   int32
		start uint64
	}
	seen := map[process]bool{}
	for _, h := range g.Holders {
		p := process{h.PID, h.StartTime}
		if h.PID <= 0 || h.Epoch == 0 || h.Epoch > g.Epoch || seen[p] {
			return fmt.Errorf("holder %+v", h)
		}
		seen[p] = true
	}
	return nil
}

// block is what the file's length is a multiple of, so that writing the file
// again rarely changes the length.
const block = 4096

// Save replaces the file. written, if not nil, is called when the new content is
// in a file that is not in its place yet.
//
// Two files change places, because replacing one by a fresh one makes ext4 write
// the data out at once, which takes a millisecond. Whatever the other file holds,
// it is overwritten before that.
func (s *File) Save(path string, written func()) error {
	return s.save(path, func(a, b string) error {
		if written != nil {
			written()
		}
		return exchange(a, b)
	})
}

// save is Save; exchange may fail where a file system cannot do so.
func (s *File) save(path string, exchange func(a, b string) error) error {
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	size := (len(text) + block) / block * block
	text = append(text, bytes.Repeat([]byte{' '}, size-len(text)-1)...)
	text = append(text, '\n')
	tmp := path + ".tmp"
	if err := overwrite(tmp, text); err != nil {
		return fmt.Errorf("record a grant: %w", err)
	}
	if exchange(tmp, path) == nil {
		return nil
	}
	// The first time, or on a file system that cannot exchange files.
	if err := os.Rename(tmp, path); err != nil {
		return fmt.Errorf("record a grant: %w", err)
	}
	return nil
}

// BootID identifies the time since the kernel started.
func BootID() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(text)), nil
}
