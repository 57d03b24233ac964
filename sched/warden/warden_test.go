// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/warden/order"
	"github.com/nvshare/nvshare/sched/warden/rm"
	"github.com/nvshare/nvshare/tests/judge"
)

// patience bounds each wait. It has to be longer than the slowest machine takes.
const patience = 5 * time.Minute

// The test's program is also the warden and its guard, because they are killed.
const roleEnv = "NVSHARE_TEST_WARDEN_ROLE"

func TestMain(m *testing.M) {
	role, dir, _ := strings.Cut(os.Getenv(roleEnv), " ")
	log := quiet()
	var err error
	switch role {
	case "guard":
		err = RunGuard(dir, rm.OpenSimulated(), log)
	case "warden":
		os.Setenv(roleEnv, "guard "+dir)
		var w *Warden
		if w, err = New(Options{Dir: dir, UID: os.Getuid(), Driver: rm.OpenSimulated(), Guard: []string{"/proc/self/exe"}, Log: log}); err == nil {
			stop := make(chan struct{})
			go func() { _, _ = os.Stdin.Read(make([]byte, 1)); close(stop) }()
			err = w.Run(stop)
		}
	default:
		os.Exit(m.Run())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, role, err)
		os.Exit(1)
	}
}

func quiet() *logrus.Entry {
	l := logrus.New()
	l.SetOutput(io.Discard)
	return logrus.NewEntry(l)
}

// node is a simulated GPU, and a warden that comes and goes.
type node struct {
	*testing.T
	dir, simgpu string
	warden      *exec.Cmd
	orders      *order.Client
	off         map[int]span // by process: when its channels were off for certain, at last
}

type span struct{ from, until int64 } // of judge.Now

func newNode(t *testing.T) *node {
	t.Helper()
	simgpu := os.Getenv("NVSHARE_TEST_SIMGPU")
	if simgpu == "" {
		t.Skip("SKIPPED: NVSHARE_TEST_SIMGPU names no simulated GPU: make test-unit does")
	}
	mayCopy(t)
	n := &node{T: t, dir: t.TempDir(), simgpu: simgpu, off: map[int]span{}}
	t.Cleanup(func() {
		if n.warden != nil {
			n.kill(syscall.SIGKILL)
		}
		lock, err := takeLock(filepath.Join(n.dir, "lock")) // once the guard has ended
		n.check(err)
		lock.Close()
	})
	return n
}

// mayCopy skips where the kernel does not let us copy a descriptor of a process of our own.
func mayCopy(t *testing.T) {
	t.Helper()
	child := exec.Command("sleep", "infinity")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = child.Process.Kill(); _ = child.Wait() }()
	pidfd, err := unix.PidfdOpen(child.Process.Pid, 0)
	if err != nil {
		t.Skipf("SKIPPED: pidfd_open: %v", err)
	}
	defer unix.Close(pidfd)
	fd, err := unix.PidfdGetfd(pidfd, 0, 0)
	if err != nil {
		t.Skipf("SKIPPED: pidfd_getfd of a child: %v: the kernel, Yama or a seccomp profile does not let this user trace", err)
	}
	unix.Close(fd)
}

func (n *node) check(err error) {
	n.Helper()
	if err != nil {
		n.Fatal(err)
	}
}

func (n *node) until(what string, ok func() bool) {
	n.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			n.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func (n *node) start() {
	n.Helper()
	n.warden = exec.Command("/proc/self/exe")
	n.warden.Env = append(os.Environ(), roleEnv+"=warden "+n.dir)
	n.warden.Stderr = os.Stderr
	_, err := n.warden.StdinPipe() // the warden ends with it
	n.check(err)
	n.warden.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	n.check(n.warden.Start())
	n.connect()
}

func (n *node) connect() {
	n.Helper()
	n.until("the warden answers", func() (ok bool) {
		var err error
		n.orders, err = order.Dial(filepath.Join(n.dir, Socket))
		return err == nil
	})
	n.Cleanup(func() { n.orders.Close() })
}

func (n *node) kill(sig syscall.Signal) {
	n.Helper()
	n.check(n.warden.Process.Signal(sig))
	_ = n.warden.Wait()
	n.warden = nil
}

// guard returns the pid of the warden's guard.
func (n *node) guard() int {
	n.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", n.warden.Process.Pid))
	n.check(err)
	if fields := strings.Fields(string(text)); len(fields) > 0 {
		pid, err := strconv.Atoi(fields[0])
		n.check(err)
		return pid
	}
	// Another thread of the warden started it.
	dirs, err := filepath.Glob("/proc/[0-9]*/stat")
	n.check(err)
	for _, d := range dirs {
		text, _ := os.ReadFile(d)
		_, rest, _ := strings.Cut(string(text), ") ")
		if f := strings.Fields(rest); len(f) > 1 && f[1] == strconv.Itoa(n.warden.Process.Pid) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(d)))
			n.check(err)
			return pid
		}
	}
	n.Fatal("the warden has no guard")
	return 0
}

