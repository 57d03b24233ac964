// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/loop"
	"github.com/nvshare/nvshare/sched/daemon/node"
	"github.com/nvshare/nvshare/sched/daemon/peer"
	"github.com/nvshare/nvshare/sched/daemon/state"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
)

var (
	batch, latency = api.Priority_PRIORITY_BATCH, api.Priority_PRIORITY_LATENCY
	unsaid         = api.Priority_PRIORITY_UNSPECIFIED
)

// sharing is a scheduler with its control connection.
type sharing struct {
	*scheduler
	*api.Conn
}

func newSharing(t *testing.T, dir string, more ...func(*Daemon)) sharing {
	s := start(t, dir, nil, more...)
	return sharing{s, dial(t, s)}
}

// whole makes an id that starts so.
func whole(first string) string { return first + strings.Repeat("0", 64-len(first)) }

// describe tells the scheduler of a container in pod ml/<id>.
func (s sharing) describe(id string, share *api.Share, gpus ...string) {
	s.t.Helper()
	c := &api.Container{Id: whole(id), Namespace: "ml", Pod: id, Name: "main", Share: share, Gpus: gpus}
	if _, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{Container: c}); err != nil {
		s.t.Fatal(err)
	}
}

// told returns what the core of a GPU is told of an account.
func (s sharing) told(gpu int, account string) (share sched.Share) {
	s.t.Helper()
	if err := s.Ask(context.Background(), func() { share = s.tenants.ShareOf(s.Order[gpu], account) }); err != nil {
		s.t.Fatal(err)
	}
	return share
}

// For each field the most particular word holds: the pod's, for all GPUs, for
// one.
func TestShareOfATenant(t *testing.T) {
	s := newSharing(t, t.TempDir())
	account := peer.ContainerAccount + whole("a")
	s.describe("a", &api.Share{CoreLimit: 50, CoreRequest: 20, Weight: 300, Priority: latency, Gang: "ring"})
	pod := sched.Share{Limit: 50, Request: 20, Weight: 300, Priority: sched.Latency, Gang: "gang ml/ring"}
	for i, step := range []struct {
		req    *api.SetShareRequest
		change string // of the last GPU, old to new
		want   [2]sched.Share
	}{
		{&api.SetShareRequest{}, "50/20/300/latency/ml/ring 50/20/300/latency/ml/ring", [2]sched.Share{pod, pod}},
		{&api.SetShareRequest{Gpu: "1", CoreLimit: proto.Uint32(60)}, "50/20/300/latency/ml/ring 60/20/300/latency/ml/ring",
			[2]sched.Share{pod, {Limit: 60, Request: 20, Weight: 300, Priority: sched.Latency, Gang: "gang ml/ring"}}},
		{&api.SetShareRequest{Priority: &batch, Weight: proto.Uint32(10), Gang: proto.String("true")}, "60/20/300/latency/ml/ring 60/20/10/batch/true",
			[2]sched.Share{{Limit: 50, Request: 20, Weight: 10, Gang: account}, {Limit: 60, Request: 20, Weight: 10, Gang: account}}},
		{&api.SetShareRequest{CoreLimit: proto.Uint32(70), Gang: proto.String("other")}, "60/20/10/batch/true 70/20/10/batch/ml/other", // for all: what was said of one goes
			[2]sched.Share{{Limit: 70, Request: 20, Weight: 10, Gang: "gang ml/other"}, {Limit: 70, Request: 20, Weight: 10, Gang: "gang ml/other"}}},
		{&api.SetShareRequest{CoreLimit: proto.Uint32(0), CoreRequest: proto.Uint32(0), Weight: proto.Uint32(0), Priority: &unsaid, Gang: proto.String("")},
			"70/20/10/batch/ml/other 50/20/300/latency/ml/ring", [2]sched.Share{pod, pod}},
	} {
		step.req.Container = "ml/a/main"
		r, err := s.SetShare(context.Background(), step.req)
		if err != nil {
			t.Fatalf("step %d: %v", i+1, err)
		}
		last := r.Changes[len(r.Changes)-1]
		text := func(s *api.Share) string {
			return fmt.Sprintf("%d/%d/%d/%s/%s", s.CoreLimit, s.CoreRequest, s.Weight, api.FormatPriority(s.Priority), s.Gang)
		}
		if got := text(last.Old) + " " + text(last.New); got != step.change || r.Container.Pod != "a" {
			t.Errorf("step %d: %s of %v, want %s", i+1, got, r.Container, step.change)
		}
		for gpu, want := range step.want {
			if got := s.told(gpu, account); got != want {
				t.Errorf("step %d, GPU %d: %v, want %v", i+1, gpu, got, want)
			}
		}
	}
	if _, err := s.ForgetContainer(context.Background(), &api.ForgetContainerRequest{Id: whole("a")}); err != nil {
		t.Fatal(err)
	}
	if got := s.told(0, account); got != (sched.Share{}) {
		t.Errorf("after its end: %v", got)
	}
}

