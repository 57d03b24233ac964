// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/sched/api"
)

func devices() []device { return devicesOf(twoGPUs(), all, whole) }

func TestConfig(t *testing.T) {
	for text, want := range map[string]string{
		share + `"coreLimit": 60}`:                          "core limit 60%",
		share + `"coreLimit": "60%", "weight": 200}`:        "core limit 60%, weight 200",
		share + `"priority": "latency"}`:                    "priority latency",
		share + `"overlap": "small"}`:                       "overlap group small",
		share + `"gang": true}`:                             "gang of itself",
		share + `"gang": "ring", "memoryMode": "swap"}`:     "gang ring, memory mode swap",
		`{"apiVersion": "nvshare.com/v1", "kind": "Share"}`: "",
	} {
		terms, err := parseConfig([]byte(text))
		var said []string
		for _, f := range api.Fields {
			if f.Said(terms) {
				said = append(said, f.Name+" "+f.Format(terms))
			}
		}
		if got := strings.Join(said, ", "); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		`{"kind": "Share", "apiVersion": "nvshare.com/v2"}`: "give apiVersion nvshare.com/v1",
		`{"coreLimit": 60}`:         "give apiVersion nvshare.com/v1",
		`[]`:                        "not a JSON object",
		`null`:                      "give apiVersion",
		share + `"coreLimit": 101}`: "1 to 100",
		share + `"coreLimit": 0.5}`: "1 to 100",
		share + `"coreLimit": -1}`:  "1 to 100",
		share + `"coreLimit": {}}`:  "a text or a number",
		share + `"coreLimit": 1, "coreLimit": 2}`: "duplicate",
		share + `"corelimit": 60}`:                `unknown field "corelimit": there are coreLimit`,
		share + `"z": 1, "b": 1, "y": 1, "x": 1}`: `unknown field "b"`,
		share + `"weight": 10001}`:                "1 to 10000",
		share + `"priority": "high"}`:             "batch or latency",
		share + `"coreRequest": 40}`:              "capacity",
		share + `"memoryLimit": "8Gi"}`:           "capacity",
		share + `"overlap": "a/b"}`:               "is not an overlap group",
	} {
		if terms, err := parseConfig([]byte(text)); err == nil || !strings.Contains(err.Error(), want) || terms != (api.Terms{}) {
			t.Errorf("%s: %+v, %v; want an error with %q", text, terms, err, want)
		}
	}
}

// Every field of the table is a key, or a capacity.
func TestEveryFieldHasAForm(t *testing.T) {
	if n := len(configKeys()); n != len(api.Fields)-3 {
		t.Errorf("%d keys for %d fields", n, len(api.Fields))
	}
}

func TestRead(t *testing.T) {
	const class, claim = resourceapi.AllocationConfigSourceClass, resourceapi.AllocationConfigSourceClaim
	c := claimOf(uid(1), part(name0, "s1", "40", "20Gi"), part(name1, "", "100", ""))
	c.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{
		opaque(claim, share+`"coreLimit": 90, "weight": 7}`), opaque(class, share+`"coreLimit": 100}`), opaque(claim, share+`"weight": 9}`, "gpu"),
		opaque(claim, share+`"weight": 11}`, "another"),
	}
	c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{Driver: "other.example", Device: "x"})
	r, err := read(c, node, devices())
	check(t, err)
	if len(r.Shares) != 2 {
		t.Fatalf("%d shares", len(r.Shares))
	}
	if s := r.Shares[0]; s.Name != uid(1)+"-"+name0+"-s1" || s.GPU != gpu0 || s.Terms != (api.Terms{CoreRequest: 40, CoreLimit: 100, Weight: 9, MemoryLimit: 20 << 30}) {
		t.Errorf("the first share is %+v", s)
	}
	if s := r.Shares[1]; s.Name != uid(1)+"-"+name1 || s.GPU != gpu1 || s.Terms.CoreRequest != 100 || s.Terms.MemoryLimit != 0 {
		t.Errorf("the second share is %+v", s)
	}
}

