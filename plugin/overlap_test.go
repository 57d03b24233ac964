// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"strings"
	"testing"
)

// A pod that asks for an overlap group is told why it cannot be in one.
func TestOverlapGroupOfAPod(t *testing.T) {
	p := New(quiet(), NewContainers(quiet()))
	p.SetInventory(inventory(t))
	pod, ctr := asking("a", "all", "")
	pod.Annotations[OverlapAnnotation] = "small"
	if _, _, err := p.CreateContainer(context.Background(), pod, ctr); err == nil || !strings.Contains(err.Error(), OverlapAnnotation+`="small"`) {
		t.Errorf("%v", err)
	}
}
