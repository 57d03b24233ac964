// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
	"github.com/nvshare/nvshare/sched/wire"
)

func TestSetMemoryLimit(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	c := dial(t, s)
	ctx := context.Background()
	id := func(first string) string { return first + strings.Repeat("0", 64-len(first)) }
	for _, ct := range []*api.Container{
		{Id: id("abc1"), Name: "main", Namespace: "ml", Pod: "train"},
		{Id: id("abd"), Name: "side", Namespace: "ml", Pod: "train"},
		{Id: id("e"), Name: "main", Namespace: "ml", Pod: "twice"}, {Id: id("f"), Name: "main", Namespace: "ml", Pod: "twice"},
	} {
		if _, err := c.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: ct}); err != nil {
			t.Fatal(err)
		}
	}
	uid := uint32(4711)
	type change struct{ old, new uint64 }
	for i, tc := range []struct {
		req  *api.SetShareRequest
		want []change // found later, then by GPU
	}{
		{&api.SetShareRequest{Container: "abc", MemoryBytes: proto.Uint64(8 * gib)}, []change{{0, 8 * gib}, {0, 8 * gib}, {0, 8 * gib}}},
		{&api.SetShareRequest{Container: id("abc1"), Gpu: "1", MemoryBytes: proto.Uint64(4 * gib)}, []change{{8 * gib, 4 * gib}}},
		{&api.SetShareRequest{Container: "ml/train/main", Gpu: strings.ToLower(gpuB.UUID), MemoryBytes: proto.Uint64(2 * gib)}, []change{{4 * gib, 2 * gib}}},
		{&api.SetShareRequest{Container: "abc", Gpu: "1", MemoryBytes: proto.Uint64(0)}, []change{{2 * gib, 8 * gib}}}, // what is set for all holds again
		{&api.SetShareRequest{Container: "abc", Gpu: "0", MemoryBytes: proto.Uint64(gib)}, []change{{8 * gib, gib}}},
		{&api.SetShareRequest{Container: "abc", MemoryBytes: proto.Uint64(3 * gib)}, []change{{8 * gib, 3 * gib}, {gib, 3 * gib}, {8 * gib, 3 * gib}}},
		{&api.SetShareRequest{Container: "abc", MemoryBytes: proto.Uint64(0)}, []change{{3 * gib, 0}, {3 * gib, 0}, {3 * gib, 0}}},
		{&api.SetShareRequest{Container: id("9"), MemoryBytes: proto.Uint64(gib), Gpu: "0"}, []change{{0, gib}}}, // not seen yet
		{&api.SetShareRequest{Container: "9", Gpu: "0", MemoryBytes: proto.Uint64(0)}, []change{{gib, 0}}},       // known by its limit
		{&api.SetShareRequest{Uid: &uid, MemoryBytes: proto.Uint64(gib), Gpu: "0"}, []change{{0, gib}}},
		{&api.SetShareRequest{Uid: &uid, MemoryBytes: proto.Uint64(0)}, []change{{0, 0}, {gib, 0}, {0, 0}}},
	} {
		r, err := c.SetShare(ctx, tc.req)
		if err != nil {
			t.Errorf("step %d: %v", i+1, err)
			continue
		}
		var got []change
		for _, ch := range r.Changes {
			got = append(got, change{ch.OldMemoryBytes, ch.NewMemoryBytes})
		}
		if !reflect.DeepEqual(got, tc.want) || (r.Uid == uid) != (tc.req.Uid != nil) || (r.Container.Id == "") != (tc.req.Uid != nil) {
			t.Errorf("step %d: %v of %v %d, want %v", i+1, got, r.Container, r.Uid, tc.want)
		}
	}
	for name, tc := range map[string]struct {
		req  *api.SetShareRequest
		code codes.Code
	}{
		"nobody":           {&api.SetShareRequest{MemoryBytes: proto.Uint64(gib)}, codes.InvalidArgument},
		"both":             {&api.SetShareRequest{Container: "abc", Uid: &uid, MemoryBytes: proto.Uint64(gib)}, codes.InvalidArgument},
		"no such GPU":      {&api.SetShareRequest{Container: "abc", Gpu: "9", MemoryBytes: proto.Uint64(gib)}, codes.NotFound},
		"no such id":       {&api.SetShareRequest{Container: "77", MemoryBytes: proto.Uint64(gib)}, codes.NotFound},
		"short unknown id": {&api.SetShareRequest{Container: strings.Repeat("7", 63), MemoryBytes: proto.Uint64(gib)}, codes.NotFound},
		"ambiguous id":     {&api.SetShareRequest{Container: "ab", MemoryBytes: proto.Uint64(gib)}, codes.InvalidArgument},
		"ambiguous name":   {&api.SetShareRequest{Container: "ml/twice/main", MemoryBytes: proto.Uint64(gib)}, codes.InvalidArgument},
		"a pod of two":     {&api.SetShareRequest{Container: "ml/train", MemoryBytes: proto.Uint64(gib)}, codes.InvalidArgument},
		"part of a name":   {&api.SetShareRequest{Container: "ml/tra", MemoryBytes: proto.Uint64(gib)}, codes.NotFound},
		"too little":       {&api.SetShareRequest{Container: "abc", MemoryBytes: proto.Uint64(8)}, codes.InvalidArgument},
		"too much":         {&api.SetShareRequest{Container: "abc", MemoryBytes: proto.Uint64(math.MaxUint64)}, codes.InvalidArgument},
	} {
		if _, err := c.SetShare(ctx, tc.req); status.Code(err) != tc.code {
			t.Errorf("%s: %v, want %v", name, err, tc.code)
		}
	}
	if err := s.Ask(ctx, func() {
		if tenants, _ := s.Order[0].Core.Reservations(); len(s.Daemon.tenants.Shares.Tenants) != 0 || len(tenants) != 0 {
			t.Errorf("left behind: %v, %v", s.Daemon.tenants.Shares, tenants)
		}
	}); err != nil {
		t.Fatal(err)
	}
}