func (n *node) do(orders ...order.Order) []order.Result {
	n.Helper()
	sent := judge.Now()
	results, err := n.orders.Do(patience, orders...)
	n.check(err)
	for i, r := range results {
		if r.Off {
			n.off[orders[i].PID] = span{judge.Now(), sent + order.Lease.Nanoseconds()}
		}
	}
	return results
}

// must has an order carried out, again if it was not in time: this machine may do much else.
func (n *node) must(o order.Order) (r order.Result) {
	n.Helper()
	n.until(string(o.Op), func() bool {
		r = n.do(o)[0]
		return r.Error != tooLong
	})
	if r.Error != "" {
		n.Fatalf("%s: %s", o.Op, r.Error)
	}
	return r
}

// busy is a process that uses the GPU without a pause.
type busy struct {
	n     *node
	pid   int
	lines chan int
}

func (n *node) busy(name string, args ...string) *busy {
	n.Helper()
	cmd := exec.Command(filepath.Join(filepath.Dir(n.simgpu), "bin", "cuda-busy"), append([]string{"--tenant", name, "--kernel-us", "500", "--depth", "1", "--report-ms", "1"}, args...)...)
	cmd.Env = append(os.Environ(), "NVSHARE_SIMGPU_DIR="+n.dir, "LD_LIBRARY_PATH="+n.simgpu)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	n.check(err)
	n.check(cmd.Start())
	b := &busy{n: n, pid: cmd.Process.Pid, lines: make(chan int)}
	go func() {
		defer close(b.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			var v struct{ Launches int }
			if json.Unmarshal(s.Bytes(), &v) == nil && v.Launches > 0 {
				select {
				case b.lines <- v.Launches:
				default: // nobody waits
				}
			}
		}
	}()
	n.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return b
}

// goes waits until the GPU has done work of the process.
func (b *busy) goes() {
	b.n.Helper()
	for range 2 { // the first may have been under way
		select {
		case <-b.lines:
		case <-time.After(patience):
			b.n.Fatalf("process %d stands still", b.pid)
		}
	}
}

// stands fails if the GPU has done work of the process since its channels are off, by its own record. What
// came once their lease may be over is not looked at: this machine may do much else.
func (b *busy) stands() {
	b.n.Helper()
	time.Sleep(20 * time.Millisecond) // time for a defect to show
	off := b.n.off[b.pid]
	trace, err := judge.ReadLogSince(filepath.Join(b.n.dir, "log"), off.from)
	b.n.check(err)
	for _, iv := range trace.Intervals {
		if iv.Process.PID == uint32(b.pid) && iv.End > off.from && iv.Start < off.until {
			b.n.Fatalf("process %d goes on", b.pid)
		}
	}
}

func TestOrders(t *testing.T) {
	n := newNode(t)
	n.start()
	a, b := n.busy("a"), n.busy("b")
	a.goes()
	b.goes()
	r := n.must(order.Order{Op: order.State, PID: a.pid})
	if r.Clients != 1 || r.Groups != 4 || r.Channels != 11 || r.Off || len(r.GPUs) != 1 || r.SliceUs == 0 {
		t.Errorf("state: %+v", r)
	}
	n.until("the slices are theirs", func() bool { // an order may be answered too late
		n.do(order.Order{Op: order.Slice, PID: a.pid, Us: 5000}, order.Order{Op: order.Slice, PID: b.pid, Us: 7000})
		return n.must(order.Order{Op: order.State, PID: a.pid}).SliceUs == 5000 && n.must(order.Order{Op: order.State, PID: b.pid}).SliceUs == 7000
	})
	var packet []order.Order
	for us := range uint64(8) {
		packet = append(packet, order.Order{Op: order.Slice, PID: b.pid, Us: 2000 + us})
	}
	n.do(packet...)
	n.until("the slice is that of the last order", func() bool { return n.must(order.Order{Op: order.State, PID: b.pid}).SliceUs == 2007 })
	if r := n.must(order.Order{Op: order.Off, PID: a.pid}); !r.Off {
		t.Error("it is not off")
	}
	a.stands()
	b.goes()
	if r := n.must(order.Order{Op: order.On, PID: a.pid}); r.Off {
		t.Error("it is off")
	}
	a.goes()
	for _, o := range []order.Order{{Op: order.Off, PID: os.Getpid()}, {Op: order.Off, PID: a.pid, Start: 1}, {Op: "what", PID: a.pid}, {Op: order.State, PID: 1 << 30}} {
		if r := n.do(o)[0]; r.Error == "" {
			t.Errorf("%+v was carried out", o)
		}
	}
	a.goes()
}

