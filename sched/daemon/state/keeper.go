// SPDX-License-Identifier: Apache-2.0

package state

import (
	"fmt"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/timer"
)

// keepRetry is the pause after a record could not be written.
const keepRetry = 2 * time.Second

// Keeper writes a record of what nobody would say again: it tries until that is done. Its Timer says when it writes next.
type Keeper struct {
	*timer.Timer
	Err     error // why the record is not as content says; nil: it is
	log     *logrus.Entry
	path    string
	what    string
	content func() any
}

// NewKeeper returns a keeper that was not told to write yet. what names the content for people, of which there are several.
func NewKeeper(timers *timer.List, log *logrus.Entry, path, what string, content func() any) *Keeper {
	k := &Keeper{log: log, path: path, what: what, content: content}
	k.Timer = timers.New(k.Keep)
	return k
}

// Write writes the record once.
func (k *Keeper) Write() error {
	if err := WriteRecord(k.path, k.content()); err != nil {
		return fmt.Errorf("record %s: %w", k.what, err)
	}
	k.Stop()
	if k.Err != nil {
		k.log.Infof("%s are recorded again", k.what)
	}
	k.Err = nil
	return nil
}

// Keep writes the record, and again until that is done.
func (k *Keeper) Keep() {
	err := k.Write()
	if err == nil {
		return
	}
	if k.Err == nil {
		k.log.WithError(err).Errorf("the next scheduler would not know %s; trying again every %v", k.what, keepRetry)
	}
	k.Err = err
	k.Set(loop.Now().Add(keepRetry))
}

// KeepLater has Keep done in a while, with what changes until then.
func (k *Keeper) KeepLater(pause time.Duration) {
	if !k.Planned() {
		k.Set(loop.Now().Add(pause))
	}
}
