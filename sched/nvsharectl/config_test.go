// SPDX-License-Identifier: Apache-2.0

package main

import (
	"maps"
	"os/user"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/nvshare/nvshare/sched/api"
)

// What sets something says what it did, where, and how to take that back. The original's flags do
// the same.
func TestConfigSet(t *testing.T) {
	// changes are of two GPUs and of those found later.
	changes := func(change func(gpu int, old, now map[string]string)) (all []*api.Change) {
		for i, uuid := range []string{"", "GPU-x", "GPU-y"} {
			old := map[string]string{"turn-length": "100ms", "anti-thrash": "auto", "swap-share": "10%"}
			now := maps.Clone(old)
			change(i-1, old, now)
			for name := range old {
				all = append(all, &api.Change{Uuid: uuid, Index: uint32(max(i-1, 0)), Name: name, Old: old[name], New: now[name]})
			}
		}
		return all
	}
	is := func(name, value string) func(int, map[string]string, map[string]string) {
		return func(_ int, _, now map[string]string) { now[name] = value }
	}
	was := func(name, value string) func(int, map[string]string, map[string]string) {
		return func(_ int, old, _ map[string]string) { old[name] = value }
	}
	to200, toOff := is("turn-length", "200ms"), is("anti-thrash", "off")
	const (
		longer = "turn-length 100ms → 200ms, over restarts too; `nvsharectl config reset turn-length` undoes it\n"
		off    = "anti-thrash auto → off (tenants run at the same time), over restarts too; `nvsharectl config reset anti-thrash` undoes it\n"
	)
	for _, tc := range []struct {
		args    string
		want    *api.SetRequest
		changes []*api.Change
		out     string
	}{
		{"config set turn-length 200ms", &api.SetRequest{QuantumNs: 200e6}, changes(to200), longer},
		{"-T 200ms", &api.SetRequest{QuantumNs: 200e6}, changes(to200), longer},
		{"--set-tq=0.2", &api.SetRequest{QuantumNs: 200e6}, changes(to200), longer},
		{"-T 45", &api.SetRequest{QuantumNs: 45e9}, changes(to200), longer}, // seconds, as the original has it
		{"-T 200s", &api.SetRequest{QuantumNs: 200e9}, changes(to200), longer},
		{"-T 100ms", &api.SetRequest{QuantumNs: 100e6}, changes(is("turn-length", "100ms")), "turn-length is 100ms already: nothing has changed\n"},
		{"config set turn-length 200ms --gpu 1", &api.SetRequest{Gpu: "1", QuantumNs: 200e6}, changes(to200)[6:],
			"GPU 1: turn-length 100ms → 200ms, over restarts too; `nvsharectl config reset turn-length --gpu 1` undoes it\n"},
		{"config set turn-length 200ms", &api.SetRequest{QuantumNs: 200e6}, changes(to200)[:3], "GPUs found later: " + longer},
		{"config set turn-length 200ms", &api.SetRequest{QuantumNs: 200e6},
			changes(func(gpu int, old, now map[string]string) {
				if now["turn-length"] = "200ms"; gpu == 1 {
					old["turn-length"] = "200ms"
				}
			}),
			"GPUs found later: " + longer + "GPU 0: " + longer}, // GPU 1 had that
		{"-S off", &api.SetRequest{Mode: api.Mode_MODE_CONCURRENT}, changes(toOff), off},
		{"config set anti-thrash off", &api.SetRequest{Mode: api.Mode_MODE_CONCURRENT}, changes(toOff), off},
		{"-S off -T 200ms", &api.SetRequest{Mode: api.Mode_MODE_CONCURRENT, QuantumNs: 200e6},
			changes(func(gpu int, old, now map[string]string) { to200(gpu, old, now); toOff(gpu, old, now) }), longer + off},
		{"config set swap-share none", &api.SetRequest{SwapShare: proto.Uint32(0)}, changes(is("swap-share", "none")),
			"swap-share 10% → none, over restarts too; `nvsharectl config reset swap-share` undoes it\n"},
		{"config reset swap-share", &api.SetRequest{Unset: []string{"swap-share"}}, changes(was("swap-share", "25%")), "swap-share 25% → 10%\n"},
		{"config reset --all --gpu 0", &api.SetRequest{Gpu: "0", Unset: []string{"turn-length", "anti-thrash", "swap-share"}},
			changes(was("turn-length", "5ms"))[3:6],
			"GPU 0: turn-length 5ms → 100ms\nGPU 0: anti-thrash is auto already: nothing has changed\nGPU 0: swap-share is 10% already: nothing has changed\n"},
	} {
		f := &fake{changes: tc.changes}
		code, out, errs := ctl(append(strings.Fields(tc.args), "--run-dir", serve(t, f))...)
		if code != exitOK || out != tc.out || errs != "" || !proto.Equal(f.set, tc.want) {
			t.Errorf("%s: exit %d, %q, stderr %q, request %v\nwant %q", tc.args, code, out, errs, f.set, tc.out)
		}
	}
}

// configured is a scheduler of whose settings some were set by hand.
func configured() *api.StatusResponse {
	r := sample()
	r.Config = []*api.ConfigValue{
		{Name: "turn-length", Value: "200ms", Origin: api.Origin_ORIGIN_HAND, Author: &api.Author{Uid: 0, UnixTime: 1764250000}},
		{Name: "turn-length", Value: "300ms", Uuid: r.Gpus[1].Uuid, Origin: api.Origin_ORIGIN_HAND, Author: &api.Author{Uid: 4242424, UnixTime: 1764250000}},
		{Name: "turn-length", Value: "400ms", Uuid: "GPU-away", Origin: api.Origin_ORIGIN_HAND},
		{Name: "anti-thrash", Value: "auto", Origin: api.Origin_ORIGIN_DEFAULT},
		{Name: "swap-share", Value: "20%", Origin: api.Origin_ORIGIN_FLAG},
	}
	return r
}

func TestConfigList(t *testing.T) {
	defer func(l *time.Location) { time.Local = l }(time.Local)
	time.Local = time.UTC
	if u, err := user.LookupId("0"); err != nil || u.Username != "root" {
		t.Skip("user 0 has another name here")
	}
	dir := serve(t, &fake{status: configured()})
	for args, name := range map[string]string{"config list": "config.txt", "config list -o json": "config.json"} {
		code, out, errs := ctl(append(strings.Fields(args), "--run-dir", dir)...)
		if code != exitOK || errs != "" {
			t.Errorf("%s: exit %d, %q", args, code, errs)
		}
		golden(t, name, out)
	}
}

// What was set by hand is shown as that; without it there is no table, and nothing in the JSON.
func TestSetByHandIsShown(t *testing.T) {
	code, out, _ := ctl("-o", "wide", "--run-dir", serve(t, &fake{status: configured()}))
	if code != exitOK || strings.Count(out, "turn-length") != 3 || strings.Contains(out, "anti-thrash") || !strings.Contains(out, "SET BY HAND  GPU") {
		t.Errorf("exit %d\n%s", code, out)
	}
	if _, out, _ = ctl("-o", "json", "--run-dir", serve(t, &fake{status: configured()})); strings.Count(out, `"origin": "hand"`) != 3 {
		t.Error(out)
	}
	if _, out, _ = ctl("-o", "wide", "--run-dir", serve(t, &fake{status: sample()})); strings.Contains(out, "SET BY HAND") {
		t.Error(out)
	}
}
