// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

func TestSetList(t *testing.T) {
	r := sample()
	pod := &api.Container{Id: strings.Repeat("a", 64), Namespace: "ml", Pod: "train-a", Name: "main"}
	r.Settings = []*api.Setting{
		{Container: pod, Annotated: true, MemoryBytes: 8 << 30, Share: &api.Share{CoreLimit: 25}},
		{Container: pod, Uuid: r.Gpus[1].Uuid, Share: &api.Share{Weight: 300}},
		{Container: &api.Container{}, Uid: 1234, Share: &api.Share{Priority: api.Priority_PRIORITY_LATENCY}},
	}
	code, out, errs := ctl("set", "--list", "--run-dir", serve(t, &fake{status: r}))
	want := `TENANT           GPU  SET BY       SHARE
ml/train-a/main  all  annotations  memory 8Gi, limit 25%
ml/train-a/main  1    nvsharectl   weight 300
user 1234        all  nvsharectl   latency
`
	if code != exitOK || out != want {
		t.Errorf("exit %d, %q\n%s", code, errs, out)
	}
	if code, out, _ := ctl("set", "--list", "--run-dir", serve(t, &fake{status: sample()})); code != exitOK || out != "Nothing is set.\n" {
		t.Errorf("nothing: exit %d, %q", code, out)
	}
}

// A value that is removed gives way to another: the answer says by whom that is.
func TestSetNoneSaysWhatHolds(t *testing.T) {
	c := &api.Container{Id: strings.Repeat("a", 64), Name: "a"}
	program := &api.Container{Id: strings.Repeat("b", 64), Name: "b", Engine: runEngine}
	f := &fake{status: sample()}
	gpu := f.status.Gpus[0].Uuid
	f.status.Settings = []*api.Setting{
		{Container: c, Annotated: true, Share: &api.Share{CoreLimit: 25}},
		{Container: c, Share: &api.Share{Weight: 300}},
		{Container: c, Uuid: f.status.Gpus[1].Uuid, Share: &api.Share{Weight: 500, CoreLimit: 25}},
		{Container: program, Annotated: true, Share: &api.Share{CoreLimit: 25}},
	}
	for _, tc := range []struct {
		of   *api.Container
		args string
		want string
	}{
		{c, "--core-limit none", "core limit 50% → 25% (by annotations)"},
		{c, "--core-limit none --weight none", "core limit 50% → 25% (by annotations), weight 200 → 300 (by nvsharectl)"},
		{c, "--core-limit 25", "core limit 50% → 25%"},
		{c, "--priority none", "priority latency → batch"},
		{program, "--core-limit none", "core limit 50% → 25% (by nvsharectl run)"},
	} {
		f.share = &api.SetShareResponse{Container: tc.of, Changes: []*api.ShareChange{{Uuid: gpu,
			Old: &api.Share{CoreLimit: 50, Weight: 200, Priority: api.Priority_PRIORITY_LATENCY}, New: &api.Share{CoreLimit: 25, Weight: 300}}}}
		want := "GPU 0, " + tc.of.Name + ": " + tc.want + "\n"
		if code, out, errs := ctl(append(strings.Fields("set a "+tc.args), "--run-dir", serve(t, f))...); code != exitOK || out != want {
			t.Errorf("%s: exit %d, %q%s, want %q", tc.args, code, out, errs, want)
		}
	}
}

// What is carried out and is hardly meant is warned of.
func TestSetWarns(t *testing.T) {
	for args, want := range map[string]string{
		"--user 4242424 --core-limit 5":           "no user of this host has the number 4242424",
		"--user 1000 --core-limit 5":              "",
		"--user 1000 --memory-limit 8Mi":          "8Mi is too small for any CUDA program",
		"--user 1000 --memory-limit 80Gi":         "GPU 0 has 16Gi: a memory limit of 80Gi limits nothing there",
		"--user 1000 --memory-limit 8Gi":          "",
		"--user 1000 --memory-limit none":         "",
		"--user 1000 --memory-limit 80Gi --gpu 1": "GPU 1 has 16Gi",
	} {
		f := &fake{status: sample(), share: &api.SetShareResponse{}}
		code, _, errs := ctl(append(append([]string{"set"}, strings.Fields(args)...), "--run-dir", serve(t, f))...)
		if code != exitOK || !strings.Contains(errs, want) || want == "" && errs != "" {
			t.Errorf("%s: exit %d, %q, want %q", args, code, errs, want)
		}
	}
}
