// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/sirupsen/logrus"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

const (
	node  = "n0"
	gpu0  = "GPU-51600000-0000-4000-8000-000000000000"
	gpu1  = "GPU-51600000-0000-4000-8000-000000000001"
	name0 = "gpu-51600000-0000-4000-8000-000000000000"
	name1 = "gpu-51600000-0000-4000-8000-000000000001"
)

var whole = Options{Slots: 10, PromiseMemory: 100}

func silent() logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(io.Discard)
	return log
}

func twoGPUs() []cdi.GPU { return someGPUs(2) }

func someGPUs(n int) []cdi.GPU {
	var gpus []cdi.GPU
	for i := range n {
		gpus = append(gpus, cdi.GPU{Index: i, UUID: fmt.Sprintf("GPU-51600000-0000-4000-8000-%012x", i), Name: "NVIDIA H200", MemoryBytes: 80 << 30, PCIBusID: fmt.Sprintf("0000:1%d:00.0", i), DeviceNodes: []string{fmt.Sprintf("/dev/nvidia%d", i)}})
	}
	return gpus
}

func inventory(t testing.TB, gpus []cdi.GPU) *plugin.Inventory {
	t.Helper()
	driver := &cdi.Driver{Libraries: []cdi.Library{{File: "/l/libcuda.so.1.2", Paths: []string{"/l/libcuda.so.1"}, Soname: "/l/libcuda.so.1"}}, DeviceNodes: []string{"/dev/nvidiactl"}}
	spec, err := cdi.Build(cdi.KindNRI, gpus, cdi.DriverBase(driver, gpus, cdi.DefaultPaths.Hook), cdi.DefaultPaths)
	check(t, err)
	return plugin.NewInventory(spec, gpus)
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// part is a result of an allocation.
func part(device, share, cores, memory string) resourceapi.DeviceRequestAllocationResult {
	r := resourceapi.DeviceRequestAllocationResult{
		Request: "gpu", Driver: DriverName, Pool: node, Device: device,
		ConsumedCapacity: map[resourceapi.QualifiedName]resource.Quantity{Cores: resource.MustParse(cores), Slots: resource.MustParse("1")},
	}
	if memory != "" {
		r.ConsumedCapacity[Memory] = resource.MustParse(memory)
	}
	if share != "" {
		r.ShareID = ptr.To(types.UID(share))
	}
	return r
}

func claimOf(uid string, results ...resourceapi.DeviceRequestAllocationResult) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ml", Name: "c-" + uid[:4], UID: types.UID(uid)},
		Status:     resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: results}}},
	}
}

func opaque(source resourceapi.AllocationConfigSource, params string, requests ...string) resourceapi.DeviceAllocationConfiguration {
	return resourceapi.DeviceAllocationConfiguration{Source: source, Requests: requests, DeviceConfiguration: resourceapi.DeviceConfiguration{
		Opaque: &resourceapi.OpaqueDeviceConfiguration{Driver: DriverName, Parameters: runtime.RawExtension{Raw: []byte(params)}},
	}}
}

const share = `{"apiVersion": "nvshare.com/v1", "kind": "Share", `

func uid(n int) string { return fmt.Sprintf("%08x-0000-4000-8000-000000000000", n) }

// newDriver returns a driver that serves nobody, with its directories.
func newDriver(t testing.TB, dir string) *Driver {
	t.Helper()
	d, err := New(Config{NodeName: node, Directory: filepath.Join(dir, "driver"), CDIDir: filepath.Join(dir, "cdi"), Options: whole, Log: silent()})
	check(t, err)
	d.Lead()
	d.SetInventory(inventory(t, twoGPUs()))
	return d
}

// specOf reads the CDI spec of a claim.
func specOf(t testing.TB, d *Driver, uid string) (spec specs.Spec) {
	t.Helper()
	data, err := os.ReadFile(cdi.ClaimFile(d.CDIDir, uid))
	check(t, err)
	check(t, json.Unmarshal(data, &spec))
	return spec
}
