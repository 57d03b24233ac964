// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"testing"

	"github.com/containerd/nri/pkg/stub"
)

// Runtimes with NRI up to 0.8, containerd 1.7 among them, refuse a plugin
// that subscribes to an event that they do not know.
func TestEventsAreKnownToOldRuntimes(t *testing.T) {
	for name, implemented := range map[string]bool{
		"UpdatePodSandbox":            implements[stub.UpdatePodInterface](),
		"PostUpdatePodSandbox":        implements[stub.PostUpdatePodInterface](),
		"ValidateContainerAdjustment": implements[stub.ValidateContainerAdjustmentInterface](),
	} {
		if implemented {
			t.Errorf("the plugin handles %s: containerd 1.7 would not register it", name)
		}
	}
}

func implements[T any]() bool {
	_, ok := any(&session{}).(T)
	return ok
}
