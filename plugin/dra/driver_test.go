// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	k8sresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	healthapi "k8s.io/kubelet/pkg/apis/dra-health/v1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/utils/ptr"

	nvcdi "github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

// patience bounds every wait of these tests.
const patience = 5 * time.Minute

// served is a driver that serves a kubelet, with an API server that is none.
type served struct {
	*Driver
	client  *clientset
	kubelet drapb.DRAPluginClient
	conn    *grpc.ClientConn // of the kubelet
	stop    func()
}

func serve(t testing.TB, dir string, claims ...*resourceapi.ResourceClaim) *served {
	t.Helper()
	s := serveBeside(t, dir, apiServer(t, claims...), "")
	s.Lead()
	return s
}

func apiServer(t testing.TB, claims ...*resourceapi.ResourceClaim) *clientset {
	t.Helper()
	client := newClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, UID: "node"}})
	for _, c := range claims {
		_, err := client.ResourceV1().ResourceClaims(c.Namespace).Create(context.Background(), c, metav1.CreateOptions{})
		check(t, err)
	}
	return client
}

// serveBeside has a driver of a pod serve the kubelet that does not lead yet.
func serveBeside(t testing.TB, dir string, client *clientset, pod types.UID, change ...func(*Config)) *served {
	t.Helper()
	registry, own := filepath.Join(dir, "registry"), filepath.Join(dir, "driver")
	for _, d := range []string{registry, own} {
		check(t, os.MkdirAll(d, 0o755))
	}
	c := Config{Problem: func(error) {}, Client: client, NodeName: node, Registry: registry, Directory: own, PodUID: pod, CDIDir: filepath.Join(dir, "cdi"), Options: whole, Log: silent()}
	for _, f := range change {
		f(&c)
	}
	d, err := New(c)
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
	socket := filepath.Join(registry, DriverName+"-reg.sock")
	if pod != "" {
		socket = filepath.Join(registry, kubeletplugin.RollingUpdateRegistrarSocketFile(registry, DriverName, pod))
	}
	conn := s.dial(t, socket)
	defer conn.Close()
	info, err := registerapi.NewRegistrationClient(conn).GetInfo(ctx, &registerapi.InfoRequest{}, grpc.WaitForReady(true))
	check(t, err)
	if info.Type != registerapi.DRAPlugin || info.Name != DriverName {
		t.Fatalf("registered as %v", info)
	}
	s.conn = s.dial(t, info.Endpoint)
	t.Cleanup(func() { s.conn.Close() })
	s.kubelet = drapb.NewDRAPluginClient(s.conn)
	return s
}

// prepare has the kubelet ask for a claim.
func (s *served) prepare(c *resourceapi.ResourceClaim) error {
	r, err := s.kubelet.NodePrepareResources(context.Background(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}})
	if err != nil {
		return err
	}
	if e := r.Claims[string(c.UID)].GetError(); e != "" {
		return errors.New(e)
	}
	return nil
}

func (s *served) unprepare(c *resourceapi.ResourceClaim) error {
	r, err := s.kubelet.NodeUnprepareResources(context.Background(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{{Namespace: c.Namespace, Name: c.Name, Uid: string(c.UID)}}})
	if err != nil {
		return err
	}
	if e := r.Claims[string(c.UID)].GetError(); e != "" {
		return errors.New(e)
	}
	return nil
}

