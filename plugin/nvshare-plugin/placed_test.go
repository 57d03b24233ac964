// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

// until waits for something that another goroutine does.
func until(t *testing.T, what string, ok func() error) {
	t.Helper()
	var err error
	for limit := time.Now().Add(patience); time.Now().Before(limit); time.Sleep(time.Millisecond) {
		if err = ok(); err == nil {
			return
		}
	}
	t.Fatalf("waited in vain for %s: %v", what, err)
}

// serving runs the plugin on a host, without a container runtime, until the test ends.
func serving(t *testing.T, root string, args []string) {
	t.Helper()
	t.Setenv("NVSHARE_SIMGPU", "")
	t.Setenv("NVSHARE_RUN_DIR", "")
	cmd := command(new(int), quiet())
	cmd.SetArgs(slices.DeleteFunc(args, func(a string) bool { return a == "--no-nri" }))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("at the end: %v", err)
		}
	})
	until(t, "the specs", func() error {
		_, err := os.Stat(root + "/run/cdi/" + cdi.FileName(cdi.KindNRI))
		return err
	})
}

func holds(file, want string) error {
	got, err := os.ReadFile(file)
	if err == nil && string(got) != want {
		err = fmt.Errorf("%s holds %q, want %q", file, got, want)
	}
	return err
}

// What the plugin has placed is put right at once, whatever is done to it: without the
// shim, nobody's work would be arbitrated. The next look would be ten seconds later.
func TestPlacedFilesAreKeptRight(t *testing.T) {
	root, args := host(t, 1)
	serving(t, root, args)
	shim, hook := root+"/var/lib/nvshare/lib/current/libnvshare.so", root+"/var/lib/nvshare/bin/nvshare-cdi-hook"
	for name, harm := range map[string]func() error{
		"the shim is truncated": func() error { return os.Truncate(shim, 0) },
		"the shim is removed":   func() error { return os.Remove(shim) },
		"the shim is replaced": func() error {
			return errors.Join(os.WriteFile(shim+".new", []byte("other"), 0o755), os.Rename(shim+".new", shim))
		},
		"nobody may read the shim": func() error { return os.Chmod(shim, 0) },
		"the link is removed":      func() error { return os.Remove(filepath.Dir(shim)) },
		"all is removed":           func() error { return os.RemoveAll(root + "/var/lib/nvshare") },
		"the hook is truncated":    func() error { return os.Truncate(hook, 0) },
		"the hook cannot run":      func() error { return os.Chmod(hook, 0o600) },
		"the run directory goes":   func() error { return os.RemoveAll(root + "/run/nvshare/tenant") },
	} {
		until(t, name+", in spite of the plugin", harm) // which may still mend the last harm
		until(t, name, func() error {
			for file, want := range map[string]string{shim: "shim", hook: "hook"} {
				if err := holds(file, want); err != nil {
					return err
				}
				if info, err := os.Stat(file); err != nil {
					return err
				} else if info.Mode() != 0o755 {
					return fmt.Errorf("%s: %v", file, info.Mode())
				}
			}
			_, err := os.Stat(root + "/run/nvshare/tenant")
			return err
		})
	}
}

// What is put right and then goes wrong in the same way, before the next look, is put right
// again: a look that wrote something must not take what it saw before for what it left.
func TestSameHarmTwiceIsSeen(t *testing.T) {
	root, args := host(t, 1)
	n := nodeOn(t, root, args)
	for _, file := range []string{
		"/var/lib/nvshare/lib/current/libnvshare.so", "/var/lib/nvshare/lib/current", "/var/lib/nvshare/lib/empty", "/var/lib/nvshare/bin/nvshare-cdi-hook",
		"/run/nvshare/tenant", "/run/cdi/" + cdi.FileName(cdi.Kind), "/run/cdi/" + cdi.FileName(cdi.KindNRI),
	} {
		for looks := 0; n.fingerprint() != n.seen; looks++ {
			if looks == 3 {
				t.Fatal("it looks again and again")
			}
			look(n)
		}
		for range 2 {
			if err := os.Remove(root + file); err != nil {
				t.Fatal(err)
			}
			if n.fingerprint() == n.seen {
				t.Errorf("%s was removed, and nobody looks", file)
			}
			look(n)
		}
	}
}

