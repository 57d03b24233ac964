// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/daemon/node"
)

const (
	// maxContainers is how many container names the plugin may have told us.
	maxContainers = 4096
	// maxShares is how many tenants may have shares or memory limits of their own.
	maxShares = 4096
	// maxGPUs is how many GPUs a container's description may name.
	maxGPUs = 128
	// maxReported is how many problems the plugin may report.
	maxReported = 16
	// reportLife is how long a report of the plugin holds. The plugin reports every
	// 5 s.
	reportLife = 20 * time.Second
	// maxWarnings is how many warnings may come with a container's description.
	maxWarnings = 16
	// maxName is the longest name in a container's description, bytes.
	maxName = 512

	// registerTimeout ends connections that do not register. Registered ones
	// may stay silent for ever.
	registerTimeout = 5 * time.Second
	// registerCost is how many frames a REGISTER counts for: it makes a grant page.
	registerCost = 20
	// viewCost is how many frames an answer of the status socket counts for, beside one for
	// each client and each tenant with a share.
	viewCost = 20
	// persistCost is how many frames a record in the state file counts for.
	persistCost = 8
	// acceptNice is how much nicer the thread is that takes connections. Learning
	// who a process is takes a tenth of a millisecond of it; a flood of connections
	// would take every other turn of a processor from the loop otherwise.
	acceptNice = 5
	// maxEarlyReserves is how many RESERVE may wait for a search for GPUs.
	maxEarlyReserves = 8

	// slowDrain is the time beyond what a drain may take from which on a tenant that
	// drains slowly is a problem, and slowLately for how long it is one: its next drain may
	// be far away.
	slowDrain  = time.Second
	slowLately = 10 * time.Minute

	// rediscoverPause is the least time between searches for GPUs that
	// unknown UUIDs cause; rescanPause between searches while there is none.
	rediscoverPause = 5 * time.Second
	rescanPause     = 30 * time.Second
	discoverTimeout = 30 * time.Second

	// watchPause is the least time between two looks at whether the run directory
	// is there.
	watchPause = 2 * time.Second

	// persistRetry is the pause after the state file could not be written.
	// The grants that depend on it wait as long.
	persistRetry = 100 * time.Millisecond
)

// neededFiles is how many descriptors are for tenants, and for what tenants must
// not be able to take away: two for each connection and each process (the other
// one is a grant page on the way, or a pidfd), and some for the state file, the
// control socket, metrics and the page (16 connections each).
const neededFiles = 2*node.MaxConnections + 64

// spareFiles returns how many descriptors the process may have beyond
// neededFiles. It fails if there are fewer than that.
func spareFiles() (more uint64, err error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("read the limit of open files: %w", err)
	}
	if limit.Cur < neededFiles {
		return 0, fmt.Errorf("the limit of open files is %d, and %d are needed for %d processes with a connection each: raise it (ulimit -n %d, LimitNOFILE= of systemd, --ulimit nofile= of podman and docker)",
			limit.Cur, neededFiles, node.MaxClients, neededFiles)
	}
	return limit.Cur - neededFiles, nil
}

// maxSegments returns how many descriptors of host memory there may be: of what is
// kept ready, and of what clients have. They leave half of what more says.
func maxSegments(more uint64) (ready, held int) {
	quarter := more / 4
	return int(min(quarter, node.MaxClients)), int(quarter)
}
