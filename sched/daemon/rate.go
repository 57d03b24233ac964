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

// take takes one token, on credit if there is none, and returns how long it
// takes until the debt is paid.
func (b *bucket) take(t time.Time) time.Duration {
	b.tokens = min(b.tokens+t.Sub(b.at).Seconds()*b.rate, b.burst) - 1
	b.at = t
	if b.tokens >= 0 {
		return 0
	}
	return time.Duration(-b.tokens / b.rate * float64(time.Second))
}

// takeIf takes one token if there is one.
func (b *bucket) takeIf(t time.Time) bool {
	if b.take(t) == 0 {
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

func (r *rate) take() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.take(time.Now())
}
