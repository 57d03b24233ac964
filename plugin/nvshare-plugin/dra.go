// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"path/filepath"

	"github.com/sirupsen/logrus"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/plugin/dra"
	"github.com/nvshare/nvshare/plugin/kube"
)

// draFlags say whether GPUs are given by resource claims.
type draFlags struct {
	on      bool
	slots   int
	kubelet string
}

func (f *draFlags) add(s *pflag.FlagSet) {
	s.BoolVar(&f.on, "dra", false, "give GPUs by resource claims (Dynamic Resource Allocation, Kubernetes 1.36), and not by annotations")
	s.IntVar(&f.slots, "slots", dra.DefaultSlots, "with --dra: how many claims may use one GPU; a claim that does not say gets that part of it")
	s.StringVar(&f.kubelet, "kubelet-dir", "/var/lib/kubelet", "with --dra: the kubelet's directory; its subdirectories plugins/"+dra.DriverName+" and plugins_registry must have the same paths here as on the host")
}

// driver returns the driver for resource claims, nil without --dra.
func (f *flags) driver(containers *plugin.Containers, cdiDir string, log logrus.FieldLogger) (*dra.Driver, error) {
	if !f.dra.on {
		return nil, nil
	}
	config, err := kube.Config(kube.On, f.kube.kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--dra: Kubernetes API: %w", err)
	}
	node, err := kube.NodeName(f.kube.node)
	if err != nil {
		return nil, err
	}
	config.ContentType = runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("--dra: Kubernetes API: %w", err)
	}
	driver, err := dra.New(dra.Config{
		Client: client, NodeName: node, CDIDir: cdiDir, Log: log,
		Problem:   func(why error) { containers.Health.Problem("claims", why) },
		Registry:  filepath.Join(f.dra.kubelet, "plugins_registry"),
		Directory: filepath.Join(f.dra.kubelet, "plugins", dra.DriverName),
		Options:   dra.Options{Slots: f.dra.slots, PromiseMemory: f.promiseMemory, Scheduler: containers.GPU, PCI: dra.PCIAttributes(f.hostRoot)},
	})
	if err != nil {
		return nil, fmt.Errorf("--dra: %w", err)
	}
	return driver, nil
}
