// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/cdi"
)

// release makes an unpacked release whose files say version.
func release(t *testing.T, version string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"nvshare-scheduler", "nvshare-checkpoint", "nvshare-warden", "nvshare-plugin", "nvsharectl", "libnvshare.so", "nvshare-cdi-hook"} {
		put(t, filepath.Join(dir, name), name+" "+version, 0o644)
	}
	for _, name := range []string{"nvshare-scheduler", "nvshare-warden", "nvshare-plugin"} {
		put(t, dir+"/deployments/systemd/"+name+".service", "ExecStart=/usr/local/sbin/"+name+"\n# "+version+"\n", 0o644)
	}
	put(t, dir+"/deployments/systemd/nvshare-scheduler.socket", "[Socket]\n", 0o644)
	put(t, dir+"/deployments/sysusers.d/nvshare.conf", "u nvshare\n", 0o644)
	put(t, dir+"/deployments/tmpfiles.d/nvshare.conf", "d /run/nvshare\n", 0o644)
	return dir
}

// tree lists the files below root, with their modes.
func tree(t *testing.T, root string) (all []string) {
	t.Helper()
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		name := strings.TrimPrefix(path, root)
		if d.IsDir() {
			name += "/"
		} else if info, err := d.Info(); err == nil && info.Mode().Perm()&0o111 != 0 {
			name += "*"
		}
		all = append(all, name)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return all
}

// host is one that is not this one, as far as the installer may tell.
type testHost struct {
	installer
	ran []string
	out bytes.Buffer
}

func newHost(t *testing.T, from, root string) *testHost {
	h := &testHost{}
	h.installer = installer{
		from: from, root: root, prefix: "/usr/local", io: streams{out: &h.out, err: &h.out},
		command: func(_ context.Context, name string, args ...string) error {
			h.ran = append(h.ran, name+" "+strings.Join(args, " "))
			return nil
		},
		systemd:   func() bool { return true },
		scheduler: func(context.Context, string) bool { return false },
	}
	return h
}

var installedTree = []string{
	"/etc/", "/etc/systemd/", "/etc/systemd/system/", "/etc/systemd/system/nvshare-plugin.service", "/etc/systemd/system/nvshare-scheduler.service",
	"/etc/systemd/system/nvshare-scheduler.socket", "/etc/systemd/system/nvshare-warden.service", "/etc/sysusers.d/", "/etc/sysusers.d/nvshare.conf", "/etc/tmpfiles.d/", "/etc/tmpfiles.d/nvshare.conf",
	"/usr/", "/usr/local/", "/usr/local/bin/", "/usr/local/bin/nvsharectl*",
	"/usr/local/lib/", "/usr/local/lib/libnvshare.so*", "/usr/local/lib/nvshare/", "/usr/local/lib/nvshare/manifest", "/usr/local/lib/nvshare/nvshare-cdi-hook*",
	"/usr/local/sbin/", "/usr/local/sbin/nvshare-checkpoint*", "/usr/local/sbin/nvshare-plugin*", "/usr/local/sbin/nvshare-scheduler*",
	"/usr/local/sbin/nvshare-warden*",
}

