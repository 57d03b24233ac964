// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	sched "github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

// tenantEnv holds the run directory, if this binary is to be a tenant.
const tenantEnv = "NVSHARE_TEST_TENANT"

// beTenant is a process that uses the GPU: it says what its page has of memory
// limits, and reserves as many GiB as each line of its input says.
func beTenant(dir string) error {
	in := bufio.NewScanner(os.Stdin)
	in.Scan() // by now it is in its container
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Net: "unixpacket", Name: filepath.Join(dir, wire.SocketName)})
	if err != nil {
		return err
	}
	send := func(f wire.Frame) error {
		f.Version = wire.Version
		b := f.Encode()
		_, err := c.Write(b[:])
		return err
	}
	receive := func(typ wire.Type) (f wire.Frame, fd int, err error) {
		for f.Type != typ && err == nil {
			b, oob := make([]byte, 128), make([]byte, 64)
			var n, oobn int
			if n, oobn, _, _, err = c.ReadMsgUnix(b, oob); err != nil {
				break
			}
			if m, err := unix.ParseSocketControlMessage(oob[:oobn]); err == nil && len(m) == 1 {
				if fds, err := unix.ParseUnixRights(&m[0]); err == nil && len(fds) == 1 {
					fd = fds[0]
				}
			}
			f, err = wire.Decode(b[:n])
		}
		return f, fd, err
	}
	if err := send(wire.Frame{Type: wire.TypeRegister, Register: wire.Register{MinVersion: 1, Channels: 1}}); err != nil {
		return err
	}
	_, fd, err := receive(wire.TypeWelcome)
	if err != nil {
		return err
	}
	mem, err := unix.Mmap(fd, 0, wire.PageSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	page, err := wire.OpenPage(mem)
	if err != nil {
		return err
	}
	// 51600000-0000-4000-8000-000000000000
	attach := wire.Attach{UUID: wire.UUID{0x51, 0x60, 0, 0, 0, 0, 0x40, 0, 0x80}}
	if err := send(wire.Frame{Type: wire.TypeAttach, Attach: attach}); err != nil {
		return err
	}
	if f, _, err := receive(wire.TypeAttached); err != nil || f.Code != wire.OK {
		return fmt.Errorf("attach: code %d, %v", f.Code, err)
	}
	go func() {
		for last := uint64(1); ; time.Sleep(time.Millisecond) { // nothing tells of a change but the page
			if now := page.Limits(0).Memory; now != last {
				fmt.Println("limit", sched.FormatMemory(now))
				last = now
			}
		}
	}()
	for in.Scan() {
		var n uint64
		if _, err := fmt.Sscan(in.Text(), &n); err != nil {
			return err
		}
		if err := send(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: n * gib, Least: n * gib}}); err != nil {
			return err
		}
		f, _, err := receive(wire.TypeReserved)
		if err != nil {
			return err
		}
		fmt.Println("reserved", f.Reserved.Total/gib, map[uint32]string{wire.OK: "ok", wire.ErrMemory: "refused"}[f.Code])
	}
	return in.Err()
}

// tenant is such a process.
type tenant struct {
	t     *testing.T
	in    io.Writer
	lines chan string
	held  []string // the limits that it had
}

// startTenant starts one in a container's cgroup, which it skips the test for
// where cgroups cannot be made.
func startTenant(t *testing.T, dir, container string) *tenant {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), tenantEnv+"="+dir)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	x := &tenant{t: t, in: in, lines: make(chan string, 100)}
	cgroup := ""
	read := make(chan struct{})
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-read
		_ = cmd.Wait()
		if cgroup != "" {
			for end := time.Now().Add(patience); os.Remove(cgroup) != nil && time.Now().Before(end); time.Sleep(time.Millisecond) {
			}
		}
	})
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			x.lines <- s.Text()
		}
		close(read)
	}()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(mounts), "\n") {
		fields := strings.Fields(line)
		if len(fields) < 3 || !strings.HasPrefix(fields[2], "cgroup") || strings.Contains(line, "cpuset") {
			continue
		}
		dir := filepath.Join(fields[1], container)
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		if cgroup = dir; os.WriteFile(filepath.Join(dir, "cgroup.procs"), fmt.Append(nil, cmd.Process.Pid), 0o644) == nil {
			break
		}
		os.Remove(dir)
		cgroup = ""
	}
	if cgroup == "" {
		t.Skip("cannot make a cgroup for a tenant")
	}
	x.say("go")
	return x
}

func (x *tenant) say(line string) {
	x.t.Helper()
	if _, err := fmt.Fprintln(x.in, line); err != nil {
		x.t.Fatal(err)
	}
}

// await waits for a line, and notes the limits before it.
func (x *tenant) await(want string) {
	x.t.Helper()
	limit := time.After(patience)
	for {
		select {
		case line := <-x.lines:
			if held, ok := strings.CutPrefix(line, "limit "); ok {
				x.held = append(x.held, held)
			}
			if line == want {
				return
			}
			if strings.HasPrefix(line, "error") || strings.HasPrefix(line, "reserved") {
				x.t.Fatalf("waiting for %q: %s", want, line)
			}
		case <-limit:
			x.t.Fatalf("waited in vain for %q; the limits were %q", want, x.held)
		}
	}
}
