// SPDX-License-Identifier: Apache-2.0

package web

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

const uuid = "GPU-1"

func pod(name string) *api.Container {
	return &api.Container{Id: name, Name: "main", Namespace: "ml", Pod: name}
}

// source is a scheduler with two pods, one of which has an ugly name.
type source struct {
	used  time.Duration
	asked int
	err   error
}

func (s *source) Status(context.Context) (*api.StatusResponse, error) {
	if s.err != nil {
		return nil, s.err
	}
	ugly := &api.Container{Id: "u", Name: "<b onmouseover=x>&"}
	return &api.StatusResponse{
		Version: "0.1.0", UptimeNs: int64(time.Hour + s.used), Clients: 2, Problems: []string{"GPU 0: <i>a problem</i>"},
		ProblemCodes: []api.ProblemCode{api.ProblemCode_PROBLEM_CODE_OUTSIDE},
		Gpus: []*api.GPU{{
			Uuid: uuid, Name: "Test GPU", MemoryBytes: 16 << 30, Mode: api.Mode_MODE_AUTO, QuantumNs: 100e6, Way: "turns", WayReason: "tenants keep the GPU busy", Swap: &api.Swap{},
			Clients: []*api.Client{
				{Id: 1, Container: pod("train-a"), State: api.ClientState_CLIENT_STATE_HOLDING, ResidentBytes: 4 << 30},
				{Id: 2, Container: ugly, State: api.ClientState_CLIENT_STATE_WAITING, ResidentBytes: 1 << 29, AwayBytes: 3 << 29, FileBytes: 1 << 30},
			},
			Tenants: []*api.TenantUse{
				{Container: pod("train-a"), UsedNs: int64(s.used), GotPermille: 749, Clients: 1},
				{Container: ugly, UsedNs: int64(s.used / 3), GotPermille: 250, WaitedPermille: 750, Clients: 1, Share: &api.Share{CoreLimit: 25}},
			},
			Memory:   []*api.MemoryAccount{{Container: pod("train-a"), UsedBytes: 4 << 30, LimitBytes: 8 << 30}, {Container: ugly, UsedBytes: 2 << 30}},
			Promises: []*api.Promise{{Container: pod("train-a"), CoreRequest: 30}},
		}},
	}, nil
}

func (s *source) Events(_ context.Context, req *api.EventsRequest) (*api.EventsResponse, error) {
	s.asked++
	if req.Since != 0 {
		return &api.EventsResponse{Next: req.Since, Run: 1}, nil
	}
	at := time.Now().Add(-10 * time.Second).UnixNano()
	event := func(t api.EventType, c string, client uint64, after time.Duration) *api.Event {
		return &api.Event{Type: t, Uuid: uuid, Container: pod(c), Client: client, TimeNs: at + int64(after)}
	}
	return &api.EventsResponse{Next: 9, Run: 1, Events: []*api.Event{
		event(api.EventType_EVENT_TYPE_GRANT, "train-a", 1, 0), event(api.EventType_EVENT_TYPE_RELEASE, "train-a", 1, time.Second),
		event(api.EventType_EVENT_TYPE_GRANT, "train-b", 2, time.Second), event(api.EventType_EVENT_TYPE_RECLAIM, "train-b", 2, 3*time.Second),
		event(api.EventType_EVENT_TYPE_GRANT, "train-a", 1, 3*time.Second),
		{Type: api.EventType_EVENT_TYPE_SWAP_IN, Uuid: uuid, Container: pod("train-a"), Client: 1, TimeNs: at + int64(4*time.Second), TookNs: int64(time.Second)},
	}}, nil
}

func get(t *testing.T, h http.Handler, path, host string, header ...string) (int, string) {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, path, nil)
	r.Host = host
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