func TestInstallAndUninstall(t *testing.T) {
	ctx := context.Background()
	root, one := t.TempDir(), release(t, "one")
	h := newHost(t, one, root)

	h.dryRun = true
	if err := h.install(ctx); err != nil || len(tree(t, root)) != 0 || !strings.Contains(h.out.String(), "would install /usr/local/sbin/nvshare-plugin") {
		t.Errorf("dry run: %v, %v\n%s", err, tree(t, root), &h.out)
	}
	h.dryRun = false
	if err := h.install(ctx); err != nil {
		t.Fatal(err)
	}
	if got := tree(t, root); !slices.Equal(got, installedTree) {
		t.Errorf("installed:\n%q\nwant\n%q", got, installedTree)
	}
	h.out.Reset()
	if err := h.install(ctx); err != nil || h.out.String() != "all 13 files are in place\n" {
		t.Errorf("again: %v\n%s", err, &h.out)
	}

	// An upgrade, to a release that has one file less.
	two := release(t, "two")
	if err := os.Remove(two + "/deployments/systemd/nvshare-plugin.service"); err != nil {
		t.Fatal(err)
	}
	h.from = two
	if err := h.install(ctx); err != nil {
		t.Fatal(err)
	}
	if text, _ := os.ReadFile(root + "/usr/local/sbin/nvshare-plugin"); string(text) != "nvshare-plugin two" {
		t.Errorf("after the upgrade: %q", text)
	}
	if _, err := os.Stat(root + "/etc/systemd/system/nvshare-plugin.service"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what the new release does not have: %v", err)
	}

	// What the plugin has placed goes too, and what is not ours stays.
	if _, err := cdi.PlaceShim(two+"/libnvshare.so", root+cdi.DefaultLibDir); err != nil {
		t.Fatal(err)
	}
	put(t, root+"/var/lib/nvshare/bin/nvshare-cdi-hook", "", 0o755)
	put(t, root+"/var/run/nvshare/tenant/x", "", 0o644)
	put(t, root+"/var/run/cdi/nvshare.com-gpu.yaml", "kind: nvshare.com/gpu\n", 0o644)
	put(t, root+"/etc/cdi/nvidia.yaml", "kind: nvidia.com/gpu\n", 0o644)
	put(t, root+"/etc/systemd/system/nvshare-scheduler.service.d/override.conf", "[Service]\n", 0o644)
	h.dryRun = true
	before := tree(t, root)
	if err := h.uninstall(ctx); err != nil || !slices.Equal(tree(t, root), before) {
		t.Errorf("dry run of uninstall: %v", err)
	}
	h.dryRun = false
	h.out.Reset()
	if err := h.uninstall(ctx); err != nil {
		t.Fatal(err)
	}
	if says := "leave /etc/systemd/system/nvshare-scheduler.service.d, which is yours\n"; !strings.HasSuffix(h.out.String(), says) {
		t.Errorf("uninstall says\n%s, want %q at the end", &h.out, says)
	}
	want := []string{"/etc/", "/etc/cdi/", "/etc/cdi/nvidia.yaml", "/etc/systemd/", "/etc/systemd/system/",
		"/etc/systemd/system/nvshare-scheduler.service.d/", "/etc/systemd/system/nvshare-scheduler.service.d/override.conf", "/var/", "/var/lib/", "/var/run/", "/var/run/cdi/"}
	if got := tree(t, root); !slices.Equal(got, want) {
		t.Errorf("left behind:\n%q\nwant\n%q", got, want)
	}
	if err := h.uninstall(ctx); err != nil {
		t.Errorf("again: %v", err)
	}
	if len(h.ran) != 0 {
		t.Errorf("for another root it ran %q", h.ran)
	}
}

// A user who may not change the host learns that before anything else. Without the check both
// commands end at once here: there is no release, and a scheduler runs.
func TestInstallNeedsRoot(t *testing.T) {
	ctx := context.Background()
	h := newHost(t, "/nonexistent", "")
	h.uid, h.prefix, h.scheduler = 1000, t.TempDir(), func(context.Context, string) bool { return true }
	for name, do := range map[string]func(context.Context) error{"install": h.install, "uninstall": h.uninstall} {
		if err := do(ctx); err == nil || !strings.Contains(err.Error(), "use sudo") || h.out.Len() > 0 || len(h.ran) > 0 {
			t.Errorf("%s: %v, ran %q, said\n%s", name, err, h.ran, &h.out)
		}
	}
	h.dryRun = true
	if err := h.needRoot(); err != nil {
		t.Errorf("dry run: %v", err)
	}
	h = newHost(t, release(t, "one"), t.TempDir())
	h.uid = 1000
	if err := h.install(ctx); err != nil {
		t.Errorf("with --root: %v", err)
	}
}

