// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon/tenants"
)

// What a pod may not ask for is refused with the reason, which its events show, and the
// rest is in force. A container that is yet to start, and that nobody can tell, is refused.
func TestRulesByNamespace(t *testing.T) {
	s := start(t, t.TempDir(), func(o *Options) {
		o.Rules = tenants.Rules{Latency: []string{"prod"}, Gang: []string{"prod"}, Weight: map[string]uint32{"prod": 500, api.AllNamespaces: 200}}
	})
	asked := api.Terms{Priority: api.Priority_PRIORITY_LATENCY, Gang: "g", Weight: 1000, CoreLimit: 50}
	for _, try := range []struct {
		namespace string
		want      api.Terms
		refused   []string
	}{
		{"prod", api.Terms{Priority: api.Priority_PRIORITY_LATENCY, Gang: "g", Weight: 500, CoreLimit: 50}, []string{"weight 1000, above 500"}},
		{"dev", api.Terms{Weight: 200, CoreLimit: 50}, []string{"priority latency", "a gang", "weight 1000, above 200", "--max-weight", "scheduler.latencyNamespaces"}},
		{"", asked, nil}, // outside Kubernetes only root can ask
	} {
		c := &api.Container{Id: "c-" + try.namespace, Name: "c", Namespace: try.namespace, Pod: "p"}
		c.SetTerms(asked)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		conn, err := api.Dial(ctx, s.dir)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_, err = conn.DescribeContainer(ctx, &api.DescribeContainerRequest{Container: c})
		if want := map[bool]codes.Code{true: codes.OK, false: codes.InvalidArgument}[try.refused == nil]; status.Code(err) != want {
			t.Errorf("namespace %q: %v", try.namespace, err)
		}
		for _, text := range try.refused {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("namespace %q: %v does not say %q", try.namespace, err, text)
			}
		}
		for _, known := range s.status().Containers {
			if known.Id != c.Id {
				continue
			}
			if got := known.Terms(); got != try.want {
				t.Errorf("namespace %q: %+v is in force, want %+v", try.namespace, got, try.want)
			}
		}
	}
	if n := len(s.status().Containers); n != 3 {
		t.Errorf("%d containers are known", n)
	}
}
