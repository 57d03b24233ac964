// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nvshare/nvshare/sched/api"
)

// completeLimit bounds what a shell waits for when its user asks for names.
const completeLimit = time.Second

// complete makes flags of these names, and the tenants that commands take, complete to what
// there is now. A scheduler that does not answer has no names.
func complete(root *cobra.Command, f *rootFlags) {
	names := func(of func(*api.StatusResponse) []string) cobra.CompletionFunc {
		return func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			ctx, cancel := context.WithTimeout(cmd.Context(), completeLimit)
			defer cancel()
			var found []string
			if r, err := askStatus(ctx, f.runDir); err == nil {
				found = of(r)
			}
			return found, cobra.ShellCompDirectiveNoFileComp
		}
	}
	fixed := func(values ...string) cobra.CompletionFunc {
		return cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)
	}
	byFlag := map[string]cobra.CompletionFunc{
		"container":   names(containerNames),
		"tenant":      names(tenantNames),
		"gpu":         names(gpuNames),
		"type":        fixed(eventTypeNames()...),
		"anti-thrash": fixed("on", "off", "auto"),
		"priority":    fixed("batch", "latency", "none"),
		"memory-mode": fixed("swap", "resident", "managed", "none"),
	}
	withTenant := []string{"why", "set", "suspend", "resume", "migrate"}
	for _, cmd := range withSubcommands(root) {
		for name, values := range byFlag {
			if cmd.Flags().Lookup(name) != nil {
				_ = cmd.RegisterFlagCompletionFunc(name, values) // fails for flags that do not exist
			}
		}
		if output := cmd.Flags().Lookup("output"); output != nil { // in cdi generate, a file
			if forms, _ := pflag.UnquoteUsage(output); strings.Contains(forms, "|") {
				_ = cmd.RegisterFlagCompletionFunc("output", fixed(strings.Split(forms, "|")...))
			}
		}
		if slices.Contains(withTenant, cmd.Name()) && cmd.ValidArgsFunction == nil { // config set has its own
			cmd.ValidArgsFunction = names(tenantNames)
		}
	}
}

// refuseUnknown has "completion" and "help" refuse an unknown shell or command. cobra would answer
// with a help text and status 0, which a script takes for the completion.
func refuseUnknown(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	root.InitDefaultHelpCmd()
	for _, cmd := range root.Commands() {
		switch cmd.Name() {
		case "completion":
			cmd.Args, cmd.RunE = noCommand, func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
		case "help":
			cmd.Args = func(_ *cobra.Command, args []string) error {
				if found, _, err := root.Find(args); err != nil || found == root {
					return noCommand(root, args)
				}
				return nil
			}
		}
	}
}

// withSubcommands returns a command and all below it.
func withSubcommands(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, c := range cmd.Commands() {
		all = append(all, withSubcommands(c)...)
	}
	return all
}

// containerNames returns the names of the containers that the scheduler knows.
func containerNames(r *api.StatusResponse) (all []string) {
	add := func(c *api.Container) {
		if name := api.Tenant(c, 0); c.GetName() != "" && !slices.Contains(all, name) {
			all = append(all, name)
		}
	}
	for _, c := range r.Containers {
		add(c)
	}
	for _, g := range r.Gpus {
		for _, c := range g.Clients {
			add(c.Container)
		}
	}
	return all
}

func gpuNames(r *api.StatusResponse) (all []string) {
	for _, g := range r.Gpus {
		all = append(all, fmt.Sprintf("%d\t%s %s", g.Index, g.Name, g.Uuid))
	}
	return all
}

// completions writes what completes nvsharectl's command lines in three shells into dir,
// laid out as below /usr/share.
func completions(root *cobra.Command, dir string) error {
	at := func(file string) string { return filepath.Join(dir, file) }
	for _, dir := range []string{"bash-completion/completions", "zsh/site-functions", "fish/vendor_completions.d"} {
		if err := os.MkdirAll(at(dir), 0o755); err != nil {
			return err
		}
	}
	return errors.Join(
		root.GenBashCompletionFileV2(at("bash-completion/completions/nvsharectl"), true),
		root.GenZshCompletionFile(at("zsh/site-functions/_nvsharectl")),
		root.GenFishCompletionFile(at("fish/vendor_completions.d/nvsharectl.fish"), true))
}