func TestPageIsReadOnlyAndGuarded(t *testing.T) {
	open := New(&source{}, "").Handler()
	for host, want := range map[string]int{"127.0.0.1:9403": 200, "localhost:9403": 200, "[::1]:9403": 200, "localhost": 200, "evil.example:9403": 403, "": 403, "10.0.0.1": 403} {
		for _, path := range []string{"/", "/api/now", "/api/history", "/page.js"} {
			if code, _ := get(t, open, path, host); code != want {
				t.Errorf("%s of %q: %d, want %d", path, host, code, want)
			}
		}
	}
	const token = "0123456789abcdef"
	closed := New(&source{}, token).Handler()
	for _, tc := range []struct {
		path   string
		header []string
		want   int
	}{
		{"/", nil, 401},
		{"/api/now", nil, 401},
		{"/api/now?token=" + token, nil, 401}, // only the page takes it from the address
		{"/?token=wrong", nil, 401},
		{"/?token=" + token, nil, 303},
		{"/api/now", []string{"Authorization", "Bearer " + token}, 200},
		{"/api/now", []string{"Authorization", "Bearer wrong"}, 401},
		{"/api/now", []string{"Authorization", "Bearer "}, 401},
		{"/api/now", []string{"Cookie", cookie + "=" + token}, 200},
		{"/api/now", []string{"Cookie", cookie + "="}, 401},
	} {
		if code, _ := get(t, closed, tc.path, "node.example", tc.header...); code != tc.want {
			t.Errorf("%s %v: %d, want %d", tc.path, tc.header, code, tc.want)
		}
	}
	for _, method := range []string{"POST", "PUT", "DELETE"} {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(method, "/api/now", nil)
		r.Host = "localhost"
		if open.ServeHTTP(w, r); w.Code != 405 {
			t.Errorf("%s: %d", method, w.Code)
		}
	}
}

