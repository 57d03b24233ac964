// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/plugin/placement"
)

func TestParseCount(t *testing.T) {
	type a = map[string]string
	const request = CoreRequestAnnotation
	for name, c := range map[string]struct {
		annotations a
		count       int
		devices     string
		says        string // part of the error
	}{
		"a count":                           {a{Annotation: "2"}, 2, "", ""},
		"with spaces":                       {a{Annotation: " 1\n"}, 1, "", ""},
		"of a container":                    {a{Annotation: "nvshare.com/gpu=0", "gpu.nvshare.com/container.main": "3"}, 3, "", ""},
		"of the pod":                        {a{"gpu.nvshare.com/pod": "3"}, 3, "", ""},
		"of another container":              {a{Annotation + "/container.side": "3"}, 0, "", ""},
		"as many as names":                  {a{Annotation: "128"}, 128, "", ""},
		"an index is no count":              {a{Annotation: "nvshare.com/gpu=1"}, 0, "1", ""},
		"with a part":                       {a{Annotation: "2", request: "40"}, 2, "", ""},
		"just a part":                       {a{request: "40"}, 1, "", ""},
		"just a part, of the container":     {a{"gpu-core-request.nvshare.com/container.main": "40"}, 1, "", ""},
		"just a part, of another":           {a{"gpu-core-request.nvshare.com/container.side": "40"}, 0, "", ""},
		"a part of a named one":             {a{request: "40", Annotation: "nvshare.com/gpu=1"}, 0, "1", ""},
		"a part, others are named":          {a{request: "40", "gpu.nvshare.com/container.side": "nvshare.com/gpu=1"}, 0, "", ""},
		"a part, others are counted":        {a{request: "40", Annotation + "/container.side": "1"}, 0, "", ""},
		"a part, and not for this":          {a{request: "40", "gpu.nvshare.com/container.main": "none"}, 0, "", ""},
		"a part, and not for another":       {a{request: "40", "gpu.nvshare.com/container.side": " none "}, 1, "", ""},
		"none of the pod's":                 {a{Annotation: "2", Annotation + "/container.main": "none"}, 0, "", ""},
		"memory alone asks for nothing":     {a{MemoryLimitAnnotation: "4Gi", CoreLimitAnnotation: "40"}, 0, "", ""},
		"nor do keys that are like ours":    {a{request: "40", "nvshare.com/gpustat": "1", "nvshare.com/gpu-y/x": "1", "gpu.nvshare.community": "1"}, 1, "", ""},
		"zero":                              {a{Annotation: "0"}, 0, "", `annotation nvshare.com/gpu="0": 0 is not a count of GPUs: write nvshare.com/gpu=0 for the GPU with index 0, or none`},
		"negative":                          {a{Annotation: "-1"}, 0, "", "not a count"},
		"signed":                            {a{Annotation: "+1"}, 0, "", "not a count"},
		"a leading zero":                    {a{Annotation: "01"}, 0, "", "not a count"},
		"a fraction":                        {a{Annotation: "0.4"}, 0, "", `nvshare.com/gpu-core-request: "40"`},
		"percent":                           {a{Annotation: "40%"}, 0, "", `nvshare.com/gpu-core-request: "40"`},
		"too many":                          {a{Annotation: "129"}, 0, "", "more than 128 GPUs"},
		"far too many":                      {a{Annotation: strings.Repeat("9", 1<<20)}, 0, "", "not a count"},
		"a count and a name":                {a{Annotation: "1,nvshare.com/gpu=0"}, 0, "", "not a CDI device name"},
		"a word":                            {a{Annotation: "None"}, 0, "", "not a CDI device name"},
		"other digits":                      {a{Annotation: "٢"}, 0, "", "not a CDI device name"},
		"a part that is wrong asks nothing": {a{request: "400"}, 0, "", request},
	} {
		got, err := parsed(c.annotations, "main", known)
		if got.Count != c.count || strings.Join(got.Devices, ",") != c.devices || (err == nil) != (c.says == "") || !strings.Contains(fmt.Sprint(err), c.says) && err != nil {
			t.Errorf("%s: got %d and %q, %v; want %d and %q, %q", name, got.Count, got.Devices, err, c.count, c.devices, c.says)
		}
		if err != nil && len(err.Error()) > 8*maxShown {
			t.Errorf("%s: error of %d bytes", name, len(err.Error()))
		}
		if key, value, asks := askedBy(c.annotations, "main"); asks != (got.Count > 0 || len(got.Devices) > 0 || err != nil) || asks && c.annotations[key] != value {
			t.Errorf("%s: asked by %q=%.100q: %v", name, key, value, asks)
		}
	}
}

func TestParseLabels(t *testing.T) {
	for name, c := range map[string]struct {
		annotations map[string]string
		want        placement.Labels
		says        string
	}{
		"none": {nil, placement.Labels{}, ""},
		"all": {map[string]string{AffinityAnnotation: "red", "gpu-anti-affinity.nvshare.com/pod": "a.b-c_9", "gpu-exclusion.nvshare.com/container.main": " X "},
			placement.Labels{Affinity: "red", AntiAffinity: "a.b-c_9", Exclusion: "X"}, ""},
		"of another": {map[string]string{ExclusionAnnotation + "/container.side": "x"}, placement.Labels{}, ""},
		"narrowest":  {map[string]string{ExclusionAnnotation: "x", ExclusionAnnotation + "/container.main": "y"}, placement.Labels{Exclusion: "y"}, ""},
		"empty":      {map[string]string{ExclusionAnnotation: ""}, placement.Labels{}, `annotation nvshare.com/gpu-exclusion="": not a label`},
		"of another namespace": {map[string]string{AffinityAnnotation: "prod/red", AntiAffinityAnnotation: "ok"}, placement.Labels{AntiAffinity: "ok"},
			`annotation nvshare.com/gpu-affinity="prod/red": not a label`},
		"long": {map[string]string{AntiAffinityAnnotation: strings.Repeat("x", 64)}, placement.Labels{}, "up to 63"},
	} {
		got, err := parsed(c.annotations, "main", known)
		if got.Labels != c.want || (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got %+v, %v; want %+v, %q", name, got.Labels, err, c.want, c.says)
		}
	}
	if l := labelsIn("ml", placement.Labels{Affinity: "red", Exclusion: "x"}); l != (placement.Labels{Affinity: "ml/red", Exclusion: "ml/x"}) {
		t.Errorf("in a namespace: %+v", l)
	}
}
