// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/admission"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/wire"
)

// raw sends any bytes as one packet.
func (c *peerConn) raw(b []byte) {
	c.t.Helper()
	if _, err := c.Write(b); err != nil {
		c.t.Fatal(err)
	}
}

func encoded(f wire.Frame) []byte {
	f.Version = wire.Version
	b := f.Encode()
	return b[:]
}

func TestBadFramesCloseTheConnection(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, holder, e := newHolder(t, s)
	bad := newProc(t, s.dir, 0)
	reg := encoded(registerFrame())
	attach := encoded(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuA)}})
	request := encoded(wire.Frame{Type: wire.TypeRequest})
	cases := map[string][][]byte{
		"garbage":                   {bytes.Repeat([]byte{0xa5}, 64)},
		"short":                     {reg[:63]},
		"one byte":                  {{1}},
		"one byte too long":         {append(bytes.Clone(reg), 0)},
		"huge":                      {make([]byte, 100_000)},
		"request first":             {request},
		"attach first":              {attach},
		"register twice":            {reg, reg},
		"request before attach":     {reg, request},
		"release before attach":     {reg, encoded(wire.Frame{Type: wire.TypeRelease, Epoch: e, Code: wire.ReleaseRevoked})},
		"a frame of the scheduler":  {reg, encoded(wire.Frame{Type: wire.TypeGrant, Epoch: e})},
		"unknown version":           {append([]byte{9}, request[1:]...)},
		"short after a good start":  {reg, attach, request[:8]},
		"garbage after a good one":  {reg, attach, bytes.Repeat([]byte{0xff}, 64)},
		"channel 40000":             {reg, append([]byte{1, 3, 0x40, 0x9c}, request[4:]...)},
		"register without channels": {append(append(bytes.Clone(reg[:18]), 0, 0), reg[20:]...)},
	}
	for name, packets := range cases {
		t.Run(name, func(t *testing.T) {
			c := bad.connect()
			c.t = t
			for _, p := range packets {
				if _, err := c.Write(p); err != nil {
					t.Fatal(err)
				}
			}
			for {
				f, _, err := c.recv()
				if err != nil {
					t.Fatalf("%v, want REFUSED", err)
				}
				if f.Type == wire.TypeRefused {
					if f.Code != wire.ErrProtocol {
						t.Errorf("refused with code %d %s", f.Code, f.Refused.String())
					}
					break
				}
			}
			c.expectClosed()
		})
	}
	if n := s.status().ProtocolErrors; n != uint64(len(cases)) {
		t.Errorf("%d protocol errors counted, want %d", n, len(cases))
	}
	if holder.page.Word(0) != uint32(e) {
		t.Error("the holder lost its grant by others' garbage")
	}
}

func TestVersions(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p := newProc(t, s.dir, 0)
	newer := registerFrame()
	newer.Version = 2 // speaks 1 as well
	b := newer.Encode()
	c := p.connect()
	c.raw(b[:])
	c.expect(wire.TypeWelcome)
	newer.Register.MinVersion = 2
	b = newer.Encode()
	c = p.connect()
	c.raw(b[:])
	c.expectRefused(wire.ErrVersion)
}

func TestRegisterThenClose(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	p := newProc(t, s.dir, 0)
	for range 300 { // more than may be open at once
		c := p.connect()
		c.send(registerFrame())
		c.Close()
	}
	p.kill()
	s.await("everything is forgotten", func(r *api.StatusResponse) bool {
		return r.Clients == 0 && r.Connections == 0
	})
	if err := s.Ask(context.Background(), func() {
		if s.Desk.Accounts() != 0 || len(s.ByAccount) != 0 || len(s.ByProc) != 0 {
			t.Errorf("left behind: %d and %d accounts, %d processes", s.Desk.Accounts(), len(s.ByAccount), len(s.ByProc))
		}
	}); err != nil {
		t.Fatal(err)
	}
}

// 1,000 connections that say nothing: those beyond the limit are refused, and
// those who work notice nothing.
func TestIdleConnections(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) { o.Quantum = sched.MinQuantum },
		func(d *Daemon) { d.registerTimeout = time.Hour })
	_, a, e := newHolder(t, s)
	_, b := newClient(t, s)
	idle := make([]*peerConn, 1000)
	for i := range idle {
		idle[i] = dialTenant(t, s.dir)
		if i%100 == 0 { // turns go on
			b.request()
			a.expect(wire.TypeRevoke)
			a.release(e)
			e = b.granted()
			a, b = b, a
		}
	}
	const room = admission.MaxPerAccount - 2
	for _, c := range idle[room:] {
		c.expectRefused(wire.ErrTooMany)
	}
	if r := s.status(); r.Connections != admission.MaxPerAccount || r.Refused != uint64(len(idle)-room) {
		t.Errorf("%d connections, %d refused", r.Connections, r.Refused)
	}
	for _, c := range idle {
		c.Close()
	}
	s.await("only the two clients are left", func(r *api.StatusResponse) bool { return r.Connections == 2 })
}

