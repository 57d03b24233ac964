// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

func all(string) bool { return true }

// swaps is a scheduler that swaps.
func swaps(room, host uint64) func(string) plugin.GPUState {
	return func(string) plugin.GPUState { return plugin.GPUState{Swap: true, Room: room, Host: host} }
}

func TestDevices(t *testing.T) {
	mig := twoGPUs()[:1]
	mig[0].Instances = []cdi.Instance{{Index: 0, UUID: "MIG-0a", MemoryBytes: 10 << 30}, {Index: 1, GPUInstance: 13, ComputeInstance: 1}}
	unknown := twoGPUs()[:1]
	unknown[0].MemoryBytes = 0
	for _, c := range []struct {
		name    string
		gpus    []cdi.GPU
		offered func(string) bool
		options Options
		want    []string // each a device: name, type, cores, memory, slots, as value/default
	}{
		{"two GPUs", twoGPUs(), all, whole, []string{
			name0 + " gpu 100/10 80Gi/8Gi 10/1", name1 + " gpu 100/10 80Gi/8Gi 10/1"}},
		{"no GPU", nil, all, whole, nil},
		{"more slots", twoGPUs()[:1], all, Options{Slots: 16, PromiseMemory: 100}, []string{name0 + " gpu 100/6 80Gi/5Gi 16/1"}},
		{"memory beyond the GPU", twoGPUs()[:1], all, Options{Slots: 10, PromiseMemory: 150}, []string{name0 + " gpu 100/10 120Gi/12Gi 10/1"}},
		{"what the scheduler can swap", twoGPUs(), all, Options{Slots: 10, Scheduler: swaps(79<<30, 42<<30)}, []string{
			name0 + " gpu 100/10 100Gi/10Gi 10/1", name1 + " gpu 100/10 100Gi/10Gi 10/1"}},
		{"one slot of more than the GPU", twoGPUs()[:1], all, Options{Slots: 1, PromiseMemory: 150}, []string{name0 + " gpu 100/100 120Gi/80Gi 1/1"}},
		{"hardly any host memory", twoGPUs()[:1], all, Options{Slots: 10, Scheduler: swaps(70<<30, 1<<30)}, []string{name0 + " gpu 100/10 80Gi/8Gi 10/1"}},
		{"no swapping", twoGPUs()[:1], all, Options{Slots: 10}, []string{name0 + " gpu 100/10 80Gi/8Gi 10/1"}},
		{"MIG devices take the GPU's place", mig, all, whole, []string{"mig-0a mig 100/10 10Gi/1Gi 10/1", "mig-" + name0 + "-13-1 mig 100/10 none 10/1"}},
		{"a MIG device without its nodes", mig, func(name string) bool { return name == "MIG-0a" }, whole, []string{"mig-0a mig 100/10 10Gi/1Gi 10/1"}},
		{"memory not known", unknown, all, whole, []string{name0 + " gpu 100/10 none 10/1"}},
		{"memory known to the scheduler", unknown, all, Options{Slots: 10, PromiseMemory: 100, Scheduler: func(string) plugin.GPUState { return plugin.GPUState{Memory: 1<<30 + 5} }},
			[]string{name0 + " gpu 100/10 1Gi/64Mi 10/1"}},
	} {
		var got []string
		for _, d := range Devices(c.gpus, c.offered, c.options) {
			text := d.Name + " " + *d.Attributes["type"].StringValue
			if why := validation.IsDNS1123Label(d.Name); why != nil {
				t.Errorf("%s: %s: %v", c.name, d.Name, why)
			}
			if !*d.AllowMultipleAllocations {
				t.Errorf("%s: %s is for one claim", c.name, d.Name)
			}
			for _, name := range []string{"cores", "memory", "slots"} {
				q, ok := d.Capacity[resourceapi.QualifiedName(name)]
				if !ok {
					text += " none"
					continue
				}
				text += " " + q.Value.String() + "/" + q.RequestPolicy.Default.String()
				// No claim asks for more than the real memory.
				if most := q.RequestPolicy.ValidRange.Max; name == "memory" && (q.Value.Value() > *d.Attributes["memorySize"].IntValue) != (most != nil && most.Value() == *d.Attributes["memorySize"].IntValue) {
					t.Errorf("%s: %s: of %v, a claim may have %v", c.name, d.Name, &q.Value, most)
				}
				// The API server refuses a default that is no multiple of the step.
				if r := q.RequestPolicy; r.Default.Value()%r.ValidRange.Step.Value() != 0 || q.Value.Value()%r.ValidRange.Step.Value() != 0 || r.Default.Cmp(q.Value) > 0 || r.ValidRange.Max != nil && r.Default.Cmp(*r.ValidRange.Max) > 0 {
					t.Errorf("%s: %s: %s: default %v, step %v", c.name, d.Name, name, r.Default, r.ValidRange.Step)
				}
			}
			got = append(got, text)
		}
		if strings.Join(got, "\n") != strings.Join(c.want, "\n") {
			t.Errorf("%s:\n%s\nwant\n%s", c.name, strings.Join(got, "\n"), strings.Join(c.want, "\n"))
		}
	}
}

