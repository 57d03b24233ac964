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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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

// likeTenant adds to the error about a container that is not there the name of the tenant
// that is most like it.
func likeTenant(ctx context.Context, c *api.Conn, want string, err error) error {
	if want == "" || status.Code(err) != codes.NotFound || !strings.HasPrefix(messageOf(err), "container") { // it is the GPU
		return err
	}
	r, statusErr := c.Status(ctx, &api.StatusRequest{})
	if statusErr != nil {
		return err
	}
	return fmt.Errorf("%s%s", messageOf(err), suggestion(want, append(containerNames(r), tenantNames(r)...)))
}

// maxNamed is how many tenants a message names.
const maxNamed = 10

// oneTenant accepts one argument, the name of a tenant. Its error names those that there are.
func oneTenant(f *rootFlags) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch len(args) {
		case 1:
			return nil
		case 0:
			names := namesNow(cmd.Context(), f)
			if names == "" {
				return errors.New("which tenant? give its name (nvsharectl status lists them)")
			}
			return fmt.Errorf("which tenant? give one of: %s (nvsharectl status lists them)", names)
		}
		return fmt.Errorf("give one tenant, not %d arguments: quote a name with a space, like \"user 1000\"", len(args))
	}
}

// namesNow returns the names of the tenants on a GPU now; "": there are none, or no
// scheduler answers.
func namesNow(ctx context.Context, f *rootFlags) string {
	ctx, cancel := context.WithTimeout(ctx, completeLimit)
	defer cancel()
	r, err := askStatus(ctx, f.runDir)
	if err != nil {
		return ""
	}
	return listOf(tenantNames(r))
}

// listOf puts names into one line.
func listOf(names []string) string { return printable(strings.Join(first(names, maxNamed), ", ")) }

// first returns so many names at most, and how many more there are.
func first(names []string, most int) []string {
	if n := len(names); n > most {
		return append(slices.Clone(names[:most]), fmt.Sprintf("%d more", n-most))
	}
	return names
}

// suggestion returns " (did you mean X?)" for the one of names that somebody has misspelt; "": none
// is like it.
func suggestion(wrong string, names []string) string {
	if meant := api.Misspelt(wrong, names); meant != "" {
		return fmt.Sprintf(" (did you mean %s?)", printable(meant))
	}
	return ""
}

// tenantHelp is what a command's help says of the names of tenants.
const tenantHelp = `

A tenant is a container or a user. Its name is, and the first that fits is
meant: a container's name as the status shows it, its own name, or its pod's;
the number of a user, as 1000 or "user 1000"; or the beginning of a container's
id, also if that looks like a number that no user has.`

// meant is whom people mean by the name of a tenant: containers, or a user.
type meant struct {
	ids []string // of the containers
	uid *uint32  // nil: no user
}

func (m meant) has(c *api.Container, uid uint32) bool {
	if id := c.GetId(); id != "" {
		return slices.Contains(m.ids, id)
	}
	return m.uid != nil && *m.uid == uid
}

// tenants are those among which a name is looked up.
type tenants struct {
	containers map[string]*api.Container // by id
	users      map[uint32]bool           // with processes outside containers, or settings
}

func newTenants() *tenants {
	return &tenants{containers: map[string]*api.Container{}, users: map[uint32]bool{}}
}

// add adds a tenant. A container without names does not take those that it has.
func (all *tenants) add(c *api.Container, uid uint32) {
	id := c.GetId()
	switch {
	case c == nil:
	case id == "":
		all.users[uid] = true
	case all.containers[id] == nil || c.Name != "" || c.Pod != "":
		all.containers[id] = c
	}
}

// addStatus adds the tenants that the scheduler knows.
func (all *tenants) addStatus(r *api.StatusResponse) {
	for _, c := range r.GetContainers() {
		all.add(c, 0)
	}
	for _, s := range r.GetSettings() {
		all.add(s.Container, s.Uid)
	}
	for _, g := range r.GetGpus() {
		for _, c := range g.Clients {
			all.add(c.Container, c.Uid)
		}
		for _, u := range g.Tenants {
			all.add(u.Container, u.Uid)
		}
	}
}

// meant says whom a name means, by the rule of tenantHelp.
func (all *tenants) meant(name string) meant {
	ids, named := api.Meant(name, all.containers)
	uid, spelled, ok := userNumber(name)
	if ok && !named && (spelled || len(ids) == 0 || all.users[uid] || isUser(uid)) {
		return meant{uid: &uid}
	}
	return meant{ids: ids}
}

// userNumber reads the name of a user. spelled: as the status shows it, and not as a number that
// may be the beginning of a container's id.
func userNumber(name string) (uid uint32, spelled, ok bool) {
	number := strings.TrimPrefix(strings.TrimPrefix(name, "user "), "user/")
	n, err := strconv.ParseUint(number, 10, 32)
	return uint32(n), number != name, err == nil && strconv.FormatUint(n, 10) == number
}

// askMeant says whom a request is to name. The scheduler itself finds containers, by the same rule.
func askMeant(ctx context.Context, runDir, name string) (container string, uid *uint32, err error) {
	n, spelled, ok := userNumber(name)
	switch {
	case !ok:
		return name, nil, nil
	case spelled:
		return "", &n, nil
	}
	r, err := askAll(ctx, runDir)
	if err != nil {
		return "", nil, err
	}
	all := newTenants()
	all.addStatus(r)
	if m := all.meant(name); m.uid != nil {
		return "", m.uid, nil
	}
	return name, nil, nil
}