// Nothing is overwritten that nvshare did not write, and then nothing at all is
// done.
func TestInstallRefusesForeignFiles(t *testing.T) {
	ctx := context.Background()
	for name, prepare := range map[string]func(path string) error{
		"a file":      func(p string) error { return os.WriteFile(p, []byte("mine"), 0o644) },
		"a directory": func(p string) error { return os.Mkdir(p, 0o755) },
		"a link":      func(p string) error { return os.Symlink("/dev/null", p) },
	} {
		root := t.TempDir()
		path := root + "/usr/local/lib/libnvshare.so"
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), prepare(path)); err != nil {
			t.Fatal(err)
		}
		before := tree(t, root)
		h := newHost(t, release(t, "one"), root)
		if err := h.install(ctx); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s in the way: %v", name, err)
		}
		if got := tree(t, root); !slices.Equal(got, before) {
			t.Errorf("%s in the way: now there is %q", name, got)
		}
	}

	// A file that was changed after it was installed is the user's.
	root := t.TempDir()
	h := newHost(t, release(t, "one"), root)
	if err := h.install(ctx); err != nil {
		t.Fatal(err)
	}
	unit := root + "/etc/systemd/system/nvshare-scheduler.service"
	put(t, unit, "changed\n", 0o644)
	h.from = release(t, "two")
	if err := h.install(ctx); err == nil || !strings.Contains(err.Error(), unit) {
		t.Errorf("upgrade over a changed unit: %v", err)
	}
	if err := h.uninstall(ctx); err == nil || !strings.Contains(err.Error(), unit) {
		t.Errorf("uninstall of a changed unit: %v", err)
	}
	if text, _ := os.ReadFile(unit); string(text) != "changed\n" {
		t.Errorf("the changed unit holds %q", text)
	}
	if err := os.Remove(unit); err != nil {
		t.Fatal(err)
	}
	if err := h.uninstall(ctx); err != nil || len(tree(t, root)) != 0 {
		t.Errorf("once it is gone: %v, %q", err, tree(t, root))
	}
}

// An installation that was interrupted half-way can be repeated and undone.
func TestInterruptedUpgrade(t *testing.T) {
	ctx := context.Background()
	for _, next := range []string{"again", "back", "away"} {
		root, one, two := t.TempDir(), release(t, "one"), release(t, "two")
		h := newHost(t, one, root)
		if err := h.install(ctx); err != nil {
			t.Fatal(err)
		}
		items := func(from string) []item {
			h.from = from
			all, err := h.items()
			if err != nil {
				t.Fatal(err)
			}
			return all
		}
		old, err := readManifest(root + h.manifestPath())
		if err != nil {
			t.Fatal(err)
		}
		// As apply does it, but it is cut off after the third file.
		all := items(two)
		for _, i := range all {
			old.add(i.path, sum(i.data))
		}
		if err := old.write(root + h.manifestPath()); err != nil {
			t.Fatal(err)
		}
		for _, i := range all[:3] {
			put(t, root+i.path, string(i.data), i.mode)
		}
		switch next {
		case "again":
			err = h.install(ctx)
		case "back":
			h.from = one
			err = h.install(ctx)
		case "away":
			if err = h.uninstall(ctx); len(tree(t, root)) != 0 {
				t.Errorf("left behind: %q", tree(t, root))
			}
		}
		if err != nil {
			t.Errorf("%s: %v", next, err)
		}
	}
}

