// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// Every field of a share can be set by a flag, is printed when it changes, and is
// in the status, as a table and as JSON.
func TestEveryFieldOfAShare(t *testing.T) {
	full := api.Terms{MemoryLimit: 3 << 30, CoreLimit: 60, CoreRequest: 30, Weight: 7,
		Priority: api.Priority_PRIORITY_LATENCY, Gang: "ring", MemoryMode: api.MemoryMode_MEMORY_MODE_RESIDENT, Overlap: "small", Migratable: true, SuspendAfter: 600}
	for _, f := range api.Fields {
		var one api.Terms
		one.Copy(full, f.ID)
		if one == (api.Terms{}) {
			t.Fatalf("%s: nothing to set", f.Name)
		}
		if f.ID&api.FixedFields != 0 {
			if code, _, errs := ctl("set", "--user", "1", "--"+f.Key, f.Format(one), "--run-dir", serve(t, &fake{})); code != exitUsage || !strings.Contains(errs, "--"+f.Key) {
				t.Errorf("--%s, which is fixed: exit %d, %q", f.Key, code, errs)
			}
		} else {
			isSet(t, &f, one)
		}

		if f.ID == api.MemoryLimitField {
			continue // the status has it beside the share
		}
		gpu := &api.GPU{Uuid: "GPU-x", Tenants: []*api.TenantUse{{Container: &api.Container{}, Uid: 1, Share: one.Share()}}}
		s := &fake{status: &api.StatusResponse{Gpus: []*api.GPU{gpu}, Containers: []*api.Container{{Id: "c", Share: one.Share()}}}}
		dir := serve(t, s)
		if _, out, _ := ctl("status", "-o", "wide", "--run-dir", dir); !strings.Contains(out, "  "+f.Short+f.Format(one)+"  ") {
			t.Errorf("%s: the table lacks %q:\n%s", f.Name, f.Short+f.Format(one), out)
		}
		_, out, _ := ctl("status", "-o", "json", "--run-dir", dir)
		var got, nothing struct {
			GPUs []struct {
				Tenants []struct{ Share map[string]any }
			}
			Containers []struct{ Share map[string]any }
		}
		if err := json.Unmarshal([]byte(out), &got); err != nil {
			t.Fatal(err)
		}
		key := strings.ReplaceAll(f.Key, "-", "_")
		if f.ID == api.SuspendAfterField {
			key += "_s"
		}
		gpu.Tenants[0].Share, s.status.Containers[0].Share = nil, nil
		_, out, _ = ctl("status", "-o", "json", "--run-dir", dir)
		if err := json.Unmarshal([]byte(out), &nothing); err != nil {
			t.Fatal(err)
		}
		if v := got.GPUs[0].Tenants[0].Share[key]; v == nil || v == nothing.GPUs[0].Tenants[0].Share[key] {
			t.Errorf("%s of the tenant: JSON has %v", f.Name, v)
		}
		if v := got.Containers[0].Share[key]; v == nil || v == nothing.Containers[0].Share[key] {
			t.Errorf("%s of the container: JSON has %v", f.Name, v)
		}
	}
}

// isSet checks that nvsharectl set changes the field, and prints the change.
func isSet(t *testing.T, f *api.Field, one api.Terms) {
	t.Helper()
	s := &fake{share: &api.SetShareResponse{Uid: 1, Changes: []*api.ShareChange{{Uuid: "GPU-x", New: one.Share(), NewMemoryBytes: one.MemoryLimit}}}}
	code, out, errs := ctl("set", "--user", "1", "--"+f.Key, f.Format(one), "--run-dir", serve(t, s))
	if want := "GPU 0, user 1: " + f.Name + " " + f.Format(api.Terms{}) + " → " + f.Format(one) + "\n"; code != exitOK || out != want {
		t.Errorf("--%s: exit %d, %q %q, want %q", f.Key, code, out, errs, want)
	}
	if got, fields := s.setShare.Terms(); got != one || fields != f.ID {
		t.Errorf("--%s: the request changes %b to %+v", f.Key, fields, got)
	}
}