// shortDir returns a directory for sockets, whose paths are limited.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dra")
	check(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func (s *served) dial(t testing.TB, socket string) *grpc.ClientConn {
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
	dir := shortDir(t)
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
	// A GPU is lost: the pod that has it is told.
	health, err := healthapi.NewDRAResourceHealthClient(s.conn).NodeWatchResources(ctx, &healthapi.NodeWatchResourcesRequest{})
	check(t, err)
	hears := func(name string, want healthapi.HealthStatus) {
		t.Helper()
		for {
			report, err := health.Recv()
			check(t, err)
			for _, d := range report.Devices {
				if d.Device.DeviceName == name && d.Health == want {
					return
				}
			}
		}
	}
	hears(name0, healthapi.HealthStatus_HEALTHY)
	s.SetInventory(inventory(t, twoGPUs()[1:]))
	hears(name0, healthapi.HealthStatus_UNHEALTHY)
	await(t, "the other GPU alone is published", func() bool { return slices.Equal(published(), []string{name1}) })
	r, err := s.kubelet.NodeUnprepareResources(ctx, &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	if check(t, err); r.Claims[claim.Uid].GetError() != "" {
		t.Errorf("unprepared: %v", r)
	}
	s.stop()
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// The kubelet asks for many claims at the same time. Each is prepared once, and no GPU is
// promised twice.
func TestManyAtOnce(t *testing.T) {
	const fit, more = 10, 6 // claims
	dir := shortDir(t)
	var claims []*resourceapi.ResourceClaim
	for i := range fit + more {
		claims = append(claims, claimOf(uid(i+1), part(name0, fmt.Sprint("s", i), "10", "1Gi")))
		claims[i].Name = string(claims[i].UID)
	}
	s := serve(t, dir, claims...)
	defer s.stop()
	var refused atomic.Int32
	var all sync.WaitGroup
	for _, c := range claims {
		for range 2 {
			all.Go(func() {
				if err := s.prepare(c); err != nil {
					refused.Add(1)
					if !strings.Contains(err.Error(), "110 %") {
						t.Error(err)
					}
				}
			})
		}
	}
	all.Wait()
	if n := refused.Load(); n != 2*more || len(s.store.Records()) != fit {
		t.Errorf("%d requests are refused, and %d claims are prepared; want %d, %d", n, len(s.store.Records()), 2*more, fit)
	}
	for _, c := range claims {
		all.Go(func() {
			if err := s.unprepare(c); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if left := files(t, filepath.Join(dir, "driver", "claims")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// devicesIn returns the names of the published devices.
func devicesIn(t testing.TB, client *clientset) (names []string) {
	t.Helper()
	list, err := client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
	check(t, err)
	for _, slice := range list.Items {
		for _, d := range slice.Spec.Devices {
			names = append(names, d.Name)
		}
	}
	return names
}

// While a driver is replaced, two run at the same time. The kubelet may ask either of them
// for anything, and a container's share is known to both.
func TestRollingUpdate(t *testing.T) {
	dir := shortDir(t)
	var claims []*resourceapi.ResourceClaim
	for i := range 4 {
		claims = append(claims, claimOf(uid(i+1), part(name0, string(rune('a'+i)), "40", "20Gi")))
		claims[i].Name = string(claims[i].UID)
	}
	client := apiServer(t, claims...)
	old := serveBeside(t, dir, client, "old")
	old.Lead()
	await(t, "both GPUs are published", func() bool { return slices.Equal(devicesIn(t, client), []string{name0, name1}) })
	check(t, old.prepare(claims[0]))

	// The next one comes, knows another number of GPUs, and publishes nothing yet.
	next := serveBeside(t, dir, client, "next")
	next.SetInventory(inventory(t, twoGPUs()[:1]))
	check(t, next.prepare(claims[1]))
	for name, d := range map[string]*served{"old": old, "next": next} {
		d.Claims().Load()
		for _, c := range claims[:2] {
			if _, known := d.Claims().ByDevice(string(c.UID) + "-" + name0 + "-" + string(*c.Status.Allocation.Devices.Results[0].ShareID)); !known {
				t.Errorf("the %s driver does not know claim %s", name, c.UID)
			}
		}
	}
	if err := old.prepare(claims[2]); err == nil || !strings.Contains(err.Error(), "120 %") {
		t.Errorf("a third time 40 %% of one GPU: %v", err)
	}
	token := next.store.Records()[1].Shares[0].Token
	if err := old.prepare(claims[1]); err != nil || old.store.Records()[1].Shares[0].Token != token {
		t.Errorf("prepared again by the other driver: %v, and a token of its own", err)
	}
	check(t, next.unprepare(claims[0]))
	check(t, old.prepare(claims[2]))
	check(t, old.unprepare(claims[1]))
	if got := devicesIn(t, client); !slices.Equal(got, []string{name0, name1}) {
		t.Errorf("published while two run: %v", got)
	}

	// The old one ends and takes its sockets along; those of one that was killed go too.
	old.stop()
	killed, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "registry", DriverName+"-killed-reg.sock"), Net: "unix"})
	check(t, err)
	killed.SetUnlinkOnClose(false)
	killed.Close()
	next.Lead()
	await(t, "the next one publishes what it knows", func() bool { return slices.Equal(devicesIn(t, client), []string{name0}) })
	if left, err := filepath.Glob(filepath.Join(dir, "registry", "*")); err != nil || len(left) != 1 || !strings.Contains(left[0], "next") {
		t.Errorf("sockets for the kubelet: %v (%v)", left, err)
	}
	check(t, next.prepare(claims[3]))
	check(t, next.unprepare(claims[2]))
	check(t, next.unprepare(claims[3]))
	next.stop()
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// Where somebody else gives the GPUs, the driver says so and publishes none.
func TestAnotherOwner(t *testing.T) {
	another := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: resourceapi.ResourceSliceSpec{
		Driver: "gpu.nvidia.com", NodeName: ptr.To(node), Devices: []resourceapi.Device{{Name: "gpu-0"}},
	}}
	with := func(resource corev1.ResourceName, n string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}, Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{resource: k8sresource.MustParse(n)}}}
	}
	for want, objects := range map[string][]runtime.Object{
		"nvidia.com/gpu: 8":           {with("nvidia.com/gpu", "8")},
		"nvshare.com/gpu: 10":         {with("nvshare.com/gpu", "10")},
		"nvidia.com/mig-1g.10gb: 7":   {with("nvidia.com/mig-1g.10gb", "7")},
		"driver gpu.nvidia.com gives": {with("cpu", "2"), another},
		"":                            {with("nvidia.com/gpu", "0")},
	} {
		d := newDriver(t, t.TempDir())
		d.Client = newClientset(objects...)
		other, err := d.otherOwner(context.Background())
		if check(t, err); want == "" && other != nil || want != "" && (other == nil || !strings.Contains(other.Error(), want)) {
			t.Errorf("%v; want %q", other, want)
		}
	}
}

// While somebody else gives the GPUs, the driver looks for that often, and not for each claim.
func TestLooksForClaimsSeldom(t *testing.T) {
	d := newDriver(t, t.TempDir())
	d.Problem = func(error) {}
	c := claimOf(uid(1), part(name0, "s1", "40", ""))
	check(t, prepare(d, c).Err)
	client := apiServer(t, c)
	nodes, err := client.CoreV1().Nodes().Get(t.Context(), node, metav1.GetOptions{})
	check(t, err)
	nodes.Status.Allocatable = corev1.ResourceList{"nvidia.com/gpu": k8sresource.MustParse("8")}
	_, err = client.CoreV1().Nodes().UpdateStatus(t.Context(), nodes, metav1.UpdateOptions{})
	check(t, err)
	d.Client = client
	for range 4 {
		if next := d.look(t.Context()); next != ownerInterval {
			t.Errorf("the next look is after %v", next)
		}
	}
	n := 0
	for _, a := range client.Actions() {
		if a.Matches("get", "resourceclaims") {
			n++
		}
	}
	if n != 1 {
		t.Errorf("the claim was read %d times", n)
	}
}

// What the scheduler learns of a GPU is published at once.
func TestRefreshPublishes(t *testing.T) {
	var drained atomic.Bool
	s := serveBeside(t, shortDir(t), apiServer(t), "", func(c *Config) {
		c.Options.Scheduler = func(uuid string) plugin.GPUState {
			return plugin.GPUState{Sharing: plugin.SharedByTurns, Drained: drained.Load()}
		}
	})
	defer s.stop()
	s.Lead()
	tainted := func() (n int) {
		list, err := s.client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
		check(t, err)
		for _, slice := range list.Items {
			for _, d := range slice.Spec.Devices {
				n += len(d.Taints)
			}
		}
		return n
	}
	await(t, "both GPUs are published", func() bool { return len(devicesIn(t, s.client)) == 2 })
	for _, want := range []bool{true, false, true} {
		drained.Store(want)
		s.Refresh()
		await(t, "the taints of both GPUs", func() bool { return tainted() == map[bool]int{true: 2}[want] })
	}
}

// A kubelet that starts removes the slices of its node, because the drivers may not be back.
// The driver writes them again after repairDelay, by the clock of synctest.
func TestRemovedSlicesComeBack(t *testing.T) {
	d := newDriver(t, t.TempDir())
	synctest.Test(t, func(t *testing.T) {
		client := apiServer(t)
		d.Client = client
		writer, err := d.startWriter(t.Context(), &resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{
			node: {Slices: []resourceslice.Slice{{Devices: Devices(twoGPUs(), all, whole)}}},
		}})
		check(t, err)
		defer writer.Stop()
		written := client.ResourceV1().ResourceSlices()
		for range 3 {
			time.Sleep(2 * repairDelay)
			synctest.Wait()
			list, err := written.List(t.Context(), metav1.ListOptions{})
			check(t, err)
			if len(list.Items) != 1 {
				t.Fatalf("the node has %d slices, want 1", len(list.Items))
			}
			check(t, written.Delete(t.Context(), list.Items[0].Name, metav1.DeleteOptions{}))
		}
	})
}

// A claim that somebody has made, and no pod uses for a while, is allocated anew for the next
// pod. The kubelet unprepares it in between, unless it has lost its state: then the devices of
// before count for nobody any more.
func TestClaimIsAllocatedAnew(t *testing.T) {
	d := newDriver(t, t.TempDir())
	check(t, prepare(d, claimOf(uid(1), part(name0, "before", "60", "20Gi"))).Err)
	was := d.store.Records()[0].Shares[0]
	claim := claimOf(uid(1), part(name1, "now", "60", "20Gi"))
	r := prepare(d, claim)
	if check(t, r.Err); len(r.Devices) != 1 || r.Devices[0].DeviceName != name1 || *r.Devices[0].ShareID != "now" {
		t.Errorf("the kubelet gets %+v", r.Devices)
	}
	if spec := specOf(t, d, uid(1)); len(spec.Devices) != 1 || !strings.HasSuffix(spec.Devices[0].Name, name1+"-now") {
		t.Errorf("CDI devices: %+v", spec.Devices)
	}
	if _, known := d.store.ByDevice(was.Name); known {
		t.Error("the earlier share is known by its name")
	}
	if _, known := d.store.ByToken(was.Token); known {
		t.Error("the earlier share is known by its token")
	}
	check(t, prepare(d, claimOf(uid(2), part(name0, "other", "60", "20Gi"))).Err)

	// The whole device is given for another alternative of the request.
	for _, request := range []string{"gpu/first", "gpu/second"} {
		result := part(name0, "", "0", "")
		result.Request = request
		if r := prepare(d, claimOf(uid(6), result)); r.Err != nil || r.Devices[0].Requests[0] != request {
			t.Errorf("the kubelet gets %+v", r)
		}
	}
	check(t, unprepare(d, claimOf(uid(6))))

	// It goes to another node, or to none.
	for n, results := range [][]resourceapi.DeviceRequestAllocationResult{{part(name0, "there", "60", "")}, nil} {
		claim := claimOf(uid(3+n), part(name0, "here", "10", ""))
		check(t, prepare(d, claim).Err)
		for i := range results {
			results[i].Pool = "n1"
		}
		claim.Status.Allocation = &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}
		if results == nil {
			claim.Status.Allocation = nil
		}
		d.Client = apiServer(t, claim)
		if d.sweep(t.Context()); len(d.store.Records()) != 0 {
			t.Errorf("prepared here: %v", d.store.Records())
		}
	}

	// It comes back while the API server answers.
	check(t, prepare(d, claimOf(uid(5), part(name0, "gone", "10", ""))).Err)
	none := claimOf(uid(5))
	none.Status.Allocation = nil
	client := apiServer(t, none)
	client.PrependReactor("get", "resourceclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		check(t, prepare(d, claimOf(uid(5), part(name0, "back", "10", ""))).Err)
		return false, nil, nil
	})
	d.Client = client
	if d.sweep(t.Context()); len(d.store.Records()) != 1 || *d.store.Records()[0].Shares[0].ShareID != "back" {
		t.Errorf("prepared here: %v", d.store.Records())
	}
	specOf(t, d, uid(5))
}

