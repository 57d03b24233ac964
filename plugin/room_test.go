// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
)

// moves is a scheduler that moves containers when the test says so.
type moves struct {
	asked chan string
	end   chan error
}

// fragmented is a node of two GPUs half of each of which is promised: a may move, b may not.
func fragmented(t *testing.T) (*placing, *moves) {
	t.Helper()
	p, m := newPlacing(t, 2), &moves{make(chan string), make(chan error)}
	p.containers.MakeRoom(func(_ context.Context, id, uuid string) error {
		m.asked <- id + " " + uuid
		return <-m.end
	})
	pod, ctr := podOf("a", "id-a", says("gpu=nvshare.com/gpu=0", "gpu-migratable=true", "gpu-core-request=50"))
	if _, _, err := p.CreateContainer(t.Context(), pod, ctr); err != nil {
		t.Fatal(err)
	}
	if on, err := p.create("b", "gpu=nvshare.com/gpu=1", "gpu-core-request=50"); err != nil || on != "1" {
		t.Fatalf("b on %q: %v", on, err)
	}
	return p, m
}

// moveEnded waits until a move has ended, with or without room.
func (p *placing) moveEnded() {
	p.t.Helper()
	cs := p.containers
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		cs.mu.Lock()
		running := cs.reserved != nil && cs.reserved.until.IsZero()
		cs.mu.Unlock()
		if !running {
			return
		}
		if time.Now().After(end) {
			p.t.Fatal("the move has not ended")
		}
	}
}

func (p *placing) refused(name, want string, annotations ...string) {
	p.t.Helper()
	if on, err := p.create(name, annotations...); err == nil || !strings.Contains(err.Error(), want) {
		p.t.Errorf("%s: given %q, %v, want a refusal with %q", name, on, err, want)
	}
}

var big = []string{"gpu=1", "gpu-core-request=80"}

// A pod that fits on no GPU is refused while another moves for it, and then admitted. Nobody
// else gets what is kept for the two meanwhile.
func TestRoomIsMade(t *testing.T) {
	p, m := fragmented(t)
	p.refused("big", "ml/a/main moves from GPU 0 ("+gpuID(0)+") to GPU 1 ("+gpuID(1)+") to make room: try again", big...)
	if got, want := <-m.asked, "id-a "+gpuID(1); got != want {
		t.Errorf("asked to move %q, want %q", got, want)
	}
	p.refused("big", "ml/a/main moves to GPU 1 ("+gpuID(1)+") to make room: try again", big...)
	p.refused("small", "cannot be promised", "gpu=nvshare.com/gpu=1", "gpu-core-request=10") // kept for a
	m.end <- nil
	p.moveEnded()
	p.refused("small", "cannot be promised", "gpu=nvshare.com/gpu=0", "gpu-core-request=30") // kept for big
	if on, err := p.create("big", big...); err != nil || on != "0" {
		t.Fatalf("big on %q: %v", on, err)
	}
	if c := p.containers.want["id-a"]; !slices.Equal(c.GPUs, []string{gpuID(1)}) {
		t.Errorf("a counts on %s", c.GPUs)
	}
	if on, err := p.create("small", "gpu=1", "gpu-core-request=20"); err != nil || on != "0" {
		t.Errorf("beside big: %q, %v", on, err)
	}
	p.refused("more", "too little time", "gpu=1", "gpu-core-request=1")
}

// A tenant that could not move is not asked again for a while, and the pod's error says why.
func TestRoomCannotBeMade(t *testing.T) {
	p, m := fragmented(t)
	now := time.Unix(1e9, 0)
	p.containers.now = func() time.Time { return now }
	p.refused("big", "try again", big...)
	<-m.asked
	m.end <- errors.New("process 7 has a peer's memory open")
	p.moveEnded()
	p.refused("big", "ml/a/main could not move away: process 7 has a peer's memory open", big...)
	if on, err := p.create("small", "gpu=nvshare.com/gpu=1", "gpu-core-request=50"); err != nil {
		t.Errorf("room is kept that was not made: %q, %v", on, err)
	}
	p.remove("small")
	now = now.Add(moveAgain)
	p.refused("big", "try again", big...)
	<-m.asked
	m.end <- nil
	p.moveEnded()
	if _, err := p.create("big", big...); err != nil {
		t.Error(err)
	}
}