func TestLimitsAreBounded(t *testing.T) {
	s := start(t, t.TempDir(), nil, func(d *Daemon) {
		for i := range maxShares {
			d.tenants.Shares.Tenants[peer.UserAccount+string(rune('a'+i))] = tenants.TenantShares{All: api.Terms{MemoryLimit: gib}}
		}
	})
	if _, err := dial(t, s).SetShare(context.Background(), limitRequest(t, "", gib)); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one more: %v", err)
	}
}

// Limits outlive the scheduler; those of pods come and go with the container.
func TestLimitsSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, nil)
	ctx := context.Background()
	newHolder(t, s)
	s.limit("", 8*gib)
	s.limit("1", 4*gib)
	before := readFile(t, filepath.Join(dir, "state.json"))
	pod := &api.Container{Id: "pod", Name: "main", MemoryLimitBytes: 2 * gib}
	for range 2 {
		if _, err := dial(t, s).DescribeContainer(ctx, &api.DescribeContainerRequest{Container: pod}); err != nil {
			t.Fatal(err)
		}
	}
	s.stop()
	if strings.Contains(before, "limit") {
		t.Errorf("the state file has limits: %s", before)
	}

	s = start(t, dir, nil)
	_, a := newClient(t, s)
	a.attach(1, gpuB, 0, 0)
	if a.shows(8*gib, 0); a.page.Limits(1).Memory != 4*gib {
		t.Errorf("second GPU: %+v", a.page.Limits(1))
	}
	r := s.status()
	if len(r.Containers) != 1 || r.Containers[0].Id != "pod" || r.Containers[0].MemoryLimitBytes != 2*gib {
		t.Errorf("containers that the plugin may forget: %v", r.Containers)
	}
	podLimit := func() (limit uint64) {
		if err := s.Ask(ctx, func() { limit = s.Order[0].Core.ReservedBy(peer.ContainerAccount+"pod", 0).Limit }); err != nil {
			t.Fatal(err)
		}
		return limit
	}
	c := dial(t, s)
	if podLimit() != 2*gib {
		t.Errorf("limit of the pod: %d", podLimit())
	}
	// The operator's word goes before the annotation's.
	if _, err := c.SetShare(ctx, &api.SetShareRequest{Container: "pod", MemoryBytes: proto.Uint64(3 * gib)}); err != nil || podLimit() != 3*gib {
		t.Errorf("limit of the pod: %d, %v", podLimit(), err)
	}
	pod.MemoryLimitBytes = gib
	if _, err := c.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: pod}); err != nil || podLimit() != 3*gib {
		t.Errorf("limit of the pod: %d, %v", podLimit(), err)
	}
	if _, err := c.SetShare(ctx, &api.SetShareRequest{Container: "pod", MemoryBytes: proto.Uint64(0)}); err != nil || podLimit() != gib {
		t.Errorf("limit of the pod: %d, %v", podLimit(), err)
	}
	if _, err := c.ForgetContainer(ctx, &api.ForgetContainerRequest{Id: "pod"}); err != nil || podLimit() != 0 {
		t.Errorf("limit of the pod after its end: %d, %v", podLimit(), err)
	}
	s.limit("", 0)
	s.stop()
	if l, err := state.ReadRecord[tenants.Shares](filepath.Join(dir, "shares.json"), tenants.SharesVersion); err != nil || len(l.Tenants) != 0 {
		t.Errorf("left in the file: %v, %v", l, err)
	}
}