// On this host the services are told; here it is none, so nothing may be
// written: everything is in place, or nothing is asked to be.
func TestInstallTellsTheHost(t *testing.T) {
	ctx := context.Background()
	for name, c := range map[string]struct {
		changed, start, systemd bool
		want                    []string
		says                    string
	}{
		"installed":          {true, false, true, []string{"ldconfig /usr/local/lib", "systemd-sysusers nvshare.conf", "systemd-tmpfiles --create nvshare.conf", "systemctl daemon-reload"}, "systemctl enable --now"},
		"installed, started": {true, true, true, []string{"ldconfig /usr/local/lib", "systemd-sysusers nvshare.conf", "systemd-tmpfiles --create nvshare.conf", "systemctl daemon-reload", "systemctl enable nvshare-scheduler.service nvshare-plugin.service", "systemctl restart nvshare-scheduler.service nvshare-plugin.service"}, ""},
		"nothing new":        {false, false, true, nil, ""},
		"nothing new, start": {false, true, true, []string{"systemctl enable --now nvshare-scheduler.service nvshare-plugin.service"}, ""},
		"a host of its own":  {true, false, false, []string{"ldconfig /usr/local/lib"}, "systemd does not run here"},
	} {
		h := newHost(t, "", "")
		h.start = c.start
		h.systemd = func() bool { return c.systemd }
		if err := h.settle(ctx, c.changed); err != nil || !slices.Equal(h.ran, c.want) || !strings.Contains(h.out.String(), c.says) {
			t.Errorf("%s: %v, ran %q, said %s", name, err, h.ran, &h.out)
		}
	}
	for _, changed := range []bool{true, false} { // --start that starts nothing has failed
		h := newHost(t, "", "")
		h.start, h.systemd = true, func() bool { return false }
		if err := h.settle(ctx, changed); err == nil || !strings.Contains(err.Error(), "/usr/local/sbin/nvshare-scheduler and /usr/local/sbin/nvshare-plugin") {
			t.Errorf("started without systemd: %v, said %s", err, &h.out)
		}
	}
	h := newHost(t, "", "")
	h.scheduler = func(context.Context, string) bool { return true }
	m := manifest{files: map[string][]string{"/usr/local/sbin/nvshare-scheduler": nil, "/etc/systemd/system/nvshare-scheduler.service": nil, "/etc/systemd/system/nvshare-scheduler.socket": nil, "/etc/systemd/system/nvshare-warden.service": nil}}
	if err := h.stop(ctx, m); err == nil || !strings.Contains(err.Error(), "end it first") || !slices.Equal(h.ran, []string{"systemctl disable --now nvshare-scheduler.socket nvshare-scheduler.service nvshare-plugin.service nvshare-warden.service"}) {
		t.Errorf("a scheduler that does not end: %v, ran %q", err, h.ran)
	}
}

func TestUninstallMindsThePreloadFile(t *testing.T) {
	root := t.TempDir()
	h := newHost(t, release(t, "one"), root)
	if err := h.install(context.Background()); err != nil {
		t.Fatal(err)
	}
	put(t, root+"/etc/ld.so.preload", "\n/usr/local/lib/libnvshare.so", 0o644)
	if err := h.uninstall(context.Background()); err == nil || !strings.Contains(err.Error(), "/etc/ld.so.preload") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(root + "/usr/local/lib/libnvshare.so"); err != nil {
		t.Errorf("the library that every program loads: %v", err)
	}
}

// A command that is named has nothing behind it.
func TestTellsWhatItRuns(t *testing.T) {
	h := newHost(t, "", "")
	if err := h.tell(context.Background(), "ldconfig"); err != nil || h.out.String() != "run ldconfig\n" {
		t.Errorf("%v, said %q", err, &h.out)
	}
}

