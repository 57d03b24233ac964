package residency

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// 3 has a limit of 1, and says each 9 s that the driver refuses it memory.
func TestHostileLiar(t *testing.T) {
	turns := everybodyWaits{map[base.ClientID]bool{}}
	arenas := NewArenas()
	still := true
	mem := New(Config{Swap: true, Capacity: 100, Physical: 104, MoveUnit: 1}, &arenas, turns, func(a base.Action) {
		if s, ok := a.(Still); ok {
			still = s.On
		}
	})
	mem.Begin(1, time.Second)
	mem.SetTenant(SetTenantMemory{Tenant: "liar", Limit: 1})
	for id := base.ClientID(1); id <= 3; id++ {
		n, tenant := uint64(20), ""
		if id == 3 {
			n, tenant = 1, "liar"
		}
		mem.Attach(Client{ID: id, CanMove: true, Tenant: tenant})
		mem.Reserve(Reserve{Client: id, Total: n})
		mem.Moved(Moved{Client: id, Seen: mem.rooms.clients[id].seq, Report: Report{Resident: n}})
		mem.Settle()
	}
	lost, rooms := 0, uint64(100)
	for at := time.Duration(0); at < time.Hour; at += time.Second {
		mem.Begin(base.Time(1+at), time.Second)
		if at%(9*time.Second) == 0 {
			mem.SetActive(3, true)
			mem.Moved(Moved{Client: 3, Epoch: 1, Seen: mem.rooms.clients[3].seq, Report: Report{Away: 1}, Stuck: true, NoMemory: true})
			mem.SetActive(3, false)
		}
		mem.unsettled = true
		mem.Settle()
		if !still && mem.Overfull() {
			lost++
		}
		rooms = min(rooms, mem.rooms.clients[1].room, mem.rooms.clients[2].room)
	}
	if lost > 60 {
		t.Errorf("41 of 104 promised: not still, and not as natively, for %d s of an hour; least room %d", lost, rooms)
	}
}
