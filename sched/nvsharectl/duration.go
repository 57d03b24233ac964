// SPDX-License-Identifier: Apache-2.0

package main

import (
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// durationFlag is a flag: a number of seconds, or with a unit, as every duration of
// nvsharectl.
type durationFlag time.Duration

func (d *durationFlag) String() string { return time.Duration(*d).String() }
func (d *durationFlag) Type() string   { return "time" }
func (d *durationFlag) Set(s string) error {
	v, err := api.ParseDuration(s)
	if err == nil {
		*d = durationFlag(v)
	}
	return err
}
