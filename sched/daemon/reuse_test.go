// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"strconv"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// successor is a process of another user that has the pid of one that has died. The
// kernel gives pids in turn; ns_last_pid says where it goes on.
func successor(t *testing.T, dir string, pid int, uid uint32) *proc {
	t.Helper()
	const last = "/proc/sys/kernel/ns_last_pid"
	for range 1000 { // others may take the pid
		if err := os.WriteFile(last, []byte(strconv.Itoa(pid-1)), 0); err != nil {
			t.Skipf("no pid can be given again here: %v", err)
		}
		p := newProc(t, dir, uid)
		if p.cmd.Process.Pid == pid {
			return p
		}
		p.kill()
	}
	t.Skipf("pid %d was not free in 1000 attempts", pid)
	return nil
}

// A process that is given the pid of a dead client is another client: it has neither
// the grant, nor the name, nor the connections of the dead one.
func TestPidIsGivenAgain(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to choose pids and users")
	}
	dir := t.TempDir()
	openToAll(t, dir)
	s := start(t, dir, nil)
	dead, a, epoch := newHolder(t, s)
	pid := dead.cmd.Process.Pid
	dead.kill() // a's connection stays open, as with a child that inherited it
	s.await("the death is noticed", func(r *api.StatusResponse) bool { return len(r.Gpus[0].Clients) == 0 })

	heir := successor(t, dir, pid, 3001)
	h := heir.connect().register(0).attach(0, gpuA, epoch, 0)
	if h.id == a.id {
		t.Errorf("the process that got pid %d is client %d, as the dead one was", pid, h.id)
	}
	a.expectClosed()
	r := s.status()
	if len(r.Gpus[0].Clients) != 1 {
		t.Fatalf("clients: %v", r.Gpus[0].Clients)
	}
	c := r.Gpus[0].Clients[0]
	if ownContainer(t) == "" && c.Uid != 3001 {
		t.Errorf("it counts as user %d's", c.Uid)
	}
	if c.State == api.ClientState_CLIENT_STATE_HOLDING {
		t.Error("it has the dead one's grant")
	}
	if e := h.release(epoch).request().granted(); e <= epoch {
		t.Errorf("grant %d after %d", e, epoch)
	}
}

// The scheduler restarts, the holder has died meanwhile, and its pid is another
// process's: nobody waits for that process to release the GPU.
func TestPidIsGivenAgainDuringARestart(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to choose pids and users")
	}
	dir := t.TempDir()
	openToAll(t, dir)
	s := start(t, dir, nil)
	dead, _, _ := newHolder(t, s)
	pid := dead.cmd.Process.Pid
	was := startOf(t, pid)
	s.stop()
	dead.kill()
	heir := successor(t, dir, pid, 3001)
	for startOf(t, pid) == was { // the start is known to 10 ms
		heir.kill()
		heir = successor(t, dir, pid, 3001)
	}
	s = start(t, dir, nil) // the grace period is longer than the test waits
	if r := s.status(); len(r.Gpus[0].Clients) != 0 {
		t.Errorf("clients: %v", r.Gpus[0].Clients)
	}
	newProc(t, dir, 0).connect().register(wire.RegisterReconnect).attach(0, gpuA, 0, wire.AttachWant).granted()
}

// startOf is when a process started, as the scheduler records it.
func startOf(t *testing.T, pid int) uint64 {
	t.Helper()
	f, err := peer.NewFinder()
	if err != nil {
		t.Fatal(err)
	}
	p, err := f.FindPID(int32(pid))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	return p.Start
}
