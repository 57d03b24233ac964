// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"
)

// A /proc that hides processes from the scheduler is found by its mount options, with the command
// that mends it; one that hides them from others only is none of our business.
func TestDoctorKnowsHiddenProcesses(t *testing.T) {
	const (
		user   = "Uid:\t998\t998\t998\t998\nGid:\t997\t997\t997\t997\nGroups:\t44 997 \nCapEff:\t0000000000000000\n"
		traces = "Uid:\t998\t998\t998\t998\nGid:\t997\t997\t997\t997\nGroups:\t \nCapEff:\t0000000000080000\n"
	)
	for name, tc := range map[string]struct {
		options, status string
		level           level
		fix             string
	}{
		"all to be seen":          {"rw", user, pass, ""},
		"said so":                 {"rw,hidepid=off", user, pass, ""},
		"hidden":                  {"rw,hidepid=invisible", user, fail, "mount -o remount,hidepid=2,gid=997 /proc"},
		"of an old kernel":        {"rw,hidepid=2", user, fail, "gid=997"},
		"shown, not to be read":   {"rw,hidepid=noaccess", user, fail, "gid=997"},
		"from others":             {"rw,gid=44,hidepid=invisible", user, pass, ""},
		"another group":           {"rw,gid=9,hidepid=invisible", user, fail, "gid=997"},
		"no group can see":        {"rw,gid=997,hidepid=ptraceable", user, fail, "hidepid=2,gid=997"},
		"it may trace":            {"rw,hidepid=ptraceable", traces, pass, ""},
		"an unknown scheduler":    {"rw,hidepid=invisible", "", warn, "gid=GROUP"},
		"unknown, all to be seen": {"rw", "", pass, ""},
	} {
		p := host(t)
		write(t, p, "/proc/4711/status", tc.status)
		write(t, p, "/proc/self/mountinfo", "20 1 0:5 / /proc rw - proc proc rw,hidepid=invisible\n22 27 0:21 / /proc rw,relatime - proc proc "+tc.options+"\n23 22 0:6 / /proc/x rw - proc proc rw,hidepid=2\n24 1 0:7 / /sys rw - sysfs sysfs rw\n")
		all := p.examine()
		i := slices.IndexFunc(all, func(f finding) bool { return f.Check == "proc" })
		if i < 0 || all[i].Level != tc.level || !strings.Contains(all[i].Fix, tc.fix) || (all[i].Fix == "") != (tc.fix == "") {
			t.Errorf("%s: %+v", name, all)
		}
	}
	p := host(t) // the scheduler is in a container, with a /proc of its own
	write(t, p, "/proc/4711/status", user)
	write(t, p, "/proc/4711/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n")
	write(t, p, "/proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw,hidepid=invisible\n")
	if all := checkProc(p); len(all) != 1 || all[0].Level != pass {
		t.Errorf("a /proc of its own: %+v", all)
	}
}
