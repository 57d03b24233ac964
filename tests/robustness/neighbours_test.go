// SPDX-License-Identifier: Apache-2.0

package robustness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
)

// turnsEnv sets how many turns TestHostileFrames lets each neighbour have beside each
// attack. The measurement in results needs 200; the test needs a few.
const turnsEnv = "NVSHARE_TEST_TURNS"

func turns() uint64 {
	if n, err := strconv.ParseUint(os.Getenv(turnsEnv), 10, 32); err == nil && n > 0 {
		return n
	}
	return 4
}

// period is where a measurement begins, and what the scheduler had used until then.
type period struct {
	s   *site
	of  []*tenant
	at  int64
	cpu time.Duration
}

// measure begins to look at how long tenants wait, and at what the scheduler needs.
func (s *site) measure(of ...*tenant) period {
	s.t.Helper()
	s.newGrants()
	return period{s: s, of: of, at: judge.Now(), cpu: s.schedulerCPU()}
}

// log prints the waits of a period, and the scheduler's processor time for each of some
// accounts. It only reports: how long a wait is depends on the machine. The processor
// time includes what the test's own look at the status costs, 200 times a second.
func (p period) log(what string, accounts int) {
	p.s.t.Helper()
	cpu, wall := p.s.schedulerCPU()-p.cpu, time.Duration(judge.Now()-p.at)
	var waits []time.Duration
	events, lost := p.s.newGrants()
	for _, e := range events {
		if slices.ContainsFunc(p.of, func(x *tenant) bool { return x.cmd.Process.Pid == int(e.Pid) }) {
			waits = append(waits, time.Duration(e.WaitedNs))
		}
	}
	if len(waits) == 0 {
		p.s.t.Errorf("%s: no turn of the neighbours is among the events", what)
		return
	}
	slices.Sort(waits)
	round := func(d time.Duration) time.Duration { return d.Round(10 * time.Microsecond) }
	p.s.t.Logf("%-8s waits: %4d, p50 %8v, p99 %8v; scheduler: %.2f CPU s in %.1f s, %.1f ms a second for each of %d accounts; %d events lost",
		what, len(waits), round(waits[len(waits)/2]), round(waits[len(waits)*99/100]),
		cpu.Seconds(), wall.Seconds(), 1000*cpu.Seconds()/wall.Seconds()/float64(accounts), accounts, lost)
}

// newGrants returns the grants since the last call, and how many events the scheduler
// had forgotten by then.
func (s *site) newGrants() (grants []*api.Event, lost uint64) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := api.Dial(ctx, filepath.Join(s.dir, "run"))
	s.check(err)
	defer conn.Close()
	for {
		r, err := conn.Events(ctx, &api.EventsRequest{Since: s.since, Run: s.run, Types: []api.EventType{api.EventType_EVENT_TYPE_GRANT}})
		s.check(err)
		s.since, s.run = r.Next, r.Run
		lost += r.Lost
		if len(r.Events) == 0 {
			return grants, lost
		}
		grants = append(grants, r.Events...)
	}
}

// schedulerCPU is the processor time that the scheduler has used.
func (s *site) schedulerCPU() time.Duration {
	s.t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.scheduler.Process.Pid))
	s.check(err)
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	if len(fields) < 13 {
		s.check(errors.New("/proc/PID/stat is too short"))
	}
	ticks := 0
	for _, f := range fields[11:13] { // utime and stime, in 1/100 s
		n, err := strconv.Atoi(string(f))
		s.check(err)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
