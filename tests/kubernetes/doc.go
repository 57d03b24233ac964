// SPDX-License-Identifier: Apache-2.0

// Package kubernetes tests nvshare on a real Kubernetes of one node: etcd, API server,
// controller manager, scheduler, kubelet and containerd as released, the manifests and
// the image as shipped, and a simulated GPU. The tests run with the build tag k8s (make
// e2e-k8s), need root, and change nothing of the machine: see package node.
//
// manifests/ has pods to try nvshare on any cluster, and manifests/dra those for resource
// claims; the tests use them too. TestCluster and TestDRA test a tier each.
package kubernetes
