// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/nvshare/nvshare/sched/api"
)

// listener is a scheduler that notes what it is told, or refuses.
type listener struct {
	api.ControlService
	told   chan *api.DescribeContainerRequest
	joins  chan *api.JoinOverlapRequest
	refuse error
}

func (l *listener) DescribeContainer(_ context.Context, r *api.DescribeContainerRequest) (*api.DescribeContainerResponse, error) {
	l.told <- r
	return &api.DescribeContainerResponse{}, l.refuse
}

func (l *listener) JoinOverlap(_ context.Context, r *api.JoinOverlapRequest) (*api.JoinOverlapResponse, error) {
	l.joins <- r
	return nil, l.refuse
}

// listen serves a control socket in a new run directory.
func listen(t *testing.T, refuse error) (runDir string, l *listener) {
	t.Helper()
	runDir = t.TempDir()
	socket, err := net.Listen("unix", api.SocketPath(runDir))
	if err != nil {
		t.Fatal(err)
	}
	server, err := ttrpc.NewServer()
	if err != nil {
		t.Fatal(err)
	}
	l = &listener{told: make(chan *api.DescribeContainerRequest, 64), joins: make(chan *api.JoinOverlapRequest, 8), refuse: refuse}
	api.RegisterControlService(server, l)
	go func() { _ = server.Serve(context.Background(), socket) }()
	t.Cleanup(func() { server.Close() })
	return runDir, l
}

// described runs the hook for a container with annotations.
func described(t *testing.T, runDir, bundle string, annotations map[string]string, args ...string) (status int, stderr string) {
	t.Helper()
	text, err := json.Marshal(map[string]any{"id": "0123abcd", "pid": 4711, "bundle": bundle, "annotations": annotations})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	status = run(append([]string{"describe", "--run-dir", runDir}, args...), bytes.NewReader(text), &out)
	return status, out.String()
}

func TestDescribe(t *testing.T) {
	runDir, l := listen(t, nil)
	bundle, _ := container(t)
	write(t, bundle+"/config.json", `{"linux":{"devices":[{"path":"/dev/nvidia1"}]},"process":{"env":["SIM_0=GPU-c"]}}`)
	code, stderr := described(t, runDir, bundle, map[string]string{
		"nvshare.com/gpu-memory-limit": "8Gi", "nvshare.com/gpu-core-limit": "25", "nvshare.com/gpu-gang": "ring", "else": "where", "nvshare.com/gpu-limit": "7", "nvshare.com/gpu": "1"},
		"--gpu", "GPU-a=/dev/nvidia0", "--gpu", "GPU-b=/dev/nvidia1", "--gpu", "GPU-c=SIM_0=GPU-c")
	if code != 0 || !strings.Contains(stderr, "without effect: nvshare.com/gpu, nvshare.com/gpu-limit;") {
		t.Fatalf("status %d: %s", code, stderr)
	}
	r := <-l.told
	c := r.Container
	if want := (api.Terms{MemoryLimit: 8 << 30, CoreLimit: 25, Gang: "ring"}); c.Terms() != want || c.Id != "0123abcd" || r.Pid != 4711 ||
		!slices.Equal(c.Gpus, []string{"GPU-b", "GPU-c"}) || c.Engine != "containerd" || c.Name != "0123abcd" {
		t.Errorf("told %v", r)
	}
	if len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "nvshare.com/gpu-limit") {
		t.Errorf("warnings %q", r.Warnings)
	}
}

