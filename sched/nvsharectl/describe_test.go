// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

func TestDescribe(t *testing.T) {
	d := &describing{fake: fake{status: sample()}}
	dir := serve(t, d)
	code, out, errs := ctl("--run-dir", dir, "describe", "job_71", "--engine", "slurm", "--gpu", "1", "--memory-limit", "20Gi", "--core-request", "25")
	if code != 0 || out != "" || errs != "" || len(d.told) != 1 {
		t.Fatalf("exit %d, %s%s; told %v", code, out, errs, d.told)
	}
	c := d.told[0].Container
	if c.Terms() != (api.Terms{MemoryLimit: 20 << 30, CoreRequest: 25}) || c.Id != "job_71" || c.Name != "job_71" || c.Engine != "slurm" ||
		d.told[0].Pid != 0 || !slices.Equal(c.Gpus, []string{d.status.Gpus[1].Uuid}) {
		t.Errorf("told %v", d.told[0])
	}
	if code, out, errs = ctl("--run-dir", dir, "describe", "job_71", "--end"); code != 0 || out != "" || errs != "" || d.forgotten != "job_71" {
		t.Errorf("exit %d, %s%s; forgotten %q", code, out, errs, d.forgotten)
	}
	for _, wrong := range []string{"describe", "describe job_71 --end --memory-limit 1Gi", "describe job_71 --memory-limit x", "describe job_71 --gpu 9"} {
		if code, _, errs := ctl(append([]string{"--run-dir", dir}, strings.Fields(wrong)...)...); code != exitUsage || errs == "" {
			t.Errorf("%s: exit %d, %s", wrong, code, errs)
		}
	}
}
