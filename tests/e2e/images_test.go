//go:build e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
	"github.com/nvshare/nvshare/tests/judge"
	"github.com/nvshare/nvshare/tests/node"
)

const bareImage, muslImage = "localhost/nvshare-bare:1", "localhost/nvshare-musl:1"

// The shim holds each container, whatever its user, rights, root file system and
// preloaded libraries are. AppArmor is not tested: the node has it off, because loading a
// profile would change the machine.
func TestImages(t *testing.T) {
	ctx := within(t)
	check(t, shared.AddImage(ctx, bareImage, true, map[string]string{busyProgram: filepath.Join(buildDir, "bin", "cuda-busy")}))
	preloads := map[string]string{"LD_PRELOAD": node.UserLibrary}
	for i, tc := range []struct {
		name       string
		ownUsers   bool
		restricted bool
		image      string
		env        map[string]string
	}{
		{name: "own-preload", env: preloads},
		// A user other than root, a read-only root, no capabilities, no new
		// privileges, the default seccomp profile.
		{name: "restricted", restricted: true},
		{name: "own-users", ownUsers: true}, // hostUsers: false
		{name: "restricted-own-users", ownUsers: true, restricted: true, env: preloads},
		{name: "distroless", image: bareImage},
		{name: "distroless-restricted", restricted: true, image: bareImage},
		{name: "distroless-own-users", restricted: true, ownUsers: true, image: bareImage},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := within(t)
			from := judge.Now()
			tenant := fmt.Sprintf("image-%d", i) // the record cuts longer names
			spec := busy(tenant)
			spec.Restricted, spec.Image = tc.restricted, tc.image
			for k, v := range tc.env {
				spec.Env[k] = v
			}
			pod, err := shared.Run(ctx, node.PodSpec{Name: tenant, Annotations: map[string]string{gpuAnnotation: firstGPU}, OwnUsers: tc.ownUsers}, spec)
			if err != nil && tc.ownUsers && noIDMaps(err) {
				t.Skipf("this kernel does not map the IDs of the node's file systems: %v", err)
			}
			check(t, err)
			t.Cleanup(func() { removePod(t, pod) })
			awaitTurns(t, ctx, tenant, from, 1)
			awaitClient(t, ctx, "its name", pod.PID(), func(c *api.Client) bool { return c.Container.GetPod() == tenant })
			if c := client(t, ctx, pod.PID()); c == nil || c.Interposed == 0 || c.Bypassed != 0 {
				t.Errorf("the scheduler knows it as %v", c)
			}
			status := string(must(os.ReadFile(fmt.Sprintf("/proc/%d/status", pod.PID())))(t))
			is := func(line string) bool { return strings.Contains(status, "\n"+line+"\n") }
			if tc.restricted && !(is("CapBnd:\t0000000000000000") && is("NoNewPrivs:\t1") && is("Seccomp:\t2")) {
				t.Errorf("the process is not restricted as intended:\n%s", status)
			}
			uid := 0
			if tc.restricted {
				uid = 65534
			}
			if tc.ownUsers {
				uid += 1 << 20
			}
			if !strings.Contains(status, fmt.Sprintf("\nUid:\t%d\t", uid)) {
				t.Errorf("its user is not %d on the node:\n%s", uid, status)
			}
			if tc.env != nil {
				maps := string(must(os.ReadFile(fmt.Sprintf("/proc/%d/maps", pod.PID())))(t))
				if !strings.Contains(maps, node.UserLibrary) {
					t.Errorf("its own library is not loaded:\n%s", maps)
				}
			}
			observe(t, from).noOverlap(t)
			check(t, pod.Stop(ctx))
		})
	}
}

// noIDMaps recognises runc's error where a file system has no ID-mapped mounts.
func noIDMaps(err error) bool {
	return strings.Contains(err.Error(), "MOUNT_ATTR_IDMAP") || strings.Contains(err.Error(), "idmap")
}

// On musl the shim cannot be loaded. The program runs without it, and the plugin
// reports the container.
func TestMuslIsReported(t *testing.T) {
	cc, err := exec.LookPath("musl-gcc")
	if err != nil {
		t.Skip("no musl-gcc here")
	}
	ctx := within(t)
	dir := t.TempDir()
	check(t, os.WriteFile(dir+"/main.c", []byte(`#include <stdio.h>
#include <unistd.h>
int main(void) { puts("it runs"); fflush(stdout); pause(); return 0; }
`), 0o644))
	if out, err := exec.CommandContext(ctx, cc, "-O1", "-o", dir+"/main", dir+"/main.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	check(t, shared.AddImage(ctx, muslImage, false, map[string]string{"/usr/bin/main": dir + "/main"}))
	pod := runPod(t, node.PodSpec{Name: "musl", Annotations: map[string]string{gpuAnnotation: firstGPU}, SharedPIDs: true},
		node.ContainerSpec{Args: []string{"/usr/bin/main"}, Image: muslImage})
	check(t, node.Until(ctx, "the program to run", func() error {
		if log := pod.Log(); !strings.Contains(log, "it runs") {
			return fmt.Errorf("the program printed %q", log)
		}
		return nil
	}))
	pluginSays(t, "pod default/musl", "runs without nvshare", "musl")
}
