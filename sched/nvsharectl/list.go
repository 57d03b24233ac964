// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/nvshare/nvshare/sched/api"
)

// listSettings prints what annotations and nvsharectl set say of tenants' terms.
func listSettings(ctx context.Context, runDir string, io streams) error {
	r, err := askAll(ctx, runDir)
	if err != nil {
		return err
	}
	t := table{names: 0, head: []string{"TENANT", "GPU", "SET BY", "SHARE"}}
	for _, s := range r.Settings {
		gpu := "all"
		if s.Uuid != "" {
			gpu = s.Uuid // not found at present
		}
		for _, g := range r.Gpus {
			if g.Uuid == s.Uuid {
				gpu = fmt.Sprint(g.Index)
			}
		}
		t.add(nil, api.Tenant(s.Container, s.Uid), gpu, setBy(s), describeTerms(api.TermsOf(s.Share, s.MemoryBytes)))
	}
	if len(t.rows) == 0 {
		fmt.Fprintln(io.out, "Nothing is set.")
		return nil
	}
	t.print(io)
	return nil
}

// setBy names what says a setting.
func setBy(s *api.Setting) string {
	switch {
	case !s.Annotated:
		return "nvsharectl"
	case s.Container.GetEngine() == runEngine:
		return runEngine
	}
	return "annotations"
}

// describeTerms writes the terms that are said.
func describeTerms(terms api.Terms) string {
	var parts []string
	for _, f := range api.Fields {
		if f.Said(terms) {
			parts = append(parts, f.Short+f.Format(terms))
		}
	}
	return strings.Join(parts, ", ")
}
