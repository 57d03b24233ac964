// SPDX-License-Identifier: Apache-2.0

package sched

import (
	"os"
	"regexp"
	"slices"
	"testing"
)

// The shim believes the controls of those versions of the driver that the scheduler says
// are known to work.
func TestListedDriversAreTheShims(t *testing.T) {
	const path = "../hook/core/controls.c"
	source, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	list := regexp.MustCompile(`(?s)versions\[\] = \{(.*?)\};`).FindSubmatch(source)
	if list == nil {
		t.Fatalf("%s: no list of versions", path)
	}
	var versions []string
	for _, v := range regexp.MustCompile(`"([^"]*)"`).FindAllSubmatch(list[1], -1) {
		versions = append(versions, string(v[1]))
	}
	if !slices.Equal(versions, listedDrivers()) {
		t.Errorf("%s lists %q, the scheduler %q", path, versions, listedDrivers())
	}
	for _, v := range versions {
		if !(Controls{Driver: v}).Listed() {
			t.Errorf("%s is not listed", v)
		}
	}
}
