// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/daemon/node"
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
