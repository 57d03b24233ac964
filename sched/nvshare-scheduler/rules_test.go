// SPDX-License-Identifier: Apache-2.0

package main

import (
	"reflect"
	"testing"

	"github.com/nvshare/nvshare/sched/daemon/tenants"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/daemon"
)

// Pods may ask for nothing at the cost of others where the administrator has not named their
// namespaces: nil would be all of these.
func TestRulesByFlags(t *testing.T) {
	none := []string{}
	for name, test := range map[string]struct {
		args []string
		want tenants.Rules
	}{
		"default": {nil, tenants.Rules{Latency: none, Gang: none, Overlap: none, Weight: map[string]uint32{"*": 100}}},
		"named": {[]string{"--latency-namespaces=prod, team-a", "--gang-namespaces=*", "--max-weight=100,prod=1000"},
			tenants.Rules{Latency: []string{"prod", "team-a"}, Gang: []string{"*"}, Overlap: none, Weight: map[string]uint32{"*": 100, "prod": 1000}}},
		"no bound of weights": {[]string{"--max-weight="}, tenants.Rules{Latency: none, Gang: none, Overlap: none}},
	} {
		var f ruleFlags
		var o daemon.Options
		cmd := &cobra.Command{}
		f.add(cmd)
		if err := cmd.ParseFlags(test.args); err != nil {
			t.Fatal(err)
		}
		if err := f.fill(&o); err != nil || !reflect.DeepEqual(o.Rules, test.want) {
			t.Errorf("%s: %+v, %v, want %+v", name, o.Rules, err, test.want)
		}
	}
}
