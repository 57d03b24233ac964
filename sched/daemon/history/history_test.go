// SPDX-License-Identifier: Apache-2.0

package history

import (
	"fmt"
	"slices"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// What is rare outlives the turns, and what is gone is counted.
func TestHistoryForgetsTurnsFirst(t *testing.T) {
	h := New(1)
	h.AddChange(&Event{Kind: api.EventType_EVENT_TYPE_START})
	h.AddCaused(&Event{Kind: api.EventType_EVENT_TYPE_FENCE})
	const turns = keptTurns + 100
	for i := range turns {
		h.AddTurn(&Event{Kind: api.EventType_EVENT_TYPE_GRANT, UUID: fmt.Sprint(i % 2)})
	}
	h.AddChange(&Event{Kind: api.EventType_EVENT_TYPE_SET})

	var all []Event
	seq, lost := uint64(0), uint64(0)
	for {
		found, next, gone := h.Since(seq, "")
		if len(found) > MaxAnswer {
			t.Fatalf("%d events at once", len(found))
		}
		if len(found) == 0 {
			break
		}
		all, seq, lost = append(all, found...), next, lost+gone
	}
	if lost != 100 || len(all) != keptTurns+3 {
		t.Errorf("%d events, %d lost", len(all), lost)
	}
	if all[0].Kind != api.EventType_EVENT_TYPE_START || all[1].Kind != api.EventType_EVENT_TYPE_FENCE || all[2].Seq != 103 || all[len(all)-1].Seq != turns+3 {
		t.Errorf("first %+v, then %+v and %+v, last %+v", all[0], all[1], all[2], all[len(all)-1])
	}
	if !slices.IsSortedFunc(all, func(a, b Event) int { return int(a.Seq) - int(b.Seq) }) {
		t.Error("not in order")
	}
	// A GPU of which nothing is in reach costs one answer, not one for each page.
	if found, next, _ := h.Since(0, "other"); len(found) != 0 || next != turns+3 {
		t.Errorf("%d events, next %d", len(found), next)
	}
	// Of a scheduler that has done less.
	if found, _, lost := h.Since(1<<40, ""); len(found) == 0 || lost != 100 {
		t.Errorf("%d events, %d lost", len(found), lost)
	}
}
