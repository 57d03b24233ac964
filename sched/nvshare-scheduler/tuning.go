// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/nvshare/nvshare/sched"
	"github.com/nvshare/nvshare/sched/account"
	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/sched/daemon"
	"github.com/nvshare/nvshare/sched/daemon/memory"
	"github.com/nvshare/nvshare/sched/residency"
)

// tuningFlags say how time is accounted. Their defaults come from the
// environment, by the names that nvshare's users know.
type tuningFlags struct{ window, sample, carry, tail number }

// number is a flag whose default is in an environment variable.
type number struct {
	flag, env string
	value     string
	low, high int
	zero      bool // 0 is possible as well
}

func (f *tuningFlags) add(cmd *cobra.Command) {
	f.window = number{flag: "compute-window-ms", env: "NVSHARE_COMPUTE_WINDOW_MS", low: 500, high: 20_000}
	f.sample = number{flag: "quota-sample-interval-ms", env: "NVSHARE_QUOTA_SAMPLE_INTERVAL_MS", low: 10, high: 1000, zero: true}
	f.carry = number{flag: "quota-carryover-percent", env: "NVSHARE_QUOTA_CARRYOVER_PERCENT", high: 100}
	f.tail = number{flag: "drop-tail-billing-percent", env: "NVSHARE_DROP_TAIL_BILLING_PERCENT", high: 100}
	f.window.add(cmd, int(account.DefaultWindow.Milliseconds()), "how long a tenant may catch up on time that its core limit allowed and that it did not use, in `milliseconds`")
	f.sample.add(cmd, 0, "how often use is compared with core limits, in `milliseconds`; 0: at the moment when a limit is reached")
	f.carry.add(cmd, 100, "how much of its use above a core limit a tenant has to make up for, in `percent`")
	f.tail.add(cmd, 100, "how much of the first 50 ms of a drain (the time from a revoke to the release) is billed, in `percent`; the rest is billed in full")
}

func (n *number) add(cmd *cobra.Command, normally int, usage string) {
	cmd.Flags().StringVar(&n.value, n.flag, cmp.Or(os.Getenv(n.env), strconv.Itoa(normally)), usage+"; default from "+n.env)
}

func (n *number) parse() (int, error) {
	v, err := strconv.Atoi(n.value)
	if err == nil && (n.low <= v && v <= n.high || n.zero && v == 0) {
		return v, nil
	}
	from := "--" + n.flag
	if n.value == os.Getenv(n.env) {
		from = n.env
	}
	possible := fmt.Sprintf("from %d to %d", n.low, n.high)
	if n.zero {
		possible += ", or 0"
	}
	return 0, fmt.Errorf("%s: %.64q is not a whole number %s", from, n.value, possible)
}

func (f *tuningFlags) tuning() (account.Tuning, error) {
	var v [4]int
	for i, n := range []*number{&f.window, &f.sample, &f.carry, &f.tail} {
		var err error
		if v[i], err = n.parse(); err != nil {
			return account.Tuning{}, err
		}
	}
	return account.Tuning{
		Window: time.Duration(v[0]) * time.Millisecond, Sample: time.Duration(v[1]) * time.Millisecond,
		DropCarry: 100 - v[2], DropTail: 100 - v[3],
	}, nil
}

// antiThrashDefault is what NVSHARE_SCHEDULING_MODE says, in the words of
// --anti-thrash.
func antiThrashDefault() string {
	switch mode := os.Getenv("NVSHARE_SCHEDULING_MODE"); mode {
	case "":
		return "auto"
	case "serial":
		return "on"
	case "concurrent":
		return "off"
	default:
		return mode // "auto"; the flag refuses anything else
	}
}

