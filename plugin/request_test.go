// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	nriplugin "github.com/containerd/nri/pkg/plugin"
)

const uuid = "GPU-51600000-0000-4000-8000-000000000001"

var known = []string{"0", "1", "GPU-51600000-0000-4000-8000-000000000000", uuid, "all"}

// parsed is parseRequest with one error.
func parsed(annotations map[string]string, container string, known []string) (Request, error) {
	r, choiceErr, termsErr := parseRequest(annotations, container, known)
	return r, errors.Join(choiceErr, termsErr)
}

// The annotations that README and the recipes show, those behind a comment sign too, are ones that
// the plugin knows, with values that it takes, and each says something.
func TestAnnotationsOfREADME(t *testing.T) {
	page, err := os.ReadFile("../README.md")
	more, moreErr := os.ReadFile("../sched/sharing.md")
	if err := errors.Join(err, moreErr); err != nil {
		t.Fatal(err)
	}
	page = append(page, more...)
	recipes, err := filepath.Glob("../deployments/recipes/*.md")
	for _, recipe := range recipes {
		text, readErr := os.ReadFile(recipe)
		err = errors.Join(err, readErr)
		page = append(page, text...)
	}
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?ms)^```(?:yaml|toml)\n(.*?)^```$").FindAllStringSubmatch(string(page), -1)
	pair := regexp.MustCompile(`([a-z.-]*nvshare\.com[a-z./-]*)(?:: |" = )(?:"([^"]*)"|([^\s"{},]+))`)
	n := 0
	for _, block := range blocks {
		for _, m := range pair.FindAllStringSubmatch(block[1], -1) {
			n++
			key, value := m[1], m[2]+m[3]
			annotations := map[string]string{key: value}
			nothing, _ := parsed(nil, "train", known)
			r, err := parsed(annotations, "train", known)
			if text := UnknownAnnotations(annotations); err != nil || text != "" {
				t.Errorf("%s: %q: %v %s", key, value, err, text)
			} else if value != "batch" && fmt.Sprint(r) == fmt.Sprint(nothing) {
				t.Errorf("%s: %q asks for nothing", key, value)
			}
		}
	}
	if len(blocks) < 12 || n < 40 {
		t.Errorf("found %d annotations in %d blocks: the pattern is wrong", n, len(blocks))
	}
}

func TestParseRequest(t *testing.T) {
	for name, c := range map[string]struct {
		annotations map[string]string
		want        []string
		says        string // part of the error
	}{
		"none":                 {nil, nil, ""},
		"other annotations":    {map[string]string{"nvshare.com/gpu-core-limit": "5", "nvshare.com/gpu-of-later": "x", "x/nvshare.com/gpu": "y"}, nil, ""},
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
		"bare index":          {map[string]string{Annotation: "1,nvshare.com/gpu=0"}, nil, "write nvshare.com/gpu=1"},
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
		got, err := parsed(c.annotations, "main", known)
		if !slices.Equal(got.Devices, c.want) || (err == nil) != (c.says == "") || (err != nil && !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: got %v, %v; want %v, %q", name, got.Devices, err, c.want, c.says)
		}
	}
	if _, err := parsed(map[string]string{Annotation: "nvshare.com/gpu=0"}, "main", nil); err == nil || !strings.Contains(err.Error(), "no GPU") {
		t.Errorf("node without GPU: %v", err)
	}
}

// The scopes are NRI's own.
func TestScopesAgreeWithNRI(t *testing.T) {
	for _, name := range []string{Annotation, MemoryLimitAnnotation} {
		keys := []string{name, name + "/pod", name + "/container.main", name + "/container.side"}
		for set := range 1 << len(keys) {
			annotations := map[string]string{}
			for i, k := range keys {
				if set&(1<<i) != 0 {
					annotations[k] = k
				}
			}
			_, got, ok := annotationFor(annotations, name, "main")
			want, wantOK := nriplugin.GetEffectiveAnnotation(&api.PodSandbox{Annotations: annotations}, name, "main")
			if got != want || ok != wantOK {
				t.Errorf("%v: got %q %v, NRI says %q %v", annotations, got, ok, want, wantOK)
			}
		}
	}
}

