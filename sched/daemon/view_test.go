// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/wire"
)

func (s *scheduler) view() *api.StatusResponse {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r, err := api.AskView(ctx, s.dir)
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// A user sees its own processes, and of other users' numbers.
func TestViewOfOneUser(t *testing.T) {
	if os.Getuid() != 0 || ownContainer(t) != "" {
		t.Skip("needs root outside containers, to be two users")
	}
	dir := t.TempDir()
	twoUsers(t, dir)
	s := start(t, dir, nil)
	_, mine, _ := newHolder(t, s)
	theirs := newProc(t, dir, nobody).connect().register(0).attach(0, gpuA, 0, 0)
	theirs.send(wire.Frame{Type: wire.TypeReserve, Reserve: wire.Reserve{Total: 5 << 20, Least: 5 << 20}})
	theirs.expect(wire.TypeReserved)
	theirs.request()
	s.await("both are seen", func(r *api.StatusResponse) bool {
		return stateOf(r, mine.id) == api.ClientState_CLIENT_STATE_HOLDING && stateOf(r, theirs.id) == api.ClientState_CLIENT_STATE_WAITING
	})
	r := s.view()
	g := r.Gpus[0]
	if r.View.Uid != 0 || len(g.Clients) != 1 || g.Clients[0].Id != mine.id || g.Clients[0].State != api.ClientState_CLIENT_STATE_HOLDING || len(g.Tenants) != 1 {
		t.Errorf("my own: view %v, clients %v, tenants %v", r.View, g.Clients, g.Tenants)
	}
	if o := g.Others; o.Tenants != 1 || o.Clients != 1 || o.Waiting != 1 || o.Holding != 0 || o.MemoryBytes != 5<<20 {
		t.Errorf("of others: %v", o)
	}
	if text := prototext.Format(r); strings.Contains(text, fmt.Sprint(nobody)) {
		t.Errorf("the view names user %d:\n%s", nobody, text)
	}
}

// What the API says of others, whatever the field, is not in a view.
func TestViewLeaksNothing(t *testing.T) {
	const secret = "secret"
	all := &api.StatusResponse{}
	fill(all.ProtoReflect(), secret, 3)
	mine := &api.Container{Id: "mine", Name: "main"}
	all.Version = "1"
	for _, g := range all.Gpus { // what a GPU is, and why it is shared as it is, is for all
		g.Uuid, g.Name, g.Way, g.WayReason = "GPU-1", "GPU", "turns", "why"
		g.NotSwapped, g.WayCode, g.Refused = "why", "why", []*api.WayRefusal{{Way: "slices", Code: "why", Reason: "why"}}
		g.Clients = append(g.Clients, &api.Client{Id: 77, Container: mine, Command: "python3", Bypassed: 1})
		g.Tenants = append(g.Tenants, &api.TenantUse{Container: mine, GotPermille: 5})
		g.Memory = append(g.Memory, &api.MemoryAccount{Container: mine, UsedBytes: 9})
		g.Promises = append(g.Promises, &api.Promise{Container: mine, CoreRequest: 7})
	}
	all.Settings = append(all.Settings, &api.Setting{Container: mine})
	r := narrow(all, &api.View{Container: mine},
		func(c *api.Container, _ uint32) bool { return c.GetId() == "mine" },
		func(c *api.Client) bool { return c.Id == 77 })
	if text := prototext.Format(r); strings.Contains(text, secret) {
		t.Errorf("the view has\n%s", text)
	}
	g := r.Gpus[0]
	if len(g.Clients) != 1 || len(g.Tenants) != 1 || len(g.Memory) != 1 || len(g.Promises) != 1 || len(r.Settings) != 1 || len(r.Containers) != 1 {
		t.Errorf("my own is missing in\n%s", prototext.Format(r))
	}
	if len(r.Problems) != len(r.Gpus) || !strings.Contains(r.Problems[0], "bypass") || len(r.ProblemCodes) != len(r.Problems) {
		t.Errorf("my own problems: %q, %v", r.Problems, r.ProblemCodes)
	}
	if o := g.Others; o.Clients != 2 || o.CoreRequest == 0 || o.MemoryBytes == 0 || o.GotPermille == 0 {
		t.Errorf("others: %v", o)
	}
}

// fill sets every field, of lists two elements, down to a depth.
func fill(m protoreflect.Message, text string, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		value := func() (v protoreflect.Value, ok bool) {
			switch f.Kind() {
			case protoreflect.MessageKind:
				if depth == 0 {
					return v, false
				}
				sub := dynamic(m, f)
				fill(sub.Message(), text, depth-1)
				return sub, true
			case protoreflect.StringKind:
				return protoreflect.ValueOfString(text), true
			case protoreflect.Uint32Kind:
				return protoreflect.ValueOfUint32(11), true
			case protoreflect.Uint64Kind:
				return protoreflect.ValueOfUint64(11), true
			}
			return v, false
		}
		if f.IsList() {
			list := m.Mutable(f).List()
			for range 2 {
				if v, ok := value(); ok {
					list.Append(v)
				}
			}
		} else if v, ok := value(); ok {
			m.Set(f, v)
		}
	}
}

// dynamic makes an empty message for a field.
func dynamic(m protoreflect.Message, f protoreflect.FieldDescriptor) protoreflect.Value {
	if f.IsList() {
		return m.Mutable(f).List().NewElement()
	}
	return m.NewField(f)
}

// Whoever asks without pause, and does not read, is refused; the scheduler goes on, and
// keeps nothing of the askers.
func TestViewersAreBounded(t *testing.T) {
	s := start(t, t.TempDir(), nil)
	var open []net.Conn
	for range 2000 {
		c, err := net.Dial("unix", filepath.Join(s.dir, api.ViewName))
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	refused := 0
	for _, c := range open {
		c.SetReadDeadline(time.Now().Add(patience))
		if n, _ := c.Read(make([]byte, 1)); n == 0 {
			refused++
		}
		c.Close()
	}
	if refused == 0 {
		t.Error("2000 questions at once were all answered")
	}
	s.await("there are no connections left", func(r *api.StatusResponse) bool { return s.Desk.Accounts() == 0 })
	// The others may have asked so much that there is no answer for some seconds.
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		r, err := api.AskView(t.Context(), s.dir)
		if err == nil && r.View != nil && len(r.Gpus) == 2 {
			return
		}
		if err == nil || time.Now().After(end) {
			t.Fatalf("afterwards: %v, %v", r, err)
		}
	}
}

// A view is small however many others there are.
func BenchmarkView(b *testing.B) {
	all := &api.StatusResponse{Gpus: []*api.GPU{{}}}
	for i := range 4096 {
		c := &api.Container{Id: fmt.Sprint(i)}
		all.Gpus[0].Clients = append(all.Gpus[0].Clients, &api.Client{Id: uint64(i), Container: c})
		all.Gpus[0].Tenants = append(all.Gpus[0].Tenants, &api.TenantUse{Container: c})
	}
	for b.Loop() {
		r := narrow(all, &api.View{}, func(*api.Container, uint32) bool { return false }, func(*api.Client) bool { return false })
		if size := proto.Size(r); size > 200 {
			b.Fatalf("%d bytes", size)
		}
	}
}
