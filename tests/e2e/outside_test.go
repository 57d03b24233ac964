//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

// inPodAndPodman runs a test of a container on the first GPU, in a pod and in podman. spec and test
// get the name of the pod, and of podman's container.
func inPodAndPodman(t *testing.T, name string, annotations map[string]string, spec func(name string) node.ContainerSpec, test func(t *testing.T, ctx context.Context, name string)) {
	t.Run("pod", func(t *testing.T) {
		of := map[string]string{gpuAnnotation: firstGPU}
		for k, v := range annotations {
			of[k] = v
		}
		startPod(t, name, of, spec(name))
		test(t, within(t), name)
	})
	t.Run("podman", func(t *testing.T) {
		if !node.HavePodman() {
			t.Skip("there is no podman on this machine")
		}
		name := name + "-podman"
		of := spec(name)
		of.Annotations = annotations
		runPodman(t, name, of)
		test(t, within(t), name)
	})
}

// isOf says whether a container is of the pod, or is podman's container, of that name.
func isOf(c *api.Container, name string) bool { return c.GetPod() == name || c.GetName() == name }

// bySetuid are the files of an image in which user 65534 becomes root by su, whom PAM asks
// nothing. The loader of a setuid program drops LD_PRELOAD, for the programs that it starts too.
func bySetuid(t *testing.T) map[string]string {
	t.Helper()
	permits := must(filepath.Glob("/usr/lib/*/security/pam_permit.so"))(t)
	if len(permits) == 0 {
		t.Skip("SKIPPED: this machine has no PAM in /usr/lib")
	}
	files := map[string]string{"/usr/bin/sh": "/bin/sh", permits[0]: permits[0], busyProgram: shared.Bin("cuda-busy")}
	for _, program := range []string{"env", "setpriv", "su"} {
		files["/usr/bin/"+program] = "/usr/bin/" + program
	}
	dir := t.TempDir()
	for to, text := range map[string]string{
		"/etc/passwd":      "root:x:0:0:root:/:/usr/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/bin/sh\n",
		"/etc/group":       "root:x:0:\nnogroup:x:65534:\n",
		"/etc/pam.d/other": "auth required pam_permit.so\naccount required pam_permit.so\nsession required pam_permit.so\n",
	} {
		files[to] = filepath.Join(dir, filepath.Base(to))
		check(t, os.WriteFile(files[to], []byte(text), 0o644))
	}
	return files
}

// ssh, su, sudo and cron start programs without the container's environment, or without the
// LD_PRELOAD in it: these have the shim too, whatever the root file system is.
func TestProgramsWithoutTheEnvironment(t *testing.T) {
	const image = "localhost/nvshare-no-environment:1"
	check(t, shared.AddImage(within(t), image, true, bySetuid(t)))
	bySu := func(option string) func([]string) []string {
		return func(program []string) []string {
			return []string{"/usr/bin/setpriv", "--reuid=65534", "--regid=65534", "--clear-groups",
				"/usr/bin/su", option, "-c", "exec " + strings.Join(program, " ")}
		}
	}
	for _, tc := range []struct {
		name string
		argv func(program []string) []string
		rest bool // of the container's environment is there
	}{
		{"env-i", func(program []string) []string { return append([]string{"/usr/bin/env", "-i"}, program...) }, false},
		{"su", bySu("-"), false},
		{"sudo-E", bySu("-m"), true}, // su -m is what sudo -E is
	} {
		t.Run(tc.name, func(t *testing.T) {
			from := judge.Now()
			spec := func(name string) node.ContainerSpec {
				return node.ContainerSpec{Image: image, Env: map[string]string{"THE_REST": "1"}, Args: tc.argv(append(busy("").Args, "--tenant", name))}
			}
			inPodAndPodman(t, tc.name, nil, spec, func(t *testing.T, ctx context.Context, name string) {
				hasShim(t, ctx, name, from, tc.rest)
			})
		})
	}
	t.Run("restricted", func(t *testing.T) {
		from := judge.Now()
		const name = "env-i-restricted"
		startPod(t, name, map[string]string{gpuAnnotation: firstGPU}, node.ContainerSpec{Image: image, Restricted: true,
			Args: append([]string{"/usr/bin/env", "-i"}, append(busy("").Args, "--tenant", name)...)})
		hasShim(t, within(t), name, from, false)
	})
}

