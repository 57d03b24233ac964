// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/plugin/dra"
	"github.com/nvshare/nvshare/tests/kubeapi"
)

// A claim takes two requests to the API server: to read it, and to write its status. The
// client of the driver must not hold back 500 claims a minute, nor a burst for all slots of
// eight GPUs.
func TestClaimsAreNotHeldBack(t *testing.T) {
	dir := t.TempDir()
	f := flags{kube: liveFlags{kubeconfig: filepath.Join(dir, "kubeconfig"), node: kubeapi.Node},
		dra: draFlags{on: true, slots: dra.DefaultSlots, kubelet: dir}}
	kubeapi.New(t).Kubeconfig(f.kube.kubeconfig)
	driver, err := f.driver(plugin.NewContainers(quiet()), filepath.Join(dir, "cdi"), quiet())
	if err != nil {
		t.Fatal(err)
	}
	limit := driver.Client.ResourceV1().RESTClient().GetRateLimiter()
	if limit.QPS() < 2*500/60 {
		t.Errorf("%v requests a second", limit.QPS())
	}
	for i := range 2 * 8 * dra.DefaultSlots {
		if !limit.TryAccept() {
			t.Fatalf("request %d of a burst has to wait", i)
		}
	}
}

// A pod whose driver replaces another one is ready once the kubelet can reach its driver,
// and not because the other one is ready.
func TestReadyOnceRegistered(t *testing.T) {
	dir, err := os.MkdirTemp("", "kubelet") // short: the name of the socket depends on it
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := draFlags{kubelet: dir}
	if err := f.isRegistered(); err != nil {
		t.Errorf("outside of pods: %v", err)
	}
	t.Setenv("POD_UID", "11112222-0000-4000-8000-000000000000")
	if err := f.isRegistered(); err == nil {
		t.Error("ready without a socket")
	}
	write(t, filepath.Join(f.registry(), "nvshare.com-11112222-0000-4000-8000-000000000000-reg.sock"), "")
	if err := f.isRegistered(); err != nil {
		t.Errorf("with the socket: %v", err)
	}
}