// A process that does not let the driver answer delays nobody else.
func TestSlowProcess(t *testing.T) {
	n := newNode(t)
	n.start()
	slow, quick := n.busy("slow"), n.busy("quick")
	slow.goes()
	quick.goes()
	n.must(order.Order{Op: order.State, PID: quick.pid})
	n.check(judge.Stop(slow.pid))
	var r []order.Result
	n.until("the quick one answers", func() bool {
		r = n.do(order.Order{Op: order.Off, PID: slow.pid}, order.Order{Op: order.Off, PID: quick.pid})
		return r[1].Error != tooLong
	})
	if r[0].Error == "" || r[1].Error != "" {
		t.Errorf("%+v", r)
	}
	quick.stands()
	n.check(syscall.Kill(slow.pid, syscall.SIGCONT))
	quick.goes() // its order has run out
	slow.goes()
}

// The driver counts: who was taken off four times is put on as often by one order.
func TestTakenOffAgain(t *testing.T) {
	n := newNode(t)
	n.start()
	a := n.busy("a")
	a.goes()
	n.must(order.Order{Op: order.Off, PID: a.pid})
	for range 2 * maxOffs {
		n.must(order.Order{Op: order.Off, PID: a.pid, Again: true})
	}
	a.stands()
	n.must(order.Order{Op: order.On, PID: a.pid})
	a.goes()
}

