// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

func TestAuditFlag(t *testing.T) {
	_, args := host(t, 1)
	if err := execute(append(args, "--audit", "kill")...); err == nil || !strings.Contains(err.Error(), `--audit: "kill"`) {
		t.Errorf("got %v", err)
	}
}
