// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// status -o wide names what the hardware holds tenants to, and who is held by nothing.
func TestStatusSaysWhatIsEnforced(t *testing.T) {
	r := &api.StatusResponse{
		Gpus:      []*api.GPU{{Index: 3, Uuid: "GPU-a", Way: "slices"}, {Index: 5, Uuid: "GPU-b"}},
		Unmanaged: []*api.Unmanaged{{Uuid: "GPU-b", Index: 5, Pid: 7}, {Uuid: "GPU-b", Index: 5, Pid: 8}},
	}
	var out bytes.Buffer
	printWide(streams{out: &out}, r)
	for _, line := range []string{
		"hardware     time slices, as the library sets them (GPU 3); one process does not read another's GPU memory\n",
		"nobody       now, GPU 5: 2 without the library\n",
	} {
		if !strings.Contains(out.String(), line) {
			t.Errorf("no line %q in:\n%s", line, &out)
		}
	}
}

// status -o wide says whether programs without the library are held.
func TestStatusSaysWhoHoldsTheOthers(t *testing.T) {
	for want, r := range map[string]*api.StatusResponse{
		"driver       turns, time slices, core limits and memory limits of programs without the library, and fences: nvshare-warden, from outside": {Warden: true, Gpus: []*api.GPU{{Uuid: "GPU-b", Index: 5}},
			Unmanaged: []*api.Unmanaged{{Uuid: "GPU-b", Held: "held from outside"}}},
		"nobody       a program without the library (cooperative: no nvshare-warden runs)": {WardenProblem: "no nvshare-warden runs"},
		"nobody       a program without the library; one":                                  {}, // of an older scheduler
		"nobody       now, GPU 5: 1 without":                                               {Gpus: []*api.GPU{{Uuid: "GPU-b", Index: 5}}, Unmanaged: []*api.Unmanaged{{Uuid: "GPU-b", Held: "not held to its core limit: x"}}},
	} {
		var out bytes.Buffer
		printWide(streams{out: &out}, r)
		if !strings.Contains(out.String(), want) || r.Warden && strings.Contains(out.String(), "now, GPU") {
			t.Errorf("no line %q in:\n%s", want, &out)
		}
	}
}

// Without NVML the scheduler does not know how much memory a GPU has. 0 is not the size.
func TestSizeOfMemoryIsNotKnown(t *testing.T) {
	g := &api.GPU{Name: "NVIDIA H200", QuantumNs: 1e8, Memory: []*api.MemoryAccount{{Uid: 1000, UsedBytes: 3 << 30, LimitBytes: 6 << 30}}}
	for what, text := range map[string]string{"describeGPU": describeGPU(g), "limitsOf": limitsOf(g), "memoryOf": memoryOf(g, "/")} {
		if strings.Contains(text, "of 0") || strings.Contains(text, "of its 0") || strings.Contains(text, "/0") {
			t.Errorf("%s: %q", what, text)
		}
	}
}
