// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/overlap"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/wire"
)

// patience bounds every wait in these tests. It only has to be longer than any
// machine takes; nothing here takes that long when it works.
const patience = 5 * time.Minute

// Roles of this test binary when it runs itself.
const (
	roleEnv     = "NVSHARE_TEST_ROLE"
	roleDirEnv  = "NVSHARE_TEST_DIR"
	roleWhatEnv = "NVSHARE_TEST_WHAT"
)

func TestMain(m *testing.M) {
	switch os.Getenv(roleEnv) {
	case "connector":
		connector(os.Getenv(roleDirEnv))
	case "scheduler":
		schedulerProcess(os.Getenv(roleDirEnv))
	case "overlap":
		fmt.Fprintln(os.Stderr, overlap.Start(os.Args[1:]))
		os.Exit(1)
	case "attacker":
		attacker(os.Getenv(roleDirEnv), os.Getenv(roleWhatEnv))
	default:
		os.Exit(m.Run())
	}
}

var (
	gpuA = node.Found{Index: 0, UUID: "GPU-51600000-0000-4000-8000-000000000000", Name: "Test GPU", MemoryBytes: 1 << 30}
	gpuB = node.Found{Index: 1, UUID: "GPU-51600000-0000-4000-8000-000000000001", Name: "Test GPU", MemoryBytes: 1 << 30}
)

func uuidOf(g node.Found) wire.UUID {
	u, err := wire.ParseUUID(g.UUID)
	if err != nil {
		panic(err)
	}
	return u
}

// scheduler is a Daemon that serves in this process.
type scheduler struct {
	*Daemon
	t    *testing.T
	dir  string
	stop func() // ends it and waits; may be called again
}

func testOptions(dir string) Options {
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	return Options{
		Config: node.Config{
			RunDir:  dir,
			Quantum: sched.MaxQuantum, // nothing happens by time unless a test asks for it
			Log:     logrus.NewEntry(logger),
		},
		Grace:   sched.MaxGrace,
		List:    func(context.Context) ([]node.Found, error) { return []node.Found{gpuA, gpuB}, nil },
		Version: "test",
	}
}

// bare is a Daemon that has nothing open and does not run.
func bare(t testing.TB) *Daemon {
	finder, err := peer.NewFinder()
	if err != nil {
		t.Fatal(err)
	}
	return assemble(testOptions(t.TempDir()), "boot", finder)
}

// start is begin, and waits until the scheduler knows its GPUs.
func start(t *testing.T, dir string, change func(*Options), more ...func(*Daemon)) *scheduler {
	t.Helper()
	s := begin(t, dir, change, more...)
	known := func() (n int) {
		if err := s.Ask(t.Context(), func() { n = len(s.Order) }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for until := time.Now().Add(patience); known() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("the scheduler finds no GPU")
		}
	}
	return s
}

// begin runs a scheduler in dir until the test ends or stop is called, and
// fails the test if an invariant broke meanwhile. change may be nil. The scheduler may
// know no GPU yet.
func begin(t *testing.T, dir string, change func(*Options), more ...func(*Daemon)) *scheduler {
	t.Helper()
	o := testOptions(dir)
	said := &lastWords{}
	o.Log.Logger.SetOutput(said)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the scheduler said at last:\n%s", said)
		}
	})
	if change != nil {
		change(&o)
	}
	d, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	d.unhurried()
	for _, f := range more {
		f(d)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Run(ctx) }()
	stopped := false
	s := &scheduler{Daemon: d, t: t, dir: dir}
	s.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			t.Error("Run does not return")
			return
		}
		if d.invariantErr != nil {
			t.Errorf("invariant: %v", d.invariantErr)
		}
	}
	t.Cleanup(s.stop)
	return s
}

// unhurried has the daemon check itself, make each status anew, and wait for clients for as long as the tests do:
// on a machine that is busy, host memory alone takes longer to make than a client may be
// quiet.
func (d *Daemon) unhurried() {
	d.checkAlways = true
	d.overviewPart = 0
	d.away.PrepareLimit, d.away.BusyPause, d.away.LeaveWait, d.moves.DepartLimit = patience, patience, patience, patience
}

// lastWords keeps the end of what is written.
type lastWords struct {
	mu   sync.Mutex
	text []byte
}

func (w *lastWords) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.text = append(w.text, p...)
	w.text = w.text[max(0, len(w.text)-16<<10):]
	return len(p), nil
}

func (w *lastWords) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.text)
}

