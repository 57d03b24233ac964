// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"path/filepath"
	"testing"
)

func TestMuslOnly(t *testing.T) {
	const elsewhere = "/etc/hostname" // exists here, not in the image
	for name, c := range map[string]struct {
		files []string
		links map[string]string
		want  bool
	}{
		"glibc":                   {[]string{"lib64/ld-linux-x86-64.so.2"}, nil, false},
		"musl":                    {[]string{"lib/ld-musl-x86_64.so.1"}, nil, true},
		"musl on arm64":           {[]string{"lib/ld-musl-aarch64.so.1"}, nil, true},
		"both":                    {[]string{"lib/ld-musl-x86_64.so.1", "lib64/ld-linux-x86-64.so.2"}, nil, false},
		"neither":                 {[]string{"bin/static"}, nil, false},
		"musl, one /usr":          {[]string{"usr/lib/ld-musl-x86_64.so.1"}, map[string]string{"lib": "/usr/lib"}, true},
		"glibc, one /usr":         {[]string{"usr/lib64/ld-linux-x86-64.so.2", "lib/ld-musl-x86_64.so.1"}, map[string]string{"lib64": "usr/lib64"}, false},
		"a link out of the image": {[]string{"bin/x"}, map[string]string{"lib/ld-musl-x86_64.so.1": elsewhere}, false},
		"a link above the root":   {[]string{"bin/x"}, map[string]string{"lib/ld-musl-x86_64.so.1": "../../../../../../../.." + elsewhere}, false},
	} {
		root := t.TempDir()
		for _, f := range c.files {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(root, f)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(root, f), nil, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		for link, to := range c.links {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(root, link)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
				t.Fatal(err)
			}
		}
		if got := muslOnly(root); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	if muslOnly("/nonexistent") {
		t.Error("what is not there has musl")
	}
}

func TestRootfs(t *testing.T) {
	const mounts = `1 0 254:1 / / rw,relatime - ext4 /dev/vda1 rw
2 1 0:50 / /host/run/containerd/io.containerd.runtime.v2.task/k8s.io/a11/rootfs rw,relatime master:9 - overlay overlay rw,lowerdir=/x/a1/rootfs
3 1 0:51 / /host/run/containerd/io.containerd.runtime.v2.task/k8s.io/a1/rootfs rw,relatime master:8 - overlay overlay rw
4
`
	for id, want := range map[string]string{"a1": "/host/run/containerd/io.containerd.runtime.v2.task/k8s.io/a1/rootfs", "a2": ""} {
		if got := rootfs(mounts, id); got != want {
			t.Errorf("%s: %q, want %q", id, got, want)
		}
	}
}