// A container that may move is told with the GPU that its programs see, and those that it can
// open.
func TestDescribeMovable(t *testing.T) {
	runDir, l := listen(t, nil)
	gpus := []string{"GPU-a", "GPU-b"}
	for name, tc := range map[string]struct {
		env         string
		annotations map[string]string
		on, reach   []string
	}{
		"any":            {`"CUDA_VISIBLE_DEVICES=GPU-a","NVSHARE_GPU=any"`, nil, gpus[:1], gpus},
		"all, and asked": {`"CUDA_VISIBLE_DEVICES=GPU-a","CUDA_VISIBLE_DEVICES=GPU-b"`, map[string]string{api.MigratableAnnotation: "true"}, gpus[1:], gpus},
		"all":            {`"CUDA_VISIBLE_DEVICES=GPU-a"`, nil, gpus, nil},
		"by an index":    {`"CUDA_VISIBLE_DEVICES=1"`, map[string]string{api.MigratableAnnotation: "true"}, gpus, nil},
	} {
		bundle, _ := container(t)
		write(t, bundle+"/config.json", `{"linux":{"devices":[{"path":"/dev/nvidia0"},{"path":"/dev/nvidia1"}]},"process":{"env":[`+tc.env+`]}}`)
		if code, stderr := described(t, runDir, bundle, tc.annotations, "--gpu", "GPU-a=/dev/nvidia0", "--gpu", "GPU-b=/dev/nvidia1"); code != 0 {
			t.Fatalf("%s: status %d: %s", name, code, stderr)
		}
		c := (<-l.told).Container
		if !slices.Equal(c.Gpus, tc.on) || !slices.Equal(c.Reach, tc.reach) || c.Terms().Migratable != (tc.annotations != nil || tc.reach != nil) {
			t.Errorf("%s: told %v", name, c)
		}
	}
}

// A container whose annotations cannot be met does not start; one without annotations
// does, unless its GPU is drained, nvshare.com/gpu=any too.
func TestDescribeRefuses(t *testing.T) {
	one, _ := container(t)
	movable, _ := container(t)
	write(t, movable+"/config.json", `{"linux":{"devices":[{"path":"/dev/nvidia0"},{"path":"/dev/nvidia1"}]},"process":{"env":["CUDA_VISIBLE_DEVICES=GPU-a","NVSHARE_GPU=any"]}}`)
	limit := map[string]string{"nvshare.com/gpu-memory-limit": "8Gi"}
	runDir, _ := listen(t, status.Error(codes.FailedPrecondition, "its processes count to user 0"))
	drained, _ := listen(t, status.Error(codes.Aborted, "GPU 0 is drained"))
	for name, tc := range map[string]struct {
		runDir      string
		annotations map[string]string
		status      int
		says        string
	}{
		"malformed":                   {runDir, map[string]string{"nvshare.com/gpu-memory-limit": "lots", "nvshare.com/gpu-core-limit": "101"}, 1, `nvshare.com/gpu-memory-limit="lots"`},
		"misspelt":                    {runDir, map[string]string{"nvshare.com/gpu-memory-limits": "8Gi"}, 1, "nvshare.com/gpu-memory-limits: unknown (did you mean nvshare.com/gpu-memory-limit?)"},
		"contradiction":               {runDir, map[string]string{"nvshare.com/gpu-core-request": "50", "nvshare.com/gpu-core-limit": "20"}, 1, "above the core limit"},
		"the scheduler refuses":       {runDir, limit, 1, "nvshare.com/gpu-memory-limit: its processes count to user 0"},
		"no scheduler":                {t.TempDir(), limit, 1, "is nvshare-scheduler running"},
		"no scheduler, and no limit":  {t.TempDir(), nil, 0, ""},
		"refused, and no limit":       {runDir, nil, 0, ""},
		"drained, and no limit":       {drained, nil, 1, "GPU 0 is drained"},
		"of Kubernetes, without ours": {t.TempDir(), map[string]string{"io.kubernetes.cri.sandbox-id": "x", "nvshare.com/gpu-memory-limit": "lots"}, 0, ""},
	} {
		for _, bundle := range []string{one, movable} {
			code, stderr := described(t, tc.runDir, bundle, tc.annotations, "--gpu", "GPU-a=/dev/nvidia0", "--gpu", "GPU-b=/dev/nvidia1")
			if code != tc.status || !strings.Contains(stderr, tc.says) || tc.says == "" && stderr != "" {
				t.Errorf("%s, any %v: status %d, %q; want %d and %q", name, bundle == movable, code, stderr, tc.status, tc.says)
			}
			if strings.Contains(stderr, "annotations") && strings.Contains(stderr, api.MigratableAnnotation) {
				t.Errorf("%s: %q names an annotation that nobody gave", name, stderr)
			}
		}
	}
}

