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

// When the API server is watched.
const (
	Auto = "auto" // in a pod, or with a kubeconfig
	On   = "on"   // anything else is an error
	Off  = "off"
)

// ErrNone says that there is no API server to ask, and that none is expected.
var ErrNone = errors.New("not in a Kubernetes pod and no kubeconfig given")

// Config finds the API server and our credentials: in a kubeconfig file, if one
// is given, else where Kubernetes puts them in a pod. It returns ErrNone if
// annotations are not to be watched here; it does not try to connect.
func Config(when, kubeconfig string) (*rest.Config, error) {
	switch when {
	case Off:
		return nil, ErrNone
	case Auto, On:
	default:
		return nil, errors.New("give auto, on or off")
	}
	var c *rest.Config
	var err error
	if kubeconfig != "" {
		c, err = clientcmd.BuildConfigFromFlags("", kubeconfig)
	} else {
		c, err = rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			if err = ErrNone; when == On {
				err = errors.New(ErrNone.Error())
			}
		}
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
