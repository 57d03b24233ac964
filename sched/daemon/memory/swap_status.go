// SPDX-License-Identifier: Apache-2.0

package memory

import (
	"fmt"
	"time"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
)

// noRoomLately is for how long the refusal of a reservation is a problem.
const noRoomLately = time.Minute

var apiKeeps = map[sched.Keep]api.MemoryMode{
	sched.Swapped:  api.MemoryMode_MEMORY_MODE_SWAP,
	sched.Resident: api.MemoryMode_MEMORY_MODE_RESIDENT,
	sched.Managed:  api.MemoryMode_MEMORY_MODE_MANAGED,
}

// SwapStatus describes where the memory of a GPU's clients is, and who waits for
// whom for too long.
func (mem *Memory) SwapStatus(g *node.GPU, share int) (out *api.Swap, problems []string) {
	s := g.Core.MemorySnapshot()
	if s == nil {
		return nil, nil
	}
	out = &api.Swap{
		CapacityBytes: s.Capacity, PromisedBytes: s.Promised,
		ArenaLimitBytes: mem.Opts.SwapMemory, ArenaUsedBytes: mem.Pool.Used(), ArenaReadyBytes: mem.Pool.Ready(), ArenaFileBytes: mem.Pool.Filed(),
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
		m := mem.MemberOf(g, has.Client)
		if m == nil {
			continue
		}
		out.ArenaBytes += m.Arena.Given() - m.Arena.Filed()
		pinned[m.Client.Account] += has.Fixed
		if has.Stranded != 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: process %d (%.16q) is not granted: %s", g.Index, m.Client.PID, m.Client.Command, strandedText(has.Stranded)))
		}
		if has.Stalled && s.Lacking > 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: process %d (%.16q) does not move its memory off the GPU; others wait for %d MiB", g.Index, m.Client.PID, m.Client.Command, s.Lacking>>20))
		}
	}
	return out, append(problems, mem.largestPinner(g, pinned)...)
}

// largestPinner names the tenant with most memory that cannot be moved, where memory was
// refused of late.
func (mem *Memory) largestPinner(g *node.GPU, pinned map[string]uint64) (problem []string) {
	if g.NoRoom == 0 || loop.Now().Sub(g.NoRoom) > noRoomLately {
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
	c, uid := mem.TenantOf(largest)
	return []string{fmt.Sprintf("GPU %d: memory was refused of late; processes say that they cannot move %d MiB, of which %s has most, %d MiB",
		g.Index, sum>>20, api.Tenant(c, uid), pinned[largest]>>20)}
}

// MemoryOfClient fills in where a client's memory is; false: that is not known.
func (mem *Memory) MemoryOfClient(g *node.GPU, cl *node.Client, c *api.Client) (known bool) {
	has, known := g.Core.ClientMemory(cl.ID)
	m := mem.MemberOf(g, cl.ID)
	if !known || m == nil {
		return false
	}
	c.MemoryMode = apiKeeps[has.Keep]
	c.ResidentBytes, c.FixedBytes, c.AwayBytes = has.Resident, has.Fixed, has.Away
	c.RoomBytes, c.LacksBytes, c.Stalled, c.Suspended = has.Room, has.Lacks, has.PassedOver, has.Suspended
	if att := cl.Attached[g]; att != nil {
		c.FixedReason = node.FixedText(att.Fixed)
	}
	c.ArenaBytes, c.FileBytes = m.Arena.Given()-m.Arena.Filed(), m.Arena.Filed()
	c.SwappedOutBytes, c.SwappedInBytes = has.Out, has.In
	return true
}

func strandedText(lacks uint64) string {
	return fmt.Sprintf("it waits for a place: others have made memory unmovable since (by exporting or registering it), and %d MiB do not fit beside that", lacks>>20)
}
