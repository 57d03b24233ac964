// SPDX-License-Identifier: Apache-2.0

// Package cgroup finds the cgroups (version 2) of tenants' processes, stops their processes, and has the kernel hold
// their memory on GPUs to a limit, where kernel (6.14) and driver (615) do that: the controller dmem.
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// Slack is what the kernel grants beyond a memory limit: it counts the contexts of processes, which the limit does not.
const Slack = 2 << 30

// Tree is a mounted hierarchy.
type Tree struct{ root, dir string }

// Find returns the hierarchy of a host, whose file system has this root.
func Find(root string) (Tree, error) {
	mounts, err := os.ReadFile(filepath.Join(root, "proc/self/mountinfo"))
	if err != nil {
		return Tree{}, err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && f[3] == "/" && strings.Contains(line, " - cgroup2 ") {
			return Tree{root, filepath.Join(root, f[4])}, nil
		}
	}
	return Tree{}, errors.New("no cgroup2 of the host is mounted")
}

// idLength is the length of a container's id, which is but a part of its cgroup's name.
const idLength = 64

// Of returns the directory of a process's cgroup, or of the one above that, which is called name or whose name has the id
// of a container.
func (t Tree) Of(pid int, name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(t.root, "proc", strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::/")
		if !ok || strings.Contains(path, "..") {
			continue
		}
		names := strings.Split(path, "/")
		for i, n := range names {
			if name != "" && (n == name || len(name) == idLength && strings.Contains(n, name)) {
				return filepath.Join(append([]string{t.dir}, names[:i+1]...)...), nil
			}
		}
	}
	return "", fmt.Errorf("the cgroup of process %d is in none that is named %.80q", pid, name)
}

// Region returns what the kernel calls the memory of a GPU with one of these names (PCI address, UUID); "": it knows
// none.
func (t Tree) Region(names ...string) string {
	f, err := os.Open(filepath.Join(t.dir, "dmem.capacity"))
	if err != nil {
		return ""
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		region, _, _ := strings.Cut(s.Text(), " ")
		for _, name := range names {
			if name != "" && strings.Contains(strings.ToLower(region), strings.ToLower(name)) {
				return region
			}
		}
	}
	return ""
}

// Max is the value of dmem.max for a memory limit; 0: none.
func Max(region string, limit uint64) string {
	if limit == 0 {
		return region + " max"
	}
	return fmt.Sprintf("%s %d", region, limit+Slack)
}

// Limit has the kernel hold a cgroup to a value of Max.
func Limit(dir, value string) error { return write(filepath.Join(dir, "dmem.max"), value) }

// Freezer is the file that stops the processes of a cgroup, with "1".
func Freezer(dir string) string { return filepath.Join(dir, "cgroup.freeze") }

// Stop stops the processes of a cgroup, or lets them go on.
func Stop(freezer string, stop bool) error {
	if stop {
		return write(freezer, "1")
	}
	return write(freezer, "0")
}

// write makes no file: the kernel has those that there are.
func write(file, value string) error {
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
