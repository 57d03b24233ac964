// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"os"
	"strings"
	"testing"
)

// installed makes a host whose specs are right.
func installed(t *testing.T) (root string, dirs []string) {
	t.Helper()
	root = fakeHost(t)
	write(t, root+DefaultPaths.ShimDir+"/"+ShimFile, "")
	write(t, root+DefaultPaths.Hook, "")
	if err := os.Chmod(root+DefaultPaths.Hook, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{DefaultPaths.TenantDir(), "/etc/cdi", "/var/run/cdi"} {
		if err := os.MkdirAll(root+dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	g := generate(t, Options{HostRoot: root})
	if _, err := Write(root+"/var/run/cdi", g.Specs...); err != nil {
		t.Fatal(err)
	}
	return root, []string{root + "/etc/cdi", root + "/var/run/cdi"}
}

func TestValidate(t *testing.T) {
	file := "/var/run/cdi/" + FileName(Kind)
	remove := func(path string) func(*testing.T, string) {
		return func(t *testing.T, root string) {
			if err := os.RemoveAll(root + path); err != nil {
				t.Fatal(err)
			}
		}
	}
	mode := func(path string, mode os.FileMode) func(*testing.T, string) {
		return func(t *testing.T, root string) {
			if err := os.Chmod(root+path, mode); err != nil {
				t.Fatal(err)
			}
		}
	}
	put := func(path, text string) func(*testing.T, string) {
		return func(t *testing.T, root string) { write(t, root+path, text) }
	}
	own := func(t *testing.T, root string) string {
		t.Helper()
		data, err := os.ReadFile(root + file)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	for name, c := range map[string]struct {
		change func(*testing.T, string)
		bad    bool
		says   string // "" if there is nothing to say
	}{
		"all is right":              {func(*testing.T, string) {}, false, ""},
		"no spec":                   {remove("/var/run/cdi"), true, "no device of nvshare.com/gpu"},
		"only the plugin's":         {remove(file), true, "no device of nvshare.com/gpu"},
		"no shim":                   {remove(DefaultLibDir), true, "nvshare-plugin puts the shim there"},
		"no hook":                   {remove(DefaultPaths.Hook), true, DefaultPaths.Hook + " is not there"},
		"a hook nobody may run":     {mode(DefaultPaths.Hook, 0o700), true, "chmod 755"},
		"no directory for tenants":  {remove(DefaultPaths.TenantDir()), true, "nvshare-scheduler makes it"},
		"a device node went":        {remove("/dev/nvidia0"), true, "/dev/nvidia0"},
		"another driver is loaded":  {put("/proc/driver/nvidia/version", "NVRM version: x  999.1  y\n"), true, "the kernel has 999.1 loaded"},
		"root's eyes only":          {mode(file, 0o600), false, "rootless engines"},
		"a closed directory":        {mode("/var/run/cdi", 0o700), false, "rootless engines"},
		"broken":                    {put(file, "kind: nvshare.com/gpu\ndevices: 7\n"), true, "ignore it"},
		"somebody else's is broken": {put("/etc/cdi/x.json", "{"), false, "ignore it"},
		"declared twice":            {func(t *testing.T, root string) { write(t, root+"/var/run/cdi/again.yaml", own(t, root)) }, true, "ignore both"},
		"and in /etc/cdi":           {func(t *testing.T, root string) { write(t, root+"/etc/cdi/mine.yaml", own(t, root)) }, false, "goes before"},
		"another vendor's twice": {func(t *testing.T, root string) {
			for _, f := range []string{"a.yaml", "b.yaml"} {
				write(t, root+"/etc/cdi/"+f, "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices: [{name: '0', containerEdits: {env: [A=b]}}]\n")
			}
		}, false, "ignore both"},
	} {
		root, dirs := installed(t)
		c.change(t, root)
		bad, said := false, ""
		for _, f := range Validate(Options{HostRoot: root}, dirs...) {
			bad = bad || f.Bad
			said += f.File + ": " + f.Text + "\n"
		}
		if bad != c.bad || !strings.Contains(said, c.says) || (c.says == "" && said != "") {
			t.Errorf("%s: bad %v:\n%s", name, bad, said)
		}
	}
}
