// SPDX-License-Identifier: Apache-2.0

package daemon

import "time"

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
