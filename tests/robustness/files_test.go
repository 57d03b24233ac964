// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/checkpoint"
	"github.com/nvshare/nvshare/sched/daemon/store"
)

// fileSite has a tenant, and a scheduler that has host memory for little more.
func fileSite(t *testing.T) (x *suspendTenant, start func(), files func() []string) {
	t.Helper()
	s := suspendSite(t)
	dir := filepath.Join(s.dir, "files")
	s.check(os.Mkdir(dir, 0o700))
	disk, err := store.Open(dir, "test")
	if err == nil {
		err = disk.Room(1 << 30)
	}
	if err != nil {
		t.Skip(err) // no rights, or the temporary directory is in memory, or so full that memory stays where it is
	}
	s.endScheduler(syscall.SIGTERM)
	start = func() {
		t.Helper()
		s.startSwapping("--swap-memory", "150Mi", "--swap-ready", "0", "--suspend-dir", dir)
	}
	start()
	files = func() []string {
		all, err := filepath.Glob(filepath.Join(dir, "*"))
		s.check(err)
		return all
	}
	return s.startSuspendTenant("x"), start, files
}

func (x *suspendTenant) awaitsFiled() {
	x.t.Helper()
	x.awaits("has its memory in a file", func(c *api.Client) bool { return c.FileBytes != 0 && c.ArenaBytes == 0 })
}

// The memory of a suspended process goes to a file, and comes back as it was, also where the
// scheduler was killed meanwhile. Nobody restores the process before.
func TestSuspendToFile(t *testing.T) {
	t.Parallel()
	x, start, files := fileSite(t)
	x.suspend()
	x.awaitsAway()
	x.awaitsFiled()
	r := &checkpoint.Runner{Program: filepath.Join(x.dir, checkpoint.Name), Env: x.env()}
	if _, err := r.On(context.Background(), x.cmd.Process.Pid, nil); err == nil || !strings.Contains(err.Error(), "are not there") {
		t.Errorf("restored without its memory: %v", err)
	}
	x.does("k")
	if all := files(); len(all) != 0 {
		t.Errorf("%v is left", all)
	}

	x.suspend()
	x.awaitsFiled()
	x.endScheduler(syscall.SIGKILL)
	start()
	x.awaitsFiled()
	x.does("k")

	for range 2 { // at moments that differ by chance
		x.suspend()
		x.awaitsAway()
		x.endScheduler(syscall.SIGKILL)
		start()
		x.asks("k")
		x.endScheduler(syscall.SIGKILL)
		start()
		x.says("k", 0)
		// It may have been said before that scheduler's start.
		x.awaits("is attached", func(c *api.Client) bool { return c.Connected })
	}

	x.suspend()
	x.awaitsFiled()
	x.check(x.cmd.Process.Kill())
	<-x.end
	x.until("no file is left", func() error {
		if all := files(); len(all) != 0 {
			return fmt.Errorf("%v is left", all)
		}
		return nil
	})
}