// Room that was made is given to others once its container is gone, or does not come.
func TestRoomIsNotKeptForEver(t *testing.T) {
	for name, leave := range map[string]func(p *placing, now *time.Time){
		"the pod ends": func(p *placing, _ *time.Time) { p.containers.EndPod("sandbox-big") },
		"time passes":  func(_ *placing, now *time.Time) { *now = now.Add(reservedFor) },
	} {
		t.Run(name, func(t *testing.T) {
			p, m := fragmented(t)
			now := time.Unix(1e9, 0)
			p.containers.now = func() time.Time { return now }
			p.refused("big", "try again", big...)
			<-m.asked
			m.end <- nil
			p.moveEnded()
			p.refused("other", "too little time", big...)
			leave(p, &now)
			if on, err := p.create("other", big...); err != nil || on != "0" {
				t.Errorf("other on %q: %v", on, err)
			}
		})
	}
	t.Run("the pod ends while the other one moves", func(t *testing.T) {
		p, m := fragmented(t)
		p.refused("big", "try again", big...)
		<-m.asked
		p.containers.EndPod("sandbox-big")
		m.end <- nil
		p.moveEnded()
		if on, err := p.create("other", big...); err != nil || on != "0" {
			t.Errorf("other on %q: %v", on, err)
		}
	})
}

// Nobody moves where no move helps, for containers that name their GPU, and without a
// scheduler that moves.
func TestNobodyMovesInVain(t *testing.T) {
	p, m := fragmented(t)
	p.refused("two", "too little time", "gpu=2", "gpu-core-request=60")
	p.refused("named", "cannot be promised", "gpu=nvshare.com/gpu=0", "gpu-core-request=80")
	p.containers.move = nil
	p.refused("big", "too little time", big...)
	select {
	case asked := <-m.asked:
		t.Errorf("asked to move %s", asked)
	default:
	}
	if p.containers.reserved != nil {
		t.Error("a move is under way")
	}
}

// The pods of one namespace have only so many containers moved for them in a time, also such as are
// never created in the end. Those of another namespace have theirs.
func TestMovesOfANamespaceAreBounded(t *testing.T) {
	p, m := fragmented(t)
	now := time.Unix(1e9, 0)
	p.containers.now = func() time.Time { return now }
	for i := range maxMoves {
		p.refused("big", "try again; until then", big...)
		<-m.asked
		m.end <- errors.New("it stays")
		p.moveEnded()
		now = now.Add(time.Second)
		clear(p.containers.stuck)
		if i == 0 {
			now = now.Add(time.Minute)
		}
	}
	p.refused("big", "namespace ml has had 6 containers moved within 10m0s, which is the most: try again in 8m54s; until then: ", big...)
	pod, ctr := podOf("other", "id-other", says(big...))
	pod.Namespace = "web"
	if _, _, err := p.CreateContainer(t.Context(), pod, ctr); err == nil || !strings.Contains(err.Error(), "to make room") {
		t.Errorf("a pod of another namespace: %v", err)
	}
	<-m.asked
	m.end <- errors.New("it stays")
	p.moveEnded()
	clear(p.containers.stuck)
	for _, later := range []time.Duration{movesWithin - time.Minute, 2 * movesWithin} {
		now = now.Add(later)
		p.refused("big", "try again; until then", big...)
		<-m.asked
		m.end <- errors.New("it stays")
		p.moveEnded()
		clear(p.containers.stuck)
	}
	if n := len(p.containers.moved); n != 1 {
		t.Errorf("%d namespaces are remembered", n)
	}
}
