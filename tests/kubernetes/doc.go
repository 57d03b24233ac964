// SPDX-License-Identifier: Apache-2.0

// Package kubernetes has the tests of nvshare on a real Kubernetes of one node:
// etcd, API server, controller manager, scheduler, kubelet and containerd as
// released, with the manifests and the image as they are shipped, on a simulated
// GPU. They run with the build tag k8s (make e2e-k8s), need root, and touch
// nothing of the machine: see package node.
//
// manifests/ has pods to try nvshare with on any cluster; the tests use them too.
package kubernetes
