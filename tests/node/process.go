// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// pollEvery is the pace of waits for things that send no event.
const pollEvery = 20 * time.Millisecond

// stopAfter is how long a daemon may take to end after SIGTERM, on a machine that is busy.
const stopAfter = time.Minute

// A Process is a daemon of the node or a program started beside it.
type Process struct {
	Name string
	Log  string // file with standard output and error, appended to

	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended and was waited for
}

// start runs a program and appends its output to log. The program leads a process
// group of its own, so that Ctrl-C reaches only the demo.
func start(name, log string, env []string, argv ...string) (*Process, error) {
	return startAs(nil, name, log, env, argv...)
}

func startAs(cred *syscall.Credential, name, log string, env []string, argv ...string) (*Process, error) {
	out, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = env
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: cred}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	p := &Process{Name: name, Log: log, cmd: cmd, done: make(chan struct{})}
	go func() {
		_ = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

// Signal sends sig. It is not an error if the process has ended.
func (p *Process) Signal(sig syscall.Signal) {
	_ = p.cmd.Process.Signal(sig)
}

// Wait returns the exit status (128 + number for a signal), or ctx's error.
func (p *Process) Wait(ctx context.Context) (int, error) {
	select {
	case <-p.done:
		return exitStatus(p.cmd.ProcessState.Sys().(syscall.WaitStatus)), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for %s: %w\n%s", p.Name, ctx.Err(), p.Tail(10))
	}
}

// Kill ends the process with SIGKILL and waits until it is gone.
func (p *Process) Kill() {
	p.Signal(unix.SIGKILL)
	<-p.done
}

// Stop ends the process with SIGTERM, then with SIGKILL if it has not ended.
func (p *Process) Stop() error {
	p.Signal(unix.SIGTERM)
	select {
	case <-p.done:
		return nil
	case <-time.After(stopAfter):
		p.Kill()
		return fmt.Errorf("%s did not end within %v of SIGTERM", p.Name, stopAfter)
	}
}

// Tail returns the last n lines of the log.
func (p *Process) Tail(n int) string { return tail(p.Log, n) }

func tail(file string, n int) string {
	data, err := os.ReadFile(file)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return strings.Join(lines, "\n")
}

// Until calls try until it returns nil. It gives up when ctx ends; its error names what
// was awaited and try's last error.
func Until(ctx context.Context, what string, try func() error) error {
	return UntilEvery(ctx, pollEvery, what, try)
}

// UntilEvery is Until for a try that is costly. However costly: tries take a quarter of the time,
// so that what is awaited has the processor.
func UntilEvery(ctx context.Context, pace time.Duration, what string, try func() error) error {
	for {
		began := time.Now()
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w; last: %w", what, ctx.Err(), err)
		case <-time.After(max(pace, min(3*time.Since(began), time.Second))):
		}
	}
}

// ready is Until for a daemon: it also gives up when the daemon has ended.
func (p *Process) ready(ctx context.Context, what string, try func() error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-p.done:
			cancel(errors.New("it has ended"))
		case <-ctx.Done():
		}
	}()
	if err := Until(ctx, what, try); err != nil {
		return fmt.Errorf("%s is not ready: %w: %w\nlast lines of %s:\n%s", p.Name, context.Cause(ctx), err, p.Log, p.Tail(10))
	}
	return nil
}

// output runs a program and returns its standard output. The error contains what the
// program wrote to standard error.
func output(ctx context.Context, env []string, argv ...string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// PID is the process's ID in the node's pid namespace.
func (p *Process) PID() int { return p.cmd.Process.Pid }
