// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/base"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/settings"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
	"github.com/nvshare/nvshare/sched/wire"
	"github.com/nvshare/nvshare/tests/mutants"
)

func FuzzRecords(f *testing.F) {
	for _, s := range recordSeeds() {
		f.Add(s[0].([]byte))
	}
	d := newFuzzDaemon(f, f.TempDir())
	f.Fuzz(d.readsRecords)
}

func TestRecordMutants(t *testing.T) {
	d := newFuzzDaemon(t, t.TempDir())
	mutants.Run(t, recordSeeds(), func(t *testing.T, in []any) { d.readsRecords(t, in[0].([]byte)) })
}

func recordSeeds() (seeds [][]any) {
	for _, s := range []string{
		`{"version":1,"given":{"quantum_ns":100000000,"mode":"exclusive"},"all":{"quantum_ns":5000000},"gpus":{"` + gpuA.UUID + `":{"mode":"auto"}}}`,
		`{"version":1,"tenants":{"container abc":{"pod":{"memory":1048576,"limit":50,"gang":"ns/name"},"all":{"request":20,"priority":"latency"},"gpus":{"` + gpuA.UUID + `":{"weight":4}},"has":["x"]}}}`,
		`{"version":1,"tenants":{"user 0":{"all":{"limit":4294967295,"request":4294967295,"weight":4294967295,"priority":"x","gang":"/"}}}}`,
		`{"version":1,"all":{"quantum_ns":-1}}`, `{"version":2}`, `{"version":1,"tenants":{"":{}}}`, "", "null",
	} {
		seeds = append(seeds, []any{[]byte(s)})
	}
	return seeds
}

// Whatever is in the files of settings and shares, the scheduler starts, and its
// cores take it.
func (d fuzzDaemon) readsRecords(t *testing.T, text []byte) {
	d.forget(t)
	if state.DecodeRecord(text, settings.SettingsVersion, &d.settings.Set) != nil {
		d.settings.Set = settings.Set{}
	}
	d.settings.Set.Given = settings.Setting{Quantum: sched.DefaultQuantum, Mode: sched.Exclusive.String()}
	if err := state.DecodeRecord(text, tenants.SharesVersion, &d.tenants.Shares); err != nil {
		d.tenants.Shares = tenants.Shares{}
	}
	d.finishDiscovery([]node.Found{gpuA, gpuB}, nil)
	for account := range d.tenants.Shares.Tenants {
		d.tenants.ShareOf(d.Order[0], account)
		d.step(d.Order[0], sched.Attach{Client: base.ClientID(len(account) + 1), Tenant: account, Share: d.tenants.ShareOf(d.Order[0], account), Want: true})
	}
	if err := d.Order[0].Core.Check(); err != nil {
		t.Fatal(err)
	}
	d.status()
}

// fuzzDaemon is a daemon without sockets, goroutines and clients. It is made
// once: it has a long memory for events.
type fuzzDaemon struct {
	*Daemon
	dir string
}

func newFuzzDaemon(f testing.TB, dir string) fuzzDaemon {
	f.Helper()
	d, err := newDaemon(testOptions(dir))
	if err != nil {
		f.Fatal(err)
	}
	return fuzzDaemon{d, dir}
}

// forget makes it as new.
func (d fuzzDaemon) forget(t *testing.T) {
	t.Helper()
	d.state = state.New(d.BootID)
	d.settings.Set, d.tenants.Shares = settings.Set{}, tenants.Shares{}
	d.Gpus, d.Order, d.Cores = map[wire.UUID]*node.GPU{}, nil, sched.NewNode()
	d.Names = map[string]*api.Container{}
	d.Cores = sched.NewNode()
}

// restart has it read its files, and find two GPUs.
func (d fuzzDaemon) restart(t *testing.T) {
	t.Helper()
	d.forget(t)
	d.restoreFiles()
	d.finishDiscovery([]node.Found{gpuA, gpuB}, nil)
}

func FuzzControl(f *testing.F) {
	for _, s := range controlSeeds(f) {
		f.Add(s[0].(uint8), s[1].([]byte), s[2].(uint8), s[3].([]byte))
	}
	dir := f.TempDir()
	d, next := newFuzzDaemon(f, dir), newFuzzDaemon(f, dir)
	f.Fuzz(func(t *testing.T, first uint8, a []byte, second uint8, b []byte) {
		d.controlled(t, next, first, a, second, b)
	})
}

func TestControlMutants(t *testing.T) {
	dir := t.TempDir()
	d, next := newFuzzDaemon(t, dir), newFuzzDaemon(t, dir)
	mutants.Run(t, controlSeeds(t), func(t *testing.T, in []any) {
		d.controlled(t, next, in[0].(uint8), in[1].([]byte), in[2].(uint8), in[3].([]byte))
	})
}

