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
	defer func() { openat2 = unix.Openat2 }()
	openat2 = func(int, string, *unix.OpenHow) (int, error) { return -1, unix.ENOSYS }
	root := t.TempDir()
	_, err := host(root).real("/etc")
	if !errors.Is(err, unix.ENOSYS) {
		t.Fatalf("it failed with %v", err)
	}
	for _, part := range []string{"/etc", root, "Linux 5.6"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("it does not say %q: %v", part, err)
		}
	}
}
