//go:build engines

// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/node"
)

// patience bounds each wait for an event. It does not measure speed.
const patience = 5 * time.Minute

var (
	shared   *node.Node
	buildDir string
	examples string // the machine's deployments/examples

	// full: also engines of other releases, which are downloaded.
	full = os.Getenv("NVSHARE_ENGINES") == "full"
)

const (
	// inside is the path at which engines of other releases see the examples.
	inside = "/examples"
	image  = "localhost/nvshare-workload:1"
)

func TestMain(m *testing.M) {
	var err error
	if buildDir, err = filepath.Abs("../../.build"); err == nil {
		examples, err = filepath.Abs("../../deployments/examples")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(node.Isolated(buildDir, "engines-", func(dir string) int {
		if err := bringUp(dir); err != nil {
			fmt.Fprintln(os.Stderr, "bring up the node:", err)
			return 1
		}
		return m.Run()
	}))
}

func bringUp(dir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n, err := node.New(dir, node.Options{Build: buildDir, Simulated: true, SimConfig: "gpus=2\nmemory_mib=16384\n"})
	if err != nil {
		return err
	}
	shared = n
	return n.Start(ctx)
}

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("daemons:\n%s", shared.Logs(15))
		}
	})
	return ctx
}

func must[T any](v T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// enginePackages are the packages of a release's root file system: the engines, and a
// shell for the examples.
var enginePackages = []string{"podman", "crun", "conmon", "docker.io", "docker-cli", "dash", "coreutils"}

// release returns the root file system of a Debian release with its engines.
func release(t *testing.T, suite string) string {
	t.Helper()
	return unpacked(t, suite, suite, enginePackages...)
}

// unpacked returns a root file system of packages of a Debian release. It stays in the build
// directory. Only make engines, slurm and apptainer download it; otherwise the test is skipped.
func unpacked(t *testing.T, name, suite string, packages ...string) string {
	t.Helper()
	if !full {
		t.Skip("make engines fetches it, make slurm and make apptainer what they need of it")
	}
	root := filepath.Join(buildDir, "engines", name)
	if _, err := os.Stat(root); err != nil {
		check(t, os.MkdirAll(filepath.Dir(root), 0o755))
		cmd := exec.Command("sh", append([]string{"../compat/images.sh", root, suite, "amd64"}, packages...)...)
		if text, err := cmd.CombinedOutput(); err != nil {
			t.Skipf("the packages of this release could not be downloaded: %v\n%s", err, text)
		}
	}
	return root
}

// wrapper puts a script before an engine's program of the same name in PATH. It adds the
// options that a test needs to the command line of an example.
func wrapper(t *testing.T, e *node.Engine, name, text string) {
	t.Helper()
	dir := filepath.Join(e.Private, "bin")
	check(t, errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+text), 0o755)))
	e.Setenv("PATH", dir+":"+shared.Tools()+":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
}

// busy is the program that examples run, with the given tenant name.
func busy(tenant string) []string {
	return []string{"/usr/bin/cuda-busy", "--kernel-us", "500", "--depth", "400", "--tenant", tenant}
}

// awaitTurns waits until a process that is not in known has had a turn, and returns it as
// the scheduler sees it.
func awaitTurns(t *testing.T, ctx context.Context, p *node.Process, known map[uint32]bool) *api.Client {
	t.Helper()
	var got *api.Client
	check(t, node.Until(ctx, "a turn of "+p.Name, func() error {
		select {
		case <-p.Ended():
			t.Fatalf("%s has ended:\n%s", p.Name, p.Tail(20))
		default:
		}
		for _, gpu := range must(shared.Status(ctx))(t).Gpus {
			for _, c := range gpu.Clients {
				if !known[c.Pid] && c.Grants > 0 {
					got = c
					return nil
				}
			}
		}
		return errors.New("no new client has had a turn:\n" + p.Tail(5))
	}))
	return got
}

func clients(t *testing.T, ctx context.Context) map[uint32]bool {
	t.Helper()
	pids := map[uint32]bool{}
	for _, gpu := range must(shared.Status(ctx))(t).Gpus {
		for _, c := range gpu.Clients {
			pids[c.Pid] = true
		}
	}
	return pids
}

// runExample runs an example until its container has had a turn, checks what the
// container got, and ends it.
func runExample(t *testing.T, e *node.Engine, name string, argv ...string) *api.Client {
	t.Helper()
	ctx := within(t)
	known := clients(t, ctx)
	p := must(e.Start(name, argv...))(t)
	c := awaitTurns(t, ctx, p, known)
	if c.Bypassed != 0 || c.Interposed == 0 {
		t.Errorf("the shim holds %d entry points, %d bypass it", c.Interposed, c.Bypassed)
	}
	if maps := must(os.ReadFile(fmt.Sprintf("/proc/%d/maps", c.Pid)))(t); !strings.Contains(string(maps), "/usr/lib/nvshare/libnvshare.so") {
		t.Error("the shim is not loaded from where the spec puts it")
	}
	end(t, ctx, p, c)
	return c
}

// end ends a container's program as its user would, and waits for its engine.
func end(t *testing.T, ctx context.Context, p *node.Process, c *api.Client) {
	t.Helper()
	check(t, syscall.Kill(int(c.Pid), syscall.SIGTERM))
	if status, err := p.Wait(ctx); err != nil || status != 0 {
		t.Errorf("%s ended with %d, %v:\n%s", p.Name, status, err, p.Tail(20))
	}
}
