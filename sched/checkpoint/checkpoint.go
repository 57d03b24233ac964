// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Name is the name of the program that makes the calls.
const Name = "nvshare-checkpoint"

// State is what the driver says of a process.
type State int

const (
	Running      State = iota
	Locked             // its calls wait, all else is as it was
	Checkpointed       // and nothing of it is on any GPU
	Failed             // it cannot be brought back
	Unknown      State = -1
)

func (s State) String() string {
	switch s {
	case Running:
		return "running"
	case Locked:
		return "locked"
	case Checkpointed:
		return "checkpointed"
	case Failed:
		return "failed"
	}
	return "in an unknown state"
}

// Pair says that what was on one GPU is restored on another one. The driver wants each GPU
// of the machine to be named once on both sides. UUIDs are as NVML has them.
type Pair struct {
	Old string `json:"old"`
	New string `json:"new"`
}

// Request is what `nvshare-checkpoint serve` reads, as one line of JSON.
type Request struct {
	Op    string `json:"op"` // off, on, state
	PID   int    `json:"pid"`
	Pairs []Pair `json:"pairs,omitempty"`
	// Limit is when the program ends over it, also if who asked has ended; 0: never.
	Limit time.Duration `json:"limit_ns,omitempty"`
}

// Result is what nvshare-checkpoint prints, as one line of JSON.
type Result struct {
	PID   int    `json:"pid"`
	State State  `json:"state"`
	Step  string `json:"step,omitempty"`  // that failed: find, init, state, lock, checkpoint, restore, unlock
	Code  int    `json:"code,omitempty"`  // CUresult of it; 0: no call of the driver failed
	Error string `json:"error,omitempty"` // what failed, as a sentence
	Took  Times  `json:"took,omitempty"`
}

// Times says how long the parts of an operation took: its steps, and first "start", which
// is all that comes before the driver's first call.
type Times []Part

// Part is one of them.
type Part struct {
	Name string        `json:"name"`
	Took time.Duration `json:"ns"`
}

func (t Times) String() string {
	parts := make([]string, len(t))
	for i, p := range t {
		parts[i] = fmt.Sprintf("%s %v", p.Name, p.Took.Round(time.Millisecond))
	}
	return strings.Join(parts, ", ")
}

// Add returns the times of both, those of the same name together.
func (t Times) Add(more ...Part) Times {
	t = slices.Clone(t)
	for _, p := range more {
		i := slices.IndexFunc(t, func(q Part) bool { return q.Name == p.Name })
		if i < 0 {
			t = append(t, p)
		} else {
			t[i].Took += p.Took
		}
	}
	return t
}

// Sum is how long all parts took.
func (t Times) Sum() (sum time.Duration) {
	for _, p := range t {
		sum += p.Took
	}
	return sum
}

// CUresults that mean something here.
const (
	notPermitted = 800
	notSupported = 801
)

// Error says why an operation failed.
type Error struct {
	Result
	Timeout bool // the program was ended because it took too long
}

func (e *Error) Error() string {
	switch {
	case e.Timeout:
		return e.Result.Error
	case e.Code == notSupported:
		return e.Result.Error + " (the driver cannot checkpoint it: it may share memory with other processes, use managed memory, or be a client of MPS)"
	case e.Code == notPermitted:
		return e.Result.Error + " (run the scheduler as root, or with CAP_SYS_PTRACE)"
	}
	return e.Result.Error
}

// ErrNone says that there is no program to make the calls.
var ErrNone = errors.New("the program " + Name + " is not there: install it beside nvshare-scheduler")

// Find returns the path of the program: beside this one, or in PATH. "": it is not there.
func Find() string {
	if self, err := os.Executable(); err == nil {
		if path := filepath.Join(filepath.Dir(self), Name); executable(path) {
			return path
		}
	}
	path, err := exec.LookPath(Name)
	if err != nil {
		return ""
	}
	return path
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}
