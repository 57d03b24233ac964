package residency

import (
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// a suspended client that never answers
func TestHostileSuspendedNeverAnswers(t *testing.T) {
	turns := everybodyWaits{map[base.ClientID]bool{}}
	arenas := NewArenas()
	still := true
	mem := New(Config{Swap: true, Capacity: 100, Physical: 104}, &arenas, turns, func(a base.Action) {
		if s, ok := a.(Still); ok {
			still = s.On
		}
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
	for at := time.Duration(0); at < time.Hour; at += time.Minute {
		mem.Begin(base.Time(1+at), time.Second)
		mem.unsettled = true
		mem.Settle()
	}
	if !still {
		t.Error("an hour later, 20 of 104 promised, not still")
	}
}

