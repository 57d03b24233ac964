// SPDX-License-Identifier: Apache-2.0

package tenants

import (
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

func TestNoRulesAllowEverything(t *testing.T) {
	asked := api.Terms{Priority: api.Priority_PRIORITY_LATENCY, Gang: "g", Weight: 10000}
	if got, err := (Rules{}).Bound("any", asked); got != asked || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := (Rules{Latency: []string{}}).Bound("any", asked); got.Priority != 0 || err == nil {
		t.Errorf("no namespace may have a priority: %+v, %v", got, err)
	}
}
