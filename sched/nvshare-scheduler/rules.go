// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon"
)

// ruleFlags bound what pods may ask for, by namespace.
type ruleFlags struct{ latency, gang, overlap, weight string }

func (f *ruleFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.latency, "latency-namespaces", daemon.AllNamespaces, "`namespaces` whose pods may have the priority latency, separated by commas; *: all, and containers outside Kubernetes; \"\": none")
	fs.StringVar(&f.overlap, "overlap-namespaces", daemon.AllNamespaces, "`namespaces` whose pods may be in overlap groups, in the same form")
	fs.StringVar(&f.gang, "gang-namespaces", daemon.AllNamespaces, "`namespaces` whose pods may have gangs, in the same form")
	fs.StringVar(&f.weight, "max-weight", "", "greatest `weight` that pods may ask for, also by namespace: 100,prod=1000; \"\": no bound")
}

func namespacesIn(list string) []string {
	return strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
}

func (f *ruleFlags) fill(o *daemon.Options) error {
	if f.latency != daemon.AllNamespaces {
		o.Rules.Latency = append([]string{}, namespacesIn(f.latency)...)
	}
	if f.overlap != daemon.AllNamespaces {
		o.Rules.Overlap = append([]string{}, namespacesIn(f.overlap)...)
	}
	if f.gang != daemon.AllNamespaces {
		o.Rules.Gang = append([]string{}, namespacesIn(f.gang)...)
	}
	for _, rule := range namespacesIn(f.weight) {
		namespace, number, named := strings.Cut(rule, "=")
		if !named {
			namespace, number = daemon.AllNamespaces, rule
		}
		n, err := api.ParseWeight(number)
		if err != nil || n == 0 || namespace == "" {
			return fmt.Errorf("--max-weight: %.64q is neither a weight from 1 to 10000 nor NAMESPACE=WEIGHT", rule)
		}
		if o.Rules.Weight == nil {
			o.Rules.Weight = map[string]uint32{}
		}
		o.Rules.Weight[namespace] = n
	}
	return nil
}
