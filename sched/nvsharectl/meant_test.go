// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/api"
)

// asking is a scheduler that notes which tenants requests name.
type asking struct {
	fake
	container string
	uid       *uint32
}

func (a *asking) Suspend(_ context.Context, r *api.SuspendRequest) (*api.SuspendResponse, error) {
	a.container, a.uid = r.Container, r.Uid
	return &api.SuspendResponse{}, nil
}

func (a *asking) Resume(ctx context.Context, r *api.SuspendRequest) (*api.SuspendResponse, error) {
	return a.Suspend(ctx, r)
}

func (a *asking) Migrate(_ context.Context, r *api.MigrateRequest) (*api.MigrateResponse, error) {
	a.container, a.uid = r.Container, r.Uid
	return &api.MigrateResponse{}, nil
}

func (a *asking) SetShare(_ context.Context, r *api.SetShareRequest) (*api.SetShareResponse, error) {
	a.container, a.uid = r.Container, r.Uid
	return &api.SetShareResponse{}, nil
}

// A name of a tenant means the same to every command: a number is a user, and a container's name
// goes before the beginning of an id.
func TestWhoIsMeant(t *testing.T) {
	containers := map[string]*api.Container{} // by what the test calls them
	r := &api.StatusResponse{Gpus: []*api.GPU{{Uuid: "GPU-x"}}}
	for id, c := range map[string]*api.Container{
		"0f00": {Name: "a"}, "aa06": {Name: "b"}, "00a4": {Name: "c"}, "0b5c": {Name: "1000", Namespace: "ml", Pod: "p"},
		"482913cc": {Name: "d"}, "77": {Name: "main", Namespace: "ml", Pod: "x"}, "78": {Name: "main", Namespace: "ml", Pod: "y"},
	} {
		c.Id = id + strings.Repeat("e", 64-len(id))
		containers[id] = c
		r.Gpus[0].Clients = append(r.Gpus[0].Clients, &api.Client{Id: uint64(len(containers)), Container: c})
	}
	r.Gpus[0].Clients = append(r.Gpus[0].Clients, &api.Client{Id: 90, Container: &api.Container{}, Uid: 0}, &api.Client{Id: 91, Container: &api.Container{}, Uid: 1000}, &api.Client{Id: 92, Container: &api.Container{}, Uid: 4_000_000_001})
	events := func(*api.EventsRequest) *api.EventsResponse {
		resp := &api.EventsResponse{Run: 1, Next: 1}
		for _, c := range r.Gpus[0].Clients {
			resp.Events = append(resp.Events, &api.Event{Type: api.EventType_EVENT_TYPE_REGISTER, Container: c.Container, Uid: c.Uid, Client: c.Id, TimeNs: time.Now().UnixNano()})
		}
		return resp
	}
	for _, tc := range []struct {
		name string
		want string // api.Tenant of those that are meant
		asks string // of the container that a request names; "": the user with the number
		user uint32
	}{
		{name: "a", want: "a", asks: "a"},   // and not b, whose id begins so
		{name: "aa", want: "b", asks: "aa"}, // the beginning of an id
		{name: "0", want: "user 0"},         // and not c, whose id begins so
		{name: "00a", want: "c", asks: "00a"},
		{name: "user 1000", want: "user 1000", user: 1000},
		{name: "4000000001", want: "user 4000000001", user: 4_000_000_001},
		{name: "482913", want: "", user: 482913}, // of a user to be, and not d, whose id begins so
		{name: "482913cc", want: "d", asks: "482913cc"},
		{name: "main", want: "ml/x/main ml/y/main", asks: "main"}, // the scheduler refuses that
	} {
		a := &asking{fake: fake{status: r, events: events}}
		dir := serve(t, a)
		for _, command := range []string{"suspend", "resume", "migrate", "set --core-limit 5"} {
			a.container, a.uid = "", nil
			args := append(strings.Fields(command), tc.name, "--run-dir", dir)
			if code, _, errs := ctl(args...); code != exitOK || a.container != tc.asks || (a.uid != nil) != (tc.asks == "") || a.uid != nil && *a.uid != tc.user {
				t.Errorf("%v: exit %d, %s asks for %q, %v", args, code, errs, a.container, a.uid)
			}
		}
		_, out, _ := ctl("why", tc.name, "--run-dir", dir)
		_, shown, _ := ctl("events", "--tenant", tc.name, "--run-dir", dir)
		var why, of []string
		for line := range strings.Lines(out) {
			if who, _, ok := strings.Cut(line, " on GPU 0: "); ok {
				why = append(why, who)
			}
		}
		for line := range strings.Lines(shown) {
			_, rest, _ := strings.Cut(line, "register")
			who, _, _ := strings.Cut(strings.TrimSpace(rest), " (pid")
			of = append(of, who)
		}
		slices.Sort(why)
		slices.Sort(of)
		if strings.Join(why, " ") != tc.want || strings.Join(of, " ") != tc.want {
			t.Errorf("why %q shows %q, events --tenant %q, want %q", tc.name, why, of, tc.want)
		}
	}
}