func TestMemoryLimit(t *testing.T) {
	const key = MemoryLimitAnnotation
	for name, c := range map[string]struct {
		annotations map[string]string
		want        uint64
		says        string // part of the error
	}{
		"none":               {map[string]string{Annotation: "nvshare.com/gpu=0"}, 0, ""},
		"quantity":           {map[string]string{key: "8Gi"}, 8 << 30, ""},
		"decimal unit":       {map[string]string{key: "4G"}, 4e9, ""},
		"bare number":        {map[string]string{key: "4096"}, 4 << 30, ""},
		"spaces around":      {map[string]string{key: " 4096Mi\n"}, 4 << 30, ""},
		"for the container":  {map[string]string{key: "8Gi", key + "/pod": "4Gi", key + "/container.main": "2Gi"}, 2 << 30, ""},
		"for another":        {map[string]string{key + "/container.side": "2Gi"}, 0, ""},
		"key for Kubernetes": {map[string]string{key: "8Gi", "gpu-memory-limit.nvshare.com/container.main": "2Gi"}, 2 << 30, ""},
		"pod, Kubernetes":    {map[string]string{key: "8Gi", "gpu-memory-limit.nvshare.com/pod": "2Gi"}, 2 << 30, ""},

		"nonsense":              {map[string]string{key: "lots"}, 0, `annotation nvshare.com/gpu-memory-limit="lots": "lots" is not a size of memory`},
		"empty":                 {map[string]string{key: ""}, 0, `annotation nvshare.com/gpu-memory-limit=""`},
		"unit that is none":     {map[string]string{key: "8GB"}, 0, "did you mean 8G?"},
		"negative":              {map[string]string{key: "-8Gi"}, 0, "a quantity such as 8Gi"},
		"zero":                  {map[string]string{key: "0"}, 0, "less than 1Mi"},
		"millibytes":            {map[string]string{key: "8m"}, 0, "a quantity such as 8Gi"},
		"too large":             {map[string]string{key: "99E"}, 0, "more than 1Pi"},
		"hours of work":         {map[string]string{key: "1e999999999"}, 0, "a quantity such as 8Gi"},
		"nonsense in the scope": {map[string]string{key: "8Gi", "gpu-memory-limit.nvshare.com/container.main": "x"}, 0, `annotation gpu-memory-limit.nvshare.com/container.main="x"`},
	} {
		got, err := parsed(c.annotations, "main", known)
		if got.Terms.MemoryLimit != c.want || (err == nil) != (c.says == "") || (err != nil && !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: got %v, %v; want %v, %q", name, got.Terms.MemoryLimit, err, c.want, c.says)
		}
	}
	long := strings.Repeat("9", 200<<10)
	if _, err := parsed(map[string]string{key: long}, "main", known); err == nil || len(err.Error()) > 8*maxShown {
		t.Errorf("error of %d bytes", len(fmt.Sprint(err)))
	}
}

// What pods say may be long; what we say of it is not.
func TestErrorsAreShort(t *testing.T) {
	long := strings.Repeat("x", 200<<10)
	for _, value := range []string{long, "nvshare.com/gpu=" + long, long + "=0", "nvshare.com/gpu=0," + long} {
		_, err := parsed(map[string]string{Annotation: value}, "main", known)
		if err == nil || len(err.Error()) > 8*maxShown || !strings.Contains(err.Error(), value[:maxShown]) {
			t.Errorf("error of %d bytes for %.60q", len(fmt.Sprint(err)), value)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	for _, v := range []string{"nvshare.com/gpu=0,nvshare.com/gpu=all", "2", " 1 ", "0", "none", "+1", "0x1", "1e1", "99999999999999999999", "٢"} {
		f.Add(v)
	}
	f.Fuzz(func(t *testing.T, value string) {
		got, err := parsed(map[string]string{Annotation: value}, "main", known)
		if err == nil && len(got.Devices) == 0 && got.Count == 0 && strings.TrimSpace(value) != noGPU {
			t.Fatalf("%q is neither met nor refused", value)
		}
		if got.Count < 0 || got.Count > maxDevices || got.Count > 0 && (err != nil || len(got.Devices) > 0) {
			t.Fatalf("%q gave %+v, %v", value, got, err)
		}
		for _, d := range got.Devices {
			if !slices.Contains(known, d) {
				t.Fatalf("%q gave unknown device %q", value, d)
			}
		}
	})
}
