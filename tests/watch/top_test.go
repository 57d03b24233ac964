// SPDX-License-Identifier: Apache-2.0

package watch

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"
)

// terminal is a program on a pseudo-terminal, and all that it has written.
type terminal struct {
	master *os.File
	cmd    *exec.Cmd
	ended  chan struct{} // closed when the program has ended
	err    error         // how

	mu   sync.Mutex
	said strings.Builder
}

func openTerminal(t *testing.T, cmd *exec.Cmd, rows, cols uint16) *terminal {
	t.Helper()
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Skipf("LEFT OUT: this machine gives no pseudo-terminals: %v", err)
	}
	master := os.NewFile(uintptr(fd), "ptmx")
	t.Cleanup(func() { master.Close() })
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		err = unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
	}
	if err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer slave.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	x := &terminal{master: master, cmd: cmd, ended: make(chan struct{})}
	go func() {
		buffer := make([]byte, 64<<10)
		for {
			n, err := master.Read(buffer)
			x.mu.Lock()
			x.said.Write(buffer[:n])
			x.mu.Unlock()
			if err != nil && err != io.EOF || n == 0 {
				break
			}
		}
		x.err = cmd.Wait()
		close(x.ended)
	}()
	t.Cleanup(func() { _ = cmd.Process.Kill(); <-x.ended })
	return x
}

func (x *terminal) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.said.String()
}

// resize changes the size, upon which a program draws all of its screen again.
func (x *terminal) resize(t *testing.T, rows, cols uint16) {
	t.Helper()
	raw, err := x.master.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		failed = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
	}); err != nil || failed != nil {
		t.Fatal(err, failed)
	}
}

func (x *terminal) press(t *testing.T, keys string) {
	t.Helper()
	if _, err := x.master.WriteString(keys); err != nil {
		t.Fatal(err)
	}
}

// top on a real terminal shows a real tenant, and what is typed filters; q gives the terminal
// back. With NO_COLOR there is no colour.
func TestTopOnATerminal(t *testing.T) {
	b := newBed(t, "--anti-thrash", "on", "--tq", "20ms")
	b.must(t, b.Tenant("cuda-busy", "--seconds", "600"))
	b.awaitTenants(t, 1)
	cmd := exec.Command(filepath.Join(b.Dir, "nvsharectl"), "top", "-d", "100ms")
	cmd.Env = append(b.Env, "TERM=xterm-256color", "NO_COLOR=1")
	x := openTerminal(t, cmd, 24, 80)
	saw := func(texts ...string) {
		t.Helper()
		looks := uint16(0)
		b.must(t, b.Await(t.Context(), func() error {
			// What is drawn over an older picture may lack letters that were there already.
			if looks++; looks%50 == 0 {
				x.resize(t, 24, 80+looks/50%2)
			}
			for _, text := range texts {
				if !strings.Contains(ansi.Strip(x.text()), text) {
					return fmt.Errorf("%q is not on the terminal:\n%s", text, ansi.Strip(x.text()))
				}
			}
			return nil
		}))
	}
	saw("Health:", "cuda-busy", "p50/p99", "LIMIT", "? help")
	x.press(t, "/cuda\r")
	saw(`only "cuda"`, "cuda-busy")
	if text := x.text(); strings.Contains(text, "\x1b[31m") || strings.Contains(text, "\x1b[32m") || !strings.Contains(text, "\x1b[?1049h") {
		t.Errorf("colours, or no screen of its own: %q", text)
	}
	x.press(t, "q")
	select {
	case <-x.ended:
	case <-time.After(Patience):
		t.Fatalf("q does not end it:\n%q", x.text())
	}
	if x.err != nil || !strings.Contains(x.text(), "\x1b[?1049l") {
		t.Errorf("it ended with %v and left %q", x.err, x.text())
	}
}
