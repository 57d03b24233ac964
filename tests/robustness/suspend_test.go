// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
)

const suspendMiB = 64

// suspendTenant is a process of suspend-tenant.
type suspendTenant struct {
	*talker
	*site
}

// suspendSite is a site whose scheduler can take contexts off the GPU.
func suspendSite(t *testing.T) *site {
	t.Helper()
	s := newSite(t)
	s.configure("gpus=2\nmemory_mib=320\n")
	s.put(checkpoint.Name) // beside the scheduler
	s.buildTenant("suspend-tenant")
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.log())
		}
	})
	s.startSwapping()
	return s
}

// helpers are the nvshare-checkpoint that run.
func (s *site) helpers() (pids []int) {
	s.t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*")
	s.check(err)
	for _, dir := range all {
		args, _ := os.ReadFile(filepath.Join(dir, "cmdline"))
		if strings.HasPrefix(string(args), filepath.Join(s.dir, checkpoint.Name)+"\x00") {
			pid, err := strconv.Atoi(filepath.Base(dir))
			s.check(err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// hanging waits until nvshare-checkpoint hangs, as faults has it, and returns
// its process. One that only works on it would go on when there are no faults any more.
func (s *site) hanging() (pid int) {
	s.t.Helper()
	s.until("nvshare-checkpoint hangs", func() error {
		text, err := os.ReadFile(filepath.Join(s.dir, "sim", "run", "hangs"))
		if err != nil {
			return err
		}
		pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
		if pids := s.helpers(); err == nil && !slices.Contains(pids, pid) {
			err = fmt.Errorf("%d did, and %v work", pid, pids)
		}
		return err
	})
	return pid
}

func (s *site) startSwapping(more ...string) {
	s.t.Helper()
	s.startScheduler(append([]string{"--swap-memory", "1Gi", "--swap-headroom", "0"}, more...)...)
	s.until("the scheduler swaps", func() error {
		if s.swap() == nil {
			return fmt.Errorf("not yet")
		}
		return nil
	})
}

func (s *site) startSuspendTenant(name string, change ...func(*exec.Cmd)) *suspendTenant {
	s.t.Helper()
	env := s.env("LD_PRELOAD="+filepath.Join(s.build, "lib", "libnvshare.so"), "NVSHARE_SIMGPU_TENANT="+name)
	x := &suspendTenant{s.startTalker(name, env, change, "suspend-tenant", strconv.Itoa(suspendMiB)), s}
	x.says("filled", 0)
	return x
}

// asks has the process make a call.
func (x *suspendTenant) asks(letter string) {
	x.t.Helper()
	_, err := io.WriteString(x.in, letter)
	x.check(err)
}

// says waits for an answer.
func (x *suspendTenant) says(letter string, n int) {
	x.t.Helper()
	line := make(chan string, 1)
	go func() {
		text, err := x.out.ReadString('\n')
		if err != nil {
			text = err.Error()
		}
		line <- text
	}()
	select {
	case got := <-line:
		if got != fmt.Sprintf("%s %d\n", letter, n) {
			x.t.Fatalf("%s says %q to %q", x.name, got, letter)
		}
	case <-time.After(patience):
		x.t.Fatalf("%s does not answer %q: %v\n%s", x.name, letter, x.client(), x.log())
	}
}

func (x *suspendTenant) does(letter string) {
	x.t.Helper()
	x.asks(letter)
	x.says(letter, 0)
}

// client is what the status says of the process; nil: nothing.
func (x *suspendTenant) client() *api.Client {
	r, err := x.status()
	if err != nil {
		return nil
	}
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			if int(c.Pid) == x.cmd.Process.Pid {
				return c
			}
		}
	}
	return nil
}

func (x *suspendTenant) awaits(what string, ok func(c *api.Client) bool) {
	x.t.Helper()
	x.until(x.name+" "+what, func() error {
		if c := x.client(); c == nil || !ok(c) {
			return fmt.Errorf("it is %v", c)
		}
		return nil
	})
}

func (x *suspendTenant) awaitsAway() {
	x.t.Helper()
	x.awaits("is off the GPU with its context", func(c *api.Client) bool { return c.Context == api.ContextState_CONTEXT_STATE_AWAY })
	if s := x.state(); s != checkpoint.Checkpointed {
		x.t.Fatalf("%s is %v", x.name, s)
	}
}

func (x *suspendTenant) awaitsPresent() {
	x.t.Helper()
	x.awaits("is present", func(c *api.Client) bool { return c.Context == api.ContextState_CONTEXT_STATE_PRESENT && !c.Suspended })
}

// state is what the driver says.
func (x *suspendTenant) state() checkpoint.State {
	x.t.Helper()
	r := &checkpoint.Runner{Program: filepath.Join(x.dir, checkpoint.Name), Env: x.env()}
	state, err := r.State(context.Background(), x.cmd.Process.Pid)
	x.check(err)
	return state
}

// control makes a control call for the user whose processes the test has.
func (s *site) control(call func(*api.Conn, context.Context, *api.SuspendRequest) (*api.SuspendResponse, error)) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := api.Dial(ctx, filepath.Join(s.dir, "run"))
	s.check(err)
	defer c.Close()
	uid := uint32(os.Getuid())
	_, err = call(c, ctx, &api.SuspendRequest{Uid: &uid})
	s.check(err)
}

func (s *site) suspend() { s.t.Helper(); s.control((*api.Conn).Suspend) }
func (s *site) resume()  { s.t.Helper(); s.control((*api.Conn).Resume) }

// faults has calls of the driver fail from now on; "": none.
func (s *site) faults(text string) {
	s.t.Helper()
	path := filepath.Join(s.dir, "sim", "run", "checkpoint")
	s.check(os.WriteFile(path+".new", []byte(text+"\n"), 0o644))
	s.check(os.Rename(path+".new", path))
}

// A suspended process is off the GPU, context included, until its first driver call,
// whichever that is, or an order. Its memory is what it was.
func TestSuspendContext(t *testing.T) {
	t.Parallel()
	s := suspendSite(t)
	x := s.startSuspendTenant("x")
	for _, letter := range []string{"k", "q", "p", "s", "i", "c", "m", "a", "t", "u"} {
		s.suspend()
		x.awaitsAway()
		x.does(letter)
		x.awaits("is present", func(c *api.Client) bool { return c.Context == api.ContextState_CONTEXT_STATE_PRESENT })
		x.does("k")
	}
	s.suspend()
	x.awaitsAway()
	s.resume()
	x.awaitsPresent()
	x.awaits("has its memory", func(c *api.Client) bool { return c.ResidentBytes >= suspendMiB<<20 && !c.Moving && c.RestoreNs > 0 })
	x.does("k")

	s.suspend()
	x.awaitsAway()
	x.does("f")
	x.asks("x")
	<-x.end
	s.check(x.err)
}
