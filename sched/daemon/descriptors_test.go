// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// With fewer descriptors than its limits allow tenants to take, the scheduler
// does not start, and says how many it needs.
func TestTooFewDescriptors(t *testing.T) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
			t.Error(err)
		}
	}()
	for n, enough := range map[uint64]bool{1024: false, neededFiles - 1: false, neededFiles: true} {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: was.Max}); err != nil {
			t.Fatal(err)
		}
		_, err := newDaemon(testOptions(t.TempDir()))
		if (err == nil) != enough {
			t.Errorf("%d descriptors: %v", n, err)
		}
		if err != nil && !strings.Contains(err.Error(), fmt.Sprintf("%d, and %d are needed", n, neededFiles)) {
			t.Errorf("%d descriptors: %v", n, err)
		}
	}
}