// An annotation and the operator's word may contradict each other; the core is
// told what can be.
func TestShareIsPossible(t *testing.T) {
	s := newSharing(t, t.TempDir())
	if _, err := s.SetShare(context.Background(), &api.SetShareRequest{Container: whole("a"), CoreLimit: proto.Uint32(30)}); err != nil {
		t.Fatal(err)
	}
	s.describe("a", &api.Share{CoreRequest: 60})
	if got := s.told(0, peer.ContainerAccount+whole("a")); got != (sched.Share{Limit: 30, Request: 30}) {
		t.Errorf("the core is told %v", got)
	}
	if p := s.status().Gpus[0].Promises; len(p) != 1 || p[0].CoreRequest != 30 {
		t.Errorf("promised are %v", p)
	}
}

func TestSetShareIsRefused(t *testing.T) {
	s := newSharing(t, t.TempDir())
	s.describe("a", &api.Share{CoreRequest: 60}, gpuA.UUID)
	s.describe("b", &api.Share{CoreRequest: 30})
	s.describe("c", nil, gpuA.UUID)
	uid := uint32(4711)
	for name, tc := range map[string]struct {
		req  *api.SetShareRequest
		code codes.Code
		says []string
	}{
		"nobody":       {&api.SetShareRequest{CoreLimit: proto.Uint32(1)}, codes.InvalidArgument, nil},
		"no such GPU":  {&api.SetShareRequest{Uid: &uid, Gpu: "9"}, codes.NotFound, nil},
		"no such id":   {&api.SetShareRequest{Container: "77"}, codes.NotFound, nil},
		"limit":        {&api.SetShareRequest{Uid: &uid, CoreLimit: proto.Uint32(101)}, codes.InvalidArgument, []string{"1 to 100"}},
		"request":      {&api.SetShareRequest{Uid: &uid, CoreRequest: proto.Uint32(1 << 31)}, codes.InvalidArgument, []string{"1 to 100"}},
		"weight":       {&api.SetShareRequest{Uid: &uid, Weight: proto.Uint32(10001)}, codes.InvalidArgument, []string{"10000"}},
		"priority":     {&api.SetShareRequest{Uid: &uid, Priority: api.Priority(7).Enum()}, codes.InvalidArgument, []string{"priority 7"}},
		"priority < 0": {&api.SetShareRequest{Uid: &uid, Priority: api.Priority(-1).Enum()}, codes.InvalidArgument, []string{"priority -1"}},
		"gang":         {&api.SetShareRequest{Uid: &uid, Gang: proto.String("a/b")}, codes.InvalidArgument, []string{`"a/b"`}},
		"memory":       {&api.SetShareRequest{Uid: &uid, CoreLimit: proto.Uint32(5), MemoryBytes: proto.Uint64(8)}, codes.InvalidArgument, []string{"1Mi"}},
		"above its limit": {&api.SetShareRequest{Container: "ml/b/main", CoreLimit: proto.Uint32(20)}, codes.InvalidArgument,
			[]string{"ml/b/main", "30 %", "20 %"}},
		"too much": {&api.SetShareRequest{Container: "ml/c/main", CoreRequest: proto.Uint32(11), Weight: proto.Uint32(7)}, codes.FailedPrecondition,
			[]string{"GPU 0", "11 % cannot be promised to ml/c/main", "90 % are already", "60 % to ml/a/main, 30 % to ml/b/main", "at most 10 % are left"}},
		"of a user":     {&api.SetShareRequest{Uid: &uid, CoreRequest: proto.Uint32(11)}, codes.FailedPrecondition, []string{"GPU 0", "user 4711"}},
		"on one GPU":    {&api.SetShareRequest{Uid: &uid, Gpu: "1", CoreRequest: proto.Uint32(71)}, codes.FailedPrecondition, []string{"GPU 1", "30 % to ml/b/main;"}},
		"raised by one": {&api.SetShareRequest{Container: "ml/a/main", CoreRequest: proto.Uint32(71)}, codes.FailedPrecondition, []string{"at most 70 %"}},
	} {
		_, err := s.SetShare(context.Background(), tc.req)
		if status.Code(err) != tc.code {
			t.Errorf("%s: %v, want %v", name, err, tc.code)
		}
		for _, part := range tc.says {
			if !strings.Contains(fmt.Sprint(err), part) {
				t.Errorf("%s: the error lacks %q: %v", name, part, err)
			}
		}
	}
	if err := s.Ask(context.Background(), func() {
		if len(s.tenants.Shares.Tenants) != 2 {
			t.Errorf("what was refused has left something: %v", s.tenants.Shares.Tenants)
		}
	}); err != nil {
		t.Fatal(err)
	}
	var promised []string
	for _, g := range s.status().Gpus {
		for _, p := range g.Promises {
			promised = append(promised, fmt.Sprintf("%d: %s %d", g.Index, api.Tenant(p.Container, p.Uid), p.CoreRequest))
		}
	}
	if got, want := strings.Join(promised, ", "), "0: ml/a/main 60, 0: ml/b/main 30, 1: ml/b/main 30"; got != want {
		t.Errorf("the status has %s, want %s", got, want)
	}
	// To the last percent it can be promised.
	for _, req := range []*api.SetShareRequest{
		{Container: "ml/c/main", CoreRequest: proto.Uint32(10)},
		{Uid: &uid, Gpu: "1", CoreRequest: proto.Uint32(70)},
	} {
		if _, err := s.SetShare(context.Background(), req); err != nil {
			t.Error(err)
		}
	}
	if p := s.status().Problems; len(p) != 0 {
		t.Errorf("problems %q", p)
	}
}