func (s *scheduler) status() *api.StatusResponse {
	s.t.Helper()
	c, err := api.Dial(context.Background(), s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	defer c.Close()
	r, err := c.Status(context.Background(), &api.StatusRequest{})
	if err != nil {
		s.t.Fatal(err)
	}
	if len(r.Packed) == 0 && (len(r.ProblemCodes) != len(r.Problems) || slices.Contains(r.ProblemCodes, api.ProblemCode_PROBLEM_CODE_UNSPECIFIED)) {
		s.t.Errorf("problems %q have the codes %v", r.Problems, r.ProblemCodes)
	}
	return r
}

// await polls the status until it is as wanted: what the scheduler does of
// itself, like noticing a death, sends nothing to wait for.
func (s *scheduler) await(what string, ok func(*api.StatusResponse) bool) *api.StatusResponse {
	s.t.Helper()
	for end := time.Now().Add(patience); ; {
		asked := time.Now()
		r := s.status()
		if ok(r) {
			return r
		}
		if time.Now().After(end) {
			s.t.Fatalf("never: %s; status: %v", what, r)
		}
		time.Sleep(max(time.Millisecond, 3*time.Since(asked))) // what is awaited has most of the processor
	}
}

// proc is another process, from which connections are made: the scheduler
// takes them for that process, while the test reads and writes on them.
type proc struct {
	t   *testing.T
	cmd *exec.Cmd
	ctl *net.UnixConn
}

// newProc starts a process that connects to the scheduler in dir, as user uid
// if that is not 0.
func newProc(t *testing.T, dir string, uid uint32) *proc {
	t.Helper()
	return newProcOf(t, "/proc/self/exe", dir, uid)
}

// newProcOf has the process's program under another name.
func newProcOf(t *testing.T, exe, dir string, uid uint32) *proc {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	p := &proc{t: t, ctl: conn.(*net.UnixConn), cmd: exec.Command(exe)}
	p.cmd.Env = append(os.Environ(), roleEnv+"=connector", roleDirEnv+"="+dir)
	p.cmd.ExtraFiles = []*os.File{theirs}
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if uid != 0 {
		p.cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.kill(); p.ctl.Close() })
	return p
}

// connector runs in the other process: for each byte on descriptor 3 it
// connects and sends the connection back.
func connector(dir string) {
	const ctl = 3
	for {
		var b [1]byte
		if n, err := unix.Read(ctl, b[:]); n != 1 || err != nil {
			os.Exit(0)
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err == nil {
			err = unix.Connect(fd, &unix.SockaddrUnix{Name: filepath.Join(dir, wire.SocketName)})
		}
		if err != nil {
			_ = unix.Sendmsg(ctl, []byte(err.Error()), nil, nil, 0)
		} else {
			_ = unix.Sendmsg(ctl, []byte("ok"), unix.UnixRights(fd), nil, 0)
		}
		unix.Close(fd)
	}
}

// connect makes a connection as the process.
func (p *proc) connect() *peerConn {
	p.t.Helper()
	c, err := p.tryConnect()
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { c.Close() })
	return &peerConn{t: p.t, UnixConn: c}
}

