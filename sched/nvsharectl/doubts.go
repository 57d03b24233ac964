// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os/user"
	"regexp"
	"strconv"

	"github.com/nvshare/nvshare/sched/api"
)

// fewMiB is a memory limit with which no CUDA program starts, bytes.
const fewMiB = 256 << 20

var bareNumber = regexp.MustCompile(`^[0-9.]+$`)

// doubts returns why a request that was carried out may not be what its author meant.
func (f *shareFlags) doubts(req *api.SetShareRequest, r *api.StatusResponse) (doubts []string) {
	add := func(format string, args ...any) { doubts = append(doubts, fmt.Sprintf(format, args...)) }
	if req.Uid != nil && *req.Uid != 0 {
		_, err := user.LookupId(strconv.FormatUint(uint64(*req.Uid), 10))
		if err != nil && !hasUser(r, *req.Uid) {
			add("no user of this host has the number %d, and no process of such a user is on a GPU", *req.Uid)
		}
	}
	limit, text := req.GetMemoryBytes(), *f.values[memoryLimitKey]
	if limit == 0 {
		return doubts
	}
	if limit < fewMiB {
		add("a memory limit of %s is too small for any CUDA program%s", api.FormatMemory(limit), unitMeant(text))
	}
	for _, g := range r.GetGpus() {
		if one := req.Gpu == "" || isGPU(g, req.Gpu); one && g.MemoryBytes != 0 && limit > g.MemoryBytes {
			add("GPU %d has %s: a memory limit of %s limits nothing there", g.Index, size(g.MemoryBytes), api.FormatMemory(limit))
		}
	}
	return doubts
}

// memoryLimitKey is the flag of the memory limit.
const memoryLimitKey = "memory-limit"

// unitMeant says what a number without a unit means.
func unitMeant(text string) string {
	if !bareNumber.MatchString(text) {
		return ""
	}
	return fmt.Sprintf(": a number without a unit is MiB; did you mean %sGi?", text)
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
