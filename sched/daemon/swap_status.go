// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"time"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/history"
)

var apiKeeps = map[sched.Keep]api.MemoryMode{
	sched.Swapped:  api.MemoryMode_MEMORY_MODE_SWAP,
	sched.Resident: api.MemoryMode_MEMORY_MODE_RESIDENT,
	sched.Managed:  api.MemoryMode_MEMORY_MODE_MANAGED,
}

// swapStatus describes where the memory of a GPU's clients is, and who waits for
// whom for too long.
func (d *Daemon) swapStatus(g *gpu) (out *api.Swap, problems []string) {
	s := g.swap
	if s == nil {
		return nil, nil
	}
	out = &api.Swap{
		CapacityBytes: s.residency.Capacity(), PromisedBytes: s.residency.Promised(),
		ArenaLimitBytes: d.opts.SwapMemory, ArenaUsedBytes: d.arena.Used(), ArenaReadyBytes: d.arena.Ready(),
		OutBytes: s.out.bytes, InBytes: s.in.bytes, OutNs: int64(s.out.took), InNs: int64(s.in.took),
		Outs: s.out.times, Ins: s.in.times, OutBytesPerSecond: s.out.rate, InBytesPerSecond: s.in.rate,
		Refused: s.refused, SharePercent: uint32(d.swapShareOf(g.UUID)),
	}
	lacking := s.residency.Lacking()
	for _, id := range s.residency.IDs() {
		o, _ := s.residency.Occupancy(id)
		out.ResidentBytes += o.Resident
		out.FixedBytes += o.Fixed
		out.AwayBytes += o.Away
		m := s.members[id]
		if m == nil {
			continue
		}
		out.ArenaBytes += m.arena.Given()
		if m.stranded != 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: process %d (%.16q) is not granted: %s", g.Index, m.client.PID, m.client.Command, strandedText(s.residency.Stranded(id))))
		}
		if m.stalled && lacking > 0 {
			problems = append(problems, fmt.Sprintf("GPU %d: process %d (%.16q) does not move its memory off the GPU; others wait for %d MiB", g.Index, m.client.PID, m.client.Command, lacking>>20))
		}
	}
	return out, problems
}

// memoryOfClient fills in where a client's memory is.
func (d *Daemon) memoryOfClient(g *gpu, cl *client, c *api.Client) {
	if g.swap == nil {
		return
	}
	o, ok := g.swap.residency.Occupancy(cl.id)
	m := g.swap.members[cl.id]
	if !ok || m == nil {
		return
	}
	c.MemoryMode = apiKeeps[o.Keep]
	c.ResidentBytes, c.FixedBytes, c.AwayBytes = o.Resident, o.Fixed, o.Away
	c.RoomBytes, c.LacksBytes, c.Stalled = o.Room, o.Lacks, o.Stalled
	c.ArenaBytes = m.arena.Given()
	c.SwappedOutBytes, c.SwappedInBytes = m.moved.Out, m.moved.In
}

func notResident(g *gpu, who string, err error) error {
	return status.Errorf(codes.FailedPrecondition, "GPU %d: the memory of %s cannot be kept on it: %v", g.Index, who, err)
}

// strandedRetry is after how long it is tried again to place what had no place: what is
// on the GPU besides clients may have gone.
const strandedRetry = 30 * time.Second

// strand is for a client that the driver has refused memory. If it has no place beside
// what others have made unmovable since (exported, registered), it is granted nothing
// before there is one: it would keep the GPU from others for nothing.
func (d *Daemon) strand(g *gpu, id sched.ClientID, m *clientMemory) {
	lacks := g.swap.residency.Stranded(id)
	if lacks == 0 || m.stranded != 0 {
		return
	}
	m.stranded = now().Add(strandedRetry)
	text := strandedText(lacks)
	d.turn(time.Now(), g, id, &history.Event{Kind: api.EventType_EVENT_TYPE_STALL, Text: text})
	d.tell(m.client.subject(), logrus.WarnLevel, fmt.Sprintf("GPU %d: %s", g.Index, text))
	d.step(g, sched.SetStranded{Client: id, On: true})
	d.planLook(g)
}

func strandedText(lacks uint64) string {
	return fmt.Sprintf("it waits for a place: others have made memory unmovable since (by exporting or registering it), and %d MiB do not fit beside that", lacks>>20)
}
