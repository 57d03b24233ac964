// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/manual"
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
	for _, cmd := range manual.Commands(root) {
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

// noCommand refuses what is no command, and names the command that is most like it.
func noCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	var names []string
	for _, c := range cmd.Commands() {
		if !c.Hidden {
			names = append(names, c.Name())
		}
	}
	return fmt.Errorf("unknown command %q%s", args[0], suggestion(args[0], names))
}

// noWords refuses words beside the flags of a command that takes none.
func noWords(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	hint := ""
	if cmd.Flags().Lookup("gpu") != nil {
		hint = ": name a GPU with --gpu"
	}
	return fmt.Errorf("%s takes no argument %q%s", cmd.Name(), args[0], hint)
}

// flagError names the flag that is most like one that does not exist.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return err
	}
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, "--"+f.Name) })
	return fmt.Errorf("%w%s", err, suggestion("--"+unknown.GetSpecifiedName(), names))
}

// suggestion returns " (did you mean X?)" for the one of names that somebody has misspelt; "": none
// is like it.
func suggestion(wrong string, names []string) string {
	if meant := api.Misspelt(wrong, names); meant != "" {
		return fmt.Sprintf(" (did you mean %s?)", printable(meant))
	}
	return ""
}

// first returns so many names at most, and how many more there are.
func first(names []string, most int) []string {
	if n := len(names); n > most {
		return append(slices.Clone(names[:most]), fmt.Sprintf("%d more", n-most))
	}
	return names
}

// oneTenant accepts one argument, the name of a tenant.
func oneTenant(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return errors.New("give one tenant (nvsharectl status lists them); quote a name with a space, like \"user 1000\"")
	}
	return nil
}

// tenantHelp is what a command's help says of the names of tenants.
const tenantHelp = `

A tenant is a container or a user. A number, as 1000 or "user 1000", is a user.
A container has its name as the status shows it, its own name, or its pod's, and
else the beginning of its id.`

// userOf reads the name of a user; nil: it is that of a container.
func userOf(name string) *uint32 {
	n, err := strconv.ParseUint(strings.TrimPrefix(name, "user "), 10, 32)
	if err != nil {
		return nil
	}
	uid := uint32(n)
	return &uid
}

// nameTenant says in a request whom people mean by a name. The scheduler finds containers.
func nameTenant(name string) (container string, uid *uint32) {
	if uid = userOf(name); uid != nil {
		return "", uid
	}
	return name, nil
}

// tenants are the containers, by id, among which a name is looked up.
type tenants map[string]*api.Container

// add adds one. A container without names does not take those that it has.
func (all tenants) add(c *api.Container) {
	if id := c.GetId(); id != "" && (all[id] == nil || c.Name != "" || c.Pod != "") {
		all[id] = c
	}
}

// addStatus adds the containers that the scheduler knows.
func (all tenants) addStatus(r *api.StatusResponse) {
	for _, c := range r.GetContainers() {
		all.add(c)
	}
	for _, g := range r.GetGpus() {
		for _, t := range tenantsOf(g) {
			all.add(t.Container)
		}
	}
}

// meant returns what tells whether a tenant is meant by a name, as a request's is.
func (all tenants) meant(name string) func(c *api.Container, uid uint32) bool {
	user := userOf(name)
	ids, _ := api.Meant(name, all)
	return func(c *api.Container, uid uint32) bool {
		if user != nil {
			return c.GetId() == "" && uid == *user
		}
		return slices.Contains(ids, c.GetId())
	}
}