func TestOnlyTheSchedulersUserGivesOrders(t *testing.T) {
	mayCopy(t)
	dir := t.TempDir()
	t.Setenv(roleEnv, "guard "+dir)
	w, err := New(Options{Dir: dir, UID: os.Getuid() + 1, Driver: rm.OpenSimulated(), Guard: []string{"/proc/self/exe"}, Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	stop, ended := make(chan struct{}), make(chan error)
	go func() { ended <- w.Run(stop) }()
	c, err := order.Dial(filepath.Join(dir, Socket))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Do(patience, order.Order{Op: order.State, PID: os.Getpid()}); err == nil {
		t.Error("the order of another user was carried out")
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if st, err := os.Stat(filepath.Join(dir, Socket)); err == nil && st.Mode().Perm() != 0o600 {
		t.Errorf("the socket has mode %v", st.Mode())
	}
}

// Whatever ends while somebody is off, he goes on.
func TestNobodyIsStranded(t *testing.T) {
	for name, end := range map[string]func(*node){
		"the scheduler ends":       func(n *node) { n.orders.Close() },
		"the scheduler hangs":      func(*node) {},
		"the warden is killed":     func(n *node) { n.kill(syscall.SIGKILL) },
		"the warden is told to":    func(n *node) { n.warden.Stdin = nil; n.check(n.orders.Close()); n.kill(syscall.SIGTERM) },
		"the warden hangs":         func(n *node) { n.check(n.warden.Process.Signal(syscall.SIGSTOP)) },
		"the guard is killed":      func(n *node) { n.check(syscall.Kill(n.guard(), syscall.SIGKILL)) },
		"both, and the next start": killBoth,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.start()
			a := n.busy("a")
			a.goes()
			n.must(order.Order{Op: order.Off, PID: a.pid})
			a.stands()
			end(n)
			a.goes()
		})
	}
}

func killBoth(n *node) {
	n.Helper()
	guard := n.guard()
	n.check(syscall.Kill(guard, syscall.SIGSTOP)) // so that it does nothing in between
	n.kill(syscall.SIGKILL)
	n.check(syscall.Kill(guard, syscall.SIGKILL))
	n.start()
}

// The warden, its guard or both are killed at any moment while orders come.
func TestFiftyKills(t *testing.T) {
	n := newNode(t)
	const seed = 46
	random := rand.New(rand.NewPCG(seed, seed))
	processes := []*busy{n.busy("a"), n.busy("b"), n.busy("c")}
	for _, p := range processes {
		p.goes()
	}
	n.start()
	for kill := range 50 {
		orders := n.orders
		over := make(chan struct{})
		go func() { // until the connection ends
			defer close(over)
			for i := 0; ; i++ {
				var packet []order.Order
				for j, p := range processes {
					op := order.Off
					if (i+j)%3 == 0 {
						op = order.On
					}
					packet = append(packet, order.Order{Op: op, PID: p.pid, Again: i%2 == 0})
				}
				if _, err := orders.Do(patience, packet...); err != nil {
					return
				}
			}
		}()
		time.Sleep(time.Duration(random.IntN(8000)) * time.Microsecond) // the moment of the kill
		switch kill % 3 {
		case 0:
			n.kill(syscall.SIGKILL)
		case 1:
			_ = syscall.Kill(n.guard(), syscall.SIGKILL)
			n.kill(syscall.SIGKILL)
		case 2:
			killBoth(n)
			<-over
			continue
		}
		<-over
		n.start()
	}
	n.check(n.orders.Close())
	for _, p := range processes {
		p.goes()
	}
}

// A process that ended is not kept by us: the GPU knows that it has ended, and so does the ledger.
func TestEndWhileOff(t *testing.T) {
	n := newNode(t)
	n.start()
	a := n.busy("a")
	a.goes()
	n.must(order.Order{Op: order.Off, PID: a.pid})
	n.check(syscall.Kill(a.pid, syscall.SIGKILL))
	l, err := newLedger(n.dir)
	n.check(err)
	n.until("the ledger forgets it", func() bool {
		entries, err := l.read()
		n.check(err)
		return len(entries) == 0
	})
	if r := n.do(order.Order{Op: order.Off, PID: a.pid})[0]; !r.Gone {
		t.Errorf("off: %+v", r)
	}
}

// What another boot wrote down is of no process that lives, and half a file is an error.
func TestLedgerOfAnotherBoot(t *testing.T) {
	l, err := newLedger(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := l.note(entry{PID: 1, Start: 2}); err != nil {
		t.Fatal(err)
	}
	if entries, err := l.read(); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
	l.boot = "another"
	if entries, err := l.read(); err != nil || len(entries) != 0 {
		t.Errorf("after a boot: %v, %v", entries, err)
	}
	if err := os.WriteFile(l.path, []byte(`{"boot`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := l.read(); err == nil {
		t.Error("half a file is read")
	}
}

// inContainer puts a process into a cgroup that is named like a container's; "": the kernel does not let us make one.
func (n *node) inContainer(pid int) (id, freezer string) {
	n.Helper()
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	n.check(err)
	for line := range strings.Lines(string(mounts)) {
		f := strings.Fields(line)
		if !strings.Contains(line, " - cgroup2 ") {
			continue
		}
		id = fmt.Sprintf("%064x", pid)
		dir := filepath.Join(f[4], "nvshare-test-"+id)
		if err := os.Mkdir(dir, 0o755); err != nil {
			break
		}
		n.Cleanup(func() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
			n.until("the cgroup is empty", func() bool { return os.Remove(dir) == nil })
		})
		n.check(os.WriteFile(dir+"/cgroup.procs", []byte(strconv.Itoa(pid)), 0o644))
		return id, dir + "/cgroup.freeze"
	}
	n.Skip("SKIPPED: no cgroup can be made here")
	return "", ""
}

// A container that is stopped goes on, whatever ends. Nothing else is stopped.
func TestFreeze(t *testing.T) {
	for name, end := range map[string]func(*node){
		"the order runs out":       func(*node) {},
		"the scheduler ends":       func(n *node) { n.orders.Close() },
		"the warden is killed":     func(n *node) { n.kill(syscall.SIGKILL) },
		"both, and the next start": killBoth,
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.start()
			a := n.busy("a")
			a.goes()
			id, freezer := n.inContainer(a.pid)
			if r := n.do(order.Order{Op: order.Freeze, PID: a.pid, Container: strings.Repeat("0", 64)})[0]; r.Error == "" {
				t.Error("the cgroup of another container was stopped")
			}
			if r := n.must(order.Order{Op: order.Freeze, PID: a.pid, Container: id}); !r.Off {
				t.Fatalf("freeze: %+v", r)
			}
			if text, _ := os.ReadFile(freezer); string(text) != "1\n" {
				t.Errorf("the freezer has %q", text)
			}
			a.stands()
			end(n)
			a.goes()
			if text, _ := os.ReadFile(freezer); string(text) != "0\n" {
				t.Errorf("the freezer has %q in the end", text)
			}
		})
	}
}