// What came about without us is reported, and can be put right step by step.
func TestTooMuchIsPromised(t *testing.T) {
	s := newSharing(t, t.TempDir())
	for i := range 11 {
		s.describe(fmt.Sprintf("%x", i+1), &api.Share{CoreRequest: 10}, gpuB.UUID)
	}
	p := s.status().Problems
	if len(p) != 1 || !strings.Contains(p[0], "GPU 1: 110 % of its time are promised: 10 % to ml/1/main, ") || !strings.Contains(p[0], "the rest to 3 more") {
		t.Errorf("problems %q", p)
	}
	ctx := context.Background()
	if _, err := s.SetShare(ctx, &api.SetShareRequest{Container: "ml/1/main", CoreRequest: proto.Uint32(9)}); err != nil {
		t.Errorf("less than before: %v", err)
	}
	if _, err := s.SetShare(ctx, &api.SetShareRequest{Container: "ml/1/main", Weight: proto.Uint32(9)}); err != nil {
		t.Errorf("as before: %v", err)
	}
	if _, err := s.ForgetContainer(ctx, &api.ForgetContainerRequest{Id: whole("2")}); err != nil {
		t.Fatal(err)
	}
	if p := s.status().Problems; len(p) != 0 {
		t.Errorf("problems %q", p)
	}
}

// Before any GPU is found, what holds for all of them is looked at.
func TestSharesBeforeTheGPUs(t *testing.T) {
	s := begin(t, t.TempDir(), func(o *Options) {
		o.List = func(context.Context) ([]node.Found, error) { return nil, nil }
	})
	c, ctx := dial(t, s), context.Background()
	for i, step := range []struct {
		uid  uint32
		req  *api.SetShareRequest
		code codes.Code
	}{
		{1, &api.SetShareRequest{CoreRequest: proto.Uint32(60)}, codes.OK},
		{1, &api.SetShareRequest{CoreLimit: proto.Uint32(50)}, codes.InvalidArgument},
		{2, &api.SetShareRequest{CoreRequest: proto.Uint32(41)}, codes.FailedPrecondition},
		{2, &api.SetShareRequest{CoreRequest: proto.Uint32(40)}, codes.OK},
	} {
		step.req.Uid = &step.uid
		if _, err := c.SetShare(ctx, step.req); status.Code(err) != step.code {
			t.Errorf("step %d: %v, want %v", i+1, err, step.code)
		}
	}
}