// dialTenant connects as this process.
func dialTenant(t *testing.T, dir string) *peerConn {
	t.Helper()
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(dir, wire.SocketName), Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &peerConn{t: t, UnixConn: conn}
}

// One user's flood leaves room for the others.
func TestLimitIsPerUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to be two users")
	}
	dir := t.TempDir()
	openToAll(t, dir)
	s := start(t, dir, nil, func(d *Daemon) { d.registerTimeout = patience })
	for i := range admission.MaxPerAccount + 1 {
		c := dialTenant(t, s.dir)
		if i == admission.MaxPerAccount {
			f := c.expect(wire.TypeRefused)
			if text := f.Refused.String(); f.Code != wire.ErrTooMany || text != fmt.Sprintf("%d connections per container or user at most", admission.MaxPerAccount) {
				t.Errorf("refused with code %d: %q", f.Code, text)
			}
		}
	}
	if own := ownContainer(t); own != "" {
		t.Skip("the test runs in a container: all users count as one")
	}
	newProc(t, s.dir, nobody).connect().register(0)
}

func TestNodeLimit(t *testing.T) {
	s := start(t, t.TempDir(), nil, func(d *Daemon) { d.Desk = admission.New(2, 0) })
	p := newProc(t, s.dir, 0)
	p.connect().register(0) // a connection and a client
	p.connect().expectRefused(wire.ErrTooMany)
	s.await("the refusal is a problem", func(r *api.StatusResponse) bool {
		return r.Refused == 1 && strings.Contains(strings.Join(r.Problems, "\n"), "2 connections on this node at most")
	})
}

// A client that never reads is disconnected, and nobody waits for it.
func TestClientThatDoesNotRead(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, a, _ := newHolder(t, s)
	wrong := wire.Frame{Version: wire.Version, Type: wire.TypeAttach, Channel: 31}
	packet := wrong.Encode()
	// Each is answered with an error.
	if err := a.SetWriteDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	for {
		if _, err := a.Write(packet[:]); err != nil {
			if os.IsTimeout(err) {
				t.Fatal("never disconnected")
			}
			break
		}
	}
	s.await("the holder is lost", func(r *api.StatusResponse) bool {
		return stateOf(r, a.id) == api.ClientState_CLIENT_STATE_LOST
	})
}

func TestRegisterTimeout(t *testing.T) {
	s := start(t, t.TempDir(), nil, func(d *Daemon) { d.registerTimeout = 10 * time.Millisecond })
	p := newProc(t, s.dir, 0)
	p.connect().expectRefused(wire.ErrProtocol)
}

// noDescriptors fails like accept on a process that has no descriptor left.
type noDescriptors struct {
	acceptor
	failures int
}

