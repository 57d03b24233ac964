// SPDX-License-Identifier: Apache-2.0

package api

import (
	"fmt"
	"strings"
	"testing"
)

func TestPromised(t *testing.T) {
	a := &Container{Id: "a", Namespace: "ml", Pod: "a", Name: "main", Gpus: []string{"GPU-0"}}
	b := &Container{Id: "b", Namespace: "ml", Pod: "b", Name: "main", Gpus: []string{"GPU-1"}}
	g := &GPU{
		Uuid:     "GPU-0",
		Promises: []*Promise{{Container: &Container{}, Uid: 1000, CoreRequest: 20}, {Container: a, CoreRequest: 50}},
		Memory: []*MemoryAccount{
			{Container: a, LimitBytes: 1 << 30}, {Container: b, LimitBytes: 2 << 30}, {Container: &Container{Id: "c"}, UsedBytes: 5},
			{Container: &Container{Id: "d"}, LimitBytes: 3}, {Container: nil, Uid: 1001, LimitBytes: 9}, {Uid: 1000, LimitBytes: 4},
		},
	}
	var got []string
	for _, p := range Promised(g) {
		got = append(got, fmt.Sprintf("%s %d %d", Tenant(p.Container, p.Uid), p.CoreRequest, p.MemoryBytes))
	}
	if want := "ml/a/main 50 1073741824, user 1000 20 4, user 1001 0 9, container d 0 3"; strings.Join(got, ", ") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, ", "), want)
	}
	if p := Promised(nil); p != nil {
		t.Errorf("of none: %v", p)
	}
}
