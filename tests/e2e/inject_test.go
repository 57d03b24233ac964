//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// sleeper is a container that does nothing.
func sleeper(name string, env map[string]string) node.ContainerSpec {
	return node.ContainerSpec{Name: name, Args: []string{"/usr/bin/sleep", "infinity"}, Env: env}
}

func adjusted(t *testing.T, c *node.Container) bool {
	t.Helper()
	return strings.Contains(must(c.Environ())(t)["LD_PRELOAD"], "libnvshare.so")
}

// TestParseRequest, TestShare and TestMemoryLimit of plugin have each way to be wrong.
func TestBadRequestIsRefused(t *testing.T) {
	ctx := within(t)
	for _, tc := range []struct{ name, key, value string }{
		{"unknown-index", gpuAnnotation, "nvshare.com/gpu=99"},
		{"bare-word", gpuAnnotation, "first"},
		{"for-one-container", gpuAnnotation + "/container.main", "nvshare.com/gpu=99"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			name := "bad-" + tc.name
			pod, err := shared.RunPod(ctx, name, map[string]string{tc.key: tc.value}, sleeper("main", nil))
			if err == nil {
				removePod(t, pod)
				t.Fatalf("%s: %q was accepted", tc.key, tc.value)
			}
			for _, want := range []string{name, "main", strconv.Quote(tc.value)} {
				if !strings.Contains(unescaped(err.Error()), want) {
					t.Errorf("the error does not name %s: %v", want, err)
				}
			}
		})
	}
}

// unescaped undoes the quoting that crictl's own log line puts around errors.
func unescaped(s string) string {
	for strings.Contains(s, `\"`) {
		s = strings.ReplaceAll(s, `\"`, `"`)
	}
	return s
}

func TestUnannotatedPodIsUntouched(t *testing.T) {
	pod := startPod(t, "plain", map[string]string{"example.com/other": "x"}, sleeper("main", nil))
	if adjusted(t, pod.Containers[0]) {
		t.Error("the container has LD_PRELOAD")
	}
	for _, path := range []string{"/usr/lib/nvshare", "/run/nvshare"} {
		if _, err := os.Stat(pod.Containers[0].Root() + path); err == nil {
			t.Errorf("the container has %s", path)
		}
	}
}

// TestParseRequest of plugin has each form of a key.
func TestAnnotationSuffixes(t *testing.T) {
	for _, tc := range []struct {
		name                 string
		annotations          map[string]string
		trainHas, sidecarHas bool
	}{
		{"kubernetes-key", map[string]string{"gpu.nvshare.com/container.train": firstGPU}, true, false},
		{"container-before-pod", map[string]string{
			gpuAnnotation + "/pod":             "nvshare.com/gpu=99",
			gpuAnnotation + "/container.train": firstGPU, gpuAnnotation + "/container.sidecar": firstGPU,
		}, true, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := startPod(t, "suffix-"+tc.name, tc.annotations, sleeper("train", nil), sleeper("sidecar", nil))
			if got := adjusted(t, pod.Containers[0]); got != tc.trainHas {
				t.Errorf("container train is adjusted: %v", got)
			}
			if got := adjusted(t, pod.Containers[1]); got != tc.sidecarHas {
				t.Errorf("container sidecar is adjusted: %v", got)
			}
		})
	}
}

func TestDeviceNames(t *testing.T) {
	ctx := within(t)
	uuid := must(shared.Status(ctx))(t).Gpus[0].Uuid
	for _, device := range []string{"nvshare.com/gpu=" + uuid, "nvshare.com/gpu=all"} {
		_, short, _ := strings.Cut(device, "=")
		t.Run(short, func(t *testing.T) {
			name := "device-" + strings.ToLower(short)
			from := judge.Now()
			startPod(t, name, map[string]string{gpuAnnotation: device}, busy(short[:3]))
			awaitTurns(t, ctx, short[:3], from, 1)
		})
	}
}

func TestUsersPreloadIsKept(t *testing.T) {
	pod := startPod(t, "preload", map[string]string{gpuAnnotation: firstGPU},
		sleeper("main", map[string]string{"LD_PRELOAD": node.UserLibrary}))
	// A container that has just started may not have loaded its libraries yet.
	check(t, node.Until(within(t), "both libraries in the program", func() error {
		maps := string(must(os.ReadFile("/proc/" + strconv.Itoa(pod.PID()) + "/maps"))(t))
		for _, lib := range []string{"libnvshare.so", filepath.Base(node.UserLibrary)} {
			if !strings.Contains(maps, lib) {
				return fmt.Errorf("%s is not loaded; LD_PRELOAD is %q", lib, must(pod.Containers[0].Environ())(t)["LD_PRELOAD"])
			}
		}
		return nil
	}))
}

// Whatever its image or pod says, and however it came by its GPU, a container has the
// shim and the node's scheduler.
func TestShimAndSchedulerAreTheNodes(t *testing.T) {
	astray := map[string]string{"NVSHARE_RUN_DIR": "/tmp/mine"}
	for name, spec := range map[string]struct {
		annotations map[string]string
		devices     []string
	}{
		"annotation":     {annotations: map[string]string{gpuAnnotation: firstGPU}},
		"device":         {devices: []string{firstGPU}},
		"device-for-nri": {devices: []string{strings.Replace(firstGPU, "/gpu=", "/gpu-nri=", 1)}},
	} {
		t.Run(name, func(t *testing.T) {
			main := sleeper("main", astray)
			main.Devices = spec.devices
			pod := startPod(t, "own-"+name, spec.annotations, main)
			env := must(pod.Containers[0].Environ())(t)
			if env["NVSHARE_RUN_DIR"] != "/var/run/nvshare" || !strings.Contains(env["LD_PRELOAD"], "libnvshare.so") {
				t.Errorf("NVSHARE_RUN_DIR is %q, LD_PRELOAD %q", env["NVSHARE_RUN_DIR"], env["LD_PRELOAD"])
			}
		})
	}
}

// A tenant sees the sockets for tenants, and neither the control socket nor the state.
func TestControlSocketIsHidden(t *testing.T) {
	ctx := within(t)
	pod := busyPod(t, "prying")
	awaitTurns(t, ctx, "prying", 0, 1)
	var seen []string
	for _, e := range must(os.ReadDir(pod.Containers[0].Root() + "/run/nvshare"))(t) {
		seen = append(seen, e.Name())
	}
	if !slices.Equal(seen, []string{"scheduler.sock", "status.sock"}) {
		t.Errorf("/run/nvshare in the container holds %v, want scheduler.sock and status.sock alone", seen)
	}
	mounts := string(must(os.ReadFile("/proc/" + strconv.Itoa(pod.PID()) + "/mountinfo"))(t))
	for line := range strings.Lines(mounts) {
		f := strings.Fields(line)
		if f[3] == "/nvshare" {
			t.Errorf("the run directory itself is mounted in the container: %s", line)
		}
	}
}
