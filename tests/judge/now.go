// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Now is CLOCK_MONOTONIC in nanoseconds, the clock of the simulated GPU's log.
func Now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(fmt.Sprintf("clock_gettime(CLOCK_MONOTONIC): %v", err))
	}
	return ts.Nano()
}
