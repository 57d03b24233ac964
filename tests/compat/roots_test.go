//go:build compat

// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// cc compiles a small program for one case.
func cc(t *testing.T, args ...string) {
	t.Helper()
	cmd := exec.Command("gcc", append([]string{"-std=c11", "-D_GNU_SOURCE", "-O1"}, args...)...)
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, text)
	}
}

func nobody() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
}

// driverFor makes a copy of the driver that any user can read.
func driverFor(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(filepath.Dir(run), "driver")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	install(t, built("simgpu/libcuda.so.1"), filepath.Join(dir, "libcuda.so.1"))
	return dir
}

func install(t *testing.T, from, to string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		t.Fatal(err)
	}
	text := must(os.ReadFile(from))(t)
	if err := os.WriteFile(to, text, 0o755); err != nil {
		t.Fatal(err)
	}
}

// calls counts each system call in strace's output.
func calls(t *testing.T, file string) string {
	t.Helper()
	count := map[string]int{}
	for _, m := range regexp.MustCompile(`(?m)^\d+ +(\w+)\(`).FindAllStringSubmatch(string(must(os.ReadFile(file))(t)), -1) {
		count[m[1]]++
	}
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(count)) {
		fmt.Fprintf(&b, "%s %d, ", name, count[name])
	}
	return b.String()
}

// enter is a command that runs in another root file system, in which the scheduler's
// sockets and the simulated GPU are at their default paths.
func enter(root string, env []string, argv ...string) *exec.Cmd {
	return enterAs("0:0", root, env, argv...)
}

func enterAs(user, root string, env []string, argv ...string) *exec.Cmd {
	const script = `set -e
mount --bind "$RUN" "$ROOT/var/run/nvshare"
mount --bind "$SIM" "$ROOT/run/nvshare-simgpu"
mount --bind /proc "$ROOT/proc"
exec chroot --userspec="$USER" "$ROOT" /usr/bin/env -i "$@"`
	args := []string{"--mount", "--propagation", "private", "sh", "-c", script, "sh", "PATH=/usr/bin:/bin", "NVSHARE_SIMGPU_TENANT=" + filepath.Base(root)}
	cmd := exec.Command("unshare", append(append(args, env...), argv...)...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "RUN=" + run, "SIM=" + sim, "ROOT=" + root, "USER=" + user}
	return cmd
}

// mountPoints makes the directories on which enter mounts.
func mountPoints(t *testing.T, root string) {
	t.Helper()
	for _, dir := range []string{"var/run/nvshare", "run/nvshare-simgpu", "proc"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// bare makes a root file system with only a C library, env, the driver, the shim and a
// program.
func bare(t *testing.T) string {
	t.Helper()
	root := must(os.MkdirTemp(filepath.Dir(run), "root-"))(t)
	os.Chmod(root, 0o755)
	files := []string{"/usr/bin/env", program("probe"), program("probe-linked")}
	for _, file := range files {
		install(t, file, filepath.Join(root, "usr/bin", filepath.Base(file)))
	}
	cmd := exec.Command("ldd", append(files, shim)...)
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+built("simgpu"))
	text := must(cmd.Output())(t)
	for _, m := range regexp.MustCompile(`(?m)^\s+(?:\S+ => )?(/\S+) \(`).FindAllStringSubmatch(string(text), -1) {
		if strings.HasPrefix(m[1], build) {
			continue
		}
		to := filepath.Join(root, m[1])
		install(t, m[1], to)
	}
	install(t, built("simgpu/libcuda.so.1"), filepath.Join(root, "usr/lib/nvshare/libcuda.so.1"))
	install(t, shim, filepath.Join(root, "usr/lib/nvshare/libnvshare.so"))
	mountPoints(t, root)
	return root
}

// roots runs programs in other root file systems, made of this machine's files.
func roots(t *testing.T) {
	const lib, preload = "LD_LIBRARY_PATH=/usr/lib/nvshare", "LD_PRELOAD=/usr/lib/nvshare/libnvshare.so"
	check(t, "an image of a C library and a program", func(t *testing.T) {
		t.Parallel()
		needRoot(t)
		root := bare(t)
		managed(t, enter(root, []string{lib, preload}, "/usr/bin/probe", "dlsym"))
		managed(t, enter(root, []string{lib, preload}, "/usr/bin/probe-linked", "linked"))
	})
	check(t, "ld.so.preload", func(t *testing.T) {
		t.Parallel()
		needRoot(t)
		root := bare(t)
		if err := os.MkdirAll(filepath.Join(root, "etc"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, "etc/ld.so.preload"), []byte("/usr/lib/nvshare/libnvshare.so\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		managed(t, enter(root, []string{lib}, "/usr/bin/probe", "dlsym"))
		managed(t, enter(root, []string{lib}, "/usr/bin/probe-linked", "linked"))
		// Also in LD_PRELOAD, as a container engine adds it.
		managed(t, enter(root, []string{lib, preload}, "/usr/bin/probe", "thread"))
		// A setuid program, which ignores LD_PRELOAD, is held.
		file := filepath.Join(root, "usr/bin/setuid")
		cc(t, "-DLINKED", "-pthread", "-o", file, "programs/probe.c", "-L"+built("simgpu"), "-l:libcuda.so.1", "-ldl", "-Wl,--disable-new-dtags,-rpath,/usr/lib/nvshare")
		if err := os.Chmod(file, 0o755|os.ModeSetuid); err != nil {
			t.Fatal(err)
		}
		managed(t, enterAs("65534:65534", root, nil, "/usr/bin/setuid", "linked"))
	})
}