// settingsSaid returns the settings that the command line or the environment says.
func settingsSaid(fs *pflag.FlagSet) (names []string) {
	for _, s := range []struct{ setting, flag string }{
		{api.TurnLengthSetting, "tq"}, {api.AntiThrashSetting, "anti-thrash"}, {api.SwapShareSetting, "swap-share"},
	} {
		if fs.Changed(s.flag) || s.flag == "anti-thrash" && os.Getenv("NVSHARE_SCHEDULING_MODE") != "" {
			names = append(names, s.setting)
		}
	}
	return names
}

// warnWithout says which variable of nvshare's fork somebody set in vain.
func warnWithout(log logrus.FieldLogger) {
	if os.Getenv("NVSHARE_DROP_LEAD_MS") != "" {
		log.Warn("NVSHARE_DROP_LEAD_MS has no effect: what a drain takes is billed, so nothing has to be asked back early")
	}
}

// ruleFlags bound what pods may ask for, by namespace: nothing at the cost of others, unless the
// administrator has named the namespace.
type ruleFlags struct{ latency, gang, overlap, weight string }

func (f *ruleFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.latency, "latency-namespaces", "", "`namespaces` whose pods may have the priority latency, separated by commas; *: all; \"\": none. Containers outside Kubernetes may, as root starts them")
	fs.StringVar(&f.overlap, "overlap-namespaces", "", "`namespaces` whose pods may be in overlap groups, in the same form")
	fs.StringVar(&f.gang, "gang-namespaces", "", "`namespaces` whose pods may have gangs, in the same form")
	fs.StringVar(&f.weight, "max-weight", strconv.Itoa(sched.DefaultWeight), "greatest `weight` that pods may ask for, also by namespace: 100,prod=1000; \"\": no bound")
}

// namespacesIn returns the parts of a list, which is not nil.
func namespacesIn(list string) []string {
	return append([]string{}, strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })...)
}

func (f *ruleFlags) fill(o *daemon.Options) error {
	o.Rules.Latency, o.Rules.Overlap, o.Rules.Gang = namespacesIn(f.latency), namespacesIn(f.overlap), namespacesIn(f.gang)
	var err error
	if o.Rules.Weight, err = api.ParseBounds(f.weight, api.ParseWeight); err != nil {
		return fmt.Errorf("--max-weight: %w", err)
	}
	return nil
}

// swapFlags say whether memory is swapped, and how GPUs look.
type swapFlags struct {
	memory, ready, headroom, share, gpuMemory, suspendAfter, suspendDir string
	readyGiven                                                          bool
}

func (f *swapFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&f.memory, "swap-memory", "auto", "`size` of the host memory, of the whole node, for memory that is moved off GPUs, like 200Gi; auto: half of what the host can spare when it is needed; 0: nothing is moved")
	fs.StringVar(&f.ready, "swap-ready", "25%", "`size` or percentage of --swap-memory that is taken from the host before tenants need it, as far as the host can spare it; 0: nothing, as with --swap-memory auto unless a size is given")
	fs.StringVar(&f.share, "swap-share", "10", "`percentage` of the time that moving memory may take, 1 to 50: turns become longer than the time quantum for that; none: turns are as long as the time quantum")
	fs.StringVar(&f.headroom, "swap-headroom", "", "`size` of the part of each GPU that is left to the driver where more is promised than the GPU has, like 4Gi; by default a thirty-second of the GPU's memory")
	fs.StringVar(&f.suspendAfter, "suspend-after", "0", "`time` after which the memory of a process that does not use its GPU leaves the GPU until it does, like 10m; 0: never")
	fs.StringVar(&f.suspendDir, "suspend-dir", "", "`directory`, on a disk, to which the memory of suspended processes goes on when little of --swap-memory is left, as far as a sixteenth of its file system stays free; \"\": it stays in host memory")
	fs.StringVar(&f.gpuMemory, "gpu-memory", "", "let GPUs look as if they had no more memory than this `size`, like 24Gi")
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
		return errors.New("--suspend-after needs host memory for what leaves, and --swap-memory is 0")
	}
	o.SuspendAfter = after
	return nil
}
