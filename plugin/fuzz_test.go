// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/mutants"
)

func FuzzRequest(f *testing.F) {
	for _, s := range requestSeeds() {
		f.Add(s[0].(string), s[1].(string), s[2].(string), s[3].(string), s[4].(uint8))
	}
	f.Fuzz(requests)
}

func TestRequestMutants(t *testing.T) {
	mutants.Run(t, requestSeeds(), func(t *testing.T, in []any) {
		requests(t, in[0].(string), in[1].(string), in[2].(string), in[3].(string), in[4].(uint8))
	})
}

func requestSeeds() (seeds [][]any) {
	for _, v := range [][3]string{
		{"0", "8Gi", "50"}, {"all", "4096Mi", "0"}, {"nvshare.com/gpu=0,nvshare.com/gpu=1", "4096", "101"},
		{"2", "4G", "-1"}, {"GPU-51600000-0000-4000-8000-000000000000", "1e3", "50%"}, {",,", "9223372036854775808", "latency"},
		{"3", "red", "blue"}, {"none", "a.b_c-d", "x/y"}, {"129", "-1", "0.5"},
		{"", " ", "\x00\n"}, {strings.Repeat("0,", 200), "١", "true"},
	} {
		seeds = append(seeds, []any{v[0], v[1], v[2], "app", uint8(0)})
	}
	return seeds
}

// Who makes pods may write anything into their annotations: what comes out is a
// request that the scheduler takes, and errors that are fit for a log.
func requests(t *testing.T, devices, memory, other, container string, scope uint8) {
	known := []string{"0", "1", "all", "GPU-51600000-0000-4000-8000-000000000000", "GPU-51600000-0000-4000-8000-000000000001"}
	scopes := []string{"", "/pod", "/container.app"}
	suffix := scopes[int(scope)%len(scopes)]
	r, err := parsed(map[string]string{
		Annotation + suffix:            devices,
		MemoryLimitAnnotation + suffix: memory,
		CoreLimitAnnotation:            other,
		CoreRequestAnnotation + suffix: memory,
		WeightAnnotation + suffix:      other,
		PriorityAnnotation:             devices,
		GangAnnotation + "/pod":        other,
		AffinityAnnotation:             memory,
		AntiAffinityAnnotation:         other,
		ExclusionAnnotation + suffix:   devices,
	}, container, known)
	if err != nil && (len(err.Error()) > 16<<10 || strings.ContainsAny(err.Error(), "\x00\x1b")) {
		t.Fatalf("the error is %d bytes: %.300q", len(err.Error()), err)
	}
	if len(r.Devices) > maxDevices {
		t.Fatalf("%d devices", len(r.Devices))
	}
	if r.Count < 0 || r.Count > maxDevices || r.Count > 0 && len(r.Devices) > 0 {
		t.Fatalf("%d GPUs and %q", r.Count, r.Devices)
	}
	for _, l := range []string{r.Labels.Affinity, r.Labels.AntiAffinity, r.Labels.Exclusion} {
		if len(l) > 63 || strings.ContainsAny(l, "/,=\" \n") {
			t.Fatalf("label %q", l)
		}
	}
	for i, d := range r.Devices {
		if slices.Contains(r.Devices[:i], d) {
			t.Fatalf("%q twice in %q", d, r.Devices)
		}
	}
	if err := errors.Join(r.Terms.Validate(), r.Terms.Consistent()); err != nil {
		t.Fatalf("the scheduler would refuse what the annotations gave: %v", err)
	}
}
