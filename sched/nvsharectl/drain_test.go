// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// draining is a scheduler whose GPU is left by one tenant at each look.
type draining struct {
	api.ControlService
	mu        sync.Mutex
	tenants   []string
	uses      []*api.DrainTenant
	undrained bool // by somebody else
	asked     []*api.DrainRequest
}

func (d *draining) Drain(_ context.Context, req *api.DrainRequest) (*api.DrainResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.asked = append(d.asked, req)
	if req.Look && len(d.tenants) > 0 && d.tenants[0] != "stays" {
		d.tenants = d.tenants[1:]
	}
	return &api.DrainResponse{Uuid: "GPU-1", Index: 1, WasDrained: req.Look && !d.undrained, Tenants: d.tenants, Uses: d.uses}, nil
}

// drain --wait ends when the last tenant has left, when somebody undrains the GPU, and
// when the time is over: then it names who is left.
func TestDrainWaits(t *testing.T) {
	for name, tc := range map[string]struct {
		tenants   []string
		undrained bool
		args      []string
		status    int
		out, err  string
	}{
		"nobody is there":  {nil, false, []string{"--wait"}, 0, "GPU 1 admits no new tenants; nobody uses it\n", ""},
		"two leave":        {[]string{"a", "b"}, false, []string{"--wait"}, 0, "still used by a, b\nGPU 1 admits no new tenants; still used by b\nGPU 1 admits no new tenants; nobody uses it\n", ""},
		"without --wait":   {[]string{"a"}, false, nil, 0, "still used by a\n", ""},
		"one stays":        {[]string{"stays"}, false, []string{"--wait", "--timeout", "1ms"}, 1, "still used by stays\n", "GPU 1 is drained and still used by stays after 1ms"},
		"seconds":          {[]string{"stays"}, false, []string{"--wait", "--timeout", "0.001"}, 1, "still used by stays\n", "GPU 1 is drained and still used by stays after 1ms"},
		"somebody undrain": {[]string{"stays"}, true, []string{"--wait"}, 1, "", "somebody has undrained it"},
	} {
		t.Run(name, func(t *testing.T) {
			d := &draining{tenants: tc.tenants, undrained: tc.undrained}
			code, out, errs := ctl(append([]string{"drain", "--gpu", "1", "--run-dir", serve(t, d)}, tc.args...)...)
			if code != tc.status || !strings.HasSuffix(out, tc.out) || !strings.Contains(errs, tc.err) || tc.err == "" && errs != "" {
				t.Errorf("exit %d, %q, %q", code, out, errs)
			}
			if d.asked[0].Gpu != "1" || d.asked[0].Undrain || d.asked[0].Look {
				t.Errorf("asked %v", d.asked[0])
			}
			for _, more := range d.asked[1:] {
				if !more.Look || more.Gpu != "GPU-1" {
					t.Errorf("asked again %v", more)
				}
			}
		})
	}
	if code, _, errs := ctl("drain", "--run-dir", t.TempDir()); code != exitUsage || !strings.Contains(errs, "which GPU") {
		t.Errorf("without --gpu: exit %d, %q", code, errs)
	}
}

// Where no tenant moves, drain says once who uses the GPU, and then why they stay.
func TestDrainSaysOnceWhoStays(t *testing.T) {
	d := &draining{tenants: []string{"stays"}, uses: []*api.DrainTenant{{Stays: "stays: this node has one GPU"}}}
	code, out, errs := ctl("drain", "--gpu", "1", "--run-dir", serve(t, d))
	if want := "GPU 1 admits no new tenants; still used by stays\nstays: this node has one GPU\n"; code != exitOK || out != want || errs != "" {
		t.Errorf("exit %d, %q, %q", code, out, errs)
	}
	d = &draining{tenants: []string{"a", "stays"}, uses: d.uses}
	if _, out, _ := ctl("drain", "--gpu", "1", "--run-dir", serve(t, d)); !strings.HasSuffix(out, "GPU\nGPU 1 admits no new tenants; still used by stays\n") {
		t.Errorf("after one has left: %q", out)
	}
}
