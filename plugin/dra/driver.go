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
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	specs "tags.cncf.io/container-device-interface/specs-go"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

const (
	// sweepInterval is the time between looks for prepared claims that do not exist
	// any more. The kubelet unprepares claims itself, unless it lost its state.
	sweepInterval = 10 * time.Minute
	// ownerInterval is the time between looks whether somebody else still gives the GPUs,
	// or whether the API server is back to say so. It is also the time until the driver
	// publishes again after a failure.
	ownerInterval = 15 * time.Second
	// requestLimit bounds one request of a sweep to the API server.
	requestLimit = 10 * time.Second
	// knownLimit bounds how long a request of the kubelet waits for the first look at the
	// GPUs, and then for the plugin's registration with the runtime: the kubelet tries again
	// only after a minute.
	knownLimit = 20 * time.Second
	// dialLimit bounds the look whether somebody listens on a socket.
	dialLimit = time.Second
)

// Config says where a driver works.
type Config struct {
	Client    kubernetes.Interface
	NodeName  string
	Registry  string // directory of the kubelet for sockets of plugins
	Directory string // of this driver, for its socket and records; the same for the kubelet
	// PodUID is the driver's pod, if the next driver may run beside this one for a while
	// (rolling update): each has sockets of its own then. Empty: there is no pod.
	PodUID  types.UID
	CDIDir  string
	Options Options
	Log     logrus.FieldLogger
	// Registered is closed once the runtime asks the plugin about new containers: a
	// container that is created before runs without the shim. nil: nobody waits for this.
	Registered <-chan struct{}
	// Problem is called with what keeps the driver from giving GPUs; nil: nothing.
	Problem func(error)
}

// Driver publishes the GPUs of a node, and prepares the claims of its pods.
type Driver struct {
	Config
	store   *Store
	metrics *metrics
	changed chan struct{} // holds a token when the health may be another one
	stale   chan struct{} // holds a token when what is published may be stale
	known   chan struct{} // closed once the GPUs are known
	leads   chan struct{} // closed by Lead
	swept   time.Time     // the end of the latest sweep; only Run's goroutine has it
	blind   bool          // the latest look could not see who owns the GPUs; as swept
	// write makes these the node's slices, in its own time; nil: the driver does not lead yet. As swept.
	write func(*resourceslice.DriverResources) error

	mu        sync.Mutex
	inventory *plugin.Inventory // nil: the GPUs are not known yet
	looked    bool              // owner is known
	owner     bool              // nobody else gives the GPUs
	unusable  error             // why the cluster cannot use what is published; nil: it can
	failed    error             // why a write failed, until the API server is seen to have what is published
	waited    bool              // stateLimit is over
	published []resourceapi.Device
}

var _ kubeletplugin.DRAPlugin = (*Driver)(nil)

// New opens the records of prepared claims.
func New(c Config) (*Driver, error) {
	if err := c.Options.check(); err != nil {
		return nil, err
	}
	store, err := Open(c.Directory+"/claims", c.CDIDir, c.Log)
	if err != nil {
		return nil, err
	}
	return &Driver{Config: c, store: store, metrics: newMetrics(c.NodeName, store.Records),
		changed: make(chan struct{}, 1), stale: make(chan struct{}, 1), known: make(chan struct{}), leads: make(chan struct{})}, nil
}

// Lead says that no earlier driver of this node runs any more. It is called once.
func (d *Driver) Lead() { close(d.leads) }

// Alive returns once the locks are free that requests of the kubelet and the runtime need. A driver
// for which it does not return is stuck.
func (d *Driver) Alive() {
	_, _ = d.devices()
	_, _ = d.store.record("")
}

// leading tells whether Lead was called.
func (d *Driver) leading() bool {
	select {
	case <-d.leads:
		return true
	default:
		return false
	}
}

// Claims returns the prepared claims, for the plugin.
func (d *Driver) Claims() plugin.Claims { return d.store }

// Metrics returns what the driver counts.
func (d *Driver) Metrics() prometheus.Gatherer { return d.metrics.registry }

