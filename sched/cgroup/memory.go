// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// hierarchy says where a kind of cgroups is, and what its files and the line of unread files in memory.stat are called.
type hierarchy struct{ dir, limit, usage, unread string }

var (
	unified = hierarchy{"sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "}
	// A cgroup v1 without a limit has a number as well, a little below 2^63.
	v1 = hierarchy{"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "}
)

const noLimit = 1 << 62

// Memory returns what host memory a process's cgroup may have, and what is left of that, bytes: the limits of those
// above it hold too. false: there is no limit. root is of the host's file system; self is allowed for pid.
func Memory(root, pid string) (limit, left uint64, limited bool) {
	text, _ := os.ReadFile(filepath.Join(root, "proc", pid, "cgroup"))
	limit, left = math.MaxUint64, math.MaxUint64
	for line := range strings.Lines(string(text)) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) < 3 {
			continue
		}
		h := unified
		switch {
		case slices.Contains(strings.Split(fields[1], ","), "memory"):
			h = v1
		case fields[1] != "":
			continue
		}
		for dir := filepath.Join("/", fields[2]); ; dir = filepath.Dir(dir) {
			at := filepath.Join(root, h.dir, dir)
			if most, ok := number(filepath.Join(at, h.limit)); ok && most < noLimit {
				limit, left, limited = min(limit, most), min(left, most-min(most, h.used(at))), true
			}
			if dir == "/" {
				break
			}
		}
	}
	return limit, left, limited
}

// used returns what a cgroup has of memory, bytes, but for pages of files that nobody reads: the kernel fills memory with
// them, and gives them up first.
func (h hierarchy) used(dir string) uint64 {
	current, _ := number(filepath.Join(dir, h.usage))
	stat, _ := os.ReadFile(filepath.Join(dir, "memory.stat"))
	for line := range strings.Lines(string(stat)) {
		if text, is := strings.CutPrefix(strings.TrimSpace(line), h.unread); is {
			cache, _ := strconv.ParseUint(text, 10, 64)
			return current - min(current, cache)
		}
	}
	return current
}

// number reads a file with one number; false: there is none, or another word.
func number(path string) (uint64, bool) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil
}
