//go:build engines

// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/node"
)

// limited is how an engine runs a container on GPU 1 with an annotation, and a program in it.
type limited struct {
	engine, name string // as the scheduler knows them
	run          func(annotation, ctl string, program []string) []string
	exec         []string
}

// limitedByCLI is that of an engine whose command line is podman's.
func limitedByCLI(engine, prefix string) limited {
	l := limited{engine: engine, name: prefix + "-limited"}
	l.run = func(annotation, ctl string, program []string) []string {
		return slices.Concat([]string{engine, "run", "--rm", "--name", l.name, "--device", "nvshare.com/gpu=1", "--annotation", annotation,
			"--volume", ctl + ":/usr/bin/nvsharectl:ro", image}, program)
	}
	l.exec = []string{engine, "exec", l.name}
	return l
}

// limitedByCtr runs a container in the cgroup that containerd gives it in ctr's own
// namespace: the scheduler knows it by that.
func limitedByCtr(t *testing.T) limited {
	l := limited{engine: "containerd", name: strings.TrimPrefix(shared.Cgroup(), "/") + "-limited"}
	l.run = func(annotation, ctl string, program []string) []string {
		return slices.Concat([]string{"ctr", "run", "--rm", "--cgroup", "/default/" + l.name, "--device", "nvshare.com/gpu=1", "--annotation", annotation,
			"--mount", "type=bind,src=" + ctl + ",dst=/usr/bin/nvsharectl,options=rbind:ro", node.WorkloadImage, l.name}, program)
	}
	l.exec = []string{"ctr", "task", "exec", "--exec-id", "ctl", l.name}
	t.Cleanup(func() {
		for _, pattern := range []string{"/sys/fs/cgroup/default", "/sys/fs/cgroup/*/default"} {
			for _, dir := range must(filepath.Glob(pattern))(t) {
				_ = os.Remove(dir) // unless others have cgroups there
			}
		}
	})
	return l
}

// testAnnotations: an annotation limits a container from its first call on, and
// nvsharectl knows the container by the name that its user gave it, and says the same inside
// the container. A container whose annotation cannot be met does not start.
func testAnnotations(t *testing.T, e *node.Engine, l limited) {
	ctx := within(t)
	ctl := filepath.Join(e.Private, "nvsharectl") // static, for any image
	build := exec.CommandContext(ctx, "go", "build", "-o", ctl, "../../sched/nvsharectl")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	known := clients(t, ctx)
	p := must(e.Start(l.name, l.run("nvshare.com/gpu-memory-limit=8Gi", ctl, busy("limited"))...))(t)
	c := awaitTurns(t, ctx, p, known)
	if c.Container.Name != l.name || c.Container.Engine != l.engine || !slices.Equal(c.Container.Gpus, []string{must(shared.Status(ctx))(t).Gpus[1].Uuid}) {
		t.Errorf("the scheduler knows the container as %v", c.Container)
	}
	inForce := func(m *api.MemoryAccount) bool { return m.Container.GetId() == c.Container.Id && m.LimitBytes == 8<<30 }
	if memory := must(shared.Status(ctx))(t).Gpus[1].Memory; !slices.ContainsFunc(memory, inForce) {
		t.Errorf("in force: %v", memory)
	}
	if c.Container.MemoryLimitBytes != 8<<30 {
		t.Errorf("the annotation is lost: %v", c.Container)
	}
	inside := must(e.Run(ctx, append(l.exec, "nvsharectl")...))(t)
	for _, want := range []string{"only " + l.name + " is named here", "of 8Gi"} {
		if !strings.Contains(inside, want) {
			t.Errorf("nvsharectl in the container does not say %q:\n%s", want, inside)
		}
	}
	end(t, ctx, p, c)
	check(t, node.Until(ctx, "the container is forgotten", func() error {
		if left := must(shared.Status(ctx))(t).Containers; len(left) > 0 {
			return fmt.Errorf("the scheduler knows %v", left)
		}
		return nil
	}))
	out, err := e.Run(ctx, l.run("nvshare.com/gpu-memory-limit=lots", ctl, []string{"/usr/bin/sleep", "0"})...)
	if err == nil || !strings.Contains(err.Error()+out, `nvshare.com/gpu-memory-limit="lots"`) {
		t.Errorf("a malformed annotation: %q, %v", out, err)
	}
}
