// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon"
)

// ruleFlags bound what pods may ask for, by namespace: nothing at the cost of others, unless the
// administrator has named the namespace.
type ruleFlags struct{ latency, gang, overlap, weight string }

func (f *ruleFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.latency, "latency-namespaces", "", "`namespaces` whose pods may have the priority latency, separated by commas; *: all; \"\": none. Containers outside Kubernetes may, as root starts them")
	fs.StringVar(&f.overlap, "overlap-namespaces", "", "`namespaces` whose pods may be in overlap groups, in the same form")
	fs.StringVar(&f.gang, "gang-namespaces", "", "`namespaces` whose pods may have gangs, in the same form")
	fs.StringVar(&f.weight, "max-weight", strconv.Itoa(sched.DefaultWeight), "greatest `weight` that pods may ask for, also by namespace: 100,prod=1000; \"\": no bound")
}

// namespacesIn returns the parts of a list, which is not nil.
func namespacesIn(list string) []string {
	return append([]string{}, strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })...)
}

func (f *ruleFlags) fill(o *daemon.Options) error {
	o.Rules.Latency, o.Rules.Overlap, o.Rules.Gang = namespacesIn(f.latency), namespacesIn(f.overlap), namespacesIn(f.gang)
	var err error
	if o.Rules.Weight, err = api.ParseBounds(f.weight, api.ParseWeight); err != nil {
		return fmt.Errorf("--max-weight: %w", err)
	}
	return nil
}
