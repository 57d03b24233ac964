// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"errors"
	"os"
	"path/filepath"
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

// The MPS daemon of another root is found there, also by a link that is absolute, and is one
// that can be run.
func TestFindMPSControl(t *testing.T) {
	root := t.TempDir()
	t.Setenv("PATH", "/opt/mps")
	if path, err := FindMPSControl(Options{HostRoot: root}); err == nil {
		t.Errorf("found %s where nothing is", path)
	}
	real := filepath.Join(root, "usr/lib/nvidia", mpsName)
	for _, dir := range []string{filepath.Dir(real), filepath.Join(root, "opt/mps")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.WriteFile(real, nil, 0o644), os.Symlink("/usr/lib/nvidia/"+mpsName, filepath.Join(root, "opt/mps", mpsName))); err != nil {
		t.Fatal(err)
	}
	if path, err := FindMPSControl(Options{HostRoot: root}); err == nil {
		t.Errorf("found %s, which cannot be run", path)
	}
	if err := os.Chmod(real, 0o755); err != nil {
		t.Fatal(err)
	}
	if path, err := FindMPSControl(Options{HostRoot: root}); err != nil || path != real {
		t.Errorf("found %s, %v, want %s", path, err, real)
	}
}
