// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/ttrpc"

	"github.com/nvshare/nvshare/cdi"
)

// shortRuntime is a runtime that ends after the registration of a plugin, and before it configures it.
type shortRuntime struct{ end func() }

func (r shortRuntime) RegisterPlugin(context.Context, *api.RegisterPluginRequest) (*api.Empty, error) {
	time.AfterFunc(time.Millisecond, r.end) // the answer goes out before, or not
	return &api.Empty{}, nil
}

func (shortRuntime) UpdateContainers(context.Context, *api.UpdateContainersRequest) (*api.UpdateContainersResponse, error) {
	return &api.UpdateContainersResponse{}, nil
}

// serveShort serves one connection as such a runtime.
func serveShort(conn net.Conn) {
	mux := multiplex.Multiplex(conn)
	defer mux.Close()
	listener, err := mux.Listen(multiplex.RuntimeServiceConn)
	if err != nil {
		return
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		return
	}
	defer server.Close()
	api.RegisterRuntimeService(server, shortRuntime{func() {
		conn.Close()
		server.Close()
	}})
	_ = server.Serve(context.Background(), listener)
}

// A runtime that ends between a plugin's registration and its configuration leaves nothing of the
// plugin's side: NRI's stub would wait for the configuration for ever. Nobody waits for it either.
func TestReconnectLeavesNothing(t *testing.T) {
	listener, err := net.Listen("unix", t.TempDir()+"/nri.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go serveShort(conn)
		}
	}()
	p := New(quiet(), NewContainers(quiet()))
	again := func() {
		t.Helper()
		conn, err := net.Dial("unix", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- register(t.Context(), conn, Connection{Name: "nvshare", Index: "10"}, p) }()
		if err := await(t, ended, "the end of the connection"); err == nil || strings.Contains(err.Error(), errNotConfigured.Error()) {
			t.Errorf("the registration ended with %v", err)
		}
	}
	again()
	goroutines, files := resources(t)
	for range 20 {
		again()
	}
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		g, f := resources(t)
		if g <= goroutines+5 && f <= files+5 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%d goroutines and %d files, before %d and %d", g, f, goroutines, files)
		}
	}
}

// A node without a GPU may have a runtime without NRI: an upgrade of the DaemonSet does not wait for it.
func TestNodeWithoutGPUIsReady(t *testing.T) {
	p := New(quiet(), NewContainers(quiet()))
	for name, c := range map[string]struct {
		inv   *Inventory
		ready bool
	}{
		"no GPU":     {NewInventory(nil, nil), true},
		"a GPU":      {NewInventory(nil, []cdi.GPU{{UUID: "GPU-a"}}), false},
		"not known":  {Unavailable(errors.New("the driver is broken")), false},
		"none again": {NewInventory(nil, nil), true},
	} {
		if p.SetInventory(c.inv); (len(p.containers.Health.NotReady()) == 0) != c.ready {
			t.Errorf("%s: not ready for %q", name, p.containers.Health.NotReady())
		}
	}
}