// A cluster that would give whole GPUs away as shares gets none.
func TestClusterWithoutConsumableCapacity(t *testing.T) {
	dir := shortDir(t)
	s := serve(t, dir)
	defer s.stop()
	count := func() (n int) {
		list, err := s.client.ResourceV1().ResourceSlices().List(context.Background(), metav1.ListOptions{})
		check(t, err)
		for _, slice := range list.Items {
			n += len(slice.Spec.Devices)
		}
		return n
	}
	await(t, "both GPUs are published", func() bool { return count() == 2 })
	problems := make(chan error, 10)
	s.Problem = func(err error) { problems <- err }
	want := &resourceapi.ResourceSlice{Spec: resourceapi.ResourceSliceSpec{Devices: Devices(twoGPUs(), all, whole)}}
	got := want.DeepCopy()
	for i := range got.Spec.Devices {
		got.Spec.Devices[i].AllowMultipleAllocations = nil
	}
	s.HandleError(context.Background(), &resourceslice.DroppedFieldsError{DesiredSlice: want, ActualSlice: got}, "publish")
	if err := <-problems; err == nil || !strings.Contains(err.Error(), "DRAConsumableCapacity") {
		t.Errorf("the problem is %v", err)
	}
	await(t, "nothing is published", func() bool { return count() == 0 })
}

