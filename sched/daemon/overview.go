// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/loop"
)

// An overview is made in the loop, where it keeps grants waiting: 16 ms with 8 GPUs and 1,000
// processes. So it answers everybody for overviewPart times as long as it took, and for
// maxOverviewAge at most. On a small node that is not noticed.
const (
	overviewPart   = 20
	maxOverviewAge = 250 * time.Millisecond
)

// overview is the status at one instant. Nobody changes it, so goroutines may share it.
type overview struct {
	status   *api.StatusResponse
	own      []string          // problems that tenants cannot cause
	accounts map[uint64]string // of the clients in it, by id
	until    sched.Time
}

// overview returns the latest one, or a new one where that is old or d.latest was dropped:
// something was changed by somebody who may ask next.
func (d *Daemon) overview() *overview {
	began := loop.Now()
	if d.latest != nil && began < d.latest.until {
		return d.latest
	}
	o := &overview{status: d.status(), own: d.problems(), accounts: make(map[uint64]string, len(d.Clients))}
	for id, cl := range d.Clients {
		o.accounts[uint64(id)] = cl.Account
	}
	made := loop.Now()
	o.until = made.Add(min(d.overviewPart*made.Sub(began), maxOverviewAge))
	d.latest = o
	return o
}
