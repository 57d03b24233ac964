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