// tryConnect is connect where the scheduler may be away. The caller closes.
func (p *proc) tryConnect() (*net.UnixConn, error) {
	if _, err := p.ctl.Write([]byte{1}); err != nil {
		return nil, err
	}
	buf, oob := make([]byte, 256), make([]byte, 64)
	p.ctl.SetReadDeadline(time.Now().Add(patience))
	n, oobn, _, _, err := p.ctl.ReadMsgUnix(buf, oob)
	if err != nil {
		return nil, err
	}
	if string(buf[:n]) != "ok" {
		return nil, fmt.Errorf("connect: %s", buf[:n])
	}
	f := os.NewFile(uintptr(rights(p.t, oob[:oobn])), "conn")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// ownContainer is the container that this test runs in, or "".
func ownContainer(t *testing.T) string {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	file := os.NewFile(uintptr(fds[0]), "pair")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	finder, err := peer.NewFinder()
	if err != nil {
		t.Fatal(err)
	}
	p, err := finder.Identify(conn.(*net.UnixConn))
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	return p.Container
}

// kill ends the process with SIGKILL; it may be called again.
func (p *proc) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

func rights(t *testing.T, oob []byte) int {
	t.Helper()
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(msgs) != 1 {
		t.Fatalf("%d control messages, %v", len(msgs), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 1 {
		t.Fatalf("%d descriptors, %v", len(fds), err)
	}
	return fds[0]
}

// peerConn is the client's end of a connection.
type peerConn struct {
	t *testing.T
	*net.UnixConn
	id   uint64
	page wire.Page
	mem  []byte
	fd   int // of the page
}

func (c *peerConn) send(f wire.Frame) {
	c.t.Helper()
	f.Version = wire.Version
	b := f.Encode()
	if _, err := c.Write(b[:]); err != nil {
		c.t.Fatalf("send %v: %v", f.Type, err)
	}
}

// recv waits for the next frame; io.EOF if the scheduler closed.
func (c *peerConn) recv() (wire.Frame, []byte, error) {
	buf, oob := make([]byte, 128), make([]byte, 64)
	c.SetReadDeadline(time.Now().Add(patience))
	n, oobn, _, _, err := c.ReadMsgUnix(buf, oob)
	if errors.Is(err, syscall.ECONNRESET) {
		err = io.EOF
	}
	if err == nil && n == 0 || errors.Is(err, io.EOF) {
		err = io.EOF
	}
	if err != nil {
		return wire.Frame{}, nil, err
	}
	f, err := wire.Decode(buf[:n])
	return f, oob[:oobn], err
}

// expect waits for a frame of a type; NOTICE in between is skipped.
func (c *peerConn) expect(typ wire.Type) wire.Frame {
	c.t.Helper()
	for {
		f, _, err := c.recv()
		if err != nil {
			c.t.Fatalf("waiting for %v: %v", typ, err)
		}
		if f.Type == wire.TypeNotice && typ != wire.TypeNotice {
			continue
		}
		if f.Type != typ {
			c.t.Fatalf("got %v (code %d epoch %d %s), want %v", f.Type, f.Code, f.Epoch, f.Refused.String(), typ)
		}
		return f
	}
}

// expectRefused waits for REFUSED with the code, then the end.
func (c *peerConn) expectRefused(code uint32) {
	c.t.Helper()
	if f := c.expect(wire.TypeRefused); f.Code != code {
		c.t.Errorf("refused with code %d (%s), want %d", f.Code, f.Refused.String(), code)
	}
	c.expectClosed()
}

func (c *peerConn) expectClosed() {
	c.t.Helper()
	for {
		f, _, err := c.recv()
		if err == io.EOF {
			return
		}
		if err != nil || f.Type != wire.TypeRefused && f.Type != wire.TypeNotice {
			c.t.Fatalf("got %v, %v, want the end of the connection", f.Type, err)
		}
	}
}

func registerFrame() wire.Frame {
	return wire.Frame{Type: wire.TypeRegister, Register: wire.Register{MinVersion: 1, Channels: 2, ShimVersion: 0x000100, Interposed: 3}}
}

// register registers and maps the grant page.
func (c *peerConn) register(flags uint32) *peerConn {
	c.t.Helper()
	return c.registerOn(registerFrame().Register.Channels, flags)
}

// registerOn is register of a process that sees so many GPUs.
func (c *peerConn) registerOn(gpus uint16, flags uint32) *peerConn {
	c.t.Helper()
	f := registerFrame()
	f.Code, f.Register.Channels = flags, gpus
	c.send(f)
	w, oob, err := c.recv()
	if err != nil || w.Type != wire.TypeWelcome {
		c.t.Fatalf("got %v %s, %v, want WELCOME", w.Type, w.Refused.String(), err)
	}
	c.id = w.Welcome.ClientID
	c.fd = rights(c.t, oob)
	c.t.Cleanup(func() { unix.Close(c.fd) })
	if c.mem, err = unix.Mmap(c.fd, 0, wire.PageSize, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { unix.Munmap(c.mem) })
	if c.page, err = wire.OpenPage(c.mem); err != nil {
		c.t.Fatal(err)
	}
	return c
}

// attach attaches channel i to gpu i.
func (c *peerConn) attach(channel uint16, g node.Found, held uint64, flags uint32) *peerConn {
	c.t.Helper()
	c.send(wire.Frame{Type: wire.TypeAttach, Channel: channel, Epoch: held, Code: flags, Attach: wire.Attach{UUID: uuidOf(g)}})
	if f := c.expect(wire.TypeAttached); f.Code != wire.OK || f.Channel != channel {
		c.t.Fatalf("attached channel %d with code %d", f.Channel, f.Code)
	}
	return c
}

func (c *peerConn) request() *peerConn {
	c.t.Helper()
	c.send(wire.Frame{Type: wire.TypeRequest})
	return c
}

func (c *peerConn) release(epoch uint64) *peerConn {
	c.t.Helper()
	c.send(wire.Frame{Type: wire.TypeRelease, Epoch: epoch, Code: wire.ReleaseRevoked})
	return c
}

// granted waits for a grant on channel 0 and returns its epoch.
func (c *peerConn) granted() uint64 {
	c.t.Helper()
	f := c.expect(wire.TypeGrant)
	return f.Epoch
}

// newClient is a process of its own, registered and attached to GPU A.
func newClient(t *testing.T, s *scheduler) (*proc, *peerConn) {
	t.Helper()
	p := newProc(t, s.dir, 0)
	return p, p.connect().register(0).attach(0, gpuA, 0, 0)
}

// newHolder is a client that holds GPU A.
func newHolder(t *testing.T, s *scheduler) (*proc, *peerConn, uint64) {
	t.Helper()
	p, c := newClient(t, s)
	return p, c, c.request().granted()
}

// stateOf returns what the status says of the client on GPU A; 0: nothing.
func stateOf(r *api.StatusResponse, id uint64) api.ClientState {
	for _, c := range r.Gpus[0].Clients {
		if c.Id == id {
			return c.State
		}
	}
	return 0
}

// logTo makes a scheduler's log readable.
func logTo(b *strings.Builder) func(*Options) {
	return func(o *Options) { o.Log.Logger.SetOutput(b) }
}
