// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/node"
)

// A scheduler of a step's own: its run directory tells it from the node's, and a
// tenant belongs to the one that its environment names.
type scheduler struct {
	b    *bench
	dir  string
	log  string
	args []string
	cmd  *exec.Cmd
	done chan struct{}
}

// swapDir holds what every user can read: the tree may lie where they can't.
const swapDir = "/run/gpu-own"

// installSwap copies what tenants of the steps about swapping and preemption run. They are users
// of their own: those of one user are one tenant, which --gpu-memory limits.
func (b *bench) installSwap() error {
	if err := os.MkdirAll(filepath.Join(swapDir, "loads"), 0o755); err != nil {
		return err
	}
	files := map[string]string{"libnvshare.so": b.node.Shim(), "swap-load": b.node.Bin("swap-load"),
		"cuda-busy": b.node.Bin("cuda-busy"), "short-request": b.node.Bin("short-request"), "suspend.py": b.script("suspend.py"),
		"content.py": b.script("content.py"), "worker.py": b.script("worker.py")}
	for _, l := range []string{"__init__.py", "common.py", "driver.py", "tensor.py"} {
		files[filepath.Join("loads", l)] = b.script(filepath.Join("loads", l))
	}
	for to, from := range files {
		data, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(swapDir, to+".new"), data, 0o755); err != nil {
			return err
		}
		if err := os.Rename(filepath.Join(swapDir, to+".new"), filepath.Join(swapDir, to)); err != nil {
			return err
		}
	}
	// What tenants register of host memory might count against it.
	_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	return nil
}

// asUser is user i's environment and directory, as a tenant of s, or natively.
func (b *bench) asUser(i int, s *scheduler) (env []string, home string, who *syscall.Credential, err error) {
	id := firstUser + i
	home = filepath.Join(swapDir, fmt.Sprintf("home-%d", id))
	if err = os.MkdirAll(home, 0o700); err != nil {
		return
	}
	if err = os.Chown(home, id, id); err != nil {
		return
	}
	env = append(b.tenantEnv(native, ""), "HOME="+home, "TMPDIR="+home, "CUDA_CACHE_PATH="+home)
	if s != nil {
		env = append(env, "LD_PRELOAD="+filepath.Join(swapDir, "libnvshare.so"), "NVSHARE_RUN_DIR="+s.dir)
	}
	return env, home, &syscall.Credential{Uid: uint32(id), Gid: uint32(id)}, nil
}

// scheduler starts one. Its log is kept among the results, so name is unique.
func (b *bench) scheduler(ctx context.Context, name string, args ...string) (*scheduler, error) {
	if err := b.installSwap(); err != nil {
		return nil, err
	}
	s := &scheduler{b: b, dir: filepath.Join(swapDir, name), args: args, done: make(chan struct{}),
		log: filepath.Join(b.results, "scheduler-"+name+".log")}
	if err := os.RemoveAll(s.dir); err != nil { // settings of a run before
		return nil, err
	}
	if err := os.MkdirAll(s.dir, 0o755); err != nil {
		return nil, err
	}
	log, err := os.Create(s.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	argv := slices.Concat([]string{"--run-dir", s.dir, "--anti-thrash", "on"}, b.schedulerArgs, args)
	if b.simulated {
		argv = append(argv, "--simgpu", node.SimGPU)
	}
	s.cmd = exec.Command(b.node.SchedulerBin(), argv...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.done)
	}()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	err = node.Until(ctx, "the scheduler's answer", func() error {
		select {
		case <-s.done:
			cancel() // it will not come
		default:
		}
		r, err := s.status(ctx)
		switch {
		case err != nil:
			return err
		case len(r.Gpus) == 0:
			return errors.New("it knows of no GPU")
		case r.Gpus[0].MemoryBytes == 0:
			return errors.New("it does not know how much memory the GPU has (is libnvidia-ml.so.1 in the linker's path?), and so swaps nothing")
		}
		return nil
	})
	if err != nil {
		s.stop()
		return nil, fmt.Errorf("scheduler %v: %w: %s", args, err, s.tail())
	}
	return s, nil
}

func (s *scheduler) tail() string {
	data, _ := os.ReadFile(s.log)
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], " | ")
}

func (s *scheduler) stop() {
	_ = s.cmd.Process.Signal(unix.SIGTERM)
	select {
	case <-s.done:
	case <-time.After(5 * time.Second):
		_ = s.cmd.Process.Kill()
		<-s.done
	}
}

// env is the environment of its tenant.
func (s *scheduler) env(who string) []string {
	return append(s.b.tenantEnv(who, ""), "NVSHARE_RUN_DIR="+s.dir)
}

func (s *scheduler) status(ctx context.Context) (*api.StatusResponse, error) {
	conn, err := api.Dial(ctx, s.dir)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.Status(ctx, &api.StatusRequest{})
}

// leastSegment is of what host memory is made, bytes: 64 MiB.
const leastSegment = 64 << 20

