// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"slices"
	"time"

	"github.com/nvshare/nvshare/sched/base"
)

// Kernels that use few of the GPU's processors leave the others idle, however well turns or
// slices are passed on: only an overlap group fills them. The core never makes a group. It
// says which tenants would gain.
const (
	mostFilled = 0.5              // of the processors: what uses more leaves no room for as much again
	spaceLooks = 3                // one after the other, of the same tenants, before they are named
	staleLook  = 30 * time.Second // later, a look says nothing any more
)

// spaceLook is what the latest looks say.
type spaceLook struct {
	tenants []string  // that used the GPU, in the order of their names
	looks   int       // at these tenants, in which the processors were hardly filled
	most    float64   // the part that was filled at most
	at      base.Time // the latest look
}

// Space says that tenants together leave most of the GPU's processors idle.
type Space struct {
	Tenants []string // that an overlap group would let run at the same time; empty: there are none
	Filled  float64  // part of the processors that their kernels use
}

// filled takes note of a look at the GPU.
func (c *GPU) filled(ev Filled) {
	tenants := c.groupable()
	if c.mode != Auto || ev.Part <= 0 || ev.Part > mostFilled || len(tenants) < 2 {
		c.looks = spaceLook{}
		return
	}
	r := &c.looks
	if !slices.Equal(tenants, r.tenants) || c.now.Sub(r.at) >= staleLook {
		*r = spaceLook{tenants: tenants}
	}
	r.looks++
	r.most, r.at = max(r.most, ev.Part), c.now
}

// groupable returns the tenants that use the GPU, if all of them could be in a group.
func (c *GPU) groupable() (tenants []string) {
	for _, cl := range c.inOrder() {
		t := cl.tenant
		switch {
		case !cl.connected || c.state(cl) == StateIdle:
		case t.slot != nil || t.share.Priority == Latency:
			return nil
		case !slices.Contains(tenants, t.displayName()):
			tenants = append(tenants, t.displayName())
		}
	}
	slices.Sort(tenants)
	return tenants
}

// space returns what there is to say at a time.
func (c *GPU) space(now base.Time) Space {
	r := &c.looks
	if c.mode != Auto || r.looks < spaceLooks || now.Sub(r.at) >= staleLook {
		return Space{}
	}
	return Space{slices.Clone(r.tenants), r.most}
}