// Run serves the kubelet until ctx ends. Nothing is published before SetInventory. Before
// Lead, the driver prepares and unprepares claims, as the earlier driver does, and changes
// nothing else.
func (d *Driver) Run(ctx context.Context) error {
	ctx = quiet(ctx, d.Log)
	helper, err := kubeletplugin.Start(ctx, d,
		kubeletplugin.DriverName(DriverName), kubeletplugin.KubeClient(d.Client), kubeletplugin.NodeName(d.NodeName),
		kubeletplugin.RegistrarDirectoryPath(d.Registry), kubeletplugin.PluginDataDirectoryPath(d.Directory),
		kubeletplugin.RollingUpdate(d.PodUID),
		kubeletplugin.Serialize(false), // the store does, so that claims are read from the API server at the same time
		kubeletplugin.GRPCInterceptor(d.metrics.intercept), kubeletplugin.GRPCVerbosity(-1))
	if err != nil {
		return fmt.Errorf("serve the kubelet: %w (--dra needs the directories %s and %s, at the same paths as on the host)", err, d.Registry, d.Directory)
	}
	defer helper.Stop()
	select {
	case <-ctx.Done():
		return nil
	case <-d.leads:
	}
	d.removeStaleSockets()
	var writer *resourceslice.Controller
	defer func() { writer.Stop() }()
	d.write = func(r *resourceslice.DriverResources) (err error) {
		if writer == nil {
			writer, err = d.startWriter(ctx, r)
			return err
		}
		writer.Update(r)
		return nil
	}
	waited := time.AfterFunc(stateLimit, d.stopWaiting)
	defer waited.Stop()
	sweep := time.NewTicker(sweepInterval)
	defer sweep.Stop()
	look := func() { sweep.Reset(wait.Jitter(d.look(ctx), 0.2)) } // not all nodes of a cluster at once
	look()
	lacking := false
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-d.stale:
			if err := d.publish(); err != nil {
				d.Log.Error(err)
				sweep.Reset(ownerInterval)
			}
			before := lacking
			if lacking = d.lacking() != nil; lacking && !before {
				sweep.Reset(ownerInterval)
			}
		case <-sweep.C:
			look()
		}
	}
}

// removeStaleSockets removes the sockets of drivers that ended without doing that: the
// kubelet would try to reach them again and again.
func (d *Driver) removeStaleSockets() {
	for _, pattern := range []string{filepath.Join(d.Registry, DriverName+"-*reg.sock"), filepath.Join(d.Directory, "dra*.sock")} {
		sockets, err := filepath.Glob(pattern)
		if err != nil {
			d.Log.Errorf("look for sockets of earlier drivers: %v", err)
		}
		for _, socket := range sockets {
			conn, err := net.DialTimeout("unix", socket, dialLimit)
			if err == nil {
				conn.Close()
			}
			if errors.Is(err, unix.ECONNREFUSED) {
				d.Log.Infof("remove %s, of a driver that has ended (%v)", socket, os.Remove(socket))
			}
		}
	}
}

// look sees who owns the GPUs and which claims exist. It publishes nothing until it knows
// that nobody else gives the GPUs. It returns the time until the next look.
func (d *Driver) look(ctx context.Context) time.Duration {
	other, err := d.otherOwner(ctx)
	if err != nil { // what is published stays
		err = fmt.Errorf("see who else gives the GPUs of this node: %w; trying again", err)
		if ctx.Err() == nil {
			d.Log.Warn(err)
		}
		if d.blind { // for the second time
			d.Problem(err)
		}
		d.blind = true
		return ownerInterval
	}
	d.blind = false
	unwritten := d.unwritten(ctx)
	d.mu.Lock()
	why := errors.Join(d.unusable, other)
	d.looked, d.owner = true, other == nil
	d.mu.Unlock()
	if why != nil {
		d.Log.Errorf("GPUs are not published: %v", why)
	}
	d.Problem(errors.Join(why, unwritten))
	failed := d.publish()
	if failed != nil {
		d.Log.Error(failed)
	}
	if time.Since(d.swept) >= sweepInterval { // it asks the API server for each claim
		d.sweep(ctx)
		d.swept = time.Now()
	}
	if other != nil || unwritten != nil || failed != nil {
		return ownerInterval
	}
	return sweepInterval
}

// devices returns what can be given now.
func (d *Driver) devices() ([]device, error) {
	d.mu.Lock()
	inv := d.inventory
	d.mu.Unlock()
	if inv == nil {
		return nil, errors.New("the GPUs of this node are not known yet; the plugin's log says why if that lasts")
	}
	return devicesOf(inv.GPUs(), inv.Offers, d.Options), nil
}

