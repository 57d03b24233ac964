// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A kernel that is too old for a host's root is said to be that.
func TestKernelWithoutOpenat2(t *testing.T) {
	root := t.TempDir()
	err := host(root).unresolved("/etc", unix.ENOSYS)
	if !errors.Is(err, unix.ENOSYS) {
		t.Fatalf("it failed with %v", err)
	}
	for _, part := range []string{"/etc", root, "Linux 5.6"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("it does not say %q: %v", part, err)
		}
	}
}
