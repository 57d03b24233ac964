// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sys/unix"
)

// The runtime tells no plugin of the end of a container that ends after the plugin was sent the list of
// containers, and before the plugin is registered. What the container was promised is free then.
func TestEndBetweenListAndRegistration(t *testing.T) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	id := strings.TrimSpace(string(text)) // of the children too
	if len(id) < 8 {
		t.Skipf("the cgroup here is called %q", id)
	}
	ends, earlier, stays := child(t, ""), child(t, ""), child(t, "")
	r := newRuntime(t, "v2.4.2")
	r.pods = []*api.PodSandbox{pod(nil)}
	for i, cmd := range []*exec.Cmd{ends, earlier, stays} {
		// A part of the cgroup's name: each has an ID of its own.
		r.ctrs = append(r.ctrs, &api.Container{Id: id[:len(id)-i], PodSandboxId: "pod0", Name: fmt.Sprint("c", i), Pid: uint32(cmd.Process.Pid),
			State: api.ContainerState_CONTAINER_RUNNING, Annotations: map[string]string{PlacementAnnotation: known[2]}})
	}
	kill := func(cmd *exec.Cmd) {
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
		_ = cmd.Wait()
	}
	kill(earlier) // before the plugin looks
	r.start()
	defer r.stop()
	r.listed = func() { kill(ends) }
	containers := NewContainers(quiet())
	run(t, r, containers)
	await(t, r.synced, "the registration")
	for end := time.Now().Add(patience); containers.knows(r.ctrs[0].Id) || containers.knows(r.ctrs[1].Id); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a container that has ended keeps what it was promised")
		}
	}
	if !containers.knows(r.ctrs[2].Id) {
		t.Error("a container that runs is forgotten")
	}
}

// Where the plugin sees no container's process, in a PID namespace of its own, none of them has ended.
func TestUnseenProcessesHaveNotEnded(t *testing.T) {
	for _, sees := range []bool{false, true} {
		p := New(quiet(), NewContainers(quiet()))
		p.seesProcesses = func() bool { return sees }
		ctr := &api.Container{Id: strings.Repeat("e", 64), Pid: 1 << 30, State: api.ContainerState_CONTAINER_RUNNING}
		p.containers.add(Container{ID: ctr.Id})
		p.awaitEnds([]*api.Container{ctr}, 0)
		if p.containers.knows(ctr.Id) == sees {
			t.Errorf("where processes can be seen (%v), a container without one is known: %v", sees, !sees)
		}
	}
}
