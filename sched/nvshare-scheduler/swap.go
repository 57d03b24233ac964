// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/nvshare/nvshare/sched/daemon/memory"

	"github.com/spf13/cobra"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon"
	"github.com/nvshare/nvshare/sched/residency"
)

// swapFlags say whether memory is swapped, and how GPUs look.
type swapFlags struct {
	memory, ready, headroom, share, gpuMemory, suspendAfter string
	suspendDir, suspendDirSize                              string
	readyGiven                                              bool
}

func (f *swapFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.memory, "swap-memory", "0", "`size` of the host memory, of the whole node, for memory that is moved off GPUs, like 200Gi; auto: half of what the host can spare at the start, taken when it is first needed; 0: nothing is moved")
	fs.StringVar(&f.ready, "swap-ready", "25%", "`size` or percentage of --swap-memory that is taken from the host before tenants need it, as far as the host can spare it; 0: nothing")
	fs.StringVar(&f.share, "swap-share", "10", "`percentage` of the time that moving memory may take, 1 to 50: turns become longer than the time quantum for that; none: turns are as long as the time quantum")
	fs.StringVar(&f.headroom, "swap-headroom", "", "`size` of the part of each GPU that is left to the driver, like 4Gi; by default a thirty-second of the GPU's memory")
	fs.StringVar(&f.suspendAfter, "suspend-after", "0", "`time` after which the memory of a process that does not use its GPU leaves the GPU until it does, like 10m; 0: never")
	fs.StringVar(&f.suspendDir, "suspend-dir", "", "`directory`, on a disk, to which the memory of suspended processes goes on when little of --swap-memory is left; \"\": it stays in host memory")
	fs.StringVar(&f.suspendDirSize, "suspend-dir-size", "", "`size` of all files in --suspend-dir, like 500Gi; by default as much as leaves a sixteenth of its file system free")
	fs.StringVar(&f.gpuMemory, "gpu-memory", "", "let GPUs look as if they had no more memory than this `size`, like 24Gi")
}

// fillFiles says where memory goes on to from host memory.
func (f *swapFlags) fillFiles(o *daemon.Options) (err error) {
	o.SuspendDir = f.suspendDir
	switch {
	case f.suspendDirSize == "" || f.suspendDirSize == "0":
		return nil
	case f.suspendDir == "":
		return errors.New("--suspend-dir-size needs --suspend-dir")
	}
	if o.SuspendDirSize, err = api.ParseMemory(f.suspendDirSize); err != nil {
		return fmt.Errorf("--suspend-dir-size: %w", err)
	}
	return nil
}

func (f *swapFlags) fill(o *daemon.Options) error {
	if o.SwapAuto = f.memory == "auto"; o.SwapAuto {
		f.memory = ""
	}
	for _, size := range []struct {
		flag, value string
		to          *uint64
	}{{"swap-memory", f.memory, &o.SwapMemory}, {"gpu-memory", f.gpuMemory, &o.GPUMemory}} {
		if size.value == "" || size.value == "0" {
			continue
		}
		n, err := api.ParseMemory(size.value)
		if err != nil {
			return fmt.Errorf("--%s: %w", size.flag, err)
		}
		*size.to = n
	}
	if err := f.fillReady(o); err != nil {
		return err
	}
	return f.fillRest(o)
}

// fillReady says how much host memory is kept ready.
func (f *swapFlags) fillReady(o *daemon.Options) error {
	number, percent := strings.CutSuffix(f.ready, "%")
	switch {
	case o.SwapAuto && !f.readyGiven:
	case o.SwapAuto && percent:
		return errors.New("--swap-ready: give a size, not a percentage, with --swap-memory auto: what that is, is not known yet")
	case percent:
		n, err := strconv.ParseUint(number, 10, 64)
		if err != nil || n > 100 {
			return fmt.Errorf("--swap-ready: %.64q is neither a size nor a percentage from 0%% to 100%%", f.ready)
		}
		o.SwapReady = o.SwapMemory/100*n + o.SwapMemory%100*n/100 // without an overflow
	case f.ready != "" && f.ready != "0":
		n, err := api.ParseMemory(f.ready)
		if err != nil {
			return fmt.Errorf("--swap-ready: %w", err)
		}
		if o.SwapReady = n; !o.SwapAuto {
			o.SwapReady = min(n, o.SwapMemory)
		}
	}
	return nil
}

func (f *swapFlags) fillRest(o *daemon.Options) error {
	o.SwapHeadroom = memory.DefaultHeadroom
	if f.headroom == "0" {
		o.SwapHeadroom = 0
	} else if f.headroom != "" {
		n, err := api.ParseMemory(f.headroom)
		if err != nil {
			return fmt.Errorf("--swap-headroom: %w", err)
		}
		o.SwapHeadroom = int64(n)
	}
	share, err := api.ParseSwapShare(cmp.Or(f.share, "10"))
	if err != nil {
		return fmt.Errorf("--swap-share: %w", err)
	}
	o.SwapShare = int(share)
	if f.suspendAfter == "" || f.suspendAfter == "0" {
		return nil
	}
	after, err := api.ParseDuration(f.suspendAfter)
	switch {
	case err != nil:
		return fmt.Errorf("--suspend-after: %w", err)
	case after < residency.MinSuspendAfter || after > residency.MaxSuspendAfter:
		return fmt.Errorf("--suspend-after: %v is out of range: give a time from %v to %v, or 0", after, residency.MinSuspendAfter, residency.MaxSuspendAfter)
	case o.SwapMemory == 0 && !o.SwapAuto:
		return errors.New("--suspend-after needs host memory for what leaves: give --swap-memory as well")
	}
	o.SuspendAfter = after
	return nil
}
