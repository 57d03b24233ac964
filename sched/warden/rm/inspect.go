// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Seen is what Inspect finds: for people.
type Seen struct {
	Objects
	// Answers counts the statuses of the RM, by command.
	Answers map[string]map[string]int `json:"answers"`
}

// Inspect looks once at a process, whichever has the pid.
func Inspect(d Driver, pid int) (*Seen, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(pidfd)
	s := &Seen{Answers: map[string]map[string]int{}}
	s.Objects, err = Look(counting{d, s}, pid, pidfd, Objects{}, true)
	return s, err
}

// counting counts the answers that files of a driver get.
type counting struct {
	Driver
	seen *Seen
}

func (c counting) File(fd int) File { return countingFile{c.Driver.File(fd), c.seen} }

type countingFile struct {
	File
	seen *Seen
}

func (f countingFile) Control(client, object uint32, c Command, params []byte) (uint32, error) {
	status, err := f.File.Control(client, object, c, params)
	name, answer := fmt.Sprintf("%#x", c.Number), fmt.Sprintf("%#x", status)
	if client == object {
		name = "is it a client"
	}
	if err != nil {
		answer = err.Error()
	}
	if f.seen.Answers[name] == nil {
		f.seen.Answers[name] = map[string]int{}
	}
	f.seen.Answers[name][answer]++
	return status, err
}