func TestSharesSurviveARestart(t *testing.T) {
	dir := t.TempDir()
	s := newSharing(t, dir)
	ctx := context.Background()
	s.describe("a", &api.Share{CoreRequest: 60, Gang: "ring"}, gpuA.UUID)
	s.describe("b", nil, gpuA.UUID)
	if _, err := s.SetShare(ctx, &api.SetShareRequest{Container: "ml/b/main", CoreLimit: proto.Uint32(25), Priority: &latency, MemoryBytes: proto.Uint64(gib)}); err != nil {
		t.Fatal(err)
	}
	s.stop()

	s = newSharing(t, dir)
	if got := s.told(0, peer.ContainerAccount+whole("a")); got != (sched.Share{Request: 60, Gang: "gang ml/ring"}) {
		t.Errorf("of the annotations: %v", got)
	}
	if got := s.told(1, peer.ContainerAccount+whole("b")); got != (sched.Share{Limit: 25, Priority: sched.Latency}) {
		t.Errorf("of SetShare: %v", got)
	}
	// Which GPUs the pod was given matters before the plugin is back.
	uid := proto.Uint32(1)
	if _, err := s.SetShare(ctx, &api.SetShareRequest{Uid: uid, Gpu: "0", CoreRequest: proto.Uint32(50)}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("too much: %v", err)
	}
	if _, err := s.SetShare(ctx, &api.SetShareRequest{Uid: uid, Gpu: "1", CoreRequest: proto.Uint32(50)}); err != nil {
		t.Errorf("on the other GPU: %v", err)
	}
	// The plugin says it again, and nothing changes.
	before := readFile(t, filepath.Join(dir, "shares.json"))
	s.describe("a", &api.Share{CoreRequest: 60, Gang: "ring"}, gpuA.UUID)
	if after := readFile(t, filepath.Join(dir, "shares.json")); after != before {
		t.Errorf("described again: %s, before %s", after, before)
	}
}

