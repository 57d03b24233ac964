// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// cluster is one node whose GPUs kube-scheduler's own allocator gives away.
type cluster struct {
	t     *testing.T
	slice *resourceapi.ResourceSlice
	used  structured.AllocatedState
	n     int
}

type classes []*resourceapi.DeviceClass

func (c classes) List() ([]*resourceapi.DeviceClass, error)    { return c, nil }
func (c classes) Get(string) (*resourceapi.DeviceClass, error) { return c[0], nil }

func newCluster(t *testing.T, o Options) *cluster {
	return &cluster{t: t,
		slice: &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: resourceapi.ResourceSliceSpec{
			Driver: DriverName, NodeName: ptr.To(node), Pool: resourceapi.ResourcePool{Name: node, Generation: 1, ResourceSliceCount: 1}, Devices: Devices(twoGPUs(), all, o),
		}},
		used: structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](), AggregatedCapacity: structured.NewConsumedCapacityCollection()},
	}
}

// allocate returns the claim with these requests, allocated; nil: there is no room.
func (c *cluster) allocate(constraints []resourceapi.DeviceConstraint, requests ...resourceapi.DeviceRequest) *resourceapi.ResourceClaim {
	c.t.Helper()
	ctx := context.Background()
	class := &resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "nvshare.com"}, Spec: resourceapi.DeviceClassSpec{
		Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "nvshare.com"`}}},
	}}
	a, err := structured.NewAllocator(ctx, structured.Features{ConsumableCapacity: true, DeviceTaints: true}, c.used, classes{class}, []*resourceapi.ResourceSlice{c.slice},
		cel.NewCache(10, cel.Features{EnableConsumableCapacity: true}))
	check(c.t, err)
	c.n++
	claim := claimOf(uid(c.n))
	claim.Spec.Devices = resourceapi.DeviceClaim{Requests: requests, Constraints: constraints}
	results, err := a.Allocate(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, []*resourceapi.ResourceClaim{claim})
	check(c.t, err)
	if len(results) == 0 {
		return nil
	}
	claim.Status.Allocation = &results[0]
	for _, r := range results[0].Devices.Results {
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		c.used.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, (*types.UID)(r.ShareID)))
		c.used.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
	}
	return claim
}

// request asks for parts: "cores=40 memory=20Gi".
func request(name string, count int64, parts string) resourceapi.DeviceRequest {
	r := resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "nvshare.com", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count}}
	for p := range strings.FieldsSeq(parts) {
		key, value, _ := strings.Cut(p, "=")
		if r.Exactly.Capacity == nil {
			r.Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: map[resourceapi.QualifiedName]resource.Quantity{}}
		}
		r.Exactly.Capacity.Requests[resourceapi.QualifiedName(key)] = resource.MustParse(value)
	}
	return r
}

// given writes where a claim is: the indices of its GPUs.
func given(claim *resourceapi.ResourceClaim) string {
	if claim == nil {
		return "none"
	}
	var at []string
	for _, r := range claim.Status.Allocation.Devices.Results {
		at = append(at, r.Device[len(r.Device)-1:])
	}
	return strings.Join(at, " ")
}

// What is published makes kube-scheduler's allocator give what nvshare promises, and
// the driver takes each allocation.
func TestAllocator(t *testing.T) {
	distinct := []resourceapi.DeviceConstraint{{DistinctAttribute: ptr.To(resourceapi.FullyQualifiedName("nvshare.com/uuid"))}}
	type ask struct {
		constraints []resourceapi.DeviceConstraint
		requests    []resourceapi.DeviceRequest
		want        string
	}
	one := func(parts, want string) ask {
		return ask{nil, []resourceapi.DeviceRequest{request("gpu", 1, parts)}, want}
	}
	for name, asks := range map[string][]ask{
		"three times 40 % on two GPUs": {one("cores=40", "0"), one("cores=40", "0"), one("cores=40", "1"), one("cores=61", "none"), one("cores=60", "1"), one("cores=20", "0"), one("cores=1", "none")},
		"whole GPUs":                   {one("cores=100", "0"), one("cores=100", "1"), one("cores=1", "none"), one("", "none")},
		"memory":                       {one("cores=1 memory=50Gi", "0"), one("cores=1 memory=50Gi", "1"), one("cores=1 memory=31Gi", "none"), one("cores=1 memory=30Gi", "0")},
		"default shares": {
			one("", "0"), one("", "0"), one("", "0"), one("", "0"), one("", "0"), one("", "0"), one("", "0"), one("", "0"), one("", "0"), one("", "0"), one("", "1"),
		},
		"the slots": {
			one("cores=1 slots=10", "0"), one("cores=1", "1"), one("cores=1 slots=10", "none"),
		},
		"two GPUs of one request are two":          {{nil, []resourceapi.DeviceRequest{request("gpu", 2, "cores=40")}, "0 1"}, {nil, []resourceapi.DeviceRequest{request("gpu", 3, "cores=1")}, "none"}},
		"two requests are two GPUs if they say so": {{distinct, []resourceapi.DeviceRequest{request("a", 1, "cores=10"), request("b", 1, "cores=10")}, "0 1"}},
		"two requests may be one GPU":              {{nil, []resourceapi.DeviceRequest{request("a", 1, "cores=10"), request("b", 1, "cores=10")}, "0 0"}},
		"more than a GPU":                          {one("cores=101", "none"), one("memory=81Gi", "none")},
		"parts of a percent are rounded up":        {one("cores=500m", "0"), one("cores=100", "1"), one("cores=99", "0")},
	} {
		t.Run(name, func(t *testing.T) {
			c, d := newCluster(t, whole), newDriver(t, t.TempDir())
			for i, a := range asks {
				claim := c.allocate(a.constraints, a.requests...)
				if got := given(claim); got != a.want {
					t.Fatalf("claim %d is on GPU %s, want %s", i, got, a.want)
				}
				if claim == nil {
					continue
				}
				if r := prepare(d, claim); r.Err != nil {
					t.Errorf("claim %d: %v", i, r.Err)
				}
			}
		})
	}
}
