// SPDX-License-Identifier: Apache-2.0

package state

import (
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/timer"
)

// A record that cannot be written is written as soon as it can, with what holds then.
func TestKeeper(t *testing.T) {
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	var timers timer.List
	path, says := filepath.Join(t.TempDir(), "x.json"), File{Version: 1, BootID: "first"}
	k := NewKeeper(&timers, logrus.NewEntry(logger), path, "things", func() any { return says })
	if err := os.Mkdir(path+".tmp", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := k.Write(); err == nil || k.Err != nil || k.Planned() {
		t.Errorf("written once: %v; %v, planned %v", err, k.Err, k.Planned())
	}
	k.KeepLater(0)
	k.KeepLater(time.Hour) // it comes in an hour anyhow
	timers.Run(loop.Now())
	if k.Err == nil || !k.Planned() {
		t.Errorf("%v, planned %v", k.Err, k.Planned())
	}
	if err := os.Remove(path + ".tmp"); err != nil {
		t.Fatal(err)
	}
	says.BootID = "second"
	timers.Run(loop.Now().Add(keepRetry))
	if got, err := ReadRecord[File](path, 1); err != nil || got.BootID != "second" || k.Err != nil || k.Planned() {
		t.Errorf("%+v, %v; %v, planned %v", got, err, k.Err, k.Planned())
	}
}
