// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
)

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
	return fmt.Errorf("%s takes no word like %q%s", cmd.Name(), args[0], hint)
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
		return fmt.Errorf("give one tenant, not %d words: quote a name with a space, like \"user 1000\"", len(args))
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
