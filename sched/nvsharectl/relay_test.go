// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// told is a program, under nvsharectl run, that says which signals it gets.
type told struct {
	cmd   *exec.Cmd // nvsharectl
	lines *bufio.Scanner
}

// tellSignals starts such a program as a tenant of its own. The terminal becomes that of
// nvsharectl and the program; nil: they have none, and a process group of their own.
func tellSignals(t *testing.T, terminal *os.File) *told {
	t.Helper()
	needsGroup(t)
	script := "#!/bin/sh\nulimit -c 0; exec 2>/dev/null\n"
	for _, name := range []string{"HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "WINCH", "CONT"} {
		script += fmt.Sprintf("trap 'echo %s' %s\n", name, name)
	}
	script += "trap 'echo TERM; exit 7' TERM\necho $$\nwhile :; do sleep 0.01; done\n"
	path := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, unix.SIGHUP) // what is caught is not ignored after exec: under nohup it would be
	defer signal.Stop(caught)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL=run --run-dir "+serve(t, &describing{})+" --shim "+someLibrary(t)+" --name mine -- "+path)
	cmd.Stdout, cmd.Stderr = in, os.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	if terminal != nil {
		cmd.Stdin = terminal
		cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	in.Close()
	t.Cleanup(func() { // a program ends with its nvsharectl
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		out.Close()
	})
	_ = out.SetReadDeadline(time.Now().Add(time.Minute))
	return &told{cmd, bufio.NewScanner(out)}
}

// line returns the next thing that the program says; "": nothing comes any more.
func (p *told) line() string {
	p.lines.Scan()
	return p.lines.Text()
}

// Signals that are sent to nvsharectl alone, as by Slurm and systemd, are the program's: one
// writes its checkpoint on SIGUSR1.
func TestRunPassesSignalsOn(t *testing.T) {
	p := tellSignals(t, nil)
	p.line()
	for _, s := range []unix.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2, unix.SIGALRM, unix.SIGWINCH, unix.SIGCONT} {
		if err := p.cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
		if got := p.line(); "SIG"+got != unix.SignalName(s) {
			t.Fatalf("%s: the program says %q", unix.SignalName(s), got)
		}
	}
	_ = p.cmd.Process.Signal(unix.SIGTERM)
	if got := p.line(); got != "TERM" {
		t.Errorf("SIGTERM: the program says %q", got)
	}
	if _ = p.cmd.Wait(); p.cmd.ProcessState.ExitCode() != 7 {
		t.Errorf("the program's exit status is 7, that of nvsharectl %d", p.cmd.ProcessState.ExitCode())
	}
}

// The terminal sends what its keys mean to all in the foreground: the program gets that once.
func TestRunLeavesKeysToTheTerminal(t *testing.T) {
	keys, terminal := pseudoTerminal(t)
	p := tellSignals(t, terminal)
	p.line()
	for _, step := range []struct {
		send func()
		want string
	}{
		{func() { _, _ = keys.WriteString("\x03") }, "INT"},
		{func() { _ = p.cmd.Process.Signal(unix.SIGUSR1) }, "USR1"}, // and no INT before it
		{func() { _, _ = keys.WriteString("\x1c") }, "QUIT"},
		{func() { _ = p.cmd.Process.Signal(unix.SIGTERM) }, "TERM"},
	} {
		step.send()
		if got := p.line(); got != step.want {
			t.Fatalf("the program says %q, want %s", got, step.want)
		}
	}
}

// A program that SIGTSTP stops stops nvsharectl, so that its shell sees that, and SIGCONT has both
// go on.
func TestRunStopsWithItsProgram(t *testing.T) {
	p := tellSignals(t, nil)
	p.line()
	_ = p.cmd.Process.Signal(unix.SIGTSTP)
	var status unix.WaitStatus
	if _, err := unix.Wait4(p.cmd.Process.Pid, &status, unix.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatalf("nvsharectl does not stop: %v, %x", err, status)
	}
	_ = p.cmd.Process.Signal(unix.SIGCONT)
	if got := p.line(); got != "CONT" {
		t.Errorf("the program says %q", got)
	}
}

// What nvsharectl was started to ignore, as by nohup and as a shell's script does in the
// background, its program ignores too.
func TestRunIgnoresWhatItIsToldTo(t *testing.T) {
	if signal.Ignored(syscall.SIGINT) {
		t.Skip("the tests themselves were started with SIGINT ignored")
	}
	needsGroup(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, flags := range []string{"", "--name mine "} {
		cmd := exec.Command("sh", "-c", "trap '' HUP INT; exec "+self)
		cmd.Env = append(os.Environ(), "NVSHARE_TEST_CTL=run --run-dir "+serve(t, &describing{})+" --shim "+someLibrary(t)+" "+flags+"-- grep SigIgn /proc/self/status")
		out, err := cmd.CombinedOutput()
		var ignored uint64 // others may have been ignored before
		if _, scanErr := fmt.Sscanf(string(out), "SigIgn:\t%x", &ignored); err != nil || scanErr != nil || ignored&3 != 3 {
			t.Errorf("run %s: %v, %s", flags, err, out)
		}
	}
}

// pseudoTerminal returns both ends of a terminal.
func pseudoTerminal(t *testing.T) (keys, terminal *os.File) {
	t.Helper()
	keys, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminal can be made here: %v", err)
	}
	t.Cleanup(func() { keys.Close() })
	fd := int(keys.Fd())
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { terminal.Close() })
	return keys, terminal
}
