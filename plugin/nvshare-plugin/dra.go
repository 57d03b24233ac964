// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"
	"golang.org/x/net/netutil"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/plugin/dra"
	"github.com/nvshare/nvshare/plugin/kube"
)

const (
	requestLimit = 10 * time.Second // bounds a request for metrics
	maxScrapers  = 8                // connections for metrics
	// Requests to the API server, a second and at once. A claim takes one of them, a pod with --advertise
	// up to three. The defaults, 5 and 10, would have pods that start together wait for each other.
	apiQPS, apiBurst = 50, 200
)

// draFlags say whether GPUs are given by resource claims.
type draFlags struct {
	on      bool
	slots   int
	promise uint32 // as --promise-memory; 0: it is not given
	kubelet string
	metrics string
}

func (f *draFlags) add(s *pflag.FlagSet) {
	s.BoolVar(&f.on, "dra", false, "give GPUs by resource claims (Dynamic Resource Allocation, Kubernetes 1.36), and not by annotations")
	s.IntVar(&f.slots, "slots", dra.DefaultSlots, "with --dra: the `number` of claims that may use one GPU; a claim that does not say gets that part of it")
	s.StringVar(&f.metrics, "metrics-addr", os.Getenv("NVSHARE_DRA_METRICS_ADDR"), "with --dra: serve Prometheus metrics of claims on /metrics of this `host:port`, to everybody who reaches it (NVSHARE_DRA_METRICS_ADDR; default: nowhere)")
	s.StringVar(&f.kubelet, "kubelet-dir", "/var/lib/kubelet", "with --dra: the kubelet's `directory`; its subdirectories plugins/"+dra.DriverName+" and plugins_registry must have the same paths here as on the host")
}

// check finds flags that mean something only with --dra.
func (f *draFlags) check(s *pflag.FlagSet) error {
	for _, name := range []string{"slots", "metrics-addr", "kubelet-dir"} {
		if s.Changed(name) && !f.on {
			return fmt.Errorf("--%s is for resource claims: give --dra as well, or leave it out", name)
		}
	}
	if f.on && f.metrics != "" {
		if _, _, err := net.SplitHostPort(f.metrics); err != nil {
			return fmt.Errorf("--metrics-addr: %w (give host:port, like :9403)", err)
		}
	}
	return nil
}

// podUID is the pod of this driver, "" outside of pods.
func podUID() types.UID { return types.UID(os.Getenv("POD_UID")) }

// registry is the kubelet's directory for sockets of plugins.
func (f *draFlags) registry() string { return filepath.Join(f.kubelet, "plugins_registry") }

// isRegistered returns why the kubelet does not know the driver of this pod. Where drivers
// replace each other, the old one ends once the next one is ready. Without a pod's UID
// nothing is asked.
func (f *draFlags) isRegistered() error {
	if podUID() == "" {
		return nil
	}
	socket := filepath.Join(f.registry(), kubeletplugin.RollingUpdateRegistrarSocketFile(f.registry(), dra.DriverName, podUID()))
	if _, err := os.Stat(socket); err != nil {
		return fmt.Errorf("the driver of this pod does not serve the kubelet yet: %w", err)
	}
	return nil
}

// driver returns the driver for resource claims, nil without --dra.
func (f *flags) driver(containers *plugin.Containers, cdiDir string, log logrus.FieldLogger) (*dra.Driver, error) {
	if !f.dra.on {
		return nil, nil
	}
	config, err := kube.Config(f.kube.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--dra: Kubernetes API: %w", err)
	}
	node, err := kube.NodeName(f.kube.node)
	if err != nil {
		return nil, err
	}
	config.ContentType = runtime.ContentTypeProtobuf
	config.QPS, config.Burst = apiQPS, apiBurst
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("--dra: Kubernetes API: %w", err)
	}
	driver, err := dra.New(dra.Config{
		Client: client, NodeName: node, PodUID: podUID(), CDIDir: cdiDir, Log: log,
		Registered: containers.Registered(),
		Problem:    func(why error) { containers.Health.Problem("claims", why) },
		Registry:   f.dra.registry(),
		Directory:  filepath.Join(f.dra.kubelet, "plugins", dra.DriverName),
		Options:    dra.Options{Slots: f.dra.slots, PromiseMemory: f.dra.promise, Scheduler: containers.GPU, PCI: dra.PCIAttributes(f.hostRoot)},
	})
	if err != nil {
		return nil, fmt.Errorf("--dra: %w", err)
	}
	containers.OnGPUs = driver.Refresh
	return driver, nil
}

// serveMetrics serves what the driver counts until ctx ends; without --metrics-addr it does nothing. While
// another process has the port it tries again after each time: pods need the plugin, and not its metrics.
func (f *draFlags) serveMetrics(ctx context.Context, every time.Duration, driver *dra.Driver, log logrus.FieldLogger) {
	if f.metrics == "" {
		return
	}
	l, err := net.Listen("tcp", f.metrics)
	if err != nil {
		log.Errorf("no metrics, trying again every %v: --metrics-addr: %v", every, err)
	}
	for err != nil {
		select {
		case <-ctx.Done():
			return
		case <-time.After(every):
			l, err = net.Listen("tcp", f.metrics)
		}
	}
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(driver.Metrics(), promhttp.HandlerOpts{MaxRequestsInFlight: 4, Timeout: requestLimit}))
	server := &http.Server{Handler: mux, ReadTimeout: requestLimit, WriteTimeout: requestLimit, MaxHeaderBytes: 16 << 10}
	context.AfterFunc(ctx, func() { server.Close() })
	log.Infof("metrics on http://%s/metrics", l.Addr())
	if err := server.Serve(netutil.LimitListener(l, maxScrapers)); !errors.Is(err, http.ErrServerClosed) {
		log.Errorf("serve metrics: %v", err)
	}
}
