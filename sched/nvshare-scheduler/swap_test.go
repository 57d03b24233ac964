// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/daemon/node"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/daemon"
)

// Memory is swapped unless somebody says otherwise, and no host memory is taken for it before it is needed.
func TestSwapFlags(t *testing.T) {
	for args, want := range map[string]daemon.Options{
		"":                {Config: node.Config{SwapAuto: true, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10}},
		"--swap-memory 0": {Config: node.Config{SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10}},
		"--swap-memory 200Gi --suspend-after 10m": {Config: node.Config{SwapMemory: 200 << 30, SwapReady: 50 << 30, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10, SuspendAfter: 10 * time.Minute}},
		"--swap-memory 200Gi --swap-share 25%":    {Config: node.Config{SwapMemory: 200 << 30, SwapReady: 50 << 30, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 25}},
		"--swap-memory 200Gi --swap-share none":   {Config: node.Config{SwapMemory: 200 << 30, SwapReady: 50 << 30, SwapHeadroom: memory.DefaultHeadroom}},
		"--swap-memory 16Gi":                      {Config: node.Config{SwapMemory: 16 << 30, SwapReady: 4 << 30, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10}},
		"--swap-memory 100Gi --swap-ready 0":      {Config: node.Config{SwapMemory: 100 << 30, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10}},
		"--swap-memory 100Gi --swap-ready 8Gi":    {Config: node.Config{SwapMemory: 100 << 30, SwapReady: 8 << 30, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10}},
		"--swap-memory 8Gi --swap-ready 9Gi":      {Config: node.Config{SwapMemory: 8 << 30, SwapReady: 8 << 30, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10}},
		"--swap-memory auto":                      {Config: node.Config{SwapAuto: true, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10}},
		"--swap-memory auto --suspend-after 10m":  {Config: node.Config{SwapAuto: true, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10, SuspendAfter: 10 * time.Minute}},
		"--swap-memory auto --swap-ready 9Gi":     {Config: node.Config{SwapAuto: true, SwapReady: 9 << 30, SwapHeadroom: memory.DefaultHeadroom, SwapShare: 10}},
		"--gpu-memory 24Gi --swap-headroom 0":     {Config: node.Config{SwapAuto: true, GPUMemory: 24 << 30, SwapShare: 10}},
		"--swap-headroom 4Gi --swap-memory 0":     {Config: node.Config{SwapHeadroom: 4 << 30, SwapShare: 10}},
	} {
		var f swapFlags
		cmd := &cobra.Command{}
		f.add(cmd)
		if err := cmd.ParseFlags(strings.Fields(args)); err != nil {
			t.Fatal(err)
		}
		f.readyGiven = cmd.Flags().Changed("swap-ready")
		var got daemon.Options
		if err := f.fill(&got); err != nil {
			t.Errorf("%s: %v", args, err)
		}
		if got.SwapMemory != want.SwapMemory || got.SwapAuto != want.SwapAuto || got.SwapReady != want.SwapReady || got.SwapHeadroom != want.SwapHeadroom || got.SwapShare != want.SwapShare || got.GPUMemory != want.GPUMemory || got.SuspendAfter != want.SuspendAfter {
			t.Errorf("%s: %+v, want %+v", args, got, want)
		}
	}
}