// What was set for a container that the plugin had described ends with it, also if it ends while
// there is no scheduler: the next one has the plugin know of it. Till then it counts on its GPU only.
func TestSetShareEndsWithItsContainer(t *testing.T) {
	dir := t.TempDir()
	s := newSharing(t, dir)
	ctx := context.Background()
	set := func(id string) {
		t.Helper()
		if _, err := s.SetShare(ctx, &api.SetShareRequest{Container: whole(id), CoreRequest: proto.Uint32(30)}); err != nil {
			t.Fatal(err)
		}
	}
	s.describe("a", nil, gpuA.UUID)
	set("a")
	set("b")
	s.describe("b", nil, gpuA.UUID)
	set("c") // nobody describes it
	s.stop()

	s = newSharing(t, dir)
	var known []string
	r := s.status()
	if n := len(r.Gpus[1].Promises); n != 1 {
		t.Errorf("GPU 1, of which a and b have nothing: promised %v", r.Gpus[1].Promises)
	}
	for _, c := range r.Containers {
		known = append(known, c.Id)
		if _, err := s.ForgetContainer(ctx, &api.ForgetContainerRequest{Id: c.Id}); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{whole("a"), whole("b")}; !slices.Equal(known, want) {
		t.Errorf("the plugin is told of %q, want %q", known, want)
	}
	for _, g := range s.status().Gpus {
		if len(g.Promises) != 1 || g.Promises[0].Container.Id != whole("c") {
			t.Errorf("GPU %d: still promised: %v", g.Index, g.Promises)
		}
	}
}

func TestSharesCannotBeRecorded(t *testing.T) {
	dir := t.TempDir()
	s := newSharing(t, dir)
	if err := os.Mkdir(filepath.Join(dir, "shares.json.tmp"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := s.SetShare(context.Background(), &api.SetShareRequest{Container: whole("a"), CoreLimit: proto.Uint32(25)})
	if got := s.told(0, peer.ContainerAccount+whole("a")); status.Code(err) != codes.Unavailable || got != (sched.Share{}) {
		t.Errorf("%v, and in force is %v", err, got)
	}
}

// The core hears of a share with the attachment, and of each change.
func TestCoreIsToldOfShares(t *testing.T) {
	s := newSharing(t, t.TempDir())
	r := limitRequest(t, "", 0)
	req := &api.SetShareRequest{Container: r.Container, Uid: r.Uid, CoreLimit: proto.Uint32(25)}
	if _, err := s.SetShare(context.Background(), req); err != nil {
		t.Fatal(err)
	}
	_, c := newClient(t, s.scheduler)
	share := func() sched.Share {
		var found []sched.TenantSnapshot
		if err := s.Ask(context.Background(), func() { found = s.Order[0].Core.Snapshot(loop.Now()).Tenants }); err != nil {
			t.Fatal(err)
		}
		if len(found) != 1 {
			t.Fatalf("tenants %v", found)
		}
		return found[0].Share
	}
	limit := func() int { return share().Limit }
	if limit() != 25 {
		t.Errorf("attached with a limit of %d", limit())
	}
	req.CoreLimit = proto.Uint32(40)
	if _, err := s.SetShare(context.Background(), req); err != nil || limit() != 40 {
		t.Errorf("changed to a limit of %d, %v", limit(), err)
	}
	c.request().granted()
	req.CoreLimit = proto.Uint32(0)
	if _, err := s.SetShare(context.Background(), req); err != nil || limit() != 0 {
		t.Errorf("removed while it holds: %d, %v", limit(), err)
	}
}

func TestDescribeNonsense(t *testing.T) {
	s := newSharing(t, t.TempDir())
	for name, c := range map[string]*api.Container{
		"limit":      {Id: "a", Share: &api.Share{CoreLimit: 101}},
		"request":    {Id: "a", Share: &api.Share{CoreLimit: 10, CoreRequest: 11}},
		"gang":       {Id: "a", Share: &api.Share{Gang: "a/b"}},
		"GPUs":       {Id: "a", Gpus: make([]string, maxGPUs+1)},
		"a GPU name": {Id: "a", Gpus: []string{strings.Repeat("x", maxName+1)}},
	} {
		if _, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{Container: c}); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v", name, err)
		}
	}
	if r := s.status(); len(r.Containers) != 0 {
		t.Errorf("known: %v", r.Containers)
	}
	// The last good value stays.
	s.describe("a", &api.Share{CoreLimit: 50})
	bad := &api.Container{Id: whole("a"), Share: &api.Share{CoreLimit: 101}}
	if _, err := s.DescribeContainer(context.Background(), &api.DescribeContainerRequest{Container: bad}); err == nil || s.told(0, peer.ContainerAccount+whole("a")).Limit != 50 {
		t.Errorf("after %v the limit is %v", err, s.told(0, peer.ContainerAccount+whole("a")))
	}
}

// The two sides of the API bound shares alike.
func TestBoundsOfShares(t *testing.T) {
	if api.MaxWeight != sched.MaxWeight || api.FormatWeight(0) != fmt.Sprint(sched.DefaultWeight) {
		t.Error("weights")
	}
}

// Every field is recorded, merged, changed, removed, kept and reported, whoever
// says it.
func TestEveryFieldOfAShare(t *testing.T) {
	full := api.Terms{MemoryLimit: gib, CoreLimit: 60, CoreRequest: 30, Weight: 7, Priority: latency,
		Gang: "ring", MemoryMode: api.MemoryMode_MEMORY_MODE_RESIDENT, SuspendAfter: 600}
	dir := t.TempDir()
	s := newSharing(t, dir)
	ctx := context.Background()
	describe := func(id string, terms api.Terms, keep api.FieldSet) *api.DescribeContainerResponse {
		t.Helper()
		c := &api.Container{Id: whole(id), Namespace: "ml", Pod: id, Name: "main", Gpus: []string{gpuA.UUID}}
		c.SetTerms(terms)
		r, err := s.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: c, Keep: keep.Keep()})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	for i, f := range api.Fields {
		var one, inForce api.Terms
		one.Copy(full, f.ID)
		if inForce = one; f.ID == api.GangField {
			inForce.Gang = "ml/ring"
		}
		id := fmt.Sprintf("%x", i+1)
		wants := func(when string, want api.Terms) {
			t.Helper()
			var got api.Terms
			if err := s.Ask(ctx, func() { got = s.tenants.Shares.Tenants[peer.ContainerAccount+whole(id)].On(gpuA.UUID) }); err != nil {
				t.Fatal(err)
			}
			if got != want {
				t.Errorf("%s, %s: %+v is in force, want %+v", f.Name, when, got, want)
			}
		}
		if f.ID&api.FixedFields != 0 {
			continue // see TestOverlapGroupIsFixed
		}
		describe(id, one, 0)
		wants("by the pod", inForce)
		if r := describe(id, api.Terms{}, f.ID); r.New.Terms() != one || len(r.Changes) != 1 || api.TermsOf(r.Changes[0].New, r.Changes[0].NewMemoryBytes) != inForce {
			t.Errorf("%s, kept: %v", f.Name, r)
		}
		s.stop()
		s = newSharing(t, dir)
		wants("after a restart", inForce)
		if r := describe(id, api.Terms{}, f.ID); r.New.Terms() != one {
			t.Errorf("%s, kept after a restart: %v", f.Name, r)
		}
		describe(id, api.Terms{}, 0)
		wants("removed from the pod", api.Terms{})

		for _, gpu := range []string{"", "0"} {
			req := &api.SetShareRequest{Container: "ml/" + id + "/main", Gpu: gpu}
			for _, change := range []struct{ to, want api.Terms }{{one, inForce}, {api.Terms{}, api.Terms{}}} {
				req.Change(change.to, f.ID)
				r, err := s.SetShare(ctx, req)
				if err != nil {
					t.Fatal(err)
				}
				c := r.Changes[len(r.Changes)-1]
				if got := api.TermsOf(c.New, c.NewMemoryBytes); got != change.want {
					t.Errorf("%s, set to %+v for GPU %q: %+v", f.Name, change.to, gpu, got)
				}
				wants("set for GPU "+gpu, change.want)
			}
		}
		said := map[string]bool{}
		for _, e := range events(t, s.Conn, &api.EventsRequest{}).Events {
			if e.Type == api.EventType_EVENT_TYPE_SET {
				said[e.Setting] = true
			}
		}
		if !said[f.Name] {
			t.Errorf("%s: no event of it: %v", f.Name, said)
		}
		if _, err := s.ForgetContainer(ctx, &api.ForgetContainerRequest{Id: whole(id)}); err != nil {
			t.Fatal(err)
		}
	}
}

