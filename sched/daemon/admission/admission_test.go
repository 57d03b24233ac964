// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

var start = time.Unix(1_000_000, 0)

// However many accounts take all that they can get, one that has none gets some.
func TestThereIsRoomForNewcomers(t *testing.T) {
	const max = 8192
	for _, hostile := range []int{1, 40, 1000} {
		d := New(max, 1<<36)
		for taken := true; taken; {
			taken = false
			for i := range hostile {
				if _, err := d.Connect(fmt.Sprint("hostile ", i), start.Add(time.Duration(i)*time.Hour)); err == nil {
					taken = true
				}
			}
		}
		const processes = 3 // of a job
		for i := range processes {
			if _, err := d.Connect("honest", start); err != nil {
				t.Errorf("beside %d hostile accounts with %d of %d connections: connection %d: %v", hostile, d.connections, max, i+1, err)
			}
		}
	}
}

func TestAccountsConnectAtABoundedRate(t *testing.T) {
	d := New(8192, 1<<36)
	in := 0
	for range 100_000 {
		if a, err := d.Connect("a", start); err == nil {
			in++
			a.Disconnect()
		}
	}
	if most := 2 * connectBurst; in != most {
		t.Errorf("%d connections at once, want %d", in, most)
	}
	if _, err := d.Connect("a", start.Add(time.Second)); err != nil {
		t.Errorf("a second later: %v", err)
	}
	if _, err := d.Connect("b", start); err != nil {
		t.Errorf("another account: %v", err)
	}
}

func TestProcessesConnectAtABoundedRate(t *testing.T) {
	d := New(8192, 1<<36)
	in := 0
	for range 10 * connectBurst {
		if d.Knock(7, start) == nil {
			in++
		}
	}
	if in != connectBurst {
		t.Errorf("%d connections at once, want %d", in, connectBurst)
	}
	if err := d.Knock(7, start.Add(time.Second/connectRate)); err != nil {
		t.Errorf("a moment later: %v", err)
	}
	if err := d.Knock(8, start); err != nil {
		t.Errorf("another process: %v", err)
	}
}

// Of those that come and go, a bounded number is remembered.
func TestFewAreRemembered(t *testing.T) {
	d := New(8192, 1<<36)
	stays, _ := d.Connect("stays", start)
	for i := range 10 * maxKnown {
		_ = d.Knock(int32(i), start)
		if a, err := d.Connect(fmt.Sprint(i), start); err == nil {
			a.Disconnect()
		}
	}
	if len(d.knocks) > maxKnown || len(d.accounts) > maxKnown+1 || d.accounts["stays"] != stays {
		t.Errorf("%d processes and %d accounts are remembered, want at most %d, and the one that stays", len(d.knocks), len(d.accounts), maxKnown)
	}
}

// In ten seconds, forty accounts that ask as fast as they are let cost what all may cost
// together, and one account alone its own greatest part.
func TestCostsAreBounded(t *testing.T) {
	for _, accounts := range []int{1, 40} {
		d := New(8192, 1<<36)
		spent := 0
		for i := range accounts {
			if _, err := d.Connect(fmt.Sprint(i), start); err != nil {
				t.Fatal(err)
			}
		}
		const seconds = 10
		for _, a := range d.accounts {
			for now := start; now.Before(start.Add(seconds * time.Second)); {
				spent += 25
				now = now.Add(a.Charge(25, now))
			}
		}
		most := seconds*min(totalRate, accounts*greatestRate) + accounts*(costBurst+25)
		if spent > most {
			t.Errorf("%d accounts cost %d, want at most %d", accounts, spent, most)
		}
	}
}

// A charge above the burst is paid too, and by nobody else.
func TestGreatCostsArePaid(t *testing.T) {
	d := New(8192, 1<<36)
	a, _ := d.Connect("a", start)
	b, _ := d.Connect("b", start)
	a.Charge(10*costBurst, start)
	if wait, least := a.Charge(1, start), time.Second; wait < least {
		t.Errorf("after a charge of %d: waits for %v, want %v at least", 10*costBurst, wait, least)
	}
	if wait := b.Charge(1, start); wait != 0 {
		t.Errorf("the other account waits for %v", wait)
	}
}

func TestRefusalsAreAProblemForAWhile(t *testing.T) {
	d := New(0, 1<<36)
	_, err := d.Connect("a", start)
	if err == nil || len(err.Error()) >= 48 {
		t.Fatalf("refused with %q", err)
	}
	all, problem := d.Refused(start.Add(time.Second))
	if all != 1 || !strings.Contains(problem, err.Error()) {
		t.Errorf("%d refused: %q", all, problem)
	}
	if _, problem := d.Refused(start.Add(2 * recently)); problem != "" {
		t.Errorf("long after the latest refusal: %q", problem)
	}
}

// Processes that have host memory made, and end, get that of the node once, and then a
// bounded part of it.
func TestArenasAreMadeAtABoundedRate(t *testing.T) {
	const segment, node, seconds = 64 << 20, 1 << 36, 100
	d := New(8192, node)
	a, _ := d.Connect("a", start)
	made := uint64(0)
	now := start
	for now.Before(start.Add(seconds * time.Second)) {
		now = now.Add(max(a.AwaitArena(now), time.Millisecond))
		a.ChargeArena(segment, now)
		made += segment
	}
	if most := uint64(node + seconds*arenaRate + 2*segment); made < node || made > most {
		t.Errorf("%d MiB were made in %d s on a node with %d MiB, want at most %d", made>>20, seconds, node>>20, most>>20)
	}
	if wait := a.Charge(1, now); wait != 0 {
		t.Errorf("requests of processes that are there wait for %v", wait)
	}
}
