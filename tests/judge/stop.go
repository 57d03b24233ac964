// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// stopWithin bounds Stop. It has to be longer than the slowest machine takes.
const stopWithin = 5 * time.Minute

// Stop stops a process (SIGSTOP) where it has no file locked. All processes share the lock of the simulated GPU, and would
// stand still with it. On a real one nobody does: the kernel stops no process within a call of the driver.
func Stop(pid int) error {
	for end := time.Now().Add(stopWithin); time.Now().Before(end); {
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			return fmt.Errorf("stop process %d: %w", pid, err)
		}
		for !stopped(pid) && time.Now().Before(end) {
			time.Sleep(time.Millisecond)
		}
		if has, err := locks(pid); err != nil || !has {
			return err
		}
		if err := unix.Kill(pid, unix.SIGCONT); err != nil {
			return fmt.Errorf("continue process %d: %w", pid, err)
		}
		for has := true; has && time.Now().Before(end); time.Sleep(time.Millisecond) {
			has, _ = locks(pid)
		}
	}
	return fmt.Errorf("process %d was not stopped without a lock within %v", pid, stopWithin)
}

// stopped tells whether all threads of a process are.
func stopped(pid int) bool {
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, file := range stats {
		text, err := os.ReadFile(file)
		if err == nil && !bytes.HasPrefix(text[bytes.LastIndexByte(text, ')')+1:], []byte(" T")) {
			return false
		}
	}
	return true
}

// locks tells whether a process has a file locked by flock(2).
func locks(pid int) (bool, error) {
	text, err := os.ReadFile("/proc/locks")
	for line := range bytes.Lines(text) {
		// NUMBER: FLOCK ADVISORY WRITE PID ...; with -> behind the number it waits
		if f := bytes.Fields(line); len(f) > 4 && string(f[1]) == "FLOCK" && string(f[4]) == fmt.Sprint(pid) {
			return true, err
		}
	}
	return false, err
}
