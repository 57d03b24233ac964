// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os/user"
	"strconv"

	"github.com/nvshare/nvshare/sched/api"
)

// doubts returns why a request that was carried out may not be what its author meant.
func (f *shareFlags) doubts(req *api.SetShareRequest, r *api.StatusResponse) (doubts []string) {
	add := func(format string, args ...any) { doubts = append(doubts, fmt.Sprintf(format, args...)) }
	if req.Uid != nil && *req.Uid != 0 {
		if !isUser(*req.Uid) && !hasUser(r, *req.Uid) {
			add("no user of this host has the number %d, and no process of such a user is on a GPU", *req.Uid)
		}
	}
	return append(doubts, doubtsOfMemory(req.GetMemoryBytes(), r, func(g *api.GPU) bool {
		return req.Gpu == "" || isGPU(g, req.Gpu)
	})...)
}

// doubtsOfMemory returns why a memory limit on these GPUs, 0: none, may not be what its author meant.
func doubtsOfMemory(limit uint64, r *api.StatusResponse, on func(g *api.GPU) bool) (doubts []string) {
	if limit == 0 {
		return nil
	}
	if limit < api.FewMemory {
		doubts = append(doubts, fmt.Sprintf("a memory limit of %s is too small for any CUDA program", api.FormatMemory(limit)))
	}
	for _, g := range r.GetGpus() {
		if on(g) && g.MemoryBytes != 0 && limit > g.MemoryBytes {
			doubts = append(doubts, fmt.Sprintf("GPU %d has %s: a memory limit of %s limits nothing there", g.Index, size(g.MemoryBytes), api.FormatMemory(limit)))
		}
	}
	return doubts
}

// warn prints doubts.
func (io streams) warn(doubts []string) {
	for _, w := range doubts {
		fmt.Fprintf(io.err, "nvsharectl: warning: %s\n", w)
	}
}

// isUser reports whether the host knows a user: from /etc/passwd, or from another service of
// nsswitch.conf, which getent asks.
func isUser(uid uint32) bool {
	number := strconv.FormatUint(uint64(uid), 10)
	if _, err := user.LookupId(number); err == nil {
		return true
	}
	_, err := hear("getent", "passwd", number)
	return err == nil
}

func hasUser(r *api.StatusResponse, uid uint32) bool {
	for _, g := range r.GetGpus() {
		for _, t := range tenantsOf(g) {
			if t.container.GetId() == "" && t.uid == uid {
				return true
			}
		}
	}
	return false
}