func controlSeeds(t testing.TB) (seeds [][]any) {
	u := uint32(1000)
	n := func(v uint32) *uint32 { return &v }
	for i, m := range []proto.Message{
		&api.SetRequest{Gpu: "0", QuantumNs: int64(time.Second), Mode: api.Mode_MODE_AUTO},
		&api.SetShareRequest{Uid: &u, MemoryBytes: proto.Uint64(1 << 30)},
		&api.SetShareRequest{Container: "abc", Gpu: gpuA.UUID, CoreLimit: n(50), CoreRequest: n(20), Weight: n(7), Gang: proto.String("name")},
		&api.DescribeContainerRequest{Container: &api.Container{Id: "abc", Namespace: "ns", Pod: "p", Share: &api.Share{CoreLimit: 30, Gang: "true"}, MemoryLimitBytes: 1 << 30}},
		&api.ForgetContainerRequest{Id: "abc"},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		seeds = append(seeds, []any{uint8(i), b, uint8(i + 1), b})
	}
	return seeds
}

// Whatever comes over the control socket is answered, with an error that says
// what is wrong or by doing it; and what was done is found again by the next
// scheduler.
func (d fuzzDaemon) controlled(t *testing.T, next fuzzDaemon, first uint8, a []byte, second uint8, b []byte) {
	for _, name := range []string{"settings.json", "shares.json", "state.json"} {
		os.Remove(filepath.Join(d.dir, name))
	}
	d.restart(t)
	quit := make(chan struct{})
	ended := make(chan struct{})
	go func() { // the loop, without a clock
		defer close(ended)
		for {
			select {
			case f := <-d.Events:
				f()
			case <-quit:
				return
			}
		}
	}()
	for _, c := range []struct {
		what uint8
		body []byte
	}{{first, a}, {second, b}} {
		if err := callControl(d.Daemon, c.what, c.body); err != nil {
			if s, ok := status.FromError(err); !ok || s.Message() == "" {
				t.Fatalf("error %v has no code or no text", err)
			}
		}
	}
	close(quit)
	<-ended
	if d.tenants.Record.Planned() { // as at the end of Run
		d.tenants.Record.Keep()
	}
	for _, g := range d.Order {
		if err := g.Core.Check(); err != nil {
			t.Fatal(err)
		}
	}
	next.restart(t)
	if next.settings.Err != nil || next.tenants.Record.Err != nil {
		t.Fatalf("the next one cannot read it: %v, %v", next.settings.Err, next.tenants.Record.Err)
	}
	for i, g := range next.Order {
		if was := d.Order[i]; g.Quantum != was.Quantum || g.Mode != was.Mode {
			t.Fatalf("GPU %d: %v, %v became %v, %v", i, was.Quantum, was.Mode, g.Quantum, g.Mode)
		}
	}
	if fmt.Sprint(d.tenants.Shares) != fmt.Sprint(next.tenants.Shares) && !(len(d.tenants.Shares.Tenants) == 0 && len(next.tenants.Shares.Tenants) == 0) && !reflect.DeepEqual(d.tenants.Shares, next.tenants.Shares) {
		t.Fatalf("shares %+v became %+v", d.tenants.Shares, next.tenants.Shares)
	}
}

// callControl has the service answer a request as it came from the socket.
func callControl(d *Daemon, what uint8, body []byte) (err error) {
	s := controlService{d}
	ctx := context.Background()
	switch what % 8 {
	case 0:
		var r api.SetRequest
		if proto.Unmarshal(body, &r) == nil {
			_, err = s.Set(ctx, &r)
		}
	case 1, 2:
		var r api.SetShareRequest
		if proto.Unmarshal(body, &r) == nil {
			_, err = s.SetShare(ctx, &r)
		}
	case 3:
		var r api.DescribeContainerRequest
		if proto.Unmarshal(body, &r) == nil {
			_, err = s.DescribeContainer(ctx, &r)
		}
	case 4:
		var r api.ForgetContainerRequest
		if proto.Unmarshal(body, &r) == nil {
			_, err = s.ForgetContainer(ctx, &r)
		}
	case 5:
		var r api.EventsRequest
		if proto.Unmarshal(body, &r) == nil {
			r.WaitNs = 0
			_, err = s.Events(ctx, &r)
		}
	case 7:
		var r api.SuspendRequest
		if proto.Unmarshal(body, &r) == nil {
			if _, err = s.Suspend(ctx, &r); err == nil {
				_, err = s.Resume(ctx, &r)
			}
		}
	case 6:
		var r api.StatusRequest
		if proto.Unmarshal(body, &r) == nil {
			_, err = s.Status(ctx, &r)
		}
	}
	return err
}
