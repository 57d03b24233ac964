// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/nvshare/nvshare/sched/cgroup"
	"github.com/nvshare/nvshare/sched/warden/order"
	"github.com/nvshare/nvshare/sched/warden/rm"
)

// errGone: the process has ended.
var errGone = errors.New("the process has ended")

// startOf returns when a process started (field 22 of stat).
func startOf(pid int) (uint64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := bytes.Cut(text[max(bytes.LastIndexByte(text, ')'), 0):], []byte(" "))
	fields := bytes.Fields(rest)
	if len(fields) < 20 {
		return 0, fmt.Errorf("/proc/%d/stat has no start", pid)
	}
	return strconv.ParseUint(string(fields[19]), 10, 64)
}

// openProcess returns a pidfd of the process with this pid and start; 0: whichever has the pid.
func openProcess(pid int, start uint64) (int, error) {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, errGone
	}
	if err != nil {
		return -1, fmt.Errorf("pidfd_open: %w", err)
	}
	now, err := startOf(pid)
	if err != nil || start != 0 && now != start || ended(pidfd) {
		unix.Close(pidfd)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
			return -1, err
		}
		return -1, errGone
	}
	return pidfd, nil
}

func ended(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

const (
	// lookAgain is after which time an order looks for new clients and channels.
	lookAgain = 250 * time.Millisecond
	// lookAll is the same of a look that asks everything.
	lookAll = 5 * time.Second
	// forgetAfter is how long channels are on before the ledger forgets the process, and
	// keepFor how long a process is known of which nobody asks.
	forgetAfter = 2 * time.Second
	keepFor     = 30 * time.Second
)

// dropped is the pidfd of a process that the warden does not know any more.
const dropped = -1

// process is one that orders are about.
type process struct {
	pid   int
	start uint64
	pidfd int

	mu        sync.Mutex // held over controls
	objects   rm.Objects
	switched  rm.Objects // those of them that are off
	looked    time.Time
	looking   bool // lookLate is under way
	lookedAll time.Time
	offs      int       // how often its channels were taken off
	until     time.Time // they are off until then
	failed    string    // why they could not be put on, when that was tried last
	noted     bool      // in the ledger
	freezer   string    // of its container, which is stopped; "": it is not
	used      time.Time // the latest order, or the latest on
}

// look learns what the process has, unless that was just done. all: each object is
// asked what it is.
func (p *process) look(d rm.Driver, now time.Time, all bool) error {
	if !all && now.Sub(p.looked) < lookAgain {
		return nil
	}
	found, err := rm.Look(d, p.pid, p.pidfd, p.objects, all)
	if err != nil {
		if ended(p.pidfd) {
			return errGone
		}
		return err
	}
	come := found.Channels(p.switched)
	p.switched = found.Channels(come) // a channel that has ended may come again, under the same number
	p.objects, p.looked = found, now
	if all {
		p.lookedAll = now
	}
	return nil
}

// off takes the channels off that are known. That fails where one of them has ended, so it
// is tried once more.
func (p *process) off(d rm.Driver, l *ledger, now time.Time, again bool) error {
	if p.offs > 0 && p.offs <= maxOffs && !again {
		p.until = now.Add(order.Lease)
		return nil
	}
	if p.offs >= maxOffs { // so that the count is known: it puts its channels on by itself, they are on for a moment
		if err := p.on(d, now, 0); err != nil {
			return err
		}
	}
	if p.looked.IsZero() {
		if err := p.look(d, now, true); err != nil {
			return err
		}
	}
	err := p.switchOff(d, l, now)
	if err == nil || errors.Is(err, errGone) {
		return err
	}
	if err := p.look(d, now, true); err != nil {
		return err
	}
	return p.switchOff(d, l, now)
}

func (p *process) switchOff(d rm.Driver, l *ledger, now time.Time) error {
	if _, channels := p.objects.Count(); channels == 0 {
		return errors.New("no channel was found")
	}
	if err := l.note(p.entry()); err != nil {
		return err
	}
	p.noted = true
	p.offs++
	p.until = now.Add(order.Lease)
	p.switched = p.objects
	err := p.objects.Switch(d, p.pidfd, false)
	if err == nil {
		return nil
	}
	// Some may be off. A channel that ended is the likely reason.
	if e := p.on(d, now, 2*maxOffs); e != nil {
		return errors.Join(err, e)
	}
	return err
}

func (p *process) entry() entry {
	return entry{p.pid, p.start, p.objects.Channels(rm.Objects{}), p.freezer}
}

// freeze takes the channels off, and stops the processes of the container.
func (p *process) freeze(d rm.Driver, l *ledger, now time.Time, container string) error {
	if p.freezer != "" {
		p.until = now.Add(order.Lease)
		return nil
	}
	file, err := freezerOf(p.pid, container)
	if err != nil {
		return err
	}
	if err := p.off(d, l, now, true); err != nil {
		return err
	}
	p.freezer = file
	if err := l.note(p.entry()); err != nil {
		p.freezer = ""
		return err
	}
	if err := cgroup.Stop(file, true); err != nil { // the file system may be read-only
		p.freezer = ""
		return errors.Join(err, p.on(d, now, 0), l.note(p.entry()))
	}
	return nil
}

// lookLate takes off what came since channels were taken off. It is done after an order was answered.
func (p *process) lookLate(d rm.Driver, l *ledger, now time.Time) error {
	if p.offs == 0 {
		return nil
	}
	if err := p.look(d, now, now.Sub(p.lookedAll) > lookAll); err != nil {
		return err
	}
	come := p.objects.Channels(p.switched) // another order may have found them
	if len(come.Clients) == 0 {
		return nil
	}
	if err := l.note(p.entry()); err != nil {
		return err
	}
	p.switched = p.objects
	if err := come.Switch(d, p.pidfd, false); err != nil {
		return errors.Join(err, p.on(d, now, 2*maxOffs))
	}
	return nil
}

// on puts channels on, at least so often.
func (p *process) on(d rm.Driver, now time.Time, times int) error {
	thawed := thaw(p.freezer)
	if thawed == nil {
		p.freezer = ""
	}
	times = max(times, p.offs)
	if times == 0 {
		return thawed
	}
	err := p.objects.PutOn(d, p.pid, p.pidfd, times)
	if err != nil && ended(p.pidfd) {
		err = errGone
	}
	if err == nil || errors.Is(err, errGone) {
		p.offs, p.used, p.failed = 0, now, ""
		return thawed
	}
	return errors.Join(thawed, err)
}
