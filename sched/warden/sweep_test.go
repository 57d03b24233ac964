// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/warden/order"
	"github.com/nvshare/nvshare/sched/warden/rm"
)

func testWarden(t *testing.T) *Warden {
	t.Helper()
	l, err := newLedger(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	w := newWarden(Options{Driver: rm.OpenSimulated(), Log: quiet()}, l)
	w.guard = &guard{}
	return w
}

func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "infinity")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return cmd
}

// frozen has a process that the warden has taken off, and whose container it has stopped; then the process dies.
func frozen(t *testing.T, w *Warden, freezer string) *process {
	t.Helper()
	cmd := sleeper(t)
	p, err := w.process(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	p.offs, p.noted, p.freezer, p.until = 1, true, freezer, time.Now().Add(order.Lease)
	if err := w.ledger.note(p.entry()); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	return p
}

// The container of a process that dies while it is stopped goes on: others are in it.
func TestFrozenProcessDies(t *testing.T) {
	for name, asked := range map[string]bool{"nobody asks": false, "an order comes first": true} {
		t.Run(name, func(t *testing.T) {
			w, freezer := testWarden(t), filepath.Join(t.TempDir(), "cgroup.freeze")
			if err := os.WriteFile(freezer, []byte("1"), 0o600); err != nil {
				t.Fatal(err)
			}
			p := frozen(t, w, freezer)
			if asked {
				if r := w.one(order.Order{Op: order.State, PID: p.pid}, time.Now()); !r.Gone {
					t.Errorf("%+v", r)
				}
			}
			w.sweep(time.Now())
			if text, _ := os.ReadFile(freezer); string(text) != "0" {
				t.Errorf("the freezer has %q", text)
			}
			if len(w.all()) != 0 || !w.ledger.empty() {
				t.Error("the process is not forgotten")
			}
		})
	}
}

// Who cannot be let go on is not forgotten: it is tried again.
func TestContainerStaysFrozen(t *testing.T) {
	w, freezer := testWarden(t), t.TempDir() // a directory cannot be written to
	p := frozen(t, w, freezer)
	w.sweep(time.Now())
	if len(w.all()) != 1 || w.ledger.empty() {
		t.Fatal("a stopped container was forgotten")
	}
	if err := os.Remove(freezer); err != nil {
		t.Fatal(err)
	}
	w.sweep(time.Now())
	if len(w.all()) != 0 || !w.ledger.empty() || p.freezer != "" {
		t.Error("it is not forgotten when its container has ended")
	}
}

// Where the freezer cannot be written, the channels go on.
func TestFreezerCannotBeWritten(t *testing.T) {
	w, freezer := testWarden(t), t.TempDir()
	cmd := sleeper(t)
	p, err := w.process(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	p.offs, p.freezer = 1, freezer
	if err := p.on(w.Driver, time.Now(), 0); err == nil || p.offs != 0 || p.freezer == "" {
		t.Errorf("%v; off %d times, freezer %q", err, p.offs, p.freezer)
	}
}

// No order runs on a process that was dropped while the order waited for it: nobody would end it.
func TestOrderWhileDropped(t *testing.T) {
	w, pid := testWarden(t), sleeper(t).Process.Pid
	for range 1000 {
		old, err := w.locked(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		begun, had := make(chan struct{}), make(chan *process)
		go func() {
			close(begun)
			p, err := w.locked(pid, 0)
			if err != nil {
				t.Error(err)
			}
			had <- p
		}()
		<-begun
		runtime.Gosched()
		w.drop(old)
		old.mu.Unlock()
		p := <-had
		if p == old || w.all()[0] != p {
			t.Fatal("the process of an order is not known")
		}
		p.mu.Unlock()
	}
}

// A process that has the shim is not killed: it may be about to register.
func TestWhoHasTheShimIsNotKilled(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	lib := filepath.Join(t.TempDir(), "libnvshare.so")
	if out, err := exec.Command("cp", sleep, lib).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	cmd := exec.Command(lib, "infinity")
	cmd.Args[0] = "sleep" // which may be one of many in a program
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for maps := ""; !strings.Contains(maps, lib); { // the kernel closes what Start waits for before it maps the program
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", cmd.Process.Pid))
		if maps = string(text); err != nil {
			t.Fatal(err)
		}
	}
	if r := testWarden(t).one(order.Order{Op: order.Kill, PID: cmd.Process.Pid}, time.Now()); r.Error != order.HasShim {
		t.Errorf("%+v", r)
	}
}

// A kill waits for no order that hangs.
func TestKillWaitsForNobody(t *testing.T) {
	w, cmd := testWarden(t), sleeper(t)
	p, err := w.locked(cmd.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer p.mu.Unlock()
	if r := w.one(order.Order{Op: order.Kill, PID: p.pid, Start: p.start}, time.Now()); r.Error != "" {
		t.Errorf("%+v", r)
	}
	if _ = cmd.Wait(); cmd.ProcessState.Success() {
		t.Error("it was not killed")
	}
	if r := w.one(order.Order{Op: order.Kill, PID: p.pid, Start: p.start}, time.Now()); !r.Gone {
		t.Errorf("%+v", r)
	}
}
