// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/web"
)

type webFlags struct{ listen, tokenFile, cluster, namespace string }

func webCommand(root *rootFlags, io streams) *cobra.Command {
	f := &webFlags{}
	cmd := &cobra.Command{
		Use:   "web",
		Short: "Serve a page with the GPUs, their tenants and a day of history",
		Long: `web serves one page, until it is ended. The page changes nothing. Without a
token only this machine reaches it. With a token it may listen on other
addresses: open /?token=TOKEN, or send the header Authorization: Bearer TOKEN.
The connection is not encrypted, so put a proxy with TLS before it on a network
that you do not trust.

The history is that of this process, a day at most. The scheduler can serve the
page itself (nvshare-scheduler --web-addr), and then has a history since its
start. Users who may not use the control socket see their own tenant, and of
others numbers.

With --cluster it serves one table of the GPUs of all nodes, sorted by how much
is promised and not used. It reads the nodes' pages (web.enabled and
web.tokenSecret of the chart) through the API server, by kubectl proxy;
--token-file then has the token of these pages.`,
		Example: `  sudo nvsharectl web
  openssl rand -hex 24 | sudo install -Dm600 /dev/stdin /etc/nvshare/web-token
  sudo nvsharectl web --listen 0.0.0.0:9403 --token-file /etc/nvshare/web-token
  nvsharectl web --cluster http://127.0.0.1:8001 --token-file token`,
		Args: noWords,
		RunE: func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), root.runDir, io) },
	}
	cmd.Flags().StringVar(&f.listen, "listen", "127.0.0.1:9403", "`address` and port")
	cmd.Flags().StringVar(&f.tokenFile, "token-file", "", "a `file` with the token that requests need: 16 letters and digits or more")
	cmd.Flags().StringVar(&f.cluster, "cluster", "", "show all nodes of a cluster: the `URL` of kubectl proxy")
	cmd.Flags().StringVar(&f.namespace, "namespace", "nvshare-system", "the `namespace` of nvshare's pods, with --cluster")
	return cmd
}

func (f *webFlags) run(ctx context.Context, runDir string, io streams) error {
	token, err := web.Check(f.listen, f.tokenFile)
	if err != nil {
		return usageError{fmt.Errorf("--listen, --token-file: %w", err)}
	}
	page, err := f.open(ctx, runDir, token)
	if err != nil {
		return err
	}
	fmt.Fprintf(io.out, "http://%s/\n", page.Addr())
	return page.Serve(ctx)
}

func (f *webFlags) open(ctx context.Context, runDir, token string) (*web.Page, error) {
	if f.cluster != "" {
		return web.Cluster{API: f.cluster, Namespace: f.namespace, Token: token}.Listen(f.listen)
	}
	if _, err := askStatus(ctx, runDir); err != nil {
		return nil, err
	}
	return web.Listen(f.listen, f.tokenFile, asker{runDir})
}

// asker asks the scheduler of a run directory.
type asker struct{ runDir string }

func (a asker) Status(ctx context.Context) (*api.StatusResponse, error) {
	return askStatus(ctx, a.runDir)
}

func (a asker) Events(ctx context.Context, req *api.EventsRequest) (*api.EventsResponse, error) {
	return ask(ctx, a.runDir, (*api.Conn).Events, req)
}

func (a asker) Why(ctx context.Context, tenant string) (string, error) {
	var text strings.Builder
	err := (&whyFlags{last: time.Minute, output: "text"}).run(ctx, a.runDir, streams{out: &text}, tenant)
	return text.String(), err
}

func versionCommand(root *rootFlags, io streams) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Show the versions of nvsharectl and of the scheduler that runs",
		Args:  noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Fprintf(io.out, "nvsharectl         %s\n", api.Version)
			r, err := askStatus(cmd.Context(), root.runDir)
			if err == nil {
				fmt.Fprintf(io.out, "nvshare-scheduler  %s\n", printable(r.Version))
			}
			return err
		},
	}
}
