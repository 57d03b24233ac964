// SPDX-License-Identifier: Apache-2.0

package readme

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	sigs "sigs.k8s.io/yaml"
)

func recipes(t *testing.T) []string {
	t.Helper()
	pages, err := filepath.Glob("../../deployments/recipes/*.md")
	if err != nil || len(pages) < 10 {
		t.Fatalf("%v, %v", pages, err)
	}
	return pages
}

// What recipes have for Kubernetes are objects of its API, or hold pods of it: no field is unknown.
// plugin tries the annotations.
func TestManifestsOfRecipes(t *testing.T) {
	blocks, err := Blocks(recipes(t)...)
	if err != nil {
		t.Fatal(err)
	}
	decode := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer().Decode
	kinds := map[string]int{}
	for _, block := range blocks {
		kinds[block.Language]++
		switch block.Language {
		case "sh": // TestCommandsOfRecipes
		case "yaml":
			var any map[string]any
			if err := yaml.Unmarshal([]byte(block.Text), &any); err != nil {
				t.Errorf("%v:\n%s", err, block.Text)
				continue
			}
			if any["kind"] != nil {
				if _, _, err := decode([]byte(block.Text), nil, nil); err == nil || !runtime.IsNotRegisteredError(err) {
					if err != nil {
						t.Errorf("%v:\n%s", err, block.Text)
					}
					continue
				}
			}
			kinds["pods of others"] += podsIn(t, any)
		case "toml", "ini": // plugin tries the annotations, TestSlurm the settings
		default:
			t.Errorf("nothing tries this block:\n%s", block.Text)
		}
	}
	if kinds["yaml"] < 5 || kinds["pods of others"] < 3 {
		t.Errorf("found %v: a pattern is wrong", kinds)
	}
}

// podsIn checks each pod template in values of a chart, or in an object of somebody else's kind.
func podsIn(t *testing.T, v any) (n int) {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			if key != "template" {
				n += podsIn(t, value)
				continue
			}
			n++
			text, err := sigs.Marshal(value)
			var pod corev1.PodTemplateSpec
			if err := errors.Join(err, sigs.UnmarshalStrict(text, &pod)); err != nil {
				t.Errorf("%v:\n%s", err, text)
			}
		}
	case []any:
		for _, value := range v {
			n += podsIn(t, value)
		}
	}
	return n
}

// The commands of each recipe work as they are printed, one page at a time: its programs, for which
// cuda-busy stands, run side by side, see their limit as the GPU's size, and the scheduler has their
// names; then come the other lines, which are about them.
func TestCommandsOfRecipes(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: tenants of their own are cgroups")
	}
	const whole = 80 << 10 // MiB, as the pages say
	b := newBed(t, fmt.Sprintf("gpus=1\nmemory_mib=%d\n", whole), "--swap-memory", "1Gi")
	built := build(t)
	bin := t.TempDir()
	b.env = append(b.env, "PATH="+bin+":"+b.path, "USER=root")
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write("id", "echo 4711") // of ann, bob, ollama and runner
	memory, name := regexp.MustCompile(`--memory-limit (\d+)Gi`), regexp.MustCompile(`--name (\S+)`)
	ran := 0
	for _, page := range recipes(t) {
		t.Run(strings.TrimSuffix(filepath.Base(page), ".md"), func(t *testing.T) {
			var after []string
			for i, line := range commands(t, page) {
				line = strings.TrimPrefix(line, "sudo ")
				options, program, runs := strings.Cut(line, " -- ")
				if !strings.HasPrefix(line, "nvsharectl") {
					if !isElsewhere(t, line) {
						t.Errorf("nothing runs %q", line)
					}
					continue
				}
				if !runs {
					after = append(after, line)
					continue
				}
				ran++
				want := whole
				if m := memory.FindStringSubmatch(options); m != nil {
					_, _ = fmt.Sscan(m[1], &want)
					want <<= 10
				}
				// It looks again, because NVML tells the GPU's own size where the scheduler does not answer within 0.2 s.
				said := filepath.Join(t.TempDir(), fmt.Sprint(i))
				write(strings.Fields(program)[0], fmt.Sprintf("until %[1]s/gpu-sizes | tee /dev/stderr | grep -q ' / %[2]dMiB'; do :; done\nexec %[1]s/cuda-busy --kernel-us 200 --seconds 600", built+"/bin", want))
				p := b.start(t, "", "sh", "-c", "exec >"+said+" 2>&1; exec "+strings.Replace(options, " run", " run --shim "+built+"/lib/libnvshare.so", 1)+" -- "+program)
				b.await(t, fmt.Sprintf("%s, a program that sees %d MiB,", line, want), "grep -q ready "+said+" || { cat "+said+"; exit 1; }")
				if m := name.FindStringSubmatch(options); m != nil {
					b.await(t, line, "nvsharectl -o json | grep -q '\"name\": *\""+m[1]+"\"'")
				} else if slices.Contains(strings.Fields(options), "--memory-limit") {
					t.Errorf("%s: a tenant without a name", line)
				}
				t.Cleanup(func() { _ = p.Process.Signal(syscall.SIGTERM); _ = p.Wait() })
			}
			for _, line := range after {
				if status, said := b.run(t, line); status != 0 {
					t.Errorf("%s: status %d\n%s", line, status, said)
				}
			}
		})
	}
	if ran < 10 {
		t.Errorf("%d programs ran: the pattern is wrong", ran)
	}
}
