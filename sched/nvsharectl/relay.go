// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownSignals are those that say nothing to the program: they cannot be caught, are about
// nvsharectl's child and its own output, or Go's runtime uses them. For SIGTTIN and SIGTTOU the
// terminal stops both.
var ownSignals = []unix.Signal{
	unix.SIGKILL, unix.SIGSTOP, unix.SIGCHLD, unix.SIGPIPE, unix.SIGURG, unix.SIGTTIN, unix.SIGTTOU,
}

// keySignals are those that a terminal sends to all processes in its foreground.
var keySignals = []os.Signal{unix.SIGINT, unix.SIGQUIT, unix.SIGTSTP}

// lastSignal is the highest number of a signal.
const lastSignal = 64

// catchSignals catches the signals that are a program's, until stop. What nvsharectl was
// started to ignore, as with nohup, the program ignores too.
func catchSignals() (caught chan os.Signal, stop func()) {
	var all []os.Signal
	for s := unix.Signal(1); s <= lastSignal; s++ {
		if !slices.Contains(ownSignals, s) && !signal.Ignored(s) {
			all = append(all, s)
		}
	}
	caught = make(chan os.Signal, lastSignal)
	signal.Notify(caught, all...)
	return caught, func() { signal.Stop(caught) }
}

// passOn sends a program the signals that are caught, until done.
func passOn(caught <-chan os.Signal, program *os.Process, done <-chan struct{}) {
	for {
		select {
		case s := <-caught:
			if !slices.Contains(keySignals, s) || !inForeground() {
				_ = program.Signal(s)
			}
		case <-done:
			return
		}
	}
}

// inForeground tells whether a terminal sends what its keys mean to this process, and so to a
// program of the same process group.
func inForeground() bool {
	terminal, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer terminal.Close()
	group, err := unix.IoctlGetInt(int(terminal.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// awaitEnd waits for the end of a child. While SIGTSTP stops the child this process is stopped
// too: its shell waits for this process.
func awaitEnd(pid int) (status unix.WaitStatus, err error) {
	for {
		_, err = unix.Wait4(pid, &status, unix.WUNTRACED, nil)
		switch {
		case err == unix.EINTR:
		case err != nil || !status.Stopped():
			return status, err
		case status.StopSignal() == unix.SIGTSTP:
			_ = unix.Kill(unix.Getpid(), unix.SIGSTOP)
		}
	}
}

// person is a user of this host as whom a program runs.
type person struct {
	name, home, shell string
	credential        syscall.Credential
}

// findPerson looks a user up by name or number, in all that nsswitch.conf names, as a directory
// service: getent and id ask there, Go's package for users without cgo does not.
func findPerson(name string) (*person, error) {
	entry, err := hear("getent", "passwd", name)
	var none *exec.ExitError
	if err != nil && !errors.As(err, &none) {
		return nil, fmt.Errorf("--user %.64q: %w", name, err)
	}
	fields := strings.Split(strings.TrimSpace(entry), ":")
	if err != nil || len(fields) != 7 {
		return nil, usageError{fmt.Errorf("--user: this host knows no user %.64q", name)}
	}
	p := &person{name: fields[0], home: fields[5], shell: fields[6]}
	groups, err := hear("id", "-G", p.name)
	if err != nil {
		return nil, fmt.Errorf("--user %.64q: groups: %w", name, err)
	}
	var ids []uint32 // uid, gid, groups
	for _, text := range append(fields[2:4:4], strings.Fields(groups)...) {
		id, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return nil, fmt.Errorf("--user %.64q: %w", name, err)
		}
		ids = append(ids, uint32(id))
	}
	p.credential = syscall.Credential{Uid: ids[0], Gid: ids[1], Groups: ids[2:]}
	return p, nil
}

// setEnvironment has the environment say who the user is, as su does.
func (p *person) setEnvironment() {
	for key, value := range map[string]string{"HOME": p.home, "SHELL": p.shell, "USER": p.name, "LOGNAME": p.name} {
		os.Setenv(key, value)
	}
}

// become gives this process the user's rights, and no others.
func (p *person) become() error {
	groups := make([]int, len(p.credential.Groups))
	for i, g := range p.credential.Groups {
		groups[i] = int(g)
	}
	err := errors.Join(syscall.Setgroups(groups), syscall.Setgid(int(p.credential.Gid)), syscall.Setuid(int(p.credential.Uid)))
	if err != nil {
		return fmt.Errorf("--user %s: %w", p.name, err)
	}
	return nil
}
