package residency

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// 2 is idle, and allocates driver's memory (fixed) while 1, which was suspended, is leaving.
func TestHostileNoRoomForWhatIsThere(t *testing.T) {
	turns := everybodyWaits{map[base.ClientID]bool{}}
	arenas := NewArenas()
	still := true
	mem := New(Config{Swap: true, Capacity: 100, Physical: 104, MoveUnit: 1}, &arenas, turns, func(a base.Action) {
		if s, ok := a.(Still); ok {
			still = s.On
		}
		t.Logf("%s %+v", a.Action(), a)
	})
	mem.Begin(1, time.Second)
	for id := base.ClientID(1); id <= 2; id++ {
		mem.Attach(Client{ID: id, CanMove: true})
		mem.Reserve(Reserve{Client: id, Total: 10})
		mem.Moved(Moved{Client: id, Seen: mem.rooms.clients[id].seq, Report: Report{Resident: 10}})
		mem.Settle()
	}
	mem.Suspend(1)
	mem.Settle()
	mem.Reserve(Reserve{Client: 2, Total: 12}) // 2 more by cuArrayCreate
	mem.Settle()
	mem.Moved(Moved{Client: 2, Seen: mem.rooms.clients[2].seq, Report: Report{Resident: 12, Fixed: 2}})
	mem.Settle()
	mem.Moved(Moved{Client: 1, Seen: mem.rooms.clients[1].seq, Report: Report{Away: 10, Out: 10}})
	mem.Settle()
	for at := time.Duration(0); at < time.Hour; at += time.Second {
		mem.Begin(base.Time(1+at), time.Second)
		mem.unsettled = true
		mem.Settle()
		if at == time.Minute { // the shim has 10 in chunks and room for 10-2: it moves out 2 if it is given host memory
			mem.Moved(Moved{Client: 2, Seen: mem.rooms.clients[2].seq, Report: Report{Resident: 12, Fixed: 2}, Stuck: true, NoArena: true})
			mem.Settle()
		}
	}
	o := mem.rooms.clients[2]
	if !still {
		t.Errorf("an hour later, 22 of 104 promised, not still: 2 has room for %d, may have %d, arena %d", o.room, o.may, mem.rooms.arenaOf(o))
	}
}
