// SPDX-License-Identifier: Apache-2.0

// Package rm reaches the driver's resource manager (RM) as the client that another
// process is, through a copy of that process's open file of the driver.
//
// What it guarantees:
//
//   - No copy outlives the call that made it: an open copy would keep the memory and
//     the channels of a process that has ended.
//   - A number that is no client costs one question, and few are asked.
package rm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// File is a copy of an open file of the driver that is another process's.
type File interface {
	// Control sends a control; the answer is in params. err: it did not reach the RM.
	Control(client, object uint32, c Command, params []byte) (status uint32, err error)
	Close() error
}

// Driver is how the RM is reached: Nvidia, or Simulated.
type Driver interface {
	ABI() *ABI
	// Top is above the number of every client that there is now.
	Top() (uint32, error)
	// Is says whether a descriptor is an open file of the driver.
	Is(fd int) bool
	// May says the same of a path /proc/PID/fd/N, which is a link, before it is copied.
	May(path, link string) bool
	// File takes fd over.
	File(fd int) File
}

// maxEntries is how many descriptors of a process are looked at: a tenant can have a million.
const maxEntries = 8192

// descriptors returns the numbers of those of a process that may be the driver's. Of the others the link is read only: what
// asks the file system of an open file can hang for ever, as on a mount whose server is dead.
func descriptors(d Driver, pid int) ([]int, error) {
	dir, err := os.Open(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(maxEntries)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var all []int
	for _, name := range names {
		n, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		path := filepath.Join(dir.Name(), name)
		if link, err := os.Readlink(path); err == nil && d.May(path, link) {
			all = append(all, n)
		}
	}
	slices.Sort(all)
	return all, nil
}

// copyOf copies a descriptor of a process. nil without an error: it is not the driver's.
func copyOf(d Driver, pidfd, n int) (File, error) {
	fd, err := unix.PidfdGetfd(pidfd, n, 0)
	if err == unix.EBADF { // closed meanwhile
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("pidfd_getfd: %w", err)
	}
	if !d.Is(fd) {
		unix.Close(fd)
		return nil, nil
	}
	return d.File(fd), nil
}
