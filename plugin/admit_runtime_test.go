// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

// What the plugin has chosen is written on the containers, in a form that goes
// through the runtime: the next plugin knows who has what.
func TestPlacementThroughTheRuntime(t *testing.T) {
	r := newRuntime(t, "v2.4.2")
	r.start()
	defer r.stop()
	start := func() (stop func()) {
		stop = run(t, r, withState())
		await(t, r.synced, "the registration")
		return stop
	}
	stop := start()
	expect := func(name, want string, annotations ...string) {
		t.Helper()
		if got, err := r.startPod(name, annotations...); got != want {
			t.Errorf("%s: given %q, %v; want %q", name, got, err, want)
		}
	}
	refused := func(name, says string, annotations ...string) {
		t.Helper()
		if got, err := r.startPod(name, annotations...); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: given %q, %v; want it refused with %q", name, got, err, says)
		}
	}
	expect("a", "0", "gpu-core-request=60", "gpu-exclusion=x")
	expect("b", "1", "gpu-core-request=60")
	expect("c", "0", "gpu-core-request=20", "gpu-exclusion=x")
	refused("d", "0 can give that", "gpu=2", "gpu-core-request=50")
	for range 2 {
		refused("d", "GPU 0 ("+known[2]+") has 20 % left (ml/a/main has 60 %, ml/c/main has 20 %): too little time", "gpu-core-request=50")
		refused("d", "GPU 1 ("+known[3]+") has 40 % left (ml/b/main has 60 %): too little time", "gpu-core-request=50")
		stop()
		stop = start()
	}
	// Another plugin after ours refuses what ours has given: the runtime takes it
	// back, and so does ours.
	other, err := stub.New(refusing{}, stub.WithPluginName("refusing"), stub.WithPluginIdx("90"), stub.WithSocketPath(r.socket), stub.WithLogger(stubLogger{quiet()}))
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(context.Background()); err != nil {
		t.Fatal(err)
	}
	await(t, r.synced, "the other plugin")
	refused("e", "not today", "gpu-core-request=40")
	pod, ctr := podOf("e", "id-e", nil)
	if _, err := r.nri.StopContainer(context.Background(), &api.StopContainerRequest{Pod: pod, Container: ctr}); err != nil { // as containerd does
		t.Fatal(err)
	}
	other.Stop()
	expect("f", "1", "gpu-core-request=40")
	// The pod of a container that was never created is stopped.
	refused("g", "too little time", "gpu-core-request=1")
	if err := r.nri.StopPodSandbox(context.Background(), &api.StopPodSandboxRequest{Pod: &api.PodSandbox{Id: "sandbox-f"}}); err != nil {
		t.Fatal(err)
	}
	expect("g", "1", "gpu-core-request=40")
}

// refusing is a plugin that refuses every container.
type refusing struct{}

func (refusing) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	return nil, nil, errors.New("not today")
}
