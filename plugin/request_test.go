// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	nriplugin "github.com/containerd/nri/pkg/plugin"
)

const uuid = "GPU-51600000-0000-4000-8000-000000000001"

var known = []string{"0", "1", "GPU-51600000-0000-4000-8000-000000000000", uuid, "all"}

func TestParseRequest(t *testing.T) {
	for name, c := range map[string]struct {
		annotations map[string]string
		want        []string
		says        string // part of the error
	}{
		"none":                 {nil, nil, ""},
		"other annotations":    {map[string]string{"nvshare.com/gpu-core-limit": "5", "x/nvshare.com/gpu": "y"}, nil, ""},
		"index":                {map[string]string{Annotation: "nvshare.com/gpu=0"}, []string{"0"}, ""},
		"UUID":                 {map[string]string{Annotation: "nvshare.com/gpu=" + uuid}, []string{uuid}, ""},
		"all":                  {map[string]string{Annotation: "nvshare.com/gpu=all"}, []string{"all"}, ""},
		"several, with spaces": {map[string]string{Annotation: " nvshare.com/gpu=1 ,nvshare.com/gpu=0"}, []string{"1", "0"}, ""},
		"repeated":             {map[string]string{Annotation: "nvshare.com/gpu=0,nvshare.com/gpu=0"}, []string{"0"}, ""},
		"all and others":       {map[string]string{Annotation: "nvshare.com/gpu=0,nvshare.com/gpu=all"}, []string{"all"}, ""},

		"for the container":     {map[string]string{Annotation + "/container.main": "nvshare.com/gpu=1"}, []string{"1"}, ""},
		"for another container": {map[string]string{Annotation + "/container.side": "nvshare.com/gpu=1"}, nil, ""},
		"for the pod":           {map[string]string{Annotation + "/pod": "nvshare.com/gpu=1"}, []string{"1"}, ""},
		"container before pod": {map[string]string{Annotation: "nvshare.com/gpu=7", Annotation + "/pod": "nvshare.com/gpu=8",
			Annotation + "/container.main": "nvshare.com/gpu=1"}, []string{"1"}, ""},
		"pod before bare":      {map[string]string{Annotation: "nvshare.com/gpu=7", Annotation + "/pod": "nvshare.com/gpu=1"}, []string{"1"}, ""},
		"key for Kubernetes":   {map[string]string{"gpu.nvshare.com/container.main": "nvshare.com/gpu=1"}, []string{"1"}, ""},
		"narrower, other form": {map[string]string{Annotation: "nvshare.com/gpu=0", "gpu.nvshare.com/pod": "nvshare.com/gpu=1"}, []string{"1"}, ""},

		"empty":               {map[string]string{Annotation: ""}, nil, `annotation nvshare.com/gpu="": empty`},
		"blank":               {map[string]string{Annotation: "  "}, nil, "empty"},
		"no such index":       {map[string]string{Annotation: "nvshare.com/gpu=99"}, nil, `annotation nvshare.com/gpu="nvshare.com/gpu=99": no device "nvshare.com/gpu=99": this node has nvshare.com/gpu=0, `},
		"no such UUID":        {map[string]string{Annotation: "nvshare.com/gpu=GPU-1"}, nil, "nvshare.com/gpu=" + uuid},
		"no name":             {map[string]string{Annotation: "nvshare.com/gpu="}, nil, `no device "nvshare.com/gpu="`},
		"bare index":          {map[string]string{Annotation: "1"}, nil, "write nvshare.com/gpu=1"},
		"bare word":           {map[string]string{Annotation: "yes"}, nil, "write nvshare.com/gpu=<index>"},
		"another vendor":      {map[string]string{Annotation: "nvidia.com/gpu=0"}, nil, `"nvidia.com/gpu"`},
		"the internal kind":   {map[string]string{Annotation: "nvshare.com/gpu-nri=0"}, nil, `"nvshare.com/gpu-nri"`},
		"comma at the end":    {map[string]string{Annotation: "nvshare.com/gpu=0,"}, nil, "comma"},
		"other separator":     {map[string]string{Annotation: "nvshare.com/gpu=0;nvshare.com/gpu=1"}, nil, "no device"},
		"newline":             {map[string]string{Annotation: "nvshare.com/gpu=0\nx"}, nil, "no device"},
		"one good, one bad":   {map[string]string{Annotation: "nvshare.com/gpu=0,nvshare.com/gpu=99"}, nil, "99"},
		"too many":            {map[string]string{Annotation: strings.Repeat("nvshare.com/gpu=0,", 200) + "nvshare.com/gpu=0"}, nil, "more than 128"},
		"bad in the suffix":   {map[string]string{Annotation: "nvshare.com/gpu=0", Annotation + "/container.main": "no"}, nil, "nvshare.com/gpu/container.main"},
		"empty beats a pod's": {map[string]string{Annotation: "nvshare.com/gpu=0", Annotation + "/container.main": ""}, nil, "empty"},
	} {
		got, err := ParseRequest(c.annotations, "main", known)
		if !slices.Equal(got.Devices, c.want) || (err == nil) != (c.says == "") || (err != nil && !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: got %v, %v; want %v, %q", name, got.Devices, err, c.want, c.says)
		}
	}
	if _, err := ParseRequest(map[string]string{Annotation: "nvshare.com/gpu=0"}, "main", nil); err == nil || !strings.Contains(err.Error(), "no GPU") {
		t.Errorf("node without GPU: %v", err)
	}
}

// The scopes are NRI's own.
func TestScopesAgreeWithNRI(t *testing.T) {
	keys := []string{Annotation, Annotation + "/pod", Annotation + "/container.main", Annotation + "/container.side"}
	for set := range 1 << len(keys) {
		annotations := map[string]string{}
		for i, k := range keys {
			if set&(1<<i) != 0 {
				annotations[k] = k
			}
		}
		_, got, ok := annotationFor(annotations, "main")
		want, wantOK := nriplugin.GetEffectiveAnnotation(&api.PodSandbox{Annotations: annotations}, Annotation, "main")
		if got != want || ok != wantOK {
			t.Errorf("%v: got %q %v, NRI says %q %v", annotations, got, ok, want, wantOK)
		}
	}
}

// What pods say may be long; what we say of it is not.
func TestErrorsAreShort(t *testing.T) {
	long := strings.Repeat("x", 200<<10)
	for _, value := range []string{long, "nvshare.com/gpu=" + long, long + "=0", "nvshare.com/gpu=0," + long} {
		_, err := ParseRequest(map[string]string{Annotation: value}, "main", known)
		if err == nil || len(err.Error()) > 8*maxShown || !strings.Contains(err.Error(), value[:maxShown]) {
			t.Errorf("error of %d bytes for %.60q", len(fmt.Sprint(err)), value)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add("nvshare.com/gpu=0,nvshare.com/gpu=all")
	f.Fuzz(func(t *testing.T, value string) {
		got, err := ParseRequest(map[string]string{Annotation: value}, "main", known)
		if err == nil && len(got.Devices) == 0 {
			t.Fatalf("%q is neither met nor refused", value)
		}
		for _, d := range got.Devices {
			if !slices.Contains(known, d) {
				t.Fatalf("%q gave unknown device %q", value, d)
			}
		}
	})
}
