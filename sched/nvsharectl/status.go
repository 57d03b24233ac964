// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

func statusCommand(f *rootFlags, io streams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show who holds which GPU, and who waits",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return showStatus(cmd.Context(), f, io)
		},
	}
	outputFlag(cmd, f)
	cmd.Flags().StringVar(&f.set.gpu, "gpu", "", "show only the GPU with this `index or UUID`")
	return cmd
}

func outputFlag(cmd *cobra.Command, f *rootFlags) {
	cmd.Flags().StringVarP(&f.output, "output", "o", "table", "`table|json`")
}

// showStatus returns errUnhealthy if the scheduler reports problems, after it
// has printed them.
func showStatus(ctx context.Context, f *rootFlags, io streams) error {
	if f.output != "table" && f.output != "json" {
		return usageError{fmt.Errorf("--output: %q is neither table nor json", f.output)}
	}
	var r *api.StatusResponse
	if err := call(ctx, f.runDir, func(ctx context.Context, c *api.Conn) (err error) {
		r, err = c.Status(ctx, &api.StatusRequest{})
		return err
	}); err != nil {
		return err
	}
	if err := restrict(r, f.set.gpu); err != nil {
		return err
	}
	if f.output == "json" {
		enc := json.NewEncoder(io.out)
		enc.SetIndent("", "  ")
		if err := enc.Encode(newStatusJSON(r)); err != nil {
			return fmt.Errorf("print the status: %w", err)
		}
	} else {
		printStatus(io, r)
	}
	if len(r.Problems) > 0 {
		return errUnhealthy
	}
	return nil
}

// restrict leaves one GPU, by index or UUID; all of them for "".
func restrict(r *api.StatusResponse, gpu string) error {
	if gpu == "" {
		return nil
	}
	for _, g := range r.Gpus {
		if strings.EqualFold(g.Uuid, gpu) || strconv.Itoa(int(g.Index)) == gpu {
			r.Gpus = []*api.GPU{g}
			return nil
		}
	}
	return fmt.Errorf("GPU %q: no such index or UUID (nvsharectl status lists them)", gpu)
}

// printStatus prints two tables, GPUs and clients, and what is wrong.
func printStatus(io streams, r *api.StatusResponse) {
	gpus := table{head: []string{"GPU", "UUID", "NAME", "HOLDER", "FOR", "WAITING", "TQ", "ANTI-THRASH", "GRANTS", "FENCED"}}
	clients := table{head: []string{"GPU", "STATE", "CLIENT", "PID", "FOR", "GRANTS", "HELD", "LONGEST WAIT", "CALLS", "MEMORY", "USED/LIMIT", "BYPASSED"}}
	for _, g := range r.Gpus {
		holder, held := holderOf(g)
		gpus.add(nil,
			fmt.Sprint(g.Index), g.Uuid, g.Name, holder, held, fmt.Sprint(count(g, api.ClientState_CLIENT_STATE_WAITING)),
			time.Duration(g.QuantumNs).String(), api.AntiThrash(g.Mode), fmt.Sprint(g.Grants),
			fmt.Sprint(count(g, api.ClientState_CLIENT_STATE_FENCED)))
		for _, c := range g.Clients {
			since := "-"
			if c.SinceNs != 0 {
				since = short(c.SinceNs)
			}
			clients.add(map[int]string{1: stateColour[c.State], 10: limitColour(g, c), 11: bypassedColour(c)},
				fmt.Sprint(g.Index), stateName(c), api.Who(c), fmt.Sprint(c.Pid), since, fmt.Sprint(c.Grants), short(c.HeldNs),
				short(c.WaitMaxNs), fmt.Sprint(c.Calls), size(c.MemoryBytes), ofLimit(g, c), fmt.Sprint(c.Bypassed))
		}
	}
	if len(gpus.rows) > 0 {
		gpus.print(io)
		fmt.Fprintln(io.out)
	}
	if len(clients.rows) > 0 {
		clients.print(io)
		fmt.Fprintln(io.out)
	}
	for _, p := range r.Problems {
		fmt.Fprintln(io.out, io.paint(red, "PROBLEM: ")+printable(p))
	}
	health := io.paint(green, "OK")
	if n := len(r.Problems); n > 0 {
		health = io.paint(red, fmt.Sprintf("%d problems, see above", n))
		if n == 1 {
			health = io.paint(red, "1 problem, see above")
		}
	}
	fmt.Fprintf(io.out, "scheduler %s, up %v, %d clients. Health: %s\n",
		r.Version, time.Duration(r.UptimeNs).Round(time.Second), r.Clients, health)
}

func isHolder(c *api.Client) bool {
	switch c.State {
	case api.ClientState_CLIENT_STATE_HOLDING, api.ClientState_CLIENT_STATE_DRAINING, api.ClientState_CLIENT_STATE_LOST:
		return true
	}
	return false
}

// holderOf says who has the GPU, and for how long.
func holderOf(g *api.GPU) (holder, held string) {
	holder, held = "-", "-"
	n := 0
	for _, c := range g.Clients {
		if isHolder(c) {
			n++
			holder, held = api.Who(c), short(c.SinceNs)
		}
	}
	if n > 1 {
		return fmt.Sprintf("%d clients", n), "-"
	}
	return holder, held
}

func count(g *api.GPU, s api.ClientState) (n int) {
	for _, c := range g.Clients {
		if c.State == s {
			n++
		}
	}
	return n
}

func stateName(c *api.Client) string {
	return strings.ToLower(strings.TrimPrefix(c.State.String(), "CLIENT_STATE_"))
}

var stateColour = map[api.ClientState]string{
	api.ClientState_CLIENT_STATE_HOLDING:  green,
	api.ClientState_CLIENT_STATE_WAITING:  yellow,
	api.ClientState_CLIENT_STATE_DRAINING: yellow,
	api.ClientState_CLIENT_STATE_LOST:     red,
	api.ClientState_CLIENT_STATE_FENCED:   red,
}

// tenantOf returns what the client's container, or its user, has of the GPU's
// memory; empty if there is neither a limit nor anything reserved.
func tenantOf(g *api.GPU, c *api.Client) *api.MemoryAccount {
	for _, m := range g.Memory {
		if id := m.GetContainer().GetId(); id == c.GetContainer().GetId() && (id != "" || m.Uid == c.Uid) {
			return m
		}
	}
	return &api.MemoryAccount{}
}

// ofLimit says how much of its limit a client's container has reserved, with
// all its processes.
func ofLimit(g *api.GPU, c *api.Client) string {
	m := tenantOf(g, c)
	if m.LimitBytes == 0 {
		return "-"
	}
	return size(m.UsedBytes) + "/" + size(m.LimitBytes)
}

func limitColour(g *api.GPU, c *api.Client) string {
	if m := tenantOf(g, c); m.LimitBytes != 0 && m.UsedBytes > m.LimitBytes {
		return red
	}
	return ""
}

func bypassedColour(c *api.Client) string {
	if c.Bypassed > 0 {
		return red
	}
	return ""
}

// short prints nanoseconds with about three digits.
func short(ns int64) string {
	d := time.Duration(ns)
	switch {
	case d < time.Millisecond:
		return d.Round(time.Microsecond).String()
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

func size(n uint64) string {
	switch {
	case n >= 10<<30:
		return fmt.Sprintf("%dGi", n>>30)
	case n >= 1<<30:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(n)/(1<<30)), ".0") + "Gi"
	case n >= 1<<20:
		return fmt.Sprintf("%dMi", n>>20)
	}
	return fmt.Sprint(n)
}