// edits is an editor of the inventory.
func (d *Driver) edits(uuid string) (one, common specs.ContainerEdits, err error) {
	devices, err := d.devices()
	if err != nil {
		return one, common, err
	}
	i := slices.IndexFunc(devices, func(dev device) bool { return dev.uuid == uuid })
	if i < 0 {
		return one, common, fmt.Errorf("this node has no device %s now", uuid)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.inventory.Edits(devices[i].spec)
}

// PrepareResourceClaims writes record and CDI spec of each claim.
func (d *Driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	select {
	case <-d.known:
	case <-ctx.Done():
	case <-time.After(knownLimit):
	}
	if d.Registered != nil && d.leading() { // else the earlier plugin is still there
		select {
		case <-d.Registered:
		case <-ctx.Done():
		case <-time.After(knownLimit):
		}
	}
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		r, err := d.prepare(claim)
		if err != nil {
			err = fmt.Errorf("nvshare: claim %s/%s: %w", claim.Namespace, claim.Name, err)
			d.metrics.failed(opPrepare, err)
			d.Log.Warn(err)
			results[claim.UID] = kubeletplugin.PrepareResult{Err: err}
			continue
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: r.answer()}
	}
	return results, nil
}

func (d *Driver) prepare(claim *resourceapi.ResourceClaim) (Record, error) {
	devices, err := d.devices()
	if err != nil {
		return Record{}, err
	}
	r, err := read(claim, d.NodeName, devices)
	if err != nil {
		return r, err
	}
	r, err = d.store.prepare(r, func(r Record, others []Record) error { return overfull(r, others, devices, d.Options) }, d.edits)
	if err == nil {
		d.Log.Infof("prepared claim %s/%s: %s", r.Namespace, r.Name, r.names())
	}
	return r, err
}

// answer returns the record in the kubelet's form.
func (r Record) answer() (all []kubeletplugin.Device) {
	for _, s := range r.Shares {
		all = append(all, kubeletplugin.Device{
			Requests: []string{s.Request}, PoolName: s.Pool, DeviceName: s.Device, ShareID: s.ShareID,
			CDIDeviceIDs: []string{cdi.Kind + "=" + s.Name},
		})
	}
	return all
}

func (r Record) names() (all []string) {
	for _, s := range r.Shares {
		all = append(all, s.Device)
	}
	return all
}

// UnprepareResourceClaims removes all of each claim.
func (d *Driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		err := d.store.unprepare(claim.UID)
		if results[claim.UID] = err; err != nil {
			d.metrics.failed(opUnprepare, err)
			d.Log.Warnf("unprepare claim %s: %v", claim.NamespacedName, err)
			continue
		}
		d.Log.Infof("unprepared claim %s", claim.NamespacedName)
	}
	return results, nil
}

// sweep unprepares claims that do not exist any more, or have nothing of this node any more.
func (d *Driver) sweep(ctx context.Context) {
	if err := d.store.load(); err != nil {
		d.Log.Warn(err)
	}
	for _, r := range d.store.Records() {
		gone, err := d.gone(ctx, r)
		if err == nil && gone {
			d.Log.Infof("claim %s/%s does not exist any more, or is not allocated here: unpreparing it", r.Namespace, r.Name)
			err = d.store.unprepareSame(r) // it may be back by now
		}
		if err != nil && ctx.Err() == nil {
			d.Log.Warnf("look whether claim %s/%s still exists: %v", r.Namespace, r.Name, err)
		}
	}
}

func (d *Driver) gone(ctx context.Context, r Record) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	claim, err := d.Client.ResourceV1().ResourceClaims(r.Namespace).Get(ctx, r.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	return err == nil && (claim.UID != r.UID || !d.allocatedHere(claim)), err
}

// allocatedHere tells whether a claim has a device of this node.
func (d *Driver) allocatedHere(claim *resourceapi.ResourceClaim) bool {
	return claim.Status.Allocation != nil && slices.ContainsFunc(claim.Status.Allocation.Devices.Results, func(r resourceapi.DeviceRequestAllocationResult) bool {
		return r.Driver == DriverName && r.Pool == d.NodeName
	})
}