// It does not ask again: to see whether the cluster has learnt it, slices would have to be written that give whole GPUs away.
func TestUnusableClusterIsNotAskedAgain(t *testing.T) {
	d := newDriver(t, t.TempDir())
	d.Client, d.Problem, d.swept = apiServer(t), func(error) {}, time.Now()
	d.HandleError(t.Context(), &resourceslice.DroppedFieldsError{DesiredSlice: &resourceapi.ResourceSlice{}, ActualSlice: &resourceapi.ResourceSlice{}}, "publish")
	if then := d.look(t.Context()); then != sweepInterval {
		t.Errorf("the next look is after %v", then)
	}
}

// The first slices wait for the API server as long as it is away. Nobody else does.
func TestPublishingHoldsNobodyUp(t *testing.T) {
	client := apiServer(t)
	var away, known atomic.Bool
	asked := make(chan struct{})
	tell := sync.OnceFunc(func() { close(asked) })
	client.PrependReactor("list", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		if !away.Load() {
			return false, nil, nil
		}
		tell()
		return true, nil, errors.New("connection refused")
	})
	s := serveBeside(t, shortDir(t), client, "", func(c *Config) {
		c.Options.Scheduler = func(string) plugin.GPUState {
			if known.Load() {
				return plugin.GPUState{Sharing: plugin.SharedByTurns}
			}
			return plugin.GPUState{}
		}
	})
	defer s.stop()
	s.Lead()
	await(t, "a look at the node", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.looked })
	away.Store(true)
	known.Store(true)
	s.Refresh()
	<-asked
	alive := make(chan struct{})
	go func() { s.Alive(); s.SetInventory(inventory(t, twoGPUs())); close(alive) }()
	select {
	case <-alive:
	case <-time.After(patience):
		t.Errorf("the driver's lock was held for %v while the API server was away", patience)
	}
	away.Store(false)
	await(t, "the GPUs are published", func() bool { return len(devicesIn(t, client)) == 2 })
}

