// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/nvshare/nvshare/sched/api"
)

type dcgmOf []*api.GPU

func (d dcgmOf) Describe(ch chan<- *prometheus.Desc) {
	for _, desc := range dcgmDescs {
		ch <- desc
	}
}

func (d dcgmOf) Collect(ch chan<- prometheus.Metric) {
	x := &exposition{ch: ch, s: &scrape{samples: map[string]*GPUSample{"GPU-b": {Utilization: 0.25, MemoryUsed: 1 << 30, MemoryFree: 3 << 30}}}}
	for _, g := range d {
		x.dcgm(g)
	}
}

// Dashboards for dcgm-exporter show what each pod has: its own part, not the GPU's.
func TestDCGM(t *testing.T) {
	t.Setenv("NODE_NAME", "n0")
	pod := func(name string) *api.Container {
		return &api.Container{Id: name, Namespace: "ml", Pod: name, Name: "main"}
	}
	gpus := dcgmOf{
		{Index: 0, Uuid: "GPU-a", Name: "H200", MemoryBytes: 80 << 30, Fault: "Xid 79: gone", Model: &api.GPUModel{DriverVersion: "580.1"},
			Tenants: []*api.TenantUse{{Container: pod("a"), GotPermille: 400}, {Container: pod("b"), GotPermille: 605}},
			Memory:  []*api.MemoryAccount{{Container: pod("a"), UsedBytes: 8 << 30, LimitBytes: 10 << 30}, {Container: pod("b"), UsedBytes: 2 << 30}}},
		{Index: 1, Uuid: "GPU-b", Name: "H200"},
	}
	row := func(name, gpu, pod, v string) string {
		i, version, of := "0", "580.1", `container="main",`
		if gpu == "b" {
			i, version, of = "1", "", `container="",`
		}
		namespace := "ml"
		if pod == "" {
			namespace = ""
		}
		return name + `{DCGM_FI_DRIVER_VERSION="` + version + `",Hostname="n0",UUID="GPU-` + gpu + `",` + of + `device="nvidia` + i + `",gpu="` + i + `",modelName="H200",namespace="` + namespace + `",pod="` + pod + `"} ` + v
	}
	var want strings.Builder
	for _, m := range []struct {
		desc    *prometheus.Desc
		name    string
		a, b, n string
	}{
		{dcgmUtil, "DCGM_FI_DEV_GPU_UTIL", "40", "60.5", "25"}, {dcgmUsed, "DCGM_FI_DEV_FB_USED", "8192", "2048", "1024"},
		{dcgmFree, "DCGM_FI_DEV_FB_FREE", "2048", "71680", "3072"}, {dcgmXid, "DCGM_FI_DEV_XID_ERRORS", "79", "79", "0"},
	} {
		_, help, _ := strings.Cut(m.desc.String(), `help: "`)
		help, _, _ = strings.Cut(help, `"`)
		want.WriteString("# HELP " + m.name + " " + help + "\n# TYPE " + m.name + " gauge\n" + row(m.name, "a", "a", m.a) + "\n" + row(m.name, "a", "b", m.b) + "\n" + row(m.name, "b", "", m.n) + "\n")
	}
	if err := testutil.CollectAndCompare(gpus, strings.NewReader(want.String())); err != nil {
		t.Error(err)
	}
}

// Tenants without names of their own, and those that have the same, have different labels: else
// the scrape would fail, with all other metrics.
func TestDCGMTellsTenantsApart(t *testing.T) {
	train := func(id string) *api.Container { return &api.Container{Id: id, Name: "train"} }
	gpus := dcgmOf{{Uuid: "GPU-a", Tenants: []*api.TenantUse{
		{Container: &api.Container{}, Uid: 1000}, {Container: &api.Container{}, Uid: 1001}, {Container: train("abc")}, {Container: train("def")},
		{Container: &api.Container{Id: "xyz", Name: "ghi"}}, {Container: train("ghi")}, // which has no labels left
	}}}
	registry := prometheus.NewRegistry()
	registry.MustRegister(gpus)
	found, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, m := range found[0].Metric {
		for _, l := range m.Label {
			if l.GetName() == "container" {
				names = append(names, l.GetValue())
			}
		}
	}
	slices.Sort(names)
	if want := []string{"def", "ghi", "train", "user 1000", "user 1001"}; !slices.Equal(names, want) {
		t.Errorf("containers %q, want %q", names, want)
	}
}
