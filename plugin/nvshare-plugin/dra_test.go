// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/plugin/dra"
	"github.com/nvshare/nvshare/tests/kubeapi"
)

// A claim takes a request to the API server, to read it. The
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
	if limit.QPS() < 500/60 {
		t.Errorf("%v requests a second", limit.QPS())
	}
	for i := range 8 * dra.DefaultSlots {
		if !limit.TryAccept() {
			t.Fatalf("request %d of a burst has to wait", i)
		}
	}
}

// Another process on the port of metrics does not keep the plugin from serving pods.
func TestBusyMetricsPort(t *testing.T) {
	dir := t.TempDir()
	driver, err := dra.New(dra.Config{Directory: filepath.Join(dir, "driver"), CDIDir: filepath.Join(dir, "cdi"), Options: dra.Options{Slots: 1}, Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	out, in := io.Pipe()
	log, ended := logrus.New(), make(chan struct{})
	log.SetOutput(in)
	go func() {
		defer close(ended)
		f := draFlags{metrics: other.Addr().String()}
		f.serveMetrics(ctx, time.Millisecond, driver, log)
	}()
	lines := bufio.NewScanner(out)
	for _, want := range []string{"trying again", "metrics on http://"} {
		if !lines.Scan() || !strings.Contains(lines.Text(), want) {
			t.Fatalf("the log has %q, want %q", lines.Text(), want)
		}
		other.Close()
	}
	r, err := http.Get("http://" + other.Addr().String() + "/metrics")
	if err != nil || r.StatusCode != http.StatusOK {
		t.Errorf("once the port is free: %v, %v", r, err)
	}
	if err == nil {
		r.Body.Close()
	}
	cancel()
	<-ended
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
