// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/tests/quantile"
)

// launchPairs is how often native and shim are run in turn.
const launchPairs = 25

// What launch-cost times, and how often. Allocations are slow on every driver.
var launchRuns = []struct {
	kinds          string
	batches, calls string
	pairs          int
}{
	{"launch,launch_ex,copy,copy_uva,event,event_query,rt_launch,rt_launch_ex,rt_copy,rt_event", "60", "500", launchPairs},
	{"async,async_kept", "60", "200", launchPairs},
	{"alloc", "20", "20", 7},
}

// launchSample is what one run of launch-cost printed: nanoseconds per call.
type launchSample map[string]float64

type launchResult struct {
	Runtime string         `json:"runtime,omitempty"` // the CUDA runtime's library
	Native  []launchSample `json:"native"`
	Shim    []launchSample `json:"shim"`
	// Medians over the runs, and their difference, nanoseconds per call.
	NativeNS  launchSample `json:"native_median"`
	ShimNS    launchSample `json:"shim_median"`
	AddedNS   launchSample `json:"added"`
	PairedAdd launchSample `json:"added_median_of_pairs"`
	Said      string       `json:"runtime_said,omitempty"`
}

// launchCost compares launch-cost with and without the shim, arbitrated by
// the scheduler, no other tenant present.
func (b *bench) launchCost(ctx context.Context, _ string) error {
	all := launchResult{Runtime: b.cudart(ctx), NativeNS: launchSample{}, ShimNS: launchSample{}, AddedNS: launchSample{}, PairedAdd: launchSample{}}
	for _, run := range launchRuns {
		r := launchResult{Runtime: all.Runtime}
		pairs := run.pairs
		if b.cells.quick {
			pairs = min(pairs, 5)
		}
		args := []string{"--only", run.kinds}
		if r.Runtime != "" {
			args = append(args, "--runtime", r.Runtime)
		}
		for i := range pairs {
			// In turn native first and shim first: what drifts hits both.
			for j := range 2 {
				shim := (i+j)%2 == 1
				s, said, err := b.launchRun(ctx, shim, append(args, run.batches, run.calls)...)
				if err != nil {
					return err
				}
				all.Said = said
				if shim {
					r.Shim = append(r.Shim, s)
				} else {
					r.Native = append(r.Native, s)
				}
			}
		}
		var added []launchSample
		for i := range pairs {
			added = append(added, less(r.Shim[i], r.Native[i]))
		}
		maps.Copy(all.NativeNS, medians(r.Native))
		maps.Copy(all.ShimNS, medians(r.Shim))
		maps.Copy(all.PairedAdd, medians(added))
		all.Native, all.Shim = append(all.Native, r.Native...), append(all.Shim, r.Shim...)
	}
	all.AddedNS = less(all.ShimNS, all.NativeNS)
	fmt.Printf("CUDA runtime: %s %s\n%-16s %10s %10s %10s %10s\n", all.Runtime, all.Said, "ns per call", "native", "shim", "added", "of pairs")
	for _, name := range slices.Sorted(maps.Keys(all.NativeNS)) {
		fmt.Printf("%-16s %10.1f %10.1f %+10.1f %+10.1f\n", strings.TrimSuffix(name, "_ns"),
			all.NativeNS[name], all.ShimNS[name], all.AddedNS[name], all.PairedAdd[name])
	}
	return b.saveJSON("launch.json", all)
}

// cudart is the newest CUDA runtime among the interpreter's packages, or the
// toolkit's; empty if there is none.
func (b *bench) cudart(ctx context.Context) string {
	var found []string
	if out, err := exec.CommandContext(ctx, b.python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").Output(); err == nil {
		found, _ = filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "nvidia", "*", "lib", "libcudart.so.1[2-9]*"))
	}
	if len(found) == 0 {
		found, _ = filepath.Glob("/usr/local/cuda*/lib64/libcudart.so.1[2-9]*")
	}
	if len(found) == 0 {
		return ""
	}
	return slices.MaxFunc(found, func(a, b string) int { return strings.Compare(filepath.Base(a), filepath.Base(b)) })
}

func (b *bench) launchRun(ctx context.Context, shim bool, args ...string) (launchSample, string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(b.bundle, "bin", "launch-cost"), args...)
	who := native
	if shim {
		who = shim1
	}
	cmd.Env = append(os.Environ(), b.tenantEnv(who, "")...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, "", fmt.Errorf("%v: %w", cmd.Args, err)
	}
	var printed map[string]any
	if err := json.Unmarshal(out, &printed); err != nil {
		return nil, "", err
	}
	s := launchSample{}
	for name, v := range printed {
		if ns, ok := v.(float64); ok && strings.HasSuffix(name, "_ns") {
			s[name] = ns
		}
	}
	said, _ := printed["runtime"].(string)
	return s, said, nil
}

// less is a minus b, of what both have.
func less(a, b launchSample) launchSample {
	d := launchSample{}
	for name, v := range a {
		if w, ok := b[name]; ok {
			d[name] = v - w
		}
	}
	return d
}

func medians(samples []launchSample) launchSample {
	m := launchSample{}
	for name := range samples[0] {
		var v []float64
		for _, s := range samples {
			v = append(v, s[name])
		}
		m[name] = median(v)
	}
	return m
}

func median(v []float64) float64 { return quantile.Of(v, 0.5) }
