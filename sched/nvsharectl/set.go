// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
)

// setFlags are the settings of GPUs, on the root command as in the original
// nvsharectl.
type setFlags struct {
	quantum, antiThrash, swapShare, gpu string
}

func (f *setFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVarP(&f.quantum, "set-tq", "T", "", "set the time quantum: `n` seconds, or with a unit, like 200ms")
	fs.StringVarP(&f.antiThrash, "anti-thrash", "S", "", "`on|off|auto`: how tenants share a GPU; on: tenants take turns; off: all run at the same time; auto: time slices, turns, or all at once, as suits them")
	fs.StringVar(&f.swapShare, "swap-share", "", "set the `percentage` of the time, 1 to 50, that moving memory may take: turns become as long as that needs; none: turns are as long as the time quantum")
	fs.StringVar(&f.gpu, "gpu", "", "change, or show, only the GPU with this `index or UUID`")
}

func (f *setFlags) given(cmd *cobra.Command) bool {
	return cmd.Flags().Changed("set-tq") || cmd.Flags().Changed("anti-thrash") || cmd.Flags().Changed("swap-share")
}

func (f *setFlags) request() (*api.SetRequest, error) {
	req := &api.SetRequest{Gpu: f.gpu}
	if f.quantum != "" {
		d, err := api.ParseDuration(f.quantum)
		if err != nil {
			return nil, usageError{fmt.Errorf("--set-tq: %w", err)}
		}
		req.QuantumNs = int64(d)
	}
	if f.antiThrash != "" {
		m, err := api.ParseAntiThrash(f.antiThrash)
		if err != nil {
			return nil, usageError{fmt.Errorf("--anti-thrash: %w", err)}
		}
		req.Mode = m
	}
	if f.swapShare != "" {
		n, err := api.ParseSwapShare(f.swapShare)
		if err != nil {
			return nil, usageError{fmt.Errorf("--swap-share: %w", err)}
		}
		req.SwapShare = &n
	}
	if req.QuantumNs == 0 && req.Mode == api.Mode_MODE_UNSPECIFIED && req.SwapShare == nil {
		return nil, usageError{fmt.Errorf("--set-tq, --anti-thrash or --swap-share has no value: give one, like --set-tq 200ms")}
	}
	return req, nil
}

// run changes the settings and prints the old and the new values.
func (f *setFlags) run(ctx context.Context, runDir string, io streams) error {
	req, err := f.request()
	if err != nil {
		return err
	}
	var resp *api.SetResponse
	if err := call(ctx, runDir, func(ctx context.Context, c *api.Conn) error {
		resp, err = c.Set(ctx, req)
		return err
	}); err != nil {
		return err
	}
	for _, c := range resp.Changes {
		fmt.Fprintln(io.out, describeChange(req, c))
	}
	return nil
}

// waysToShare are what tenants do in each mode, as README says it.
var waysToShare = map[api.Mode]string{
	api.Mode_MODE_EXCLUSIVE:  "take turns",
	api.Mode_MODE_CONCURRENT: "run at the same time",
	api.Mode_MODE_AUTO:       "share by time slices, by turns, or all at the same time, as suits them",
}

func describeChange(req *api.SetRequest, c *api.Change) string {
	what := "new GPUs"
	if c.Uuid != "" {
		what = fmt.Sprintf("GPU %d", c.Index)
	}
	var parts []string
	if req.QuantumNs != 0 {
		parts = append(parts, fmt.Sprintf("time quantum %v → %v", time.Duration(c.OldQuantumNs), time.Duration(c.NewQuantumNs)))
	}
	if req.Mode != api.Mode_MODE_UNSPECIFIED {
		parts = append(parts, fmt.Sprintf("tenants %s (-S %s → %s)", waysToShare[c.NewMode], api.AntiThrash(c.OldMode), api.AntiThrash(c.NewMode)))
	}
	if req.SwapShare != nil {
		parts = append(parts, fmt.Sprintf("swap share %s → %s", api.FormatPercent(c.OldSwapShare), api.FormatPercent(c.NewSwapShare)))
	}
	return what + ": " + strings.Join(parts, ", ")
}
