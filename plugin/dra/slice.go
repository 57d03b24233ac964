// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/utils/ptr"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin"
)

// DriverName is the name of the driver in slices, classes and claims.
const DriverName = "nvshare.com"

// The capacities of a device.
const (
	Cores  resourceapi.QualifiedName = "cores"
	Memory resourceapi.QualifiedName = "memory"
	Slots  resourceapi.QualifiedName = "slots"
)

const (
	allCores = 100 // percent
	// memoryStep is what requests for memory are rounded up to, bytes.
	memoryStep = 64 << 20
	// DefaultSlots and MaxSlots bound how many claims use one device.
	DefaultSlots = 10
	MaxSlots     = allCores
)

// Options say how devices are published.
type Options struct {
	Slots         int    // claims at most on one device
	PromiseMemory uint32 // percent of the memory that may be promised; 0: what the scheduler can swap, too
	// Scheduler tells what the scheduler knows of a GPU. It may be nil.
	Scheduler func(uuid string) plugin.GPUState
	// PCI tells the standard attributes of a PCI device. It may be nil.
	PCI func(busID string) []deviceattribute.DeviceAttribute
}

// The types of devices.
const (
	typeGPU = "gpu"
	typeMIG = "mig"
)

// typeOf tells the type by the UUID: that of a GPU begins with GPU-.
func typeOf(uuid string) string {
	if strings.HasPrefix(uuid, "GPU-") {
		return typeGPU
	}
	return typeMIG
}

// device is a GPU or a MIG device.
type device struct {
	name   string // in the slice
	spec   string // in the CDI spec of cdi.KindNRI
	uuid   string // as the scheduler knows it
	gpu    cdi.GPU
	mig    bool
	memory uint64 // 0: not known
	state  plugin.GPUState
	host   uint64 // host memory for what is swapped
}

// devicesOf returns the devices of GPUs. offered are the names of the CDI spec: a MIG
// device that is not among them cannot be given.
func devicesOf(gpus []cdi.GPU, offered func(string) bool, o Options) (all []device) {
	add := func(d device) {
		if o.Scheduler != nil {
			d.state = o.Scheduler(d.uuid).WithParent(o.Scheduler(d.gpu.UUID))
		}
		d.memory = cmp.Or(d.memory, d.state.Memory)
		d.name = deviceName(d.uuid)
		if offered(d.spec) {
			all = append(all, d)
		}
	}
	for _, g := range gpus {
		for _, in := range g.Instances {
			add(device{uuid: in.ID(g), spec: in.ID(g), gpu: g, mig: true, memory: in.MemoryBytes})
		}
		if len(g.Instances) == 0 {
			add(device{uuid: g.UUID, spec: g.UUID, gpu: g, memory: g.MemoryBytes})
		}
	}
	for i := range all { // each device has an equal part
		all[i].host = all[i].state.Host / uint64(len(all))
	}
	return all
}

var notInLabel = regexp.MustCompile(`[^a-z0-9]+`)

// deviceName makes the name of a device, a DNS label, from a UUID.
func deviceName(uuid string) string {
	name := strings.Trim(notInLabel.ReplaceAllString(strings.ToLower(uuid), "-"), "-")
	if len(name) > validation.DNS1123LabelMaxLength {
		name = strings.Trim(name[:validation.DNS1123LabelMaxLength], "-")
	}
	return name
}

// Devices returns what the node publishes of its GPUs.
func Devices(gpus []cdi.GPU, offered func(string) bool, o Options) (all []resourceapi.Device) {
	for _, d := range devicesOf(gpus, offered, o) {
		// Nobody would keep what a MIG device promises that the scheduler does not know.
		if !d.mig || o.Scheduler == nil || d.state.Sharing != "" {
			all = append(all, d.publish(o))
		}
	}
	return all
}

func (d device) publish(o Options) resourceapi.Device {
	kind := typeGPU
	if d.mig {
		kind = typeMIG
	}
	out := resourceapi.Device{
		Name:                     d.name,
		AllowMultipleAllocations: ptr.To(true),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"uuid":  {StringValue: ptr.To(cut(d.uuid))},
			"type":  {StringValue: ptr.To(kind)},
			"index": {IntValue: ptr.To(int64(d.gpu.Index))},
		},
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			Cores: capacity(count(allCores), count(int64(allCores/o.Slots)), count(1), count(1)),
			Slots: capacity(count(int64(o.Slots)), count(1), count(1), count(1)),
		},
	}
	say := func(name resourceapi.QualifiedName, text string) {
		if text != "" {
			out.Attributes[name] = resourceapi.DeviceAttribute{StringValue: ptr.To(cut(text))}
		}
	}
	say("productName", d.gpu.Name)
	known, told := d.gpu.Model, d.state.Model
	say("brand", cmp.Or(known.Brand, told.Brand))
	say("architecture", cmp.Or(known.Architecture, told.Architecture))
	for name, text := range map[resourceapi.QualifiedName]string{
		"cudaComputeCapability": cmp.Or(known.ComputeCapability, told.ComputeCapability),
		"driverVersion":         cmp.Or(known.DriverVersion, told.DriverVersion),
		"cudaDriverVersion":     cmp.Or(known.CUDAVersion, told.CUDAVersion),
	} {
		if v := semantic(text); v != "" {
			out.Attributes[name] = resourceapi.DeviceAttribute{VersionValue: ptr.To(v)}
		}
	}
	if d.state.Sharing != "" { // the scheduler answers
		say("sharing", d.state.Sharing)
		out.Attributes["swap"] = resourceapi.DeviceAttribute{BoolValue: ptr.To(d.state.Swap)}
	}
	if d.mig {
		say("parentUUID", d.gpu.UUID)
	}
	if o.PCI != nil && d.gpu.PCIBusID != "" {
		for _, a := range o.PCI(d.gpu.PCIBusID) {
			out.Attributes[a.Name] = a.Value
		}
	}
	out.Taints = d.taints()
	if value := d.promisable(o); value > 0 {
		out.Capacity[Memory] = d.memoryCapacity(value, o.Slots)
		out.Attributes["memorySize"] = resourceapi.DeviceAttribute{IntValue: ptr.To(int64(d.memory))}
	}
	return out
}

