// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nvshare/nvshare/sched/warden/order"
	"github.com/nvshare/nvshare/sched/warden/rm"
)

// slowDriver takes its time for each answer, which is that there is no such client.
type slowDriver struct {
	rm.Driver
	file    string // the driver's
	clients uint32 // to ask for
	answer  func()
}

func (d slowDriver) Top() (uint32, error)    { return d.ABI().FirstClient + d.clients, nil }
func (d slowDriver) Is(int) bool             { return true }
func (d slowDriver) May(_, link string) bool { return link == d.file }
func (d slowDriver) File(int) rm.File        { return d }
func (d slowDriver) Close() error            { return nil }
func (d slowDriver) Control(uint32, uint32, rm.Command, []byte) (uint32, error) {
	d.answer()
	return d.ABI().BadClient, nil
}

// A driver that answers, however slowly, is waited for; one that does not is not, nor one that never comes to an end.
func TestAnswersAreWaitedFor(t *testing.T) {
	for name, of := range map[string]struct {
		clients uint32
		each    time.Duration // 0: it hangs
		late    bool
	}{
		"slowly": {clients: 40, each: 300 * time.Millisecond},
		"never":  {clients: 40, late: true},
		"no end": {clients: 1e6, each: time.Millisecond, late: true},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "driver")
			f, err := os.Create(file)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			w := testWarden(t)
			synctest.Test(t, func(t *testing.T) {
				over, began := make(chan struct{}), time.Now()
				w.Driver = counted{slowDriver{rm.OpenSimulated(), file, of.clients, func() {
					select {
					case <-over:
					case <-after(of.each):
					}
				}}, &w.answers}
				r := w.carryOut(order.Request{Orders: []order.Order{{Op: order.State, PID: os.Getpid()}}})
				if late := r.Results[0].Error == tooLong; late != of.late {
					t.Errorf("after %v: %+v", time.Since(began), r.Results[0])
				}
				if took := time.Since(began); of.late && took > 2*order.Lease {
					t.Errorf("the answer came after %v", took)
				}
				close(over)
			})
		})
	}
}

// after is time.After; 0: never.
func after(d time.Duration) <-chan time.Time {
	if d == 0 {
		return nil
	}
	return time.After(d)
}