// A token that is taken opens the page: from the address as it is, and then by the cookie.
// Others are refused at the start, not in the browser.
func TestTokens(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	for token, refused := range map[string]string{
		"0123456789abcdef\n":          "",
		"kX9._~-abcdefGHIJK":          "",
		"short":                       "5 characters",
		"kX9+abc/defGHIJK0123456=":    "openssl rand -hex 24",
		`0123456789"abcdef;ghi`:       "openssl rand -hex 24",
		"0123456789 abcdef\nghi":      "openssl rand -hex 24",
		"0123456789abcdef\u00fcghijk": "openssl rand -hex 24",
	} {
		if err := os.WriteFile(file, []byte(token), 0o600); err != nil {
			t.Fatal(err)
		}
		read, err := Check("0.0.0.0:9403", file)
		if refused != "" {
			if err == nil || !strings.Contains(err.Error(), refused) || !strings.Contains(err.Error(), file) || strings.Contains(err.Error(), token) {
				t.Errorf("%q: %v", token, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", token, err)
			continue
		}
		h := New(&source{}, read).Handler()
		w := httptest.NewRecorder()
		r := httptest.NewRequest("GET", "/?token="+read, nil)
		if h.ServeHTTP(w, r); w.Code != http.StatusSeeOther || len(w.Result().Cookies()) != 1 {
			t.Errorf("%q: %d, %v", token, w.Code, w.Header())
			continue
		}
		if code, _ := get(t, h, "/", "node", "Cookie", w.Result().Cookies()[0].String()); code != 200 {
			t.Errorf("%q: the cookie is refused: %d", token, code)
		}
	}
}

func TestNow(t *testing.T) {
	src := &source{}
	s := New(src, "")
	s.look(t.Context(), time.Now())
	_, text := get(t, s.Handler(), "/api/now", "localhost")
	var now nowJSON
	if err := json.Unmarshal([]byte(text), &now); err != nil {
		t.Fatal(err)
	}
	g := now.GPUs[0]
	if g.Tenants[1].State != "holding" || g.Tenants[0].State != "waiting" || g.Tenants[1].OfSize != 8<<30 || g.Promised != 30 || g.Taken != 10<<30 || g.Reserved != 6<<30 {
		t.Errorf("%+v", g)
	}
	if g.Tenants[0].Host != 1<<29 || g.Tenants[0].File != 1<<30 {
		t.Errorf("memory off the GPU: %+v", g.Tenants[0])
	}
	if len(g.Promises) != 2 || g.Promises[0] != (promiseJSON{"ml/train-a/main", 30, 8 << 30}) || g.Promises[1].Memory != 2<<30 {
		t.Errorf("promises %+v", g.Promises)
	}
	if p := now.Problems[0]; p.Text != "GPU 0: <i>a problem</i>" || p.Remedy != "end the process" {
		t.Errorf("problem %+v", p)
	}
	if m := g.Segments[len(g.Segments)-1]; !m.Moves || m.To-m.From != 1000 {
		t.Errorf("move %+v", m)
	}
	if len(g.Segments) != 4 || g.Segments[0].To-g.Segments[0].From != 1000 || g.Segments[1].Tenant != "ml/train-b/main" || g.Segments[2].To != 0 {
		t.Errorf("segments %+v", g.Segments)
	}
	seen := now.Time
	src.err = errors.New("it has ended")
	s.look(t.Context(), time.Now())
	if _, text := get(t, s.Handler(), "/api/now", "localhost"); !strings.Contains(text, "it has ended") || !strings.Contains(text, "train-a") {
		t.Errorf("without a scheduler: %s", text)
	} else if err := json.Unmarshal([]byte(text), &now); err != nil || now.Time != seen {
		t.Errorf("what is open is drawn until %d, and was seen until %d: %v", now.Time, seen, err)
	}
}

// A client that has had the GPU for longer than events are kept is in the picture, once.
func TestHoldersOfOldGrants(t *testing.T) {
	h, now := newHistory(), time.Unix(2_000_000, 0)
	r := &api.StatusResponse{UptimeNs: 1, Gpus: []*api.GPU{{Uuid: uuid, Clients: []*api.Client{{Id: 5, Container: pod("a"), Epoch: 3, SinceNs: int64(time.Hour)}}}}}
	h.add(now, r)
	h.add(now.Add(time.Second), r)
	if got := h.recent(uuid); len(got) != 1 || got[0].To != 0 || got[0].From != now.Add(-time.Hour).UnixMilli() {
		t.Errorf("%+v", got)
	}
	h.turns([]*api.Event{{Type: api.EventType_EVENT_TYPE_RELEASE, Uuid: uuid, Client: 5, TimeNs: now.UnixNano()}})
	if got := h.recent(uuid); len(got) != 1 || got[0].To != now.UnixMilli() {
		t.Errorf("after its release: %+v", got)
	}
}

// why is a source that explains.
type why struct{ source }

func (*why) Why(_ context.Context, tenant string) (string, error) { return tenant + " waited\n", nil }

// A tenant's link leads to its account, or to the command that prints it.
func TestWhy(t *testing.T) {
	if _, text := get(t, New(&why{}, "").Handler(), "/api/why?tenant=ml/a", "localhost"); text != "ml/a waited\n" {
		t.Errorf("%q", text)
	}
	if _, text := get(t, New(&source{}, "").Handler(), "/api/why?tenant=ml/a", "localhost"); !strings.Contains(text, `nvsharectl why "ml/a"`) {
		t.Errorf("%q", text)
	}
}

// quiet is a scheduler that has granted nothing yet, and what users get who see only
// their own tenant: no events.
type quiet struct{ source }

func (*quiet) Events(context.Context, *api.EventsRequest) (*api.EventsResponse, error) {
	return &api.EventsResponse{Run: 1}, nil
}

// The page goes through the segments of each GPU: without any there is an empty list.
func TestNowWithoutEvents(t *testing.T) {
	s := New(&quiet{}, "")
	s.look(t.Context(), time.Now())
	if _, text := get(t, s.Handler(), "/api/now", "localhost"); !strings.Contains(text, `"segments":[]`) {
		t.Errorf("no empty list: %s", text)
	}
}

// viewed is the answer to a user who sees only its own tenant.
type viewed struct{ quiet }

func (v *viewed) Status(ctx context.Context) (*api.StatusResponse, error) {
	r, err := v.quiet.Status(ctx)
	r.Problems, r.View = nil, &api.View{Uid: 1000, Problems: 2}
	return r, err
}

// Problems whose text only root may read are counted: the page does not say OK.
func TestNowCountsProblemsOfOthers(t *testing.T) {
	s := New(&viewed{}, "")
	s.look(t.Context(), time.Now())
	if _, text := get(t, s.Handler(), "/api/now", "localhost"); !strings.Contains(text, `Problems: 2. `) {
		t.Errorf("they are not counted: %s", text)
	}
}

// script is a scheduler that answers so, one answer to each look.
type script struct {
	source
	answers []*api.EventsResponse
	given   bool // of this look
}

func (s *script) Events(context.Context, *api.EventsRequest) (*api.EventsResponse, error) {
	if s.given = !s.given; !s.given {
		return &api.EventsResponse{Run: s.answers[0].Run}, nil
	}
	if len(s.answers[0].Events) == 0 {
		s.given = false
	}
	return s.answers[0], nil
}

// A turn ends with the client, with the run of the scheduler that granted it, and where its
// end may be among events that are lost.
func TestTurnsEnd(t *testing.T) {
	now := time.Now().Truncate(time.Millisecond)
	event := func(kind api.EventType, gpu string, client uint64, after time.Duration) *api.Event {
		return &api.Event{Type: kind, Uuid: gpu, Container: pod("a"), Client: client, TimeNs: now.Add(after - 30*time.Second).UnixNano()}
	}
	grant := event(api.EventType_EVENT_TYPE_GRANT, uuid, 7, 0)
	other := event(api.EventType_EVENT_TYPE_GRANT, uuid, 8, 5*time.Second)
	for name, tc := range map[string]struct {
		then *api.EventsResponse
		want []time.Duration // how long each turn took; 0: it goes on
	}{
		"nothing happens":        {&api.EventsResponse{Run: 1}, []time.Duration{0}},
		"another tenant comes":   {&api.EventsResponse{Run: 1, Events: []*api.Event{other}}, []time.Duration{0, 0}},
		"the process ends":       {&api.EventsResponse{Run: 1, Events: []*api.Event{event(api.EventType_EVENT_TYPE_END, "", 7, 2*time.Second)}}, []time.Duration{2 * time.Second}},
		"another process ends":   {&api.EventsResponse{Run: 1, Events: []*api.Event{event(api.EventType_EVENT_TYPE_END, "", 6, 2*time.Second)}}, []time.Duration{0}},
		"another scheduler":      {&api.EventsResponse{Run: 2, Events: []*api.Event{event(api.EventType_EVENT_TYPE_START, "", 0, 3*time.Second), other}}, []time.Duration{3 * time.Second, 0}},
		"another one, no events": {&api.EventsResponse{Run: 2}, []time.Duration{30 * time.Second}},
		"it adopts the holder":   {&api.EventsResponse{Run: 2, Events: []*api.Event{event(api.EventType_EVENT_TYPE_ADOPT, uuid, 7, 3*time.Second)}}, []time.Duration{3 * time.Second, 0}},
		"events are lost":        {&api.EventsResponse{Run: 1, Lost: 4, Events: []*api.Event{other}}, []time.Duration{5 * time.Second, 0}},
	} {
		src := &script{answers: []*api.EventsResponse{{Run: 1, Events: []*api.Event{grant}}}}
		s := New(src, "")
		s.look(t.Context(), now)
		src.answers = []*api.EventsResponse{tc.then}
		s.look(t.Context(), now)
		var got []time.Duration
		for _, one := range s.history.recent(uuid) {
			took := time.Duration(0)
			if one.To != 0 {
				took = time.Duration(one.To-one.From) * time.Millisecond
			}
			got = append(got, took)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

// A day is kept, not more, of so many tenants as there is room for; what they had is
// never lost.
func TestHistoryIsBounded(t *testing.T) {
	h := newHistory()
	at := time.Unix(1_000_000*60, 0)
	const tenants, minutes = 100, Minutes + 300
	for m := range minutes {
		r := &api.StatusResponse{UptimeNs: int64(m + 1), Gpus: []*api.GPU{{Uuid: uuid}}}
		for i := range tenants {
			c := &api.Container{Id: fmt.Sprintf("%d-%d", m, i), Name: "x", Pod: fmt.Sprintf("pod-%d-%d", m, i), Namespace: "ml"}
			r.Gpus[0].Tenants = append(r.Gpus[0].Tenants, &api.TenantUse{Container: c, UsedNs: int64(time.Minute / tenants)})
		}
		h.add(at.Add(time.Duration(m)*time.Minute), r)
	}
	day := h.day(uuid)
	if len(day.Tenants) > MaxTenants {
		t.Errorf("%d tenants have columns", len(day.Tenants))
	}
	if len(day.Times) != Minutes+1 { // and the end of the last one
		t.Errorf("%d times are kept", len(day.Times))
	}
	for i := range day.Times {
		sum, n := 0.0, 0
		for _, c := range day.Tenants {
			if sum += c.Used[i]; c.Used[i] > 0 {
				n++
			}
		}
		if n > MaxTenants || sum < 0.999 || sum > 1.001 {
			t.Fatalf("%d tenants with %v of a minute", n, sum)
		}
	}
	if hours := h.hours(); len(hours) != 2 || hours[0].GPUHours+hours[1].GPUHours < 23.99 {
		t.Errorf("%+v", hours)
	}
	if n := len(h.last[uuid]); n != tenants {
		t.Errorf("%d tenants are remembered", n)
	}
	var events []*api.Event
	for i := range 3 * maxSegments {
		events = append(events, &api.Event{Type: api.EventType_EVENT_TYPE_GRANT, Uuid: uuid, Client: uint64(i), TimeNs: at.UnixNano()})
	}
	if h.turns(events); len(h.segments[uuid]) != maxSegments {
		t.Errorf("%d segments are kept", len(h.segments[uuid]))
	}
}

// What a tenant had before this process is in no minute, and a new scheduler counts anew.
func TestHistoryCountsOnce(t *testing.T) {
	h := newHistory()
	at := time.Unix(1_000_000*60, 0)
	for i, used := range []time.Duration{time.Hour, time.Hour + 2*time.Second, time.Hour + 3*time.Second, time.Second} {
		uptime := int64(i + 10)
		if i == 3 { // another run
			uptime = 1
		}
		h.add(at.Add(time.Duration(i)*time.Second), &api.StatusResponse{UptimeNs: uptime, Gpus: []*api.GPU{{Uuid: uuid, Tenants: []*api.TenantUse{{Container: pod("a"), UsedNs: int64(used)}}}}})
	}
	if got := h.hours(); len(got) != 1 || got[0].GPUHours*3600 < 3.999 || got[0].GPUHours*3600 > 4.001 {
		t.Errorf("%+v, want 4 s", got)
	}
}

// Two containers outside Kubernetes may have one name: the name has the time of both.
func TestHistoryOfOneNameTwice(t *testing.T) {
	h, at := newHistory(), time.Unix(1_000_000*60, 0)
	for i := range 3 {
		used := int64(i) * int64(time.Second)
		h.add(at.Add(time.Duration(i)*time.Second), &api.StatusResponse{UptimeNs: int64(i + 1), Gpus: []*api.GPU{{Uuid: uuid, Tenants: []*api.TenantUse{
			{Container: &api.Container{Id: "a", Name: "job"}, UsedNs: used + int64(time.Hour)}, {Container: &api.Container{Id: "b", Name: "job"}, UsedNs: used}}}}})
	}
	if got := h.hours(); len(got) != 1 || got[0].GPUHours*3600 < 3.999 || got[0].GPUHours*3600 > 4.001 {
		t.Errorf("%+v, want 4 s", got)
	}
}

// Memory is where it was last seen in a minute, and what had no time has its place too.
func TestDayOfMemory(t *testing.T) {
	h, at := newHistory(), time.Unix(1_000_000*60, 0)
	for i, c := range []*api.Client{{Container: pod("a"), ResidentBytes: 7}, {Container: pod("a"), AwayBytes: 7, FileBytes: 3}} {
		h.add(at.Add(time.Duration(i)*time.Second), &api.StatusResponse{UptimeNs: 1, Gpus: []*api.GPU{{Uuid: uuid, Swap: &api.Swap{},
			Clients: []*api.Client{c}, Tenants: []*api.TenantUse{{Container: pod("a")}}}}})
	}
	a := h.day(uuid).Tenants["ml/a/main"]
	if a == nil || a.GPU[0] != 0 || a.Host[0] != 4 || a.File[0] != 3 || len(a.GPU) != 2 {
		t.Errorf("%+v", a)
	}
}