// What a package has installed is its own: uninstall names the command that removes it. The
// package's removal has nvsharectl remove what the plugin has placed, and says no more.
func TestUninstallOfAPackage(t *testing.T) {
	some := manifest{files: map[string][]string{"/usr/local/bin/nvsharectl": nil}}
	for name, c := range map[string]struct {
		self, prefix, root string
		placed, refused    bool
		m                  manifest
	}{
		"of a package":            {self: "/usr/bin/nvsharectl", prefix: "/usr/local", refused: true},
		"by its prefix":           {self: "/usr/bin/nvsharectl", prefix: "/usr", refused: true},
		"by the package":          {self: "/usr/bin/nvsharectl", prefix: "/usr", placed: true},
		"another one beside it":   {self: "/usr/bin/nvsharectl", prefix: "/usr/local", m: some},
		"another prefix":          {self: "/usr/bin/nvsharectl", prefix: "/opt/nvshare"},
		"installed here":          {self: "/usr/local/bin/nvsharectl", prefix: "/usr/local", m: some},
		"of a release":            {self: "/root/nvshare/nvsharectl", prefix: "/usr/local"},
		"of a host, by its image": {self: "/usr/bin/nvsharectl", prefix: "/none", root: "/host"},
	} {
		h := newHost(t, "", c.root)
		h.self, h.prefix, h.placed = c.self, c.prefix, c.placed
		err := h.refusePackage(c.m)
		if (err != nil) != c.refused || err != nil && (!strings.Contains(err.Error(), "apt remove nvshare") || !strings.Contains(err.Error(), "dnf remove nvshare")) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if code, out, errs := ctl("uninstall", "--placed", "--root", t.TempDir(), "--prefix", "/usr"); code != exitOK || out+errs != "" {
		t.Errorf("nothing to do: exit %d, %q %q", code, out, errs)
	}
	root := t.TempDir()
	put(t, root+"/var/lib/nvshare/bin/nvshare-cdi-hook", "", 0o755)
	if code, out, _ := ctl("uninstall", "--placed", "--root", root, "--prefix", "/usr"); code != exitOK || out != "remove "+root+"/var/lib/nvshare/bin/nvshare-cdi-hook\n" {
		t.Errorf("what the plugin has placed: exit %d, %q", code, out)
	}
}

// From a container of the host, which sees its sockets.
func TestUninstallBesideAScheduler(t *testing.T) {
	root := t.TempDir()
	source, placed := t.TempDir()+"/libnvshare.so", root+cdi.DefaultLibDir
	put(t, source, "shim", 0o755)
	if _, err := cdi.PlaceShim(source, placed); err != nil {
		t.Fatal(err)
	}
	put(t, root+"/var/lib/nvshare/plugin.lock", "", 0o600)
	h := newHost(t, "", root)
	h.scheduler = func(_ context.Context, runDir string) bool { return runDir == root+"/var/run/nvshare" }
	if err := h.uninstall(context.Background()); err == nil || !strings.Contains(err.Error(), "end it first") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(placed); err != nil {
		t.Errorf("removed beside a scheduler: %v", err)
	}
	h.scheduler = func(context.Context, string) bool { return false }
	if err := h.uninstall(context.Background()); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(root + "/var/lib/nvshare"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("left behind: %v", err)
	}
}

// Packages have their units elsewhere, and programs with another prefix are
// found by theirs.
func TestInstallPrefix(t *testing.T) {
	for prefix, unit := range map[string]string{
		"/usr":         "/usr/lib/systemd/system/nvshare-scheduler.service",
		"/opt/nvshare": "/etc/systemd/system/nvshare-scheduler.service",
	} {
		root := t.TempDir()
		code, _, errs := ctl("install", "--from", release(t, "one"), "--root", root, "--prefix", prefix)
		text, err := os.ReadFile(root + unit)
		if code != exitOK || err != nil || !strings.Contains(string(text), "ExecStart="+prefix+"/sbin/nvshare-scheduler\n") {
			t.Errorf("%s: exit %d, %s, %v, %q", prefix, code, errs, err, text)
		}
		if code, _, errs = ctl("uninstall", "--root", root, "--prefix", prefix); code != exitOK || len(tree(t, root)) != 0 {
			t.Errorf("uninstall: exit %d, %s, %q", code, errs, tree(t, root))
		}
	}
	for _, args := range [][]string{{"--prefix", "x"}, {"--start", "--root", "/x"}, {"extra"}} {
		if code, _, _ := ctl(append([]string{"install", "--from", "/nonexistent"}, args...)...); code != exitUsage {
			t.Errorf("%v: exit %d", args, code)
		}
	}
	if code, _, errs := ctl("install", "--from", t.TempDir(), "--root", t.TempDir()); code != exitFailed || !strings.Contains(errs, "make stage") {
		t.Errorf("no release: exit %d, %s", code, errs)
	}
	root := t.TempDir()
	put(t, root+"/usr/local/lib/nvshare/manifest", "../../etc/passwd\n", 0o644)
	if code, _, errs := ctl("uninstall", "--root", root); code != exitFailed || !strings.Contains(errs, "manifest") {
		t.Errorf("a manifest that is none: exit %d, %s", code, errs)
	}
}
