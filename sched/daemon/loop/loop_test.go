// SPDX-License-Identifier: Apache-2.0

package loop

import (
	"context"
	"runtime"
	"testing"
)

// Who asks and gives up gets back what it lent: its question is never answered later. A question
// that the loop has begun with is answered.
func TestAskIsGivenUp(t *testing.T) {
	s := New()
	go s.Run(t.Context(), func() bool { return true })
	busy, release := make(chan struct{}), make(chan struct{})
	s.Do(func() { close(busy); <-release })
	<-busy
	ctx, cancel := context.WithCancel(t.Context())
	ran, answer := false, make(chan error)
	go func() { answer <- s.Ask(ctx, func() { ran = true }) }()
	for len(s.Events) == 0 {
		runtime.Gosched()
	}
	cancel()
	if err := <-answer; err == nil {
		t.Error("a question that nobody has heard was answered")
	}
	close(release)
	if err := s.Ask(t.Context(), func() {}); err != nil || ran {
		t.Errorf("%v; ran %v", err, ran)
	}
	for range 100 {
		ctx, cancel := context.WithCancel(t.Context())
		ran = false
		if err := s.Ask(ctx, func() { cancel(); ran = true }); err != nil || !ran {
			t.Fatalf("a question that the loop has begun with: %v; ran %v", err, ran)
		}
	}
}

// A loop that has ended takes nothing more, also where there is room.
func TestDoAfterTheEnd(t *testing.T) {
	s := New()
	s.End()
	for range 100 {
		if s.Do(func() {}) {
			t.Fatal("it says that it will do what it never does")
		}
	}
}
