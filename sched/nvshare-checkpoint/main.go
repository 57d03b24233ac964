// SPDX-License-Identifier: Apache-2.0

// nvshare-checkpoint takes one process off its GPUs, or puts it back, by the checkpoint
// calls of the driver. nvshare-scheduler starts it; see package checkpoint. It is linked
// without cgo, and loads the C library and the driver when it runs (glibc 2.17 or later).
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/segments"
)

// Exit statuses.
const (
	exitFailed = 1
	exitUsage  = 2
)

// lockWait is how long work that the process has submitted may take to end.
const lockWait = 10 * time.Second

func main() {
	status := 0
	if err := command(&status).Execute(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", checkpoint.Name, err)
		if status == 0 { // nothing was tried
			fmt.Fprintf(os.Stderr, "Run %s --help\n", checkpoint.Name)
			status = exitUsage
		}
	}
	os.Exit(status)
}

// command returns the program; status is what it exits with: where it is 0 after an error,
// the command line was wrong.
func command(status *int) *cobra.Command {
	var library, lock string
	cmd := &cobra.Command{
		Use:   checkpoint.Name + " off|on|state PID | serve",
		Short: "Take a process off its GPUs, or put it back",
		Long: `nvshare-checkpoint makes the checkpoint calls of the NVIDIA driver (CUDA 12.8 or later)
for a process that uses CUDA: off locks it and takes it off its GPUs, its context
included; on brings it back; state says where it is. It prints one line of JSON: pid,
state (0 running, 1 locked, 2 checkpointed, 3 failed), and what failed.

With serve, it does the operations that it reads from standard input, each a line of JSON
with op, pid, pairs and limit_ns, until there are no more, and begins none once nobody
can write there: this is how nvshare-scheduler has tenants suspended, resumed and moved.

By hand it is for processes that a scheduler has left checkpointed: nvshare-checkpoint on
PID. Their calls go on once the scheduler has been gone for 5 s, unless they run with
NVSHARE_SCHEDULER_LOSS=closed, which leaves that to a scheduler. It needs the rights to
trace the process: the same user, or root, or CAP_SYS_PTRACE.

Exit status: 0 done, 1 failed, 2 usage.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 2 && !slices.Equal(args, []string{"serve"}) {
				return errors.New("want off, on or state and a process id, or serve")
			}
			return nil
		},
		Version:       api.Version,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          func(_ *cobra.Command, args []string) error { return run(library, lock, args, status) },
	}
	cmd.Flags().StringVar(&library, "library", "", "`path` of libcuda.so.1 (default: searched for)")
	cmd.Flags().StringVar(&lock, "lock", "", "`file` by which operations of serve on a process exclude each other")
	return cmd
}

func run(library, lock string, args []string, status *int) error {
	if len(args) == 1 {
		*status = exitFailed
		if err := serve(library, lock); err != nil {
			return err
		}
		*status = 0
		return nil
	}
	pid, err := strconv.Atoi(args[1])
	if err != nil || pid <= 0 {
		return fmt.Errorf("%q is no process id", args[1])
	}
	if args[0] != "off" && args[0] != "on" && args[0] != "state" {
		return fmt.Errorf("operation %q: want off, on or state", args[0])
	}
	*status = exitFailed
	d, result := open(library)
	if d != nil {
		result = d.operate(args[0], pid, nil)
	}
	result.PID = pid
	if err := json.NewEncoder(os.Stdout).Encode(result); err != nil || result.Error != "" {
		return err
	}
	*status = 0
	return nil
}

func parsePairs(all []checkpoint.Pair) (pairs []gpuPair, err error) {
	for _, x := range all {
		var p gpuPair
		if p.old, err = parseUUID(x.Old); err == nil {
			p.new, err = parseUUID(x.New)
		}
		if err != nil {
			return nil, fmt.Errorf("pair %s=%s: want two UUIDs of GPUs, GPU-…=GPU-…", x.Old, x.New)
		}
		pairs = append(pairs, p)
	}
	return pairs, nil
}

// open makes the driver ready; without a driver, it says why there is none.
func open(library string) (*driver, checkpoint.Result) {
	r := checkpoint.Result{State: checkpoint.Unknown}
	d, err := openDriver(library)
	if err != nil {
		r.Step, r.Error = "find", fmt.Sprintf("find: %v", err)
		return nil, r
	}
	if code := d.start(); code != 0 {
		r.Step, r.Code, r.Error = "init", code, fmt.Sprintf("init: %v", d.text(code))
		return nil, r
	}
	return d, r
}

// serve does the operations that it reads from standard input until there are no more, or the driver
// cannot be had.
func serve(library, lock string) error {
	d, broken := open(library)
	if d != nil {
		d.serves = true
	}
	requests, answers := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var q checkpoint.Request
		if err := requests.Decode(&q); err == io.EOF {
			return nil
		} else if err != nil {
			return fmt.Errorf("read a request: %w", err)
		}
		if d == nil {
			broken.PID = q.PID
			return answers.Encode(broken)
		}
		r, err := d.serveOne(q, lock)
		if err != nil {
			return err
		}
		if err := answers.Encode(r); err != nil {
			return err
		}
	}
}

// serveOne returns an error if the operation is not begun.
func (d *driver) serveOne(q checkpoint.Request, lock string) (checkpoint.Result, error) {
	if q.Limit != 0 {
		defer time.AfterFunc(q.Limit, func() { os.Exit(exitFailed) }).Stop()
	}
	if lock != "" {
		held, err := lockProcess(lock, q.PID)
		if err != nil {
			return checkpoint.Result{}, err
		}
		defer held.Close()
	}
	writers := []unix.PollFd{{Fd: int32(os.Stdin.Fd())}}
	if _, err := unix.Poll(writers, 0); err == nil && writers[0].Revents&unix.POLLHUP != 0 { // another scheduler acts for the process
		return checkpoint.Result{}, fmt.Errorf("process %d, %s: who asked for it has ended", q.PID, q.Op)
	}
	pairs, err := parsePairs(q.Pairs)
	if err != nil {
		return checkpoint.Result{PID: q.PID, State: checkpoint.Unknown, Step: "find", Error: err.Error()}, nil
	}
	return d.operate(q.Op, q.PID, pairs), nil
}

// lockProcess waits until no other program operates on a process. Closing the file ends that.
func lockProcess(path string, pid int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	for {
		switch err := unix.FcntlFlock(f.Fd(), unix.F_SETLKW, &unix.Flock_t{Type: unix.F_WRLCK, Start: int64(pid), Len: 1}); err {
		case nil:
			return f, nil
		case unix.EINTR:
		default:
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
	}
}

// operate does one operation, from whatever state the process is in.
func (d *driver) operate(op string, pid int, pairs []gpuPair) checkpoint.Result {
	r := checkpoint.Result{PID: pid, State: checkpoint.Unknown}
	fail := func(step string, code int, err error) checkpoint.Result {
		r.Step, r.Code, r.Error = step, code, fmt.Sprintf("process %d, %s: %v", pid, step, err)
		return r
	}
	code := 0
	if r.State, code = d.state(pid); code != 0 {
		return fail("state", code, d.text(code))
	}
	if op == "state" {
		return r
	}
	// Each step is taken in the state that it wants.
	steps := []struct {
		name     string
		from, to checkpoint.State
		call     func() int
	}{
		{"lock", checkpoint.Running, checkpoint.Locked, func() int { return d.lock(pid, lockWait) }},
		{"checkpoint", checkpoint.Locked, checkpoint.Checkpointed, func() int { return d.checkpoint(pid) }},
	}
	if op == "on" {
		if r.State == checkpoint.Checkpointed {
			if err := d.whole(pid); err != nil {
				return fail("restore", 0, err)
			}
		}
		steps[0].name, steps[0].from, steps[0].call = "restore", checkpoint.Checkpointed, func() int { return d.restore(pid, pairs) }
		steps[1].name, steps[1].to, steps[1].call = "unlock", checkpoint.Running, func() int { return d.unlock(pid) }
	}
	for _, s := range steps {
		if r.State != s.from {
			continue
		}
		began := time.Now()
		code := s.call()
		r.Took = append(r.Took, checkpoint.Part{Name: s.name, Took: time.Since(began)})
		if code == 0 {
			r.State = s.to
			continue
		}
		if op == "off" && s.name == "checkpoint" { // it runs on
			d.unlock(pid)
		}
		r.State = checkpoint.Unknown // it may have ended meanwhile
		if state, wrong := d.state(pid); wrong == 0 {
			r.State = state
		}
		return fail(s.name, code, d.text(code))
	}
	if want := steps[1].to; r.State != want {
		return fail("state", 0, fmt.Errorf("it is %s, not %s", r.State, want))
	}
	return r
}

// whole returns an error for a process that may have memory in a file (--suspend-dir): zeros would be
// taken for what it had. A scheduler that may not look cannot have put it there, but by hand that says
// nothing.
func (d *driver) whole(pid int) error {
	all, err := segments.Open(pid)
	if d.serves && errors.Is(err, fs.ErrPermission) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("whether nvshare-scheduler has put memory of it into a file is not known: %w", err)
	}
	defer segments.Close(all)
	if n := segments.Missing(all); n != 0 {
		return fmt.Errorf("%d MiB of its memory are not there: nvshare-scheduler has put them into a file, and brings them back", n>>20)
	}
	return nil
}
