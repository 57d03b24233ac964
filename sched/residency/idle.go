// SPDX-License-Identifier: Apache-2.0

package residency

import (
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Limits of Config.SuspendAfter, the time after which idle clients are suspended.
const (
	MinSuspendAfter = time.Second
	MaxSuspendAfter = 365 * 24 * time.Hour
)

// setIdleTime changes after what time a tenant's clients are suspended; 0: SuspendAfter;
// less: never.
func (mem *Memory) setIdleTime(tenant string, after time.Duration) {
	switch {
	case after == 0:
		delete(mem.idleTimes, tenant)
	case after > 0:
		after = base.Clamp(after, MinSuspendAfter, MaxSuspendAfter)
		fallthrough
	default:
		mem.idleTimes[tenant] = after
	}
}

// IdleTime returns after what time a client is suspended; 0: never.
func (mem *Memory) IdleTime(id base.ClientID) time.Duration {
	m := mem.members[id]
	if m == nil || mem.rooms == nil {
		return 0
	}
	if after, ok := mem.idleTimes[m.account]; ok {
		return max(after, 0)
	}
	return mem.cfg.SuspendAfter
}

// SuspendsIdle says whether any client is suspended when it is idle.
func (v View) SuspendsIdle() bool {
	if v.mem.rooms == nil {
		return false
	}
	for _, after := range v.mem.idleTimes {
		if after > 0 {
			return true
		}
	}
	return v.mem.cfg.SuspendAfter > 0
}