// memoryCapacity is of bytes that claims may have together.
func (d device) memoryCapacity(bytes uint64, slots int) resourceapi.DeviceCapacity {
	// A program cannot have more than the GPU has, however much is promised.
	most := min(bytes, roundDown(d.memory))
	c := capacity(size(bytes), size(max(min(roundDown(bytes/uint64(slots)), most), memoryStep)), size(memoryStep), size(memoryStep))
	if most < bytes {
		c.RequestPolicy.ValidRange.Max = ptr.To(size(most))
	}
	return c
}

// cut returns what a text attribute can have of a text: the API server refuses a slice with more.
func cut(text string) string {
	text = strings.ToValidUTF8(text, "")
	end := min(len(text), resourceapi.DeviceAttributeMaxValueLength)
	for end < len(text) && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end]
}

// The taints of devices. No taint ends pods: an administrator may add one that does.
const (
	DrainedTaint = DriverName + "/drained" // by nvsharectl drain
	FaultTaint   = DriverName + "/fault"   // the GPU does no more work
)

func (d device) taints() (all []resourceapi.DeviceTaint) {
	if d.state.Fault != "" {
		all = append(all, resourceapi.DeviceTaint{Key: FaultTaint, Value: faultValue(d.state.Fault), Effect: resourceapi.DeviceTaintEffectNoSchedule})
	}
	if d.state.Drained {
		all = append(all, resourceapi.DeviceTaint{Key: DrainedTaint, Effect: resourceapi.DeviceTaintEffectNoSchedule})
	}
	return all
}

var xid = regexp.MustCompile(`^Xid [0-9]+`)

// faultValue is the value of a taint: "xid-79", or "lost".
func faultValue(fault string) string {
	if name := xid.FindString(fault); name != "" {
		return strings.ReplaceAll(strings.ToLower(name), " ", "-")
	}
	return "lost"
}

// semantic writes a version as Kubernetes wants it, with three numbers: "580.95.5" of
// "580.95.05". A version that does not begin with a number is "".
func semantic(version string) string {
	numbers := [3]uint64{}
	for i, part := range strings.SplitN(leadingNumbers.FindString(version), ".", 3) {
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil {
			return ""
		}
		numbers[i] = n
	}
	return fmt.Sprintf("%d.%d.%d", numbers[0], numbers[1], numbers[2])
}

var leadingNumbers = regexp.MustCompile(`^[0-9]+(\.[0-9]+){0,2}`)

// promisable returns how much memory claims may have together, in bytes.
func (d device) promisable(o Options) uint64 {
	if o.PromiseMemory != 0 {
		return roundDown(d.memory * uint64(o.PromiseMemory) / 100)
	}
	if d.memory == 0 || d.host == 0 {
		return roundDown(d.memory)
	}
	return roundDown(max(d.memory, min(d.state.Room, d.memory)+d.host))
}

func capacity(value, otherwise, least, step resource.Quantity) resourceapi.DeviceCapacity {
	return resourceapi.DeviceCapacity{Value: value, RequestPolicy: &resourceapi.CapacityRequestPolicy{
		Default:    &otherwise,
		ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: &least, Step: &step},
	}}
}

func count(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }
func size(n uint64) resource.Quantity { return *resource.NewQuantity(int64(n), resource.BinarySI) }
func roundDown(bytes uint64) uint64   { return bytes / memoryStep * memoryStep }

// check refuses options that would make invalid devices.
func (o Options) check() error {
	if o.Slots < 1 || o.Slots > MaxSlots {
		return fmt.Errorf("%d slots for each GPU: give a number from 1 to %d", o.Slots, MaxSlots)
	}
	return nil
}

// PCIAttributes returns the standard attributes of a PCI device: its address, the root
// of its bus, and its NUMA node. What /sys does not tell is left out. hostRoot is as
// cdi.Options.HostRoot.
func PCIAttributes(hostRoot string) func(busID string) []deviceattribute.DeviceAttribute {
	var from []deviceattribute.MachineModifier
	if hostRoot != "" {
		from = append(from, deviceattribute.WithFSFromRoot(hostRoot))
	}
	return func(busID string) (all []deviceattribute.DeviceAttribute) {
		if a, err := deviceattribute.GetPCIBusIDAttribute(busID); err == nil {
			all = append(all, a)
		}
		if a, err := deviceattribute.GetPCIeRootAttributeByPCIBusID(busID, from...); err == nil {
			all = append(all, a)
		}
		if a, err := deviceattribute.GetNUMANodeAttributeByPCIBusID(busID, deviceattribute.ScalarAttribute, from...); err == nil {
			all = append(all, a)
		}
		return all
	}
}
