// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/signal"
	"slices"

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
