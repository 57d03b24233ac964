// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/warden/rm"
)

// maxOffs is how often channels are taken off before they are put on again. The driver
// counts; who does not know the count puts them on twice as often, because a warden and
// the one after it may both have ended in the middle. An on too many changes nothing.
const maxOffs = 4

// entry is a process whose channels may be off.
type entry struct {
	PID     int        `json:"pid"`
	Start   uint64     `json:"start"`
	Objects rm.Objects `json:"objects"`
	Freezer string     `json:"freezer,omitempty"` // of its container, which is stopped
}

// ledger is the file of the processes whose channels may be off. It is written before they
// are, and says so until they have been on for a while.
type ledger struct {
	path string
	boot string // channels do not outlive it

	mu      sync.Mutex
	entries map[int]entry
}

type ledgerFile struct {
	Boot    string  `json:"boot"`
	Entries []entry `json:"entries"`
}

func newLedger(dir string) (*ledger, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, err
	}
	return &ledger{path: filepath.Join(dir, "off.json"), boot: strings.TrimSpace(string(boot)), entries: map[int]entry{}}, nil
}

// note writes an entry down, if it is not there as it is.
func (l *ledger) note(e entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	old, had := l.entries[e.PID]
	if had && reflect.DeepEqual(old, e) {
		return nil
	}
	l.entries[e.PID] = e
	err := l.write()
	if err != nil {
		if delete(l.entries, e.PID); had {
			l.entries[e.PID] = old
		}
	}
	return err
}

func (l *ledger) forget(pids ...int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.entries)
	for _, pid := range pids {
		delete(l.entries, pid)
	}
	if len(l.entries) == n {
		return nil
	}
	return l.write()
}

// keep forgets all but these.
func (l *ledger) keep(left []entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.entries)
	for _, e := range left {
		l.entries[e.PID] = e
	}
	return l.write()
}

func (l *ledger) empty() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.entries) == 0
}

// write wants mu held.
func (l *ledger) write() error {
	f := ledgerFile{Boot: l.boot, Entries: slices.AppendSeq([]entry{}, maps.Values(l.entries))}
	text, err := json.Marshal(f)
	if err != nil {
		return err
	}
	tmp, err := os.OpenFile(l.path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = tmp.Write(text)
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err == nil {
		err = os.Rename(l.path+".new", l.path)
	}
	if err != nil {
		return fmt.Errorf("write down whose channels may be off: %w", err)
	}
	dir, err := os.Open(filepath.Dir(l.path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// read returns what a warden has written down.
func (l *ledger) read() ([]entry, error) {
	text, err := os.ReadFile(l.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var f ledgerFile
	if err := json.Unmarshal(text, &f); err != nil {
		return nil, fmt.Errorf("%s: %w", l.path, err)
	}
	if f.Boot != l.boot {
		return nil, nil
	}
	return f.Entries, nil
}

// Putting all on is tried again for so long. Who hangs is waited for longer: on a machine that does much else the
// driver's answer takes its time. Both are less than lockWait.
const (
	freeFor   = 5 * time.Second
	freePause = 20 * time.Millisecond
	hangsFor  = 30 * time.Second
)

var errLate = errors.New("the driver or the process has not answered in time")

// allAtOnce calls do for all at the same time, because a driver or a process may hang. It returns how each ended:
// errLate, if it has not by then.
func allAtOnce[T any](bound time.Duration, all []T, do func(T) error) []error {
	type result struct {
		i   int
		err error
	}
	failed, results := slices.Repeat([]error{errLate}, len(all)), make(chan result, len(all))
	for i, one := range all {
		go func() { results <- result{i, do(one)} }()
	}
	late := time.After(bound)
	for range all {
		select {
		case r := <-results:
			failed[r.i] = r.err
		case <-late:
			return failed
		}
	}
	return failed
}

// free puts on what the file says may be off. It returns how many processes that were, and who is left, with the reasons.
func free(d rm.Driver, l *ledger) (n int, left []entry, err error) {
	entries, err := l.read()
	if err != nil {
		return 0, nil, err
	}
	for end := time.Now().Add(freeFor); len(entries) > 0; time.Sleep(freePause) {
		left, err = nil, nil
		for i, failed := range allAtOnce(hangsFor, entries, func(e entry) error { return freeOne(d, e) }) {
			if failed != nil {
				left, err = append(left, entries[i]), errors.Join(err, fmt.Errorf("process %d: %w", entries[i].PID, failed))
			} else {
				n++
			}
		}
		if entries = left; time.Now().After(end) {
			break
		}
	}
	return n, left, err
}

func freeOne(d rm.Driver, e entry) error { return errors.Join(thaw(e.Freezer), putOn(d, e)) }

func putOn(d rm.Driver, e entry) error {
	pidfd, err := openProcess(e.PID, e.Start)
	if errors.Is(err, errGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(pidfd)
	failed := e.Objects.PutOn(d, e.PID, pidfd, 2*maxOffs)
	if failed == nil {
		return nil
	}
	now, err := rm.Look(d, e.PID, pidfd, rm.Objects{}, true) // it has other objects than before
	if err != nil {
		return errors.Join(failed, err)
	}
	if _, channels := now.Count(); channels == 0 { // it lives, and has those that the driver has refused to put on
		return failed
	}
	return now.PutOn(d, e.PID, pidfd, 2*maxOffs)
}
