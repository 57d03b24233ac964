// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Name is the name of the program that makes the calls.
const Name = "nvshare-checkpoint"

// DefaultLimit is how long an operation may take: the driver moves 2 GB of what is left on
// the GPU in a second.
const DefaultLimit = 60 * time.Second

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
type Pair struct{ Old, New string }

// Result is what nvshare-checkpoint prints, as one line of JSON.
type Result struct {
	PID   int    `json:"pid"`
	State State  `json:"state"`
	Step  string `json:"step,omitempty"`  // that failed: find, init, state, lock, checkpoint, restore, unlock
	Code  int    `json:"code,omitempty"`  // CUresult of it; 0: no call of the driver failed
	Error string `json:"error,omitempty"` // what failed, as a sentence
}

// CUresults that mean something here.
const (
	outOfMemory  = 2
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

// NoRoom says that the GPU has not enough memory free for a process to come back. Trying
// again may do.
func (e *Error) NoRoom() bool { return e.Step == "restore" && e.Code == outOfMemory }

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

// Runner starts the program. The zero Runner has none.
type Runner struct {
	Program string
	Env     []string      // beside the environment of this process
	Limit   time.Duration // of an operation; 0: DefaultLimit
}

// Off has a process leave all GPUs.
func (r Runner) Off(ctx context.Context, pid int) error {
	_, err := r.run(ctx, "off", pid, nil)
	return err
}

// On has a process come back.
func (r Runner) On(ctx context.Context, pid int, pairs []Pair) error {
	_, err := r.run(ctx, "on", pid, pairs)
	return err
}

// State asks the driver for the state of a process.
func (r Runner) State(ctx context.Context, pid int) (State, error) {
	return r.run(ctx, "state", pid, nil)
}

func (r Runner) run(ctx context.Context, op string, pid int, pairs []Pair) (State, error) {
	if r.Program == "" {
		return Unknown, ErrNone
	}
	limit := r.Limit
	if limit == 0 {
		limit = DefaultLimit
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	args := []string{op, strconv.Itoa(pid)}
	for _, p := range pairs {
		args = append(args, "--pair", p.Old+"="+p.New)
	}
	var out, diagnosis bytes.Buffer
	cmd := exec.CommandContext(ctx, r.Program, args...)
	cmd.Env = slices.DeleteFunc(append(os.Environ(), r.Env...), func(e string) bool { return strings.HasPrefix(e, "LD_PRELOAD=") })
	cmd.Stdout, cmd.Stderr = &out, &diagnosis
	cmd.WaitDelay = time.Second // a killed program that hangs in the kernel is not waited for
	failed := cmd.Run()
	res := Result{State: Unknown}
	if json.Unmarshal(out.Bytes(), &res) == nil && res.PID == pid {
		if res.Error == "" {
			return res.State, nil
		}
		return res.State, &Error{Result: res}
	}
	res = Result{PID: pid, State: Unknown}
	if ctx.Err() != nil {
		res.Error = fmt.Sprintf("%s %s of process %d did not end within %s", Name, op, pid, limit)
		return Unknown, &Error{Result: res, Timeout: true}
	}
	if failed == nil {
		failed = errors.New("it printed no result")
	}
	res.Error = fmt.Sprintf("%s %s of process %d: %v", Name, op, pid, failed)
	if text := strings.TrimSpace(diagnosis.String()); text != "" {
		res.Error += ": " + text
	}
	return Unknown, &Error{Result: res}
}
