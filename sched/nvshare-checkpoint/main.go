// SPDX-License-Identifier: Apache-2.0

// nvshare-checkpoint takes one process off its GPUs, or puts it back, by the checkpoint
// calls of the driver. nvshare-scheduler starts it; see package checkpoint. It is linked
// without cgo, and loads the C library and the driver when it runs (glibc 2.17 or later).
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
)

// Exit statuses.
const (
	exitFailed = 1
	exitUsage  = 2
)

type flags struct {
	pairs   []string
	library string
	lock    time.Duration
}

func main() {
	status := exitUsage
	if err := command(&status).Execute(); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", checkpoint.Name, err)
		os.Exit(status)
	}
	os.Exit(status)
}

// command returns the program; status is set to what it exits with.
func command(status *int) *cobra.Command {
	var f flags
	cmd := &cobra.Command{
		Use:   checkpoint.Name + " off|on|state PID",
		Short: "Take a process off its GPUs, or put it back",
		Long: `nvshare-checkpoint makes the checkpoint calls of the NVIDIA driver (CUDA 12.8 or later)
for a process that uses CUDA: off locks it and takes it off its GPUs, its context
included; on brings it back; state says where it is. It prints one line of JSON: pid,
state (0 running, 1 locked, 2 checkpointed, 3 failed), and what failed.

It is what nvshare-scheduler starts to suspend and resume tenants. By hand it is for
processes that a scheduler has left checkpointed: nvshare-checkpoint on PID. It needs the
rights to trace the process: the same user, or root, or CAP_SYS_PTRACE.`,
		Args:          cobra.ExactArgs(2),
		Version:       api.Version,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(_ *cobra.Command, args []string) error {
			pid, err := strconv.Atoi(args[1])
			if err != nil || pid <= 0 {
				return fmt.Errorf("%q is no process id", args[1])
			}
			pairs, err := parsePairs(f.pairs)
			if err != nil {
				return err
			}
			if args[0] != "off" && args[0] != "on" && args[0] != "state" {
				return fmt.Errorf("operation %q: want off, on or state", args[0])
			}
			result := operate(f, args[0], pid, pairs)
			*status = 0
			if result.Error != "" {
				*status = exitFailed
			}
			return json.NewEncoder(os.Stdout).Encode(result)
		},
	}
	cmd.Flags().StringArrayVar(&f.pairs, "pair", nil, "on: restore what was on one GPU on another, `UUID=UUID`; each GPU of the machine is named once")
	cmd.Flags().StringVar(&f.library, "library", "", "`path` of libcuda.so.1 (default: searched for)")
	cmd.Flags().DurationVar(&f.lock, "lock-wait", 10*time.Second, "off: how long work that the process has submitted may take to end")
	return cmd
}

func parsePairs(texts []string) (pairs []gpuPair, err error) {
	for _, text := range texts {
		from, to, ok := strings.Cut(text, "=")
		var p gpuPair
		if ok {
			p.old, err = parseUUID(from)
		}
		if ok && err == nil {
			p.new, err = parseUUID(to)
		}
		if !ok || err != nil {
			return nil, fmt.Errorf("--pair %q: want two UUIDs of GPUs, GPU-…=GPU-…", text)
		}
		pairs = append(pairs, p)
	}
	return pairs, nil
}

// operate does one operation, from whatever state the process is in.
func operate(f flags, op string, pid int, pairs []gpuPair) checkpoint.Result {
	r := checkpoint.Result{PID: pid, State: checkpoint.Unknown}
	fail := func(step string, code int, err error) checkpoint.Result {
		r.Step, r.Code, r.Error = step, code, fmt.Sprintf("process %d, %s: %v", pid, step, err)
		return r
	}
	d, err := openDriver(f.library)
	if err != nil {
		return fail("find", 0, err)
	}
	if code := d.start(); code != 0 {
		return fail("init", code, d.text(code))
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
		{"lock", checkpoint.Running, checkpoint.Locked, func() int { return d.lock(pid, f.lock) }},
		{"checkpoint", checkpoint.Locked, checkpoint.Checkpointed, func() int { return d.checkpoint(pid) }},
	}
	if op == "on" {
		steps[0].name, steps[0].from, steps[0].call = "restore", checkpoint.Checkpointed, func() int { return d.restore(pid, pairs) }
		steps[1].name, steps[1].to, steps[1].call = "unlock", checkpoint.Running, func() int { return d.unlock(pid) }
	}
	for _, s := range steps {
		if r.State != s.from {
			continue
		}
		code := s.call()
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