// What the hook refuses by itself the scheduler is told too: crun does not show what a hook says.
func TestRefusalIsTold(t *testing.T) {
	runDir, l := listen(t, nil)
	bundle, _ := container(t)
	if code, _ := described(t, runDir, bundle, map[string]string{"nvshare.com/gpu-memory-limit": strings.Repeat("l", 1000)}); code != 1 {
		t.Fatalf("status %d", code)
	}
	r := <-l.told
	if len(r.Warnings) != 1 || !strings.HasPrefix(r.Warnings[0], `refused: annotation nvshare.com/gpu-memory-limit="lll`) || len(r.Warnings[0]) > maxTold || r.Container.Terms() != (api.Terms{}) {
		t.Errorf("told %v", r)
	}
}

// Engines keep the names that people give in different places.
func TestNames(t *testing.T) {
	podman := t.TempDir()
	write(t, filepath.Join(podman, "containers.json"), `[{"id":"x","names":["other"]},{"id":"a","names":["train"]}]`)
	docker := t.TempDir()
	write(t, filepath.Join(docker, "config.v2.json"), `{"Name":"/serve"}`)
	withHostname := &config{}
	if err := json.Unmarshal([]byte(`{"mounts":[{"destination":"/etc/hostname","source":"`+docker+`/hostname"}]}`), withHostname); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		s            state
		c            *config
		engine, name string
	}{
		{state{ID: "a", Bundle: podman + "/a/userdata", Annotations: map[string]string{"io.container.manager": "libpod"}}, &config{}, "podman", "train"},
		{state{ID: "b", Bundle: podman + "/b/userdata", Annotations: map[string]string{"io.container.manager": "libpod"}}, &config{}, "podman", ""},
		{state{ID: "c", Annotations: map[string]string{"nerdctl/name": "web"}}, withHostname, "nerdctl", "web"},
		{state{ID: "d"}, withHostname, "docker", "serve"},
		{state{ID: "demo"}, &config{}, "containerd", "demo"},
		// Anybody may write annotations on a container of an engine, and podman's pods have some of CRI-O's.
		{state{ID: "e", Annotations: map[string]string{"nerdctl/name": "web", "io.kubernetes.pod.name": "x"}}, &config{}, "nerdctl", "web"},
		{state{ID: "a", Bundle: podman + "/a/userdata", Annotations: map[string]string{"io.container.manager": "libpod", "io.kubernetes.cri-o.SandboxID": "x"}}, &config{}, "podman", "train"},
		{state{ID: "demo", Annotations: map[string]string{"io.kubernetes.cri-o.SandboxID": "x"}}, &config{}, "containerd", "demo"},
	} {
		if engine, name, kubernetes := engine(&tc.s, tc.c); engine != tc.engine || name != tc.name || kubernetes {
			t.Errorf("%+v: %q, %q, %v", tc.s, engine, name, kubernetes)
		}
	}
	// A container of Kubernetes may have annotations of its pod.
	for _, annotations := range []map[string]string{
		{"io.kubernetes.cri.sandbox-id": "x", "nerdctl/name": "web", "io.container.manager": "libpod"},
		{"io.container.manager": "cri-o", "nerdctl/name": "web"},
	} {
		if engine, name, kubernetes := engine(&state{ID: "f", Annotations: annotations}, &config{}); engine != "" || name != "" || !kubernetes {
			t.Errorf("%v: %q, %q, %v", annotations, engine, name, kubernetes)
		}
	}
}

