// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi/ldcache"
)

const (
	lib  = "/gpu/libcuda.so.1"
	shim = "/usr/lib/nvshare/libnvshare.so"
)

// container makes a bundle whose rootfs holds an empty etc, and returns both.
func container(t *testing.T) (bundle, rootfs string) {
	t.Helper()
	bundle = t.TempDir()
	rootfs = filepath.Join(bundle, "rootfs")
	mkdir(t, filepath.Join(rootfs, "etc"))
	write(t, filepath.Join(bundle, "config.json"), `{"root":{"path":"rootfs"}}`)
	return bundle, rootfs
}

func mkdir(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// hook runs the hook for a bundle; a warning counts as status 1.
func hook(bundle string, args ...string) (status int, stderr string) {
	var out bytes.Buffer
	args = append([]string{"update-ldcache"}, args...)
	status = run(args, strings.NewReader(fmt.Sprintf(`{"ociVersion":"1.0","bundle":%q}`, bundle)), &out)
	if strings.Contains(out.String(), "warning") {
		status = 1
	}
	return status, out.String()
}

// paths returns what the cache in rootfs knows for a name.
func paths(t *testing.T, rootfs, name string) []string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(rootfs, "etc/ld.so.cache"))
	if err != nil {
		t.Fatal(err)
	}
	cache, err := ldcache.Parse(data)
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, e := range cache.Entries {
		if e.Name == name {
			found = append(found, e.Path)
		}
	}
	return found
}

func TestWritesCache(t *testing.T) {
	old := &ldcache.Cache{}
	old.Add(ldcache.FlagsAMD64, "/lib/libc.so.6")
	for name, prepare := range map[string]func(t *testing.T, etc string){
		"no cache":      func(*testing.T, string) {},
		"garbage":       func(t *testing.T, etc string) { write(t, etc+"/ld.so.cache", "garbage") },
		"existing":      func(t *testing.T, etc string) { write(t, etc+"/ld.so.cache", string(old.Bytes())) },
		"left-over tmp": func(t *testing.T, etc string) { write(t, fmt.Sprintf("%s/%s%d", etc, tmpPrefix, os.Getpid()), "") },
		"fifo": func(t *testing.T, etc string) {
			if err := unix.Mkfifo(etc+"/ld.so.cache", 0o644); err != nil {
				t.Fatal(err)
			}
		},
		"link loop": func(t *testing.T, etc string) {
			if err := os.Symlink("ld.so.cache", etc+"/ld.so.cache"); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			bundle, rootfs := container(t)
			prepare(t, filepath.Join(rootfs, "etc"))
			if status, stderr := hook(bundle, "--lib", lib, "--lib", "/gpu/libnvidia-ml.so.1"); status != 0 || stderr != "" {
				t.Fatalf("status %d: %s", status, stderr)
			}
			for _, want := range []string{lib, "/gpu/libnvidia-ml.so.1"} {
				if got := paths(t, rootfs, filepath.Base(want)); len(got) != 1 || got[0] != want {
					t.Errorf("%s is found at %q", want, got)
				}
			}
			if name == "existing" && len(paths(t, rootfs, "libc.so.6")) != 1 {
				t.Error("the image's own library was lost")
			}
			entries, _ := os.ReadDir(filepath.Join(rootfs, "etc"))
			if len(entries) != 1 {
				t.Errorf("left in etc: %v", entries)
			}
		})
	}
}