// What the API server refuses is a problem of the plugin until the server has it.
func TestRefusedSlicesAreAProblem(t *testing.T) {
	dir := shortDir(t)
	client := apiServer(t)
	var allowed atomic.Bool
	client.PrependReactor("create", "resourceslices", func(clienttesting.Action) (bool, runtime.Object, error) {
		return !allowed.Load(), nil, apierrors.NewForbidden(resourceapi.Resource("resourceslices"), "", errors.New("no role"))
	})
	s := serveBeside(t, dir, client, "")
	defer s.stop()
	s.Lead()
	await(t, "a write fails", func() bool { return s.lacking() != nil })
	next := newDriver(t, t.TempDir()) // the driver's part that only Run may call
	var problem error
	next.Client, next.Problem, next.swept, next.published = client, func(why error) { problem = why }, time.Now(), Devices(twoGPUs(), all, whole)
	next.HandleError(t.Context(), s.lacking(), "publish")
	if then := next.look(t.Context()); problem == nil || !strings.Contains(problem.Error(), "no role") || then != ownerInterval {
		t.Errorf("the problem is %v, the next look is after %v", problem, then)
	}
	allowed.Store(true)
	await(t, "the GPUs are published", func() bool { return len(devicesIn(t, client)) == 2 })
	if then := next.look(t.Context()); problem != nil || then != sweepInterval {
		t.Errorf("the problem is %v, the next look is after %v", problem, then)
	}
}

