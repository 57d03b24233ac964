//go:build engines

// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// TestInstallAndUninstall compares a host before and after. The host is the
// machine's own root file system, copied on write into memory, with its own
// ldconfig.
func TestInstallAndUninstall(t *testing.T) {
	ctx := within(t)
	for _, pattern := range []string{"/usr/local/lib/*nvshare*", "/etc/systemd/system/nvshare-*", "/var/lib/nvshare"} {
		if there, _ := filepath.Glob(pattern); len(there) > 0 {
			t.Skipf("nvshare is installed on this machine: %v", there)
		}
	}
	e, err := shared.NewEngine("host", "/", map[string]string{filepath.Join(buildDir, "release"): "/release"})
	if err != nil {
		t.Skipf("this machine's root cannot be copied on write: %v", err)
	}
	in := func(what string, argv ...string) {
		t.Helper()
		if out, err := e.Run(ctx, argv...); err != nil {
			t.Fatalf("%s: %v\n%s", what, err, out)
		}
	}
	in("install", "/release/nvsharectl", "install")
	in("what is installed runs", "/usr/local/bin/nvsharectl", "status")
	in("the linker finds the shim by name", "/usr/bin/env", "LD_PRELOAD=libnvshare.so", "/usr/bin/true")
	in("the plugin finds shim and hook", "/usr/local/sbin/nvshare-plugin", "--no-nri", "--simgpu", "/run/simgpu")
	in("its specs are right", "/usr/local/bin/nvsharectl", "cdi", "validate", "--simgpu", "/run/simgpu")
	in("again", "/usr/local/bin/nvsharectl", "install", "--from", "/release")

	// Without this refusal, tenants would lose their scheduler unnoticed.
	if _, err := e.Run(ctx, "/usr/local/bin/nvsharectl", "uninstall"); err == nil || !strings.Contains(err.Error(), "end it first") {
		t.Errorf("while the scheduler runs: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		check(t, errors.Join(shared.StartScheduler(ctx), shared.StartPlugin(ctx)))
	})
	check(t, errors.Join(shared.Plugin.Stop(), shared.Scheduler.Stop()))
	in("uninstall", "/usr/local/bin/nvsharectl", "uninstall")
	in("and once more", "/release/nvsharectl", "uninstall")

	for _, pattern := range []string{"/run/nvshare", "/run/cdi/*", e.Root + "/var/lib/nvshare"} {
		if left, _ := filepath.Glob(pattern); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
	// The overlay's upper directory holds each file that was written or removed. It
	// also holds the node's mount points, which are in the build directory, and so
	// the directories above: the clone may itself be called nvshare.
	upper := e.Root + ".upper"
	check(t, filepath.WalkDir(upper, func(path string, _ fs.DirEntry, err error) error {
		host := strings.TrimPrefix(path, upper)
		if err == nil && strings.Contains(host, "nvshare") && !below(host, buildDir) && !below(buildDir, host) {
			t.Errorf("left behind: %s", host)
		}
		return err
	}))
}

// below tells whether path is dir or below it.
func below(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, dir+"/")
}