func TestSharesFileIsDamaged(t *testing.T) {
	for name, text := range map[string]string{
		"garbage": "\x00\xff", "truncated": `{"version":1,"tenants":{"user 0":{"al`, "empty": "",
		"version 0": `{"version":0,"tenants":{}}`, "wrong type": `{"version":1,"tenants":{"user 0":{"all":-1}}}`, "negative": `{"version":1,"tenants":{"user 0":{"all":{"memory":-1}}}}`,
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "shares.json")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		var log strings.Builder
		s := start(t, dir, logTo(&log))
		_, a := newClient(t, s)
		a.reserves(gib, gib, 0, wire.OK, wire.Reserved{Total: gib, Used: gib})
		if p := s.status().Problems; len(p) != 1 || !strings.Contains(p[0], path+".damaged") {
			t.Errorf("%s: problems %q", name, p)
		}
		s.limit("", 8*gib) // from here on it is right again
		if p := s.status().Problems; len(p) != 0 {
			t.Errorf("%s: problems %q", name, p)
		}
		s.stop()
		if kept := readFile(t, path+".damaged"); kept != text || !strings.Contains(log.String(), "memory limits are lost") {
			t.Errorf("%s: kept %q, log %s", name, kept, log.String())
		}
	}
	// Odd, but what it says is clear.
	for _, text := range []string{`{"version":1}`, `{"version":1,"tenants":null}`, `{"version":1,"tenants":{"user 0":{},"x":{"all":{"memory":5}},"container ":{"pod":{"memory":1}}}}`,
		`{"version":1,"tenants":{"container a":{"engine":{"engine":"podman"}}}}`} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "shares.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		s := start(t, dir, nil)
		s.await("the GPUs", func(r *api.StatusResponse) bool { return len(r.Gpus) > 0 }) // until then that is a problem
		s.limit("", 8*gib)
		if p := s.status().Problems; len(p) != 0 {
			t.Errorf("%s: problems %q", text, p)
		}
	}
}

func TestSharesFileCannotBeWritten(t *testing.T) {
	dir := t.TempDir()
	s := start(t, dir, nil)
	c := dial(t, s)
	ctx := context.Background()
	_, a := newClient(t, s)
	block := filepath.Join(dir, "shares.json.tmp")
	if err := os.Mkdir(block, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := c.SetShare(ctx, limitRequest(t, "", gib)); status.Code(err) != codes.Unavailable {
		t.Errorf("not recorded: %v", err)
	}
	a.shows(0, 0)
	// A pod's limit is in force all the same: the plugin says it again.
	pod := &api.Container{Id: "pod", MemoryLimitBytes: gib}
	_, err := c.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: pod})
	if err != nil {
		t.Error(err)
	}
	s.await("that is a problem", func(r *api.StatusResponse) bool {
		return len(r.Problems) == 1 && strings.Contains(r.Problems[0], "record shares")
	})
	if err := os.Remove(block); err != nil {
		t.Fatal(err)
	}
	s.await("it is recorded", func(r *api.StatusResponse) bool { return len(r.Problems) == 0 })
	if text, err := os.ReadFile(filepath.Join(dir, "shares.json")); err != nil || !strings.Contains(string(text), "container pod") {
		t.Errorf("%s, %v", text, err)
	}
	s.limit("", gib)
	a.shows(gib, 0)
	if p := s.status().Problems; len(p) != 0 {
		t.Errorf("problems %q", p)
	}
}

// A GPU that is found later has the limits too.
func TestLimitOfAGPUFoundLater(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) {
		o.List = func(context.Context) ([]node.Found, error) { return []node.Found{gpuA}, nil }
	})
	s.limit("", 8*gib)
	_, c := newClient(t, s)
	if err := s.Ask(context.Background(), func() { s.finishDiscovery([]node.Found{gpuA, gpuB}, nil) }); err != nil {
		t.Fatal(err)
	}
	c.attach(1, gpuB, 0, 0)
	if l := c.page.Limits(1); l.Memory != 8*gib {
		t.Errorf("the page has %+v", l)
	}
}

// A shim asks for memory only if the limits were stored before ATTACHED, also
// where there are none: wire.h says so, and a scheduler from before RESERVE did
// not store any.
func TestLimitsAreStoredBeforeAttached(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	_, c := newClient(t, s)
	const limitSeq = 64 + 0*64 + 32 // of the slot of channel 0
	if seq := binary.LittleEndian.Uint32(c.mem[limitSeq:]); seq == 0 || seq%2 != 0 {
		t.Errorf("limit_seq is %d when ATTACHED has come", seq)
	}
}