// When many containers start or end at once, their shares are written together, not all of them
// for each one.
func TestManySharesAreOneRecord(t *testing.T) {
	s := newSharing(t, t.TempDir())
	path := filepath.Join(s.dir, "shares.json")
	recorded := func() int {
		r, err := state.ReadRecord[tenants.Shares](path, tenants.SharesVersion)
		if err != nil {
			t.Fatal(err)
		}
		return len(r.Tenants)
	}
	const many = 50
	for _, step := range []struct {
		do   func(id string)
		want int
	}{
		{func(id string) { s.tenants.Describe(&api.Container{Id: id, MemoryLimitBytes: gib}, nil) }, many},
		{s.tenants.Forget, 0},
	} {
		before := recorded()
		if err := s.Ask(t.Context(), func() {
			for i := range many {
				step.do(fmt.Sprintf("%064x", i))
				if n := recorded(); n != before {
					t.Errorf("%d are recorded after a change of %d", n, i+1)
				}
			}
		}); err != nil {
			t.Fatal(err)
		}
		s.await("they are recorded", func(*api.StatusResponse) bool { return recorded() == step.want })
	}
}

// The page of a process says which core limit its tenant has, from the beginning and when it changes: the shim then
// keeps little work ahead of the GPU though others run at the same time.
func TestPageHasTheCoreLimit(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	uid := uint32(os.Getuid())
	set := func(limit uint32) {
		t.Helper()
		if _, err := dial(t, s).SetShare(t.Context(), &api.SetShareRequest{Uid: &uid, CoreLimit: &limit}); err != nil {
			t.Fatal(err)
		}
	}
	set(25)
	_, c := newClient(t, s)
	for _, want := range []uint32{25, 60, 0} {
		if want != 25 {
			set(want)
		}
		if got := c.page.Limits(0).Core; got != want {
			t.Errorf("the page has a core limit of %d, want %d", got, want)
		}
	}
}

// Who names nobody is told so, whatever he wants.
func TestNamesNobody(t *testing.T) {
	s := newSharing(t, t.TempDir())
	_, set := s.SetShare(context.Background(), &api.SetShareRequest{})
	_, suspend := s.Suspend(context.Background(), &api.SuspendRequest{})
	_, migrate := s.Migrate(context.Background(), &api.MigrateRequest{})
	for what, err := range map[string]error{"set": set, "suspend": suspend, "migrate": migrate} {
		if text := status.Convert(err).Message(); text != "name either a container or a user" {
			t.Errorf("%s: %q", what, text)
		}
	}
}
