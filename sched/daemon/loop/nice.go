// SPDX-License-Identifier: Apache-2.0

package loop

import (
	"runtime"

	"golang.org/x/sys/unix"
)

// Yield gives this goroutine a thread of its own, with another nice value than the process's threads have, until back is
// called. The error says why its nice value stays what it was.
func Yield(nice func(was int) int) (back func(), err error) {
	const self = 0
	runtime.LockOSThread()
	raw, err := unix.Getpriority(unix.PRIO_PROCESS, self)
	was := 20 - raw
	if err == nil {
		err = unix.Setpriority(unix.PRIO_PROCESS, self, nice(was))
	}
	return func() {
		if unix.Setpriority(unix.PRIO_PROCESS, self, was) == nil {
			runtime.UnlockOSThread()
		} // else only root may; the thread ends with the goroutine
	}, err
}
