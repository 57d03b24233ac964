// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Memory returns what host memory a process's cgroup may have, and what is left of that, bytes: the limits of those
// above it hold too. false: there is no limit. root is of the host's file system; self is allowed for pid.
func Memory(root, pid string) (limit, left uint64, limited bool) {
	text, _ := os.ReadFile(filepath.Join(root, "proc", pid, "cgroup"))
	limit, left = math.MaxUint64, math.MaxUint64
	for line := range strings.Lines(string(text)) {
		path, v2 := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !v2 {
			continue
		}
		for dir := filepath.Join("/", path); ; dir = filepath.Dir(dir) {
			at := filepath.Join(root, "sys/fs/cgroup", dir)
			if most, ok := number(filepath.Join(at, "memory.max")); ok {
				limit, left, limited = min(limit, most), min(left, most-min(most, used(at))), true
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
func used(dir string) uint64 {
	current, _ := number(filepath.Join(dir, "memory.current"))
	stat, _ := os.ReadFile(filepath.Join(dir, "memory.stat"))
	for line := range strings.Lines(string(stat)) {
		if text, is := strings.CutPrefix(strings.TrimSpace(line), "inactive_file "); is {
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