// So is a node that cannot be read, at the second time: nothing is published before it was.
func TestUnreadableNodeIsAProblem(t *testing.T) {
	d := newDriver(t, t.TempDir())
	client := apiServer(t)
	forbidden := true
	client.PrependReactor("get", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return forbidden, nil, apierrors.NewForbidden(corev1.Resource("nodes"), node, errors.New("no role"))
	})
	var problem error
	d.Client, d.Problem, d.swept = client, func(why error) { problem = why }, time.Now()
	if d.look(t.Context()); problem != nil {
		t.Errorf("after one failure: %v", problem)
	}
	if d.look(t.Context()); problem == nil || !strings.Contains(problem.Error(), "no role") {
		t.Errorf("after two failures: %v", problem)
	}
	forbidden = false
	if d.look(t.Context()); problem != nil {
		t.Errorf("once it can be read: %v", problem)
	}
}

// In a pod the MIG devices' UUIDs are not known. A claim keeps its MIG device where another one is taken
// down or made, which changes the places of those after it; and its spec, where its own is gone.
func TestClaimKeepsItsMIGDevice(t *testing.T) {
	d := newDriver(t, t.TempDir())
	partition := func(instances ...int) []nvcdi.GPU {
		gpus := twoGPUs()[:1]
		for i, gi := range instances {
			gpus[0].Instances = append(gpus[0].Instances, nvcdi.Instance{Index: i, GPUInstance: gi, DeviceNodes: []string{fmt.Sprintf("/dev/nvidia-caps/nvidia-cap%d", gi)}})
		}
		d.SetInventory(inventory(t, gpus))
		return gpus
	}
	device := Devices(partition(1, 2), all, whole)[1]
	c := claimOf(uid(1), part(device.Name, "s1", "40", ""))
	check(t, prepare(d, c).Err)
	for _, instances := range [][]int{{1, 2}, {2, 5}, {2}, {1, 5, 7}} {
		partition(instances...)
		nodes := specOf(t, d, uid(1)).Devices[0].ContainerEdits.DeviceNodes
		if last := nodes[len(nodes)-1].Path; last != "/dev/nvidia-caps/nvidia-cap2" {
			t.Errorf("with GPU instances %v, the claim has %s", instances, last)
		}
		if slices.Contains(instances, 2) {
			check(t, prepare(d, c).Err)
		}
	}
	if r, _ := d.health(time.Now()); r.Devices[len(r.Devices)-1].DeviceName != device.Name || r.Devices[len(r.Devices)-1].Health != kubeletplugin.HealthStatusUnhealthy {
		t.Errorf("without its MIG device, the claim's health is %+v", r.Devices)
	}
}