// hasShim waits until the program of a container takes turns by the shim. It was started without
// LD_PRELOAD; rest says whether other variables of its container were left.
func hasShim(t *testing.T, ctx context.Context, name string, from int64, rest bool) {
	t.Helper()
	awaitTurns(t, ctx, name, from, 1)
	check(t, node.Until(ctx, "the shim in the program", func() error {
		r, err := shared.Status(ctx)
		if err != nil {
			return err
		}
		for _, c := range r.Gpus[0].Clients {
			if !isOf(c.Container, name) || c.Interposed == 0 {
				continue
			}
			env := string(must(os.ReadFile(fmt.Sprintf("/proc/%d/environ", c.Pid)))(t))
			if strings.Contains(env, "LD_PRELOAD") || strings.Contains(env, "THE_REST") != rest {
				t.Errorf("it was started with %q", env)
			}
			return nil
		}
		return errors.New("no client is of that container")
	}))
}

// A program in a container that has no shim, because it changed its root directory to one without it, is
// held from outside by the node's warden, to its container's core limit.
func TestContainersAreHeldFromOutside(t *testing.T) {
	const limit, root = 30, "/opt/other"
	warden := must(shared.StartWarden())(t)
	t.Cleanup(func() { check(t, warden.Stop()) })
	other := filepath.Join(t.TempDir(), "root")
	check(t, shared.WriteWorkloadDir(other))
	check(t, os.WriteFile(other+"/usr/lib/libcuda.so.1", must(os.ReadFile(node.SimGPU+"/lib/libcuda.so.1"))(t), 0o755))
	check(t, os.Mkdir(other+"/run/nvshare-simgpu", 0o755)) // where the driver looks for the GPU, without an environment
	spec := func(name string) node.ContainerSpec {
		return node.ContainerSpec{
			Args: []string{"/usr/bin/env", "-i", "/usr/bin/chroot", root, busyProgram, "--kernel-us", "5000", "--depth", "8", "--tenant", name},
			Mounts: []node.Mount{
				{Host: "/usr/bin/env", Container: "/usr/bin/env"}, {Host: "/usr/sbin/chroot", Container: "/usr/bin/chroot"},
				{Host: other, Container: root}, {Host: node.SimGPU + "/run", Container: root + "/run/nvshare-simgpu"},
			},
		}
	}
	annotations := map[string]string{coreLimitAnnotation: fmt.Sprint(limit)}
	inPodAndPodman(t, "chroot", annotations, spec, func(t *testing.T, ctx context.Context, name string) {
		held := ""
		says := regexp.MustCompile(fmt.Sprintf("^held from outside: its channels were on for .*, its core limit is %d %%$", limit))
		check(t, node.Until(ctx, "it to be held", func() error {
			r, err := shared.Status(ctx)
			for _, u := range r.GetUnmanaged() {
				if held = u.Held; isOf(u.Container, name) && says.MatchString(held) {
					return nil
				}
			}
			return errors.Join(err, fmt.Errorf("it is %q", held))
		}))
		out, _ := shared.Ctl(ctx, "status") // it fails, because there is a problem
		if !regexp.MustCompile(name + ".*held from outside").MatchString(out) {
			t.Errorf("status does not say that %s is held:\n%s", name, out)
		}
		from, seen := judge.Now(), ""
		check(t, node.UntilEvery(ctx, readEvery, "a window within the limit", func() error {
			length := judge.Now() - from
			if length < int64(2*window) {
				return errors.New("the window is short;" + seen)
			}
			part := 100 * float64(observe(t, from).tenant(name).Busy) / float64(length)
			from = judge.Now()
			seen += fmt.Sprintf(" %.1f %%", part)
			if part < 5 || part > limit+points {
				return errors.New("windows:" + seen)
			}
			return nil
		}))
		t.Logf("%s: %s; it had%s", name, held, seen)
	})
}