// Programs that are started without the environment load the shim too, and what the image preloads
// stays.
func TestPreload(t *testing.T) {
	for name, c := range map[string]struct{ own, want string }{
		"none of its own": {"", shim + "\n"},
		"its own":         {"/own.so /other.so\n", shim + "\n/own.so /other.so\n"},
		"there already":   {"/own.so:" + shim, "/own.so:" + shim},
		"another path":    {shim + ".old", shim + "\n" + shim + ".old"},
	} {
		bundle, rootfs := container(t)
		file := rootfs + "/etc/ld.so.preload"
		if c.own != "" {
			write(t, file, c.own)
		}
		status, stderr := hook(bundle, "--preload", shim)
		got, err := os.ReadFile(file)
		if status != 0 || stderr != "" || err != nil || string(got) != c.want {
			t.Errorf("%s: status %d, %s; the file is %q, %v", name, status, stderr, got, err)
		}
		if entries, _ := os.ReadDir(rootfs + "/etc"); len(entries) != 1 {
			t.Errorf("%s: left in etc: %v", name, entries)
		}
	}
	bundle, rootfs := container(t)
	write(t, rootfs+"/etc/ld.so.preload", strings.Repeat("/own.so\n", maxPreload/8+1))
	if status, stderr := hook(bundle, "--preload", shim, "--lib", lib); status != 1 || !strings.Contains(stderr, "too long") || len(paths(t, rootfs, filepath.Base(lib))) != 1 {
		t.Errorf("a file of the image that is too long: status %d, %s", status, stderr)
	}
	// A mount there is a claim's, or the pod's.
	bundle, rootfs = container(t)
	file := rootfs + "/etc/ld.so.preload"
	write(t, file, "")
	from := filepath.Join(t.TempDir(), "mounted")
	write(t, from, "theirs")
	if err := unix.Mount(from, file, "", unix.MS_BIND, ""); err != nil {
		t.Skipf("can't mount here: %v", err)
	}
	defer func() {
		if err := unix.Unmount(file, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	if status, stderr := hook(bundle, "--preload", shim); status != 0 || stderr != "" {
		t.Errorf("a mount: status %d, %s", status, stderr)
	}
	if got, err := os.ReadFile(from); err != nil || string(got) != "theirs" {
		t.Errorf("what is mounted is %q, %v", got, err)
	}
}

// An image may have a device node in the place of the cache, and to open one can
// have an effect on the host. A FIFO stands for the device.
func TestOpensNoDevice(t *testing.T) {
	bundle, rootfs := container(t)
	cache := filepath.Join(rootfs, "etc/ld.so.cache")
	if err := unix.Mkfifo(cache, 0o644); err != nil {
		t.Fatal(err)
	}
	watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(watch)
	if _, err := unix.InotifyAddWatch(watch, cache, unix.IN_OPEN); err != nil {
		t.Fatal(err)
	}
	if status, stderr := hook(bundle, "--lib", lib); status != 0 || stderr != "" {
		t.Fatalf("status %d: %s", status, stderr)
	}
	event := make([]byte, unix.SizeofInotifyEvent)
	n, err := unix.Read(watch, event)
	if n >= unix.SizeofInotifyEvent && binary.NativeEndian.Uint32(event[4:])&unix.IN_OPEN != 0 {
		t.Error("the hook opened what is no regular file")
	} else if n < 0 && err != unix.EAGAIN {
		t.Fatal(err)
	}
}

// Whatever an image does with its links, nothing outside of it changes.
func TestStaysInside(t *testing.T) {
	for name, prepare := range map[string]func(rootfs, outside string) error{
		"etc is a link to an absolute path": func(rootfs, outside string) error {
			return os.Symlink(outside, rootfs+"/etc")
		},
		"etc climbs out": func(rootfs, outside string) error {
			return os.Symlink("../../../../../../../.."+outside, rootfs+"/etc")
		},
		"etc goes through proc": func(rootfs, outside string) error {
			if err := os.Mkdir(rootfs+"/proc", 0o755); err != nil {
				return err
			}
			return os.Symlink("/proc/self/root"+outside, rootfs+"/etc")
		},
		"cache is a link to an absolute path": func(rootfs, outside string) error {
			if err := os.Mkdir(rootfs+"/etc", 0o755); err != nil {
				return err
			}
			return os.Symlink(outside+"/ld.so.cache", rootfs+"/etc/ld.so.cache")
		},
	} {
		t.Run(name, func(t *testing.T) {
			bundle, rootfs := container(t)
			if err := os.Remove(rootfs + "/etc"); err != nil {
				t.Fatal(err)
			}
			outside := t.TempDir()
			write(t, outside+"/ld.so.cache", "the host's")
			if err := prepare(rootfs, outside); err != nil {
				t.Fatal(err)
			}
			hook(bundle, "--lib", lib) // may fail or not
			if got, err := os.ReadFile(outside + "/ld.so.cache"); err != nil || string(got) != "the host's" {
				t.Errorf("the file outside is now %q, %v", got, err)
			}
			if entries, _ := os.ReadDir(outside); len(entries) != 1 {
				t.Errorf("new files outside: %v", entries)
			}
		})
	}
}

// In the hook's mount namespace the container's proc is mounted, so its magic
// links lead to the host.
func TestStaysInsideWithProcMounted(t *testing.T) {
	bundle, rootfs := container(t)
	mkdir(t, rootfs+"/proc")
	if err := unix.Mount("/proc", rootfs+"/proc", "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		t.Skipf("can't mount here: %v", err)
	}
	defer func() {
		if err := unix.Unmount(rootfs+"/proc", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	outside := t.TempDir()
	write(t, outside+"/ld.so.cache", "the host's")
	if err := os.Remove(rootfs + "/etc"); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/self/root"+outside, rootfs+"/etc"); err != nil {
		t.Fatal(err)
	}
	if status, stderr := hook(bundle, "--lib", lib); status != 1 {
		t.Errorf("status %d: %s", status, stderr)
	}
	if got, _ := os.ReadFile(outside + "/ld.so.cache"); string(got) != "the host's" {
		t.Errorf("the file outside is now %q", got)
	}
}

func TestLeavesVolumesAlone(t *testing.T) {
	bundle, rootfs := container(t)
	volume := t.TempDir()
	if err := unix.Mount(volume, rootfs+"/etc", "", unix.MS_BIND, ""); err != nil {
		t.Skipf("can't mount here: %v", err)
	}
	defer func() {
		if err := unix.Unmount(rootfs+"/etc", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	if status, stderr := hook(bundle, "--lib", lib); status != 1 || !strings.Contains(stderr, "cross-device") {
		t.Errorf("status %d: %s", status, stderr)
	}
	if entries, _ := os.ReadDir(volume); len(entries) != 0 {
		t.Errorf("new files in the volume: %v", entries)
	}
}

// Engines mount a read-only root so before this hook runs (crun before 1.28). What is read-only by
// itself stays as it is.
func TestReadOnlyRoot(t *testing.T) {
	bundle, rootfs := container(t)
	mount := func(from, kind string, flags uintptr) {
		t.Helper()
		if err := unix.Mount(from, rootfs, kind, flags, ""); err != nil {
			t.Skipf("can't mount here: %v", err)
		}
	}
	mount(rootfs, "", unix.MS_BIND)
	t.Cleanup(func() {
		for unix.Unmount(rootfs, unix.MNT_DETACH) == nil {
		}
	})
	mount("", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY)
	if status, stderr := hook(bundle, "--lib", lib, "--preload", shim); status != 0 || stderr != "" {
		t.Errorf("a mount that is read-only: status %d: %s", status, stderr)
	}
	if got := paths(t, rootfs, filepath.Base(lib)); len(got) != 1 {
		t.Errorf("the library is found at %q", got)
	}
	if err := os.WriteFile(rootfs+"/etc/written", nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("the container's root is no longer read-only: %v", err)
	}
	mount("tmpfs", "tmpfs", 0)
	mkdir(t, rootfs+"/etc")
	mount("", "", unix.MS_REMOUNT|unix.MS_RDONLY)
	if status, stderr := hook(bundle, "--lib", lib); status != 1 || !strings.Contains(stderr, "read-only file system") {
		t.Errorf("status %d: %s", status, stderr)
	}
}

func TestRefuses(t *testing.T) {
	bundle, _ := container(t)
	hostRoot := t.TempDir()
	write(t, hostRoot+"/config.json", `{"root":{"path":"/"}}`)
	noRoot := t.TempDir()
	write(t, noRoot+"/config.json", `{}`)
	state := func(bundle string) string { return fmt.Sprintf(`{"bundle":%q}`, bundle) }
	for name, c := range map[string]struct {
		args   []string
		stdin  string
		status int
		says   string
	}{
		"no subcommand":      {nil, "", 2, "usage"},
		"unknown subcommand": {[]string{"frob"}, "", 2, "usage"},
		"unknown flag":       {[]string{"update-ldcache", "--frob"}, "", 2, "frob"},
		"stray argument":     {[]string{"update-ldcache", "x"}, "", 2, "usage"},
		"relative library":   {[]string{"update-ldcache", "--lib", "x.so"}, "", 2, "absolute"},
		"no state":           {[]string{"update-ldcache", "--lib", lib}, "", 0, "state"},
		"no bundle":          {[]string{"update-ldcache", "--lib", lib}, "{}", 0, "bundle"},
		"missing bundle":     {[]string{"update-ldcache", "--lib", lib}, state(bundle + "/none"), 0, "no such file"},
		"no root":            {[]string{"update-ldcache", "--lib", lib}, state(noRoot), 0, "no root"},
		"the host's root":    {[]string{"update-ldcache", "--lib", lib}, state(hostRoot), 0, "leaving it alone"},
		"nothing to add":     {[]string{"update-ldcache"}, state(bundle), 0, ""},
	} {
		var out bytes.Buffer
		status := run(c.args, strings.NewReader(c.stdin), &out)
		if status != c.status || !strings.Contains(out.String(), c.says) {
			t.Errorf("%s: status %d, want %d; says %q, want %q", name, status, c.status, out.String(), c.says)
		}
	}
}

func TestEndsWhenItHangs(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the time limit")
	}
	r, w := io.Pipe() // never written: a runtime that keeps standard input open
	defer w.Close()
	var out bytes.Buffer
	if status := run([]string{"update-ldcache", "--lib", lib}, r, &out); status != 0 || !strings.Contains(out.String(), "not done after") {
		t.Errorf("status %d: %s", status, &out)
	}
}

// A real dynamic linker, in a real root, finds a library only after the hook.
func TestDynamicLinkerFindsLibrary(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil || os.Getuid() != 0 {
		t.Skip("needs a C compiler and root, to chroot")
	}
	bundle, rootfs := container(t)
	work := t.TempDir()
	write(t, work+"/lib.c", "int answer(void) { return 42; }")
	write(t, work+"/main.c", "int answer(void); int main(void) { return answer() != 42; }")
	mkdir(t, rootfs+"/gpu")
	sh := func(name string, args ...string) {
		t.Helper()
		if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
			t.Fatalf("%s %q: %v\n%s", name, args, err, out)
		}
	}
	sh(cc, "-shared", "-fPIC", "-Wl,-soname,libanswer.so.1", "-o", rootfs+"/gpu/libanswer.so.1", work+"/lib.c")
	sh(cc, "-o", rootfs+"/main", work+"/main.c", rootfs+"/gpu/libanswer.so.1")
	out, err := exec.Command("ldd", rootfs+"/main").CombinedOutput()
	if err != nil {
		t.Fatalf("ldd: %v\n%s", err, out)
	}
	for _, word := range strings.Fields(string(out)) { // libc and the linker itself
		if strings.HasPrefix(word, "/") && !strings.HasPrefix(word, rootfs) {
			mkdir(t, filepath.Dir(rootfs+word))
			sh("cp", "-L", word, rootfs+word)
		}
	}
	if exec.Command("chroot", rootfs, "/main").Run() == nil {
		t.Fatal("the library is found without the hook: this test shows nothing")
	}
	if status, stderr := hook(bundle, "--lib", "/gpu/libanswer.so.1"); status != 0 {
		t.Fatal(stderr)
	}
	sh("chroot", rootfs, "/main")
	// A package's installation makes the cache anew, in the container.
	write(t, rootfs+"/etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
	mkdir(t, rootfs+"/etc/ld.so.conf.d")
	if status, stderr := hook(bundle, "--lib", "/gpu/libanswer.so.1"); status != 0 {
		t.Fatal(stderr)
	}
	sh("ldconfig", "-r", rootfs)
	sh("chroot", rootfs, "/main")
}

func TestHelp(t *testing.T) {
	for arg, want := range map[string]string{"--help": "join --run-dir", "-h": "OCI hook", "--version": "version", "describe": ""} {
		if got := help([]string{arg}); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q lacks %q", arg, got, want)
		}
	}
}