func TestReadRefuses(t *testing.T) {
	elsewhere := part(name0, "", "1", "")
	elsewhere.Pool = "n1"
	limited := claimOf(uid(1), part(name0, "", "60", ""))
	limited.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{opaque(resourceapi.AllocationConfigSourceClass, share+`"coreLimit": 50}`)}
	wrong := claimOf(uid(1), part(name0, "", "60", ""))
	wrong.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{opaque(resourceapi.AllocationConfigSourceClass, share+`"limit": 50}`)}
	unallocated := claimOf(uid(1))
	unallocated.Status.Allocation = nil
	for want, claim := range map[string]*resourceapi.ResourceClaim{
		"not of this node's":                           claimOf(uid(1), elsewhere),
		"no such device":                               claimOf(uid(1), part("gpu-gone", "", "1", "")),
		"core request 60 % is above the core limit":    limited,
		`configuration of the Class for request "gpu"`: wrong,
		"101 cores":     claimOf(uid(1), part(name0, "", "101", "")),
		"not allocated": unallocated,
	} {
		if _, err := read(claim, node, devices()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
}

// kube-scheduler does not count a claim with adminAccess, whose result has consumed capacity all the same.
func TestAdminAccessIsPromisedNothing(t *testing.T) {
	d := newDriver(t, t.TempDir())
	admin := part(name0, "aaaaaaaa-0000-4000-8000-000000000001", "10", "8Gi")
	admin.AdminAccess = ptr.To(true)
	monitor := claimOf(uid(1), admin)
	monitor.Status.Allocation.Devices.Config = []resourceapi.DeviceAllocationConfiguration{opaque(resourceapi.AllocationConfigSourceClaim, share+`"priority": "latency"}`)}
	check(t, prepare(d, monitor).Err)
	r := d.store.Records()[0]
	if s, ok := d.store.ByDevice(r.Shares[0].Name); !ok || !s.Admin || s.Terms != (api.Terms{Weight: 1}) {
		t.Errorf("the monitor has %+v", s)
	}
	if err := prepare(d, claimOf(uid(2), part(name0, "aaaaaaaa-0000-4000-8000-000000000002", "100", "80Gi"))).Err; err != nil {
		t.Errorf("a claim that has all of the GPU, beside the monitor: %v", err)
	}
}

// What the scheduler swaps is not known before its word has come. A claim that kube-scheduler has allocated
// of it is not refused until then.
func TestSwapBeforeTheWord(t *testing.T) {
	d := newDriver(t, t.TempDir())
	state := plugin.GPUState{}
	d.Options = Options{Slots: 10, Scheduler: func(string) plugin.GPUState { return state }}
	check(t, prepare(d, claimOf(uid(1), part(name0, "aaaaaaaa-0000-4000-8000-000000000001", "10", "80Gi"))).Err)
	check(t, prepare(d, claimOf(uid(2), part(name0, "aaaaaaaa-0000-4000-8000-000000000002", "10", "60Gi"))).Err)
	state = plugin.GPUState{Memory: 80 << 30, Sharing: plugin.SharedByTurns, Swap: true, Room: 80 << 30, Host: 160 << 30}
	check(t, prepare(d, claimOf(uid(3), part(name0, "aaaaaaaa-0000-4000-8000-000000000003", "10", "20Gi"))).Err)
	if prepare(d, claimOf(uid(4), part(name0, "aaaaaaaa-0000-4000-8000-000000000004", "10", "1Gi"))).Err == nil {
		t.Error("more is promised than there is")
	}
}

// kube-scheduler counts; if it did not, the driver refuses.
func TestOverfull(t *testing.T) {
	of := func(n int, results ...resourceapi.DeviceRequestAllocationResult) Record {
		r, err := read(claimOf(uid(n), results...), node, devices())
		check(t, err)
		return r
	}
	others := []Record{of(1, part(name0, "", "40", "40Gi")), of(2, part(name0, "", "40", "30Gi"))}
	for want, r := range map[string]Record{
		"":                     of(3, part(name0, "", "20", "10Gi")),
		"promised to 101 %":    of(3, part(name0, "", "21", "1Gi")),
		"81Gi of memory would": of(3, part(name0, "", "20", "11Gi")),
		"promised to 110 %":    of(4, part(name1, "a", "60", ""), part(name1, "b", "50", "")),
	} {
		err := overfull(r, others, devices(), whole)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	if err := overfull(others[0], others, devices(), whole); err != nil {
		t.Errorf("a claim counts against itself: %v", err)
	}
}
