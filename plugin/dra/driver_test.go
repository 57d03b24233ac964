// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	nvcdi "github.com/nvshare/nvshare/cdi"
)

// patience bounds every wait of these tests.
const patience = 30 * time.Second

// served is a driver that serves a kubelet, with an API server that is none.
type served struct {
	*Driver
	client  *fake.Clientset
	kubelet drapb.DRAPluginClient
	stop    func()
}

func serve(t *testing.T, dir string, claims ...*resourceapi.ResourceClaim) *served {
	t.Helper()
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, UID: "node"}})
	for _, c := range claims {
		_, err := client.ResourceV1().ResourceClaims(c.Namespace).Create(context.Background(), c, metav1.CreateOptions{})
		check(t, err)
	}
	registry, own := filepath.Join(dir, "registry"), filepath.Join(dir, "driver")
	for _, d := range []string{registry, own} {
		check(t, os.MkdirAll(d, 0o755))
	}
	d, err := New(Config{Client: client, NodeName: node, Registry: registry, Directory: own, CDIDir: filepath.Join(dir, "cdi"), Options: whole, Log: silent()})
	check(t, err)
	d.SetInventory(inventory(t, twoGPUs()))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	s := &served{Driver: d, client: client, stop: func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}}
	// The kubelet asks the registration socket where the driver is.
	conn := s.dial(t, filepath.Join(registry, DriverName+"-reg.sock"))
	defer conn.Close()
	info, err := registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
	check(t, err)
	if info.Type != registerapi.DRAPlugin || info.Name != DriverName {
		t.Fatalf("registered as %v", info)
	}
	plugin := s.dial(t, info.Endpoint)
	t.Cleanup(func() { plugin.Close() })
	s.kubelet = drapb.NewDRAPluginClient(plugin)
	return s
}

func (s *served) dial(t *testing.T, socket string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(t, err)
	return conn
}

func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// The kubelet's way through the driver, with slices in the API server.
func TestServesTheKubelet(t *testing.T) {
	dir, err := os.MkdirTemp("", "dra") // short: socket paths are limited
	check(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	c := claimOf(uid(1), part(name0, "s1", "40", "20Gi"))
	s := serve(t, dir, c)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()

	published := func() (names []string) {
		list, err := s.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
		check(t, err)
		for _, slice := range list.Items {
			if slice.Spec.Driver != DriverName || *slice.Spec.NodeName != node || slice.Spec.Pool.Name != node {
				t.Errorf("slice %s is of driver %s, pool %s", slice.Name, slice.Spec.Driver, slice.Spec.Pool.Name)
			}
			for _, d := range slice.Spec.Devices {
				names = append(names, d.Name)
			}
		}
		return names
	}
	await(t, "both GPUs are published", func() bool { return slices.Equal(published(), []string{name0, name1}) })

	claim := &drapb.Claim{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}
	var cdiName string
	for range 2 {
		r, err := s.kubelet.NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
		check(t, err)
		got := r.Claims[claim.Uid]
		if got.GetError() != "" || len(got.GetDevices()) != 1 || got.Devices[0].GetShareId() != "s1" || got.Devices[0].PoolName != node {
			t.Fatalf("prepared: %v", got)
		}
		cdiName = got.Devices[0].CdiDeviceIds[0]
	}
	if want := nvcdi.Kind + "=" + uid(1) + "-" + name0 + "-s1"; cdiName != want {
		t.Errorf("CDI device %s, want %s", cdiName, want)
	}
	// The driver is replaced while the claim is in use, and the claim of a pod that
	// is not there any more is swept away.
	s.stop()
	check(t, prepare(newDriver(t, dir), claimOf(uid(2), part(name1, "", "10", ""))).Err)
	s = serve(t, dir, c)
	await(t, "the claim that does not exist is unprepared", func() bool { return len(s.store.Records()) == 1 })
	r, err := s.kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if check(t, err); r.Claims[claim.Uid].GetError() != "" {
		t.Errorf("unprepared: %v", r)
	}
	// A GPU is lost.
	s.SetInventory(inventory(t, twoGPUs()[1:]))
	await(t, "the other GPU alone is published", func() bool { return slices.Equal(published(), []string{name1}) })
	s.stop()
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
