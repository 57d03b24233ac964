// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// person is a user of this host as whom a program runs.
type person struct {
	name, home, shell string
	uid, gid          int
	groups            []int
}

// findPerson looks a user up by name or number, in all that nsswitch.conf names, as a directory
// service: getent and id ask there, Go's package for users without cgo does not.
func findPerson(name string) (*person, error) {
	entry, err := hear("getent", "passwd", name)
	var none *exec.ExitError
	if err != nil && !errors.As(err, &none) {
		return nil, fmt.Errorf("--user %.64q: %w", name, err)
	}
	fields := strings.Split(strings.TrimSpace(entry), ":")
	if err != nil || len(fields) != 7 {
		return nil, usageError{fmt.Errorf("--user: this host knows no user %.64q", name)}
	}
	p := &person{name: fields[0], home: fields[5], shell: fields[6]}
	groups, err := hear("id", "-G", p.name)
	if err != nil {
		return nil, fmt.Errorf("--user %.64q: groups: %w", name, err)
	}
	var ids []int
	for _, text := range append(fields[2:4:4], strings.Fields(groups)...) {
		id, err := strconv.Atoi(text)
		if err != nil {
			return nil, fmt.Errorf("--user %.64q: %w", name, err)
		}
		ids = append(ids, id)
	}
	p.uid, p.gid, p.groups = ids[0], ids[1], ids[2:]
	return p, nil
}

// setEnvironment has the environment say who the user is, as su does.
func (p *person) setEnvironment() {
	for key, value := range map[string]string{"HOME": p.home, "SHELL": p.shell, "USER": p.name, "LOGNAME": p.name} {
		os.Setenv(key, value)
	}
}

// become gives this process the user's rights, and no others.
func (p *person) become() error {
	err := errors.Join(syscall.Setgroups(p.groups), syscall.Setgid(p.gid), syscall.Setuid(p.uid))
	if err != nil {
		return fmt.Errorf("--user %s: %w", p.name, err)
	}
	return nil
}
