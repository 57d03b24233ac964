// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package cdi

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// maxEvents bounds how many of NVML's events one sample takes.
const maxEvents = 64

// fatal are the errors (Xid) of the driver after which the GPU does no more work until
// somebody resets it, as NVIDIA's catalogue of Xid errors says. Errors of one program,
// which any tenant can cause, are not among them.
var fatal = map[uint64]string{
	48: "double bit error of memory", 62: "a processor of the GPU halted", 64: "a page of memory could not be retired", 74: "NVLink error",
	79: "the GPU has fallen off the bus", 95: "uncontained memory error", 119: "the GPU's system processor does not answer",
	120: "error of the GPU's system processor", 140: "uncorrected memory error", 143: "the GPU could not be initialised", 154: "the GPU must be reset",
}

// faults collects what ended all work on GPUs.
type faults struct {
	set     nvml.EventSet // nil: the library has no events
	heard   map[int]bool  // whose errors come in set
	uuids   map[int]string
	count   map[string]uint64 // by UUID
	latest  map[string]string
	missing map[int]bool
}

// listen asks a library that was started for the errors of all GPUs from now on.
func (f *faults) listen(lib nvml.Interface) {
	if f.uuids == nil {
		*f = faults{uuids: map[int]string{}, count: map[string]uint64{}, latest: map[string]string{}, missing: map[int]bool{}}
	}
	f.set, f.heard = nil, map[int]bool{}
	for _, symbol := range []string{"nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"} {
		if lib.Extensions().LookupSymbol(symbol) != nil {
			return
		}
	}
	set, ret := lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		return
	}
	f.set = set
	count, _ := lib.DeviceGetCount()
	for i := range count {
		if dev, ret := lib.DeviceGetHandleByIndex(i); ret == nvml.SUCCESS {
			f.hear(i, dev)
		}
	}
}

// hear asks for the errors of one GPU.
func (f *faults) hear(index int, dev nvml.Device) {
	if f.set != nil && !f.heard[index] {
		ret := dev.RegisterEvents(nvml.EventTypeXidCriticalError, f.set)
		f.heard[index] = ret == nvml.SUCCESS || ret == nvml.ERROR_NOT_SUPPORTED // which tells of none
	}
}

// collect takes the errors since the last sample. It does not wait.
func (f *faults) collect() {
	if f.set == nil {
		return
	}
	for range maxEvents {
		e, ret := f.set.Wait(0)
		if ret != nvml.SUCCESS {
			return // none is left
		}
		why, ends := fatal[e.EventData]
		if e.EventType != nvml.EventTypeXidCriticalError || !ends {
			continue
		}
		if uuid, ret := e.Device.GetUUID(); ret == nvml.SUCCESS {
			f.note(uuid, fmt.Sprintf("Xid %d: %s", e.EventData, why))
		}
	}
}

func (f *faults) note(uuid, why string) {
	f.count[uuid]++
	f.latest[uuid] = why
}

// lost returns a sample of a GPU that NVML calls lost, if the GPU is known from before.
func (f *faults) lost(index int, ret nvml.Return) (s Sample, ok bool) {
	if ret != nvml.SUCCESS {
		delete(f.heard, index) // a reset may have ended it
	}
	uuid := f.uuids[index]
	if ret != nvml.ERROR_GPU_IS_LOST || uuid == "" {
		return s, false
	}
	if !f.missing[index] {
		f.missing[index] = true
		f.note(uuid, "the GPU is lost: the driver cannot reach it")
	}
	s = Sample{UUID: uuid, Utilization: -1, MemoryUtilization: -1}
	f.fill(&s)
	return s, true
}

func (f *faults) saw(index int, uuid string, dev nvml.Device) {
	f.hear(index, dev) // once it can be opened
	f.uuids[index] = uuid
	delete(f.missing, index)
}

func (f *faults) fill(s *Sample) { s.Faults, s.Fault = f.count[s.UUID], f.latest[s.UUID] }
