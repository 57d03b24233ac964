// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
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

// Copies says what a copier is to do.
type Copies struct {
	From, To string // UUIDs of GPUs; From is made ready at once; "": when it is needed
	Bytes    uint64 // that each process may have copied
}

// Copier is a program that copies.
type Copier struct {
	PID   int
	End   func()        // has the program end; may be called again
	Ended chan struct{} // closed when it has
}

// copierLimit is how long a copier may take to make both GPUs ready. It takes 0.9 s (H100).
const copierLimit = 10 * time.Second

// Copy starts a program that copies memory of processes to a GPU, for the processes at the
// other ends of the sockets (struct nvs_copy in hook/wire.h). It returns when the program is
// ready, and takes the sockets. The program ends with Copier.End, with this process, or when all
// processes have closed their sockets. It has contexts on both GPUs meanwhile.
func (r *Runner) Copy(ctx context.Context, c Copies, sockets []*os.File) (*Copier, error) {
	defer func() {
		for _, s := range sockets {
			s.Close()
		}
	}()
	if r.Program == "" {
		return nil, ErrNone
	}
	ctx, cancel := context.WithTimeout(ctx, copierLimit)
	defer cancel()
	args := []string{"copy", "--to", c.To, "--sockets", strconv.Itoa(len(sockets)), "--bytes", strconv.FormatUint(c.Bytes, 10)}
	if c.From != "" {
		args = append(args, "--from", c.From)
	}
	cmd := exec.Command(r.Program, args...)
	var diagnosis beginning
	cmd.Env, cmd.Stderr, cmd.ExtraFiles = r.environment(), &diagnosis, sockets
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	copier := &Copier{PID: cmd.Process.Pid, End: func() { in.Close() }, Ended: make(chan struct{})}
	ready := make(chan error, 1)
	go func() {
		var res Result
		err := json.NewDecoder(out).Decode(&res)
		switch {
		case err != nil:
			err = fmt.Errorf("%s copy did not start: %s", Name, diagnosis.text)
		case res.Error != "":
			err = &Error{Result: res}
		}
		ready <- err
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
		in.Close()
		close(copier.Ended)
	}()
	select {
	case err = <-ready:
	case <-ctx.Done():
		err = fmt.Errorf("%s copy was not ready within %v", Name, copierLimit)
		_ = cmd.Process.Kill()
	}
	if err != nil {
		copier.End()
		return nil, err
	}
	return copier, nil
}