// While a file cannot be placed, as on a full disk, the plugin serves on, refuses pods
// and says why. It gives GPUs as soon as the file is there.
func TestServesWhileFilesCannotBePlaced(t *testing.T) {
	root, args := host(t, 1)
	full := root + "/var/lib/nvshare"
	if err := os.MkdirAll(full, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", full, "tmpfs", 0, "size=4k,nr_inodes=1"); err != nil {
		t.Skip("needs root: ", err)
	}
	mounted := true
	defer func() {
		if mounted {
			unix.Unmount(full, unix.MNT_DETACH)
		}
	}()
	n := nodeOn(t, root, args)
	p := plugin.New(quiet(), plugin.NewContainers(quiet()))
	p.SetInventory(look(n))
	create := func() error {
		_, _, err := p.CreateContainer(context.Background(), &api.PodSandbox{Name: "train", Namespace: "ml",
			Annotations: map[string]string{plugin.Annotation: "nvshare.com/gpu=0"}}, &api.Container{Name: "main"})
		return err
	}
	if err := create(); err == nil || !strings.Contains(err.Error(), "libnvshare.so") || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("refused with %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		n.watch(ctx, true, p.SetInventory, func() {})
		close(done)
	}()
	if err := unix.Unmount(full, unix.MNT_DETACH); err != nil { // the plugin may just have a file open there
		t.Fatal(err)
	}
	mounted = false
	until(t, "the container to be created", create)
	cancel()
	<-done
}

// A scheduler that is a user of its own has its run directory to itself: it refuses a
// directory that the plugin made there as root.
func TestRunDirectoryOfAnotherUser(t *testing.T) {
	root, args := host(t, 1)
	run := root + "/run/nvshare"
	if err := os.Mkdir(run, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(run, 3000, 3000); err != nil {
		t.Skip("needs root: ", err)
	}
	n := nodeOn(t, root, args)
	_, err := n.placed.place()
	if !errors.As(err, new(errNotPlaced)) || !strings.Contains(err.Error(), "user 3000") {
		t.Errorf("without the directory: %v", err)
	}
	if _, err := os.Stat(run + "/tenant"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the plugin has made it: %v", err)
	}
	if err := os.Mkdir(run+"/tenant", 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := n.placed.place(); err != nil {
		t.Errorf("with the directory: %v", err)
	}
}

// Where the specs cannot be written, and the old ones are gone, engines would say only
// that they do not find the device: pods are told the reason.
func TestSpecThatCannotBeWrittenIsToldToPods(t *testing.T) {
	root, args := host(t, 1)
	n := nodeOn(t, root, args)
	p := plugin.New(quiet(), plugin.NewContainers(quiet()))
	p.SetInventory(look(n))
	create := func() error {
		_, _, err := p.CreateContainer(context.Background(), &api.PodSandbox{Name: "train", Namespace: "ml",
			Annotations: map[string]string{plugin.Annotation: "nvshare.com/gpu=0"}}, &api.Container{Name: "main"})
		return err
	}
	if err := create(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", n.cdiDir, "tmpfs", 0, "size=4k,nr_inodes=1"); err != nil {
		t.Skip("needs root: ", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		n.watch(ctx, true, p.SetInventory, func() {})
		close(done)
	}()
	until(t, "the reason", func() error {
		if err := create(); err == nil || !strings.Contains(err.Error(), "no space left") {
			return fmt.Errorf("refused with %v", err)
		}
		return nil
	})
	if err := unix.Unmount(n.cdiDir, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	until(t, "the container to be created", create)
	cancel()
	<-done
}
