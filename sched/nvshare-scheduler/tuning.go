// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"slices"
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
	value := os.Getenv(n.env)
	if value == "" {
		value = strconv.Itoa(normally)
	}
	cmd.Flags().StringVar(&n.value, n.flag, value, usage+"; default from "+n.env)
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

// without are variables of other nvshare schedulers that have no effect here,
// and why.
var without = map[string]string{
	"NVSHARE_SWITCH_TIME_MODE":       "turns are as long as --tq says",
	"NVSHARE_SWITCH_TIME_FIXED":      "turns are as long as --tq says",
	"NVSHARE_SWITCH_TIME_MULTIPLIER": "turns are as long as --tq says",
	"NVSHARE_MAX_RUNTIME_SEC":        "turns are as long as --tq says, and asked back when somebody waits",
	"NVSHARE_DROP_LEAD_MS":           "what a drain takes is billed, so nothing has to be asked back early",
	"NVSHARE_DEFAULT_GPU_MEMORY_GB":  "the driver says how much memory a GPU has",
	"NVSHARE_MEMORY_RESERVE_PERCENT": "--anti-thrash auto has tenants take turns from 90 % on",
}

// warnWithout says which variables somebody set in vain.
func warnWithout(log logrus.FieldLogger) {
	var names []string
	for name := range without {
		if os.Getenv(name) != "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		log.Warnf("%s has no effect: %s", name, without[name])
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
