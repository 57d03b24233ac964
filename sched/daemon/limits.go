// SPDX-License-Identifier: Apache-2.0

package daemon

import "time"

const (
	// maxClients is the number of processes on one node.
	maxClients = 4096
	// maxConnections is the number of connections and of processes on one node,
	// together: a process may connect anew before its old connection has ended.
	maxConnections = 2 * maxClients
	// maxContainers is how many container names the plugin may have told us.
	maxContainers = 4096
	// maxShares is how many tenants may have shares or memory limits of their own.
	maxShares = 4096
	// maxNamed is how many tenants an error names, where more are concerned.
	maxNamed = 8
	// maxGPUs is how many GPUs a container's description may name.
	maxGPUs = 128
	// refusalPause is the least time between two events of one tenant that say that its
	// memory limit refused memory, and between two that say that a GPU of its is not known.
	refusalPause = 10 * time.Second
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
	// persistCost is how many frames a record in the state file counts for. clientsPerWork
	// is how many clients a pass looks at, or tells of a change, for the cost of a frame.
	persistCost, clientsPerWork = 8, 16
	// acceptNice is how much nicer the thread is that takes connections. Learning
	// who a process is takes a tenth of a millisecond of it; a flood of connections
	// would take every other turn of a processor from the loop otherwise.
	acceptNice = 5
	// maxEarlyReserves is how many RESERVE may wait for a search for GPUs.
	maxEarlyReserves = 8
	// tenantLogRate and tenantLogBurst bound the lines that tenants can cause;
	// more are written for debugging only.
	tenantLogRate  = 5 // per second
	tenantLogBurst = 50

	// noRoomLately is for how long the refusal of a reservation is a problem.
	noRoomLately = time.Minute
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
	// maxOutbox is how many decisions of a GPU's may wait for that. A client that adds to
	// more is disconnected.
	maxOutbox = 1024
	// recordPause is how long a change may go unrecorded of which somebody tells again.
	recordPause = 200 * time.Millisecond
	// recordRetry is the pause after another record could not be written, for which nothing
	// waits.
	recordRetry = 2 * time.Second
)
