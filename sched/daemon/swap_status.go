// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
)

// noRoomLately is for how long the refusal of a reservation is a problem.
const noRoomLately = time.Minute

var apiKeeps = map[sched.Keep]api.MemoryMode{
	sched.Swapped:  api.MemoryMode_MEMORY_MODE_SWAP,
	sched.Resident: api.MemoryMode_MEMORY_MODE_RESIDENT,
	sched.Managed:  api.MemoryMode_MEMORY_MODE_MANAGED,
}

// swapStatus describes where the memory of a GPU's clients is, and who waits for
// whom for too long.
func (mem *memory) swapStatus(g *gpu, share int) (out *api.Swap, problems []string) {
	s := g.core.MemorySnapshot()
	if s == nil {
		return nil, nil
	}
	out = &api.Swap{
		CapacityBytes: s.Capacity, PromisedBytes: s.Promised,
		ArenaLimitBytes: mem.opts.SwapMemory, ArenaUsedBytes: mem.pool.Used(), ArenaReadyBytes: mem.pool.Ready(), ArenaFileBytes: mem.pool.Filed(),
		OutBytes: s.Out.Bytes, InBytes: s.In.Bytes, OutNs: int64(s.Out.Took), InNs: int64(s.In.Took),
		Outs: s.Out.Times, Ins: s.In.Times, OutBytesPerSecond: s.Out.Rate, InBytesPerSecond: s.In.Rate,
		Refused: s.Refused, SharePercent: uint32(share), Suspends: s.Suspends,
	}
	pinned := map[string]uint64{} // by account
	for i := range s.Clients {
		has := &s.Clients[i]
		out.ResidentBytes += has.Resident
		out.FixedBytes += has.Fixed
		out.AwayBytes += has.Away
		if has.Suspended {
			out.Suspended++
		}
		m := mem.memberOf(g, has.Client)
		if m == nil {
			continue
		}
		out.ArenaBytes += m.arena.Given() - m.arena.Filed()
		pinned[m.client.Account] += has.Fixed
		if has.Stranded != 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: process %d (%.16q) is not granted: %s", g.Index, m.client.PID, m.client.Command, strandedText(has.Stranded)))
		}
		if has.Stalled && s.Lacking > 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: process %d (%.16q) does not move its memory off the GPU; others wait for %d MiB", g.Index, m.client.PID, m.client.Command, s.Lacking>>20))
		}
	}
	return out, append(problems, mem.largestPinner(g, pinned)...)
}

// largestPinner names the tenant with most memory that cannot be moved, where memory was
// refused of late.
func (mem *memory) largestPinner(g *gpu, pinned map[string]uint64) (problem []string) {
	if g.noRoom == 0 || now().Sub(g.noRoom) > noRoomLately {
		return nil
	}
	largest, sum := "", uint64(0)
	for account, n := range pinned {
		sum += n
		if n > pinned[largest] || n == pinned[largest] && n > 0 && account < largest {
			largest = account
		}
	}
	if sum == 0 {
		return nil
	}
	c, uid := mem.tenantOf(largest)
	return []string{fmt.Sprintf("GPU %d: memory was refused of late; processes say that they cannot move %d MiB, of which %s has most, %d MiB",
		g.Index, sum>>20, api.Tenant(c, uid), pinned[largest]>>20)}
}

// memoryOfClient fills in where a client's memory is; false: that is not known.
func (mem *memory) memoryOfClient(g *gpu, cl *client, c *api.Client) (known bool) {
	has, known := g.core.ClientMemory(cl.id)
	m := mem.memberOf(g, cl.id)
	if !known || m == nil {
		return false
	}
	c.MemoryMode = apiKeeps[has.Keep]
	c.ResidentBytes, c.FixedBytes, c.AwayBytes = has.Resident, has.Fixed, has.Away
	c.RoomBytes, c.LacksBytes, c.Stalled, c.Suspended = has.Room, has.Lacks, has.PassedOver, has.Suspended
	if att := cl.attached[g]; att != nil {
		c.FixedReason = fixedText(att.fixed)
	}
	c.ArenaBytes, c.FileBytes = m.arena.Given()-m.arena.Filed(), m.arena.Filed()
	c.SwappedOutBytes, c.SwappedInBytes = has.Out, has.In
	return true
}

func strandedText(lacks uint64) string {
	return fmt.Sprintf("it waits for a place: others have made memory unmovable since (by exporting or registering it), and %d MiB do not fit beside that", lacks>>20)
}
