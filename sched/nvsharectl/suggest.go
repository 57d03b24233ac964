// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
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
		names = append(names, c.Name())
	}
	return fmt.Errorf("unknown command %q%s", args[0], suggestion(args[0], names))
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
	if want == "" || status.Code(err) != codes.NotFound {
		return err
	}
	r, statusErr := c.Status(ctx, &api.StatusRequest{})
	if statusErr != nil {
		return err
	}
	return fmt.Errorf("%s%s", messageOf(err), suggestion(want, append(containerNames(r), tenantNames(r)...)))
}

// suggestion returns " (did you mean X?)" for the one of names that is most like a
// wrong name; "": none is.
func suggestion(wrong string, names []string) string {
	best, least := "", len(strings.TrimPrefix(wrong, "--"))/3+2
	for _, name := range names {
		if d := distance(wrong, name); d < least {
			best, least = name, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", printable(best))
}

// distance is how many letters have to be put in, removed or replaced to make b of a.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