// awaitReady waits until so much host memory is ready for tenants to come, bytes, but for
// less than the smallest segment, or until no more becomes so.
func (s *scheduler) awaitReady(ctx context.Context, want uint64) (ready uint64) {
	grew := time.Now()
	for ctx.Err() == nil && time.Since(grew) < 5*time.Second {
		if now, err := s.status(ctx); err == nil && len(now.Gpus) > 0 && now.Gpus[0].Swap != nil {
			if n := now.Gpus[0].Swap.ArenaReadyBytes; n > ready {
				ready, grew = n, time.Now()
			}
		}
		if ready+leastSegment > want {
			return ready
		}
		time.Sleep(20 * time.Millisecond)
	}
	return ready
}

// A sample is where the memory of a GPU's clients was at a moment.
type sample struct {
	At      int64          `json:"at_ns"` // since 1970
	Clients []clientSample `json:"clients"`
	Arena   uint64         `json:"arena_bytes"`
	Out     uint64         `json:"out_bytes"`
	In      uint64         `json:"in_bytes"`
}

type clientSample struct {
	PID      uint32 `json:"pid"`
	State    string `json:"state"`
	Resident uint64 `json:"resident"`
	Away     uint64 `json:"away"`
	Arena    uint64 `json:"arena"`
	Out      uint64 `json:"out"`
	In       uint64 `json:"in"`
}

// A swapEvent is an event that concerns memory or turns.
type swapEvent struct {
	At      int64  `json:"at_ns"` // since 1970
	Type    string `json:"type"`
	PID     uint32 `json:"pid"`
	Bytes   uint64 `json:"bytes,omitempty"`
	Took    int64  `json:"took_ns,omitempty"`
	Waited  int64  `json:"waited_ns,omitempty"`
	Held    int64  `json:"held_ns,omitempty"`
	Drained int64  `json:"drained_ns,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

// A timeline is what a scheduler says while something goes on.
type timeline struct {
	Samples []sample    `json:"samples"`
	Events  []swapEvent `json:"events"`
	Lost    uint64      `json:"events_lost"`
	Errors  []string    `json:"errors,omitempty"`

	mu   sync.Mutex
	stop func()
}

// watch follows GPU 0 of it until stop is called.
func (s *scheduler) watch(ctx context.Context, every time.Duration) *timeline {
	t := &timeline{}
	ctx, cancel := context.WithCancel(ctx)
	var both sync.WaitGroup
	conn, err := api.Dial(ctx, s.dir)
	t.stop = func() { cancel(); both.Wait() }
	if err != nil {
		t.Errors = append(t.Errors, err.Error())
		return t
	}
	follower, err := api.Dial(ctx, s.dir)
	t.stop = func() {
		cancel()
		both.Wait()
		_ = conn.Close()
		if follower != nil {
			_ = follower.Close()
		}
	}
	failed := func(err error) {
		if ctx.Err() == nil {
			t.mu.Lock()
			t.Errors = append(t.Errors, err.Error())
			t.mu.Unlock()
		}
	}
	both.Go(func() {
		for ctx.Err() == nil {
			r, err := conn.Status(ctx, &api.StatusRequest{})
			if err != nil {
				failed(err)
				return
			}
			t.add(r)
			select {
			case <-ctx.Done():
			case <-time.After(every):
			}
		}
	})
	if err != nil {
		failed(err)
		return t
	}
	both.Go(func() {
		var next api.EventsRequest
		for {
			next.WaitNs = int64(200 * time.Millisecond)
			r, err := follower.Events(ctx, &next)
			if err != nil {
				failed(err)
				return
			}
			t.mu.Lock()
			t.Lost += r.Lost
			for _, e := range r.Events {
				if e.Index == 0 {
					t.Events = append(t.Events, swapEvent{e.TimeNs, strings.ToLower(strings.TrimPrefix(e.Type.String(), "EVENT_TYPE_")), e.Pid, e.Bytes,
						e.TookNs, e.WaitedNs, e.HeldNs, e.DrainedNs, e.Reason})
				}
			}
			t.mu.Unlock()
			next.Since, next.Run = r.Next, r.Run
			if ctx.Err() != nil {
				return
			}
		}
	})
	return t
}

func (t *timeline) add(r *api.StatusResponse) {
	if len(r.Gpus) == 0 || r.Gpus[0].Swap == nil {
		return
	}
	g := r.Gpus[0]
	s := sample{At: time.Now().UnixNano(), Arena: g.Swap.ArenaUsedBytes, Out: g.Swap.OutBytes, In: g.Swap.InBytes}
	for _, c := range g.Clients {
		s.Clients = append(s.Clients, clientSample{c.Pid, strings.ToLower(strings.TrimPrefix(c.State.String(), "CLIENT_STATE_")),
			c.ResidentBytes, c.AwayBytes, c.ArenaBytes, c.SwappedOutBytes, c.SwappedInBytes})
	}
	t.mu.Lock()
	t.Samples = append(t.Samples, s)
	t.mu.Unlock()
}

// latest is the newest sample, or nil.
func (t *timeline) latest() *sample {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.Samples) == 0 {
		return nil
	}
	s := t.Samples[len(t.Samples)-1]
	return &s
}
