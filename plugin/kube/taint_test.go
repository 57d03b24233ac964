// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/nvshare/nvshare/tests/kubeapi"
)

// The node loses nvshare's taint, and no other one, also when it comes with the taint again: the kubelet
// registers a node anew that somebody has deleted.
func TestStartupTaintIsRemoved(t *testing.T) {
	s := kubeapi.New(t)
	for _, key := range []string{"a", StartupTaint, "b"} {
		s.Taint(key, corev1.TaintEffectNoSchedule)
	}
	w, _ := startWatcher(t, s, newListener())
	again := make(chan time.Time)
	go w.removeTaints(t.Context(), again)
	for range 2 {
		node := await(t, s.Patched, "the patch of the node")
		if len(node.Spec.Taints) != 2 || node.Spec.Taints[0].Key != "a" || node.Spec.Taints[1].Key != "b" {
			t.Errorf("the taints are %v", node.Spec.Taints)
		}
		s.Taint(StartupTaint, corev1.TaintEffectNoSchedule)
		again <- time.Time{}
	}
	await(t, s.Patched, "the patch of the node")
}
