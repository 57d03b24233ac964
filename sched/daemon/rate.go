// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"sync"
	"time"
)

// bucket is a token bucket. The zero time makes it start full.
type bucket struct {
	rate, burst float64 // tokens per second, most tokens at once
	tokens      float64
	at          time.Time
}

// take takes n tokens, on credit if there are too few, and returns how long it
// takes until the debt is paid.
func (b *bucket) take(t time.Time, n float64) time.Duration {
	b.tokens = min(b.tokens+t.Sub(b.at).Seconds()*b.rate, b.burst) - n
	b.at = t
	if b.tokens >= 0 {
		return 0
	}
	return time.Duration(-b.tokens / b.rate * float64(time.Second))
}

// takeIf takes one token if there is one.
func (b *bucket) takeIf(t time.Time) bool {
	if b.take(t, 1) == 0 {
		return true
	}
	b.tokens++
	return false
}

// rate is a bucket that the readers of one account's connections share.
type rate struct {
	mu sync.Mutex
	b  bucket
}

func newRate() *rate { return &rate{b: bucket{rate: frameRate, burst: frameBurst}} }

func (r *rate) take(n float64) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.take(time.Now(), n)
}

// takeIf takes one token if there is one.
func (r *rate) takeIf() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.takeIf(time.Now())
}