// A rootless container is told to set its user's limits where that helps, and that nothing gives
// it what is fixed when a container starts.
func TestDescribeRootless(t *testing.T) {
	for want, asked := range map[string]api.Terms{
		"set them with sudo nvsharectl set --user":                                                                                           {MemoryLimit: 8 << 30},
		"a rootless container cannot have nvshare.com/gpu-overlap: leave it out, or run the container as root":                               {Overlap: "small"},
		"a rootless container cannot have nvshare.com/gpu-overlap, nvshare.com/gpu-migratable: leave them out, or run the container as root": {Overlap: "small", Migratable: true, CoreLimit: 40},
	} {
		if got := ofUser(asked); !strings.Contains(got, want) || asked.Overlap != "" && strings.Contains(got, "--user") {
			t.Errorf("%+v: %q, want %q", asked, got, want)
		}
	}
}

// A container of an engine whose group's terms its environment does not carry is refused; the
// scheduler is told as which user the container runs.
func TestDescribeOverlap(t *testing.T) {
	runDir, l := listen(t, nil)
	for env, tc := range map[string]struct {
		config, says string
	}{
		"without the limit":      {`{"process":{"user":{"uid":1000},"env":["A=b"]}}`, "add --env CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40"},
		"another limit":          {`{"process":{"env":["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40","CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50"]}}`, "PERCENTAGE=40"},
		"a user namespace":       {`{"linux":{"namespaces":[{"type":"user"}]}}`, "user namespace"},
		"a directory of nowhere": {`{"process":{"env":["CUDA_MPS_PIPE_DIRECTORY=a/b"]}}`, "absolute"},
		"good":                   {`{"process":{"user":{"uid":1000},"env":["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=40"]}}`, ""},
	} {
		bundle, _ := container(t)
		write(t, bundle+"/config.json", tc.config)
		code, stderr := described(t, runDir, bundle, map[string]string{"nvshare.com/gpu-overlap": "small", "nvshare.com/gpu-core-limit": "40"})
		if tc.says != "" && (code != 1 || !strings.Contains(stderr, tc.says)) || tc.says == "" && code != 0 {
			t.Errorf("%s: status %d, %q", env, code, stderr)
		}
	}
	if r := <-l.told; len(l.told) != 0 || r.Container.Uid != 1000 || r.Container.Terms().Overlap != "small" {
		t.Errorf("told %v, and %d more", r, len(l.told))
	}
}

// join leaves containers alone that are in no group, and refuses those whose group cannot be
// used, with the scheduler's reason.
func TestJoin(t *testing.T) {
	runDir, l := listen(t, status.Error(codes.FailedPrecondition, "not allowed"))
	bundle, _ := container(t)
	for name, tc := range map[string]struct {
		annotations map[string]string
		runDir      string
		status      int
		says        string
	}{
		"no group":     {nil, runDir, 0, ""},
		"none":         {map[string]string{"nvshare.com/gpu-overlap": "none"}, runDir, 0, ""},
		"malformed":    {map[string]string{"nvshare.com/gpu-overlap": "a/b"}, runDir, 1, `"a/b"`},
		"refused":      {map[string]string{"nvshare.com/gpu-overlap": "small"}, runDir, 1, `overlap group "small": not allowed`},
		"no scheduler": {map[string]string{"nvshare.com/gpu-overlap": "small"}, t.TempDir(), 1, "is nvshare-scheduler running"},
	} {
		text, err := json.Marshal(map[string]any{"id": "0123abcd", "bundle": bundle, "annotations": tc.annotations})
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if code := run([]string{"join", "--run-dir", tc.runDir}, bytes.NewReader(text), &out); code != tc.status || !strings.Contains(out.String(), tc.says) || tc.says == "" && out.Len() > 0 {
			t.Errorf("%s: status %d, %q; want %d and %q", name, code, out.String(), tc.status, tc.says)
		}
	}
	if asked := <-l.joins; len(l.joins) != 0 || asked.Id != "0123abcd" || asked.Overlap != "small" {
		t.Errorf("asked for %v, and %d more", asked, len(l.joins))
	}
}
