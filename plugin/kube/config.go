// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// ErrNone says that there is no API server to ask, and that none is expected.
var ErrNone = errors.New("not in a Kubernetes pod and no kubeconfig given")

// Config finds the API server and our credentials: in a kubeconfig file, if one
// is given, else where Kubernetes puts them in a pod, else it returns ErrNone. It does
// not try to connect.
func Config(kubeconfig string) (c *rest.Config, err error) {
	if kubeconfig != "" {
		c, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	} else if c, err = rest.InClusterConfig(); errors.Is(err, rest.ErrNotInCluster) {
		err = ErrNone
	}
	if err != nil {
		return nil, err
	}
	c.UserAgent = "nvshare-plugin"
	c.WarningHandler = rest.NoWarnings{}
	return c, nil
}

// NodeName returns the name of this node: the one given, or what kubelet makes of
// the host's.
func NodeName(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("name of this node: %w (give --node-name)", err)
	}
	return strings.ToLower(strings.TrimSpace(host)), nil
}