// Until the driver knows whether somebody else gives the GPUs, what an earlier driver has
// published stays.
func TestPublishesNothingBeforeItKnows(t *testing.T) {
	d := newDriver(t, t.TempDir())
	client := newClientset() // without the node
	d.Client, d.Problem = client, func(err error) { t.Errorf("a problem: %v", err) }
	d.write = func(*resourceslice.DriverResources) error {
		t.Error("slices are written")
		return nil
	}
	check(t, d.publish())
	if next := d.look(context.Background()); next != ownerInterval {
		t.Errorf("next look in %v", next)
	}
}

// A driver that starts does not know yet what the scheduler knows of the GPUs. What an earlier
// driver has published stays until then: slices without taints, and without memory, give away
// GPUs that do no work, and parts without a memory limit. A scheduler that is away is not
// waited for longer than stateLimit.
func TestPublishesWhatTheSchedulerKnows(t *testing.T) {
	for name, answers := range map[string]bool{"the scheduler answers": true, "it is away": false} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			synctest.Test(t, func(t *testing.T) {
				var state plugin.GPUState
				options := whole
				options.Scheduler = func(string) plugin.GPUState { return state }
				d, err := New(Config{Problem: func(error) {}, Client: apiServer(t), NodeName: node, Directory: filepath.Join(dir, "driver"), CDIDir: filepath.Join(dir, "cdi"), Options: options, Log: silent()})
				check(t, err)
				var written [][]resourceapi.Device
				d.write = func(r *resourceslice.DriverResources) error {
					written = append(written, r.Pools[node].Slices[0].Devices)
					return nil
				}
				gpus := twoGPUs()
				gpus[0].MemoryBytes, gpus[1].MemoryBytes = 0, 0 // as the kernel tells
				d.SetInventory(inventory(t, gpus))
				d.look(t.Context())
				if len(written) > 0 {
					t.Fatalf("published before the scheduler has answered: %v", written)
				}
				if r, known := d.health(time.Now()); known {
					t.Errorf("health before the scheduler has answered: %v", r.Devices)
				}
				if !answers {
					d.stopWaiting()
					if check(t, d.publish()); len(written) != 1 {
						t.Errorf("published %d times, want 1", len(written))
					}
					return
				}
				state = plugin.GPUState{Sharing: plugin.SharedByTurns, Memory: 80 << 30, Fault: "Xid 79: gone"}
				if check(t, d.publish()); len(written) != 1 || len(written[0][0].Taints) != 1 || len(written[0][0].Capacity) != 3 {
					t.Errorf("published: %+v", written)
				}
				if r, known := d.health(time.Now()); !known || r.Devices[0].Health != kubeletplugin.HealthStatusUnhealthy {
					t.Errorf("health: %v", r.Devices)
				}
			})
		})
	}
}

// A driver that leads prepares a claim once the runtime asks the plugin about new containers:
// one that is created before would run without the shim. An earlier driver's plugin is asked
// as long as the next one does not lead.
func TestPrepareAwaitsTheRuntime(t *testing.T) {
	for name, c := range map[string]struct{ leads, waits bool }{"leads": {true, true}, "an earlier driver leads": {false, false}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				registered, dir := make(chan struct{}), t.TempDir()
				d, err := New(Config{NodeName: node, Directory: filepath.Join(dir, "driver"), CDIDir: filepath.Join(dir, "cdi"), Options: whole, Log: silent(), Registered: registered})
				check(t, err)
				d.SetInventory(inventory(t, twoGPUs()))
				if c.leads {
					d.Lead()
				}
				claim, ended := claimOf(uid(1), part(name0, uid(7), "40", "")), false
				go func() {
					r, err := d.PrepareResourceClaims(t.Context(), []*resourceapi.ResourceClaim{claim})
					if ended = true; err != nil || r[claim.UID].Err != nil {
						t.Errorf("%v, %v", r, err)
					}
				}()
				synctest.Wait()
				if ended == c.waits {
					t.Errorf("prepared %v, before the registration", ended)
				}
				close(registered)
				synctest.Wait()
				if !ended {
					t.Error("not prepared after the registration")
				}
			})
		})
	}
}
