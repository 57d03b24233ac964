// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// freezerOf returns the file that stops the processes of a process's container. Nothing but a container's cgroup is
// stopped: others have users' sessions and daemons in them.
func freezerOf(pid int, container string) (string, error) {
	if len(container) < 32 {
		return "", fmt.Errorf("%.64q is no container", container)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", err
	}
	dir := ""
	for line := range strings.Lines(string(text)) {
		if path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::"); ok {
			dir = path
		}
	}
	before, after, ok := strings.Cut(dir, container)
	if !ok || strings.Contains(dir, "..") {
		return "", fmt.Errorf("the cgroup of process %d, %q, is not that of its container", pid, dir)
	}
	rest, _, _ := strings.Cut(after, "/")
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 4 && f[3] == "/" && strings.Contains(line, " - cgroup2 ") {
			return filepath.Join(f[4], before+container+rest, "cgroup.freeze"), nil
		}
	}
	return "", errors.New("no cgroup2 of the host is mounted")
}

func writeFreezer(file, value string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

func thaw(file string) error {
	if file == "" {
		return nil
	}
	if err := writeFreezer(file, "0"); !errors.Is(err, fs.ErrNotExist) { // the container has ended
		return err
	}
	return nil
}