// Attributes that claims select by. What is not known is left out, and what discovery does
// not know comes from the scheduler.
func TestAttributes(t *testing.T) {
	const always = `"index":{"int":1},"memorySize":{"int":85899345920},"productName":{"string":"NVIDIA H200"},`
	const end = `"type":{"string":"gpu"},"uuid":{"string":"` + gpu1 + `"}}`
	told := whole
	told.Scheduler = func(string) plugin.GPUState {
		return plugin.GPUState{Sharing: plugin.SharedBySlices, Swap: true, Model: cdi.Model{
			Brand: "Nvidia", Architecture: "Hopper", ComputeCapability: "9.0", DriverVersion: "1.2", CUDAVersion: "13.0",
		}}
	}
	pci := whole
	pci.PCI = func(busID string) []deviceattribute.DeviceAttribute {
		a, err := deviceattribute.GetPCIBusIDAttribute(busID)
		check(t, err)
		return []deviceattribute.DeviceAttribute{a}
	}
	for _, c := range []struct {
		driver  string
		options Options
		want    string
	}{
		{"", whole, `{` + always + end},
		{"580.95.05", told, `{"architecture":{"string":"Hopper"},"brand":{"string":"Nvidia"},"cudaComputeCapability":{"version":"9.0.0"},"cudaDriverVersion":{"version":"13.0.0"},` +
			`"driverVersion":{"version":"580.95.5"},` + always + `"sharing":{"string":"slices"},"swap":{"bool":true},` + end},
		{"unknown", pci, `{` + always + `"resource.kubernetes.io/pciBusID":{"string":"0000:11:00.0"},` + end},
	} {
		gpus := twoGPUs()
		gpus[1].Model.DriverVersion = c.driver
		d := Devices(gpus, all, c.options)[1]
		data, err := json.Marshal(d.Attributes)
		check(t, err)
		if string(data) != c.want {
			t.Errorf("attributes are\n%s, want\n%s", data, c.want)
		}
		for _, a := range d.Attributes {
			if v := a.VersionValue; v != nil && !semver.MatchString(*v) {
				t.Errorf("%s is no semantic version", *v)
			}
		}
	}
}

// semver is what the API server takes as a version, without the parts after the numbers.
var semver = regexp.MustCompile(`^(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)$`)

// A GPU that nobody new should have is tainted, which ends no pod.
func TestTaints(t *testing.T) {
	for _, c := range []struct {
		state plugin.GPUState
		want  string
	}{
		{plugin.GPUState{}, ""},
		{plugin.GPUState{Drained: true}, "nvshare.com/drained=:NoSchedule"},
		{plugin.GPUState{Drained: true, Fault: "Xid 79: the GPU has fallen off the bus"}, "nvshare.com/fault=xid-79:NoSchedule nvshare.com/drained=:NoSchedule"},
		{plugin.GPUState{Fault: "the GPU is lost: the driver cannot reach it"}, "nvshare.com/fault=lost:NoSchedule"},
	} {
		o := whole
		o.Scheduler = func(string) plugin.GPUState { return c.state }
		var got []string
		for _, taint := range Devices(twoGPUs(), all, o)[0].Taints {
			got = append(got, fmt.Sprintf("%s=%s:%s", taint.Key, taint.Value, taint.Effect))
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%+v: taints %q, want %q", c.state, got, c.want)
		}
	}
}

// The API server refuses a slice with a longer text, and then the node has no devices.
func TestLongNamesAreCut(t *testing.T) {
	for name, want := range map[string]string{
		strings.Repeat("x", 64):       strings.Repeat("x", 64),
		strings.Repeat("x", 65):       strings.Repeat("x", 64),
		strings.Repeat("x", 63) + "é": strings.Repeat("x", 63),
		strings.Repeat("é", 40):       strings.Repeat("é", 32),
		"NVIDIA\xff H200":             "NVIDIA H200",
	} {
		gpus := twoGPUs()[:1]
		gpus[0].Name, gpus[0].Model.Brand, gpus[0].UUID = name, name, "GPU-"+strings.Repeat("a", 80)
		attributes := Devices(gpus, all, whole)[0].Attributes
		for _, attribute := range []resourceapi.QualifiedName{"productName", "brand"} {
			if got := *attributes[attribute].StringValue; got != want {
				t.Errorf("%q is published as %s %q, want %q", name, attribute, got, want)
			}
		}
		if got := *attributes["uuid"].StringValue; len(got) > resourceapi.DeviceAttributeMaxValueLength {
			t.Errorf("a UUID of %d bytes", len(got))
		}
	}
}

// So are the MIG devices of such a GPU.
func TestTaintsOfMIGDevices(t *testing.T) {
	gpus := twoGPUs()[:1]
	gpus[0].Instances = []cdi.Instance{{UUID: "MIG-0a"}}
	o := whole
	o.Scheduler = func(uuid string) plugin.GPUState {
		return plugin.GPUState{Sharing: plugin.SharedByTurns, Drained: uuid == gpus[0].UUID, Fault: map[string]string{gpus[0].UUID: "Xid 79: gone"}[uuid]}
	}
	if got := Devices(gpus, all, o)[0].Taints; len(got) != 2 || got[0].Key != FaultTaint || got[1].Key != DrainedTaint {
		t.Errorf("taints %v", got)
	}
	o.Scheduler = func(string) plugin.GPUState { return plugin.GPUState{} }
	if got := Devices(gpus, all, o); len(got) != 0 {
		t.Errorf("a MIG device that the scheduler does not know is published: %v", got)
	}
}

func TestSlotsOutOfRange(t *testing.T) {
	for _, n := range []int{-1, 0, 101} {
		if _, err := New(Config{Options: Options{Slots: n}, Log: silent(), Directory: t.TempDir(), CDIDir: t.TempDir()}); err == nil {
			t.Errorf("%d slots are accepted", n)
		}
	}
}
