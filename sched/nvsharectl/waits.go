// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strconv"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// halfAndMost prints how long half of something, and 99 of 100, took at most.
func halfAndMost(s *api.Spread) string {
	if s.GetCount() == 0 {
		return "-"
	}
	return brief(s.P50Ns) + "/" + brief(s.P99Ns)
}

// brief prints nanoseconds in at most five characters.
func brief(ns int64) string {
	units := []struct {
		of   int64
		name string
	}{{int64(time.Hour), "h"}, {int64(time.Minute), "m"}, {int64(time.Second), "s"}, {int64(time.Millisecond), "ms"}, {int64(time.Microsecond), "µs"}}
	for _, u := range units {
		switch {
		case ns >= 10*u.of:
			return strconv.FormatInt(ns/u.of, 10) + u.name
		case ns >= u.of:
			tenths := ns * 10 / u.of
			return strconv.FormatInt(tenths/10, 10) + "." + strconv.FormatInt(tenths%10, 10) + u.name
		}
	}
	return "0"
}
