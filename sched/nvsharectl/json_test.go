// SPDX-License-Identifier: Apache-2.0

package main

import (
	"reflect"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// The rules by which -o json writes what the API has.
func TestPlain(t *testing.T) {
	swapped := &api.Event{Sequence: 7, TimeNs: 1500000000, Type: api.EventType_EVENT_TYPE_SWAP_OUT, Uuid: "GPU-x", Client: 1<<60 + 7, TookNs: 250_000_000, Container: &api.Container{Id: "c"}}
	got := plain(swapped.ProtoReflect())
	for name, want := range map[string]any{"type": "swap-out", "took_seconds": 0.25, "client": "1152921504606846983", "sequence": uint64(7), "fenced": false} {
		if !reflect.DeepEqual(got[name], want) {
			t.Errorf("%s is %v, not %v", name, got[name], want)
		}
	}
	if got["reason"] != nil || got["container"].(map[string]any)["id"] != "c" {
		t.Errorf("got %v", got)
	}
	u := plain((&api.TenantUse{GotPermille: 749}).ProtoReflect())
	if u["got"] != 0.749 || u["container"] != nil {
		t.Errorf("got %v", u)
	}
	for want, e := range map[string]api.ContextState{"away": api.ContextState_CONTEXT_STATE_AWAY, "99": 99} {
		if got := word(e); got != want {
			t.Errorf("%d is %q, not %q", e, got, want)
		}
	}
}
