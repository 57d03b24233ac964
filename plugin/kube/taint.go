// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// StartupTaint keeps pods off a new node until nvshare is there. Whoever makes the node gives it
	// the taint; the plugin removes it.
	StartupTaint = "nvshare.com/not-ready"

	// taintEvery is the time between looks for a taint that has come back: the kubelet registers a
	// node that somebody has deleted with its taints again. taintRetry is that after a failure.
	taintEvery = time.Minute
	taintRetry = 5 * time.Second
)

// RemoveTaint keeps StartupTaint off the node until ctx ends.
func (w *Watcher) RemoveTaint(ctx context.Context) {
	tick := time.Tick(taintEvery)
	w.removeTaints(ctx, tick)
}

func (w *Watcher) removeTaints(ctx context.Context, again <-chan time.Time) {
	for said := ""; ; {
		var retry <-chan time.Time
		text := ""
		if err := w.removeTaint(ctx); err != nil && ctx.Err() == nil {
			retry, text = time.After(taintRetry), err.Error()
		}
		if text != "" && text != said { // tried again, not said again
			w.log.Warnf("Kubernetes API: the taint %s stays on the node: %s", StartupTaint, text)
		}
		said = text
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-retry:
		}
	}
}

func (w *Watcher) removeTaint(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, postLimit)
	defer cancel()
	nodes := w.events.client.CoreV1().Nodes()
	node, err := nodes.Get(ctx, w.node, metav1.GetOptions{ResourceVersion: "0"}) // of the server's cache
	if err != nil {
		return err
	}
	at := slices.IndexFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Key == StartupTaint })
	if at < 0 {
		return nil
	}
	patch := fmt.Appendf(nil, `[{"op":"test","path":"/spec/taints/%d/key","value":%q},{"op":"remove","path":"/spec/taints/%[1]d"}]`, at, StartupTaint)
	if _, err = nodes.Patch(ctx, w.node, types.JSONPatchType, patch, metav1.PatchOptions{}); err == nil {
		w.log.Infof("removed the taint %s from the node: nvshare is registered", StartupTaint)
	}
	return err
}
