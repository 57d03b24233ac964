// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sort"

	"github.com/nvshare/nvshare/tests/node"
)

// launchPairs is how often native and shim are run in turn.
const launchPairs = 25

// launchSample is what one run of launch-cost printed: nanoseconds per call.
type launchSample struct {
	LaunchNS   float64 `json:"launch_ns"`
	LaunchExNS float64 `json:"launch_ex_ns"`
}

type launchResult struct {
	Native []launchSample `json:"native"`
	Shim   []launchSample `json:"shim"`
	// Medians over the runs, and their difference, nanoseconds per call.
	NativeNS  launchSample `json:"native_median"`
	ShimNS    launchSample `json:"shim_median"`
	AddedNS   launchSample `json:"added"`
	PairedAdd launchSample `json:"added_median_of_pairs"`
}

// launchCost compares launch-cost with and without the shim, arbitrated by
// the scheduler, no other tenant present.
func (b *bench) launchCost(ctx context.Context) error {
	var r launchResult
	for i := range launchPairs {
		// In turn native first and shim first: what drifts hits both.
		for j := range 2 {
			shim := (i+j)%2 == 1
			s, err := b.launchRun(ctx, shim)
			if err != nil {
				return err
			}
			if shim {
				r.Shim = append(r.Shim, s)
			} else {
				r.Native = append(r.Native, s)
			}
		}
	}
	r.NativeNS, r.ShimNS = medians(r.Native), medians(r.Shim)
	r.AddedNS = difference(r.ShimNS, r.NativeNS)
	pairs := make([]launchSample, launchPairs)
	for i := range pairs {
		pairs[i] = difference(r.Shim[i], r.Native[i])
	}
	r.PairedAdd = medians(pairs)
	fmt.Printf("launch: native %.0f ns, with the shim %.0f ns: %+.1f ns; cuLaunchKernelEx %.0f, %.0f: %+.1f ns (medians of %d)\n",
		r.NativeNS.LaunchNS, r.ShimNS.LaunchNS, r.AddedNS.LaunchNS,
		r.NativeNS.LaunchExNS, r.ShimNS.LaunchExNS, r.AddedNS.LaunchExNS, launchPairs)
	return b.saveJSON("launch.json", r)
}

func (b *bench) launchRun(ctx context.Context, shim bool) (launchSample, error) {
	var s launchSample
	cmd := exec.CommandContext(ctx, filepath.Join(b.bundle, "bin", "launch-cost"), "150", "500")
	cmd.Env = os.Environ()
	if shim {
		cmd.Env = append(cmd.Env, "LD_PRELOAD="+b.node.Shim(), "NVSHARE_RUN_DIR="+node.RunDir)
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(out, &s)
}

func difference(a, b launchSample) launchSample {
	return launchSample{a.LaunchNS - b.LaunchNS, a.LaunchExNS - b.LaunchExNS}
}

func medians(samples []launchSample) launchSample {
	pick := func(f func(launchSample) float64) float64 {
		v := make([]float64, len(samples))
		for i, s := range samples {
			v[i] = f(s)
		}
		return median(v)
	}
	return launchSample{
		pick(func(s launchSample) float64 { return s.LaunchNS }),
		pick(func(s launchSample) float64 { return s.LaunchExNS }),
	}
}

func median(v []float64) float64 {
	v = append([]float64(nil), v...)
	sort.Float64s(v)
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}