func (n *noDescriptors) AcceptUnix() (*net.UnixConn, error) {
	if n.failures > 0 {
		n.failures--
		return nil, &net.OpError{Op: "accept", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return n.acceptor.AcceptUnix()
}

func TestAcceptSurvivesExhaustion(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	path := filepath.Join(s.dir, "other.sock")
	other, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	from := &noDescriptors{acceptor: other, failures: 3}
	go func() { s.accept(ctx, from, s.admit); close(done) }()
	conn, err := net.Dial("unixpacket", path)
	if err != nil {
		t.Fatal(err)
	}
	c := &peerConn{t: t, UnixConn: conn.(*net.UnixConn)}
	c.register(0)
	c.Close()
	cancel()
	other.Close()
	<-done
}

func TestControlSocketGarbage(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	for _, b := range [][]byte{
		{0xff},
		bytes.Repeat([]byte{0xff}, 10),
		append([]byte{0, 0, 0, 4, 0, 0, 0, 1, 1, 0}, "junk"...),
		append([]byte{0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1, 0}, make([]byte, 4096)...), // 2 GiB announced
	} {
		conn, err := net.Dial("unix", filepath.Join(s.dir, api.SocketName))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Write(b); err != nil {
			t.Fatal(err)
		}
		conn.(*net.UnixConn).CloseWrite()
		conn.SetReadDeadline(time.Now().Add(patience))
		_, _ = io.Copy(io.Discard, conn)
		conn.Close()
	}
	s.status()
}

// Many clients that do anything at all, in any order: the invariants of the
// cores hold, and afterwards an honest client is served.
func TestChaos(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	s := start(t, t.TempDir(), func(o *Options) { o.Quantum, o.Grace = time.Millisecond, 2*time.Millisecond })
	var procs []*proc
	for range 6 {
		procs = append(procs, newProc(t, s.dir, 0))
	}
	conns := make([]*net.UnixConn, len(procs))
	var last uint64 = 1
	for range 4000 {
		i := rnd.IntN(len(procs))
		if conns[i] == nil || rnd.IntN(60) == 0 {
			if conns[i] != nil {
				conns[i].Close()
			}
			c := procs[i].connect()
			conns[i] = c.UnixConn
			_, _ = c.Write(encoded(registerFrame()))
			_, _ = c.Write(encoded(wire.Frame{Type: wire.TypeAttach, Attach: wire.Attach{UUID: uuidOf(gpuA)}}))
		}
		conns[i].SetReadDeadline(time.Now().Add(100 * time.Microsecond))
		var b [64]byte
		if n, err := conns[i].Read(b[:]); err == nil && n == 64 {
			if f, err := wire.Decode(b[:]); err == nil && f.Epoch != 0 {
				last = f.Epoch
			}
		}
		var f wire.Frame
		switch rnd.IntN(10) {
		case 0, 1, 2:
			f = wire.Frame{Type: wire.TypeRequest}
		case 3, 4, 5:
			f = wire.Frame{Type: wire.TypeRelease, Epoch: last, Code: 1 + rnd.Uint32N(3)}
		case 6:
			f = wire.Frame{Type: wire.TypeAttach, Channel: uint16(rnd.IntN(2)), Epoch: last * uint64(rnd.IntN(2)), Attach: wire.Attach{UUID: uuidOf(gpuB)}}
		case 7:
			f = wire.Frame{Type: wire.TypeStats, Stats: wire.Stats{Calls: 1}}
		case 8:
			f = wire.Frame{Type: wire.TypeReserve, Code: rnd.Uint32N(2), Reserve: wire.Reserve{Total: rnd.Uint64() >> rnd.IntN(64), Least: rnd.Uint64() >> rnd.IntN(64)}}
		case 9:
			f = wire.Frame{Type: wire.TypeAttach, Code: wire.AttachObserve, Channel: uint16(rnd.IntN(3)), Attach: wire.Attach{UUID: uuidOf(gpuB)}}
		}
		packet := encoded(f)
		if rnd.IntN(100) == 0 {
			packet[rnd.IntN(64)] ^= 1 << rnd.IntN(8)
		}
		_, _ = conns[i].Write(packet) // closed for its sins, at times
	}
	_, honest := newClient(t, s)
	honest.request().granted()
}

// What tenants do must not fill the disk with log lines.
func TestTenantsCannotFloodTheLog(t *testing.T) {
	var log strings.Builder
	s := start(t, t.TempDir(), logTo(&log))
	p := newProc(t, s.dir, 0)
	const n = 300
	began := time.Now()
	for range n {
		c := p.connect()
		c.raw([]byte("x"))
		c.expectRefused(wire.ErrProtocol)
		c.Close()
	}
	s.stop()
	took := time.Since(began)
	if lines := strings.Count(log.String(), "broke the protocol"); lines == 0 || float64(lines) > node.TenantLogBurst+node.TenantLogRate*took.Seconds() {
		t.Errorf("%d lines for %d bad connections in %v", lines, n, took)
	}
}

// A process may be called anything; it gets no line of its own in the log.
func TestNamesCannotForgeLogLines(t *testing.T) {
	var log strings.Builder
	dir := t.TempDir()
	s := start(t, dir, logTo(&log))
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	evil := filepath.Join(dir, "a\n\x1b[2Jlevel=x")
	if err := os.Symlink(exe, evil); err != nil {
		t.Fatal(err)
	}
	p := newProcOf(t, evil, s.dir, 0)
	c := p.connect().register(0).attach(0, gpuA, 0, 0)
	if got := s.status().Gpus[0].Clients[0].Command; got != "a\n\x1b[2Jlevel=x" {
		t.Fatalf("the process is called %q", got)
	}
	c.raw([]byte("x"))
	c.expectRefused(wire.ErrProtocol)
	s.stop()
	for line := range strings.Lines(log.String()) {
		if !strings.HasPrefix(line, "time=") || strings.Contains(line, "\x1b") {
			t.Errorf("forged: %q", line)
		}
	}
}

// A scheduler in a PID namespace of its own cannot tell its clients apart. It
// says so, to the client, in the log and in the status.
func TestOtherPIDNamespace(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root for a PID namespace")
	}
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	startProcessBy(t, dir, func(cmd *exec.Cmd) {
		logErrorsTo(t, log)(cmd)
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWPID
	})
	for range 3 {
		c := newProc(t, dir, 0).connect()
		if f := c.expect(wire.TypeRefused); !strings.Contains(f.Refused.String(), "identify") {
			t.Errorf("refused with %q", f.Refused.String())
		}
		c.expectClosed()
	}
	r := (&scheduler{t: t, dir: dir}).status()
	if len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "hostPID") || r.Refused != 3 {
		t.Errorf("status %v", r)
	}
	if n := strings.Count(readFile(t, log), "PID namespace"); n != 1 {
		t.Errorf("said %d times in the log:\n%s", n, readFile(t, log))
	}
}
