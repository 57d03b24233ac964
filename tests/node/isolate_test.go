// SPDX-License-Identifier: Apache-2.0

package node

import "testing"

// Programs of a node cannot see a clone that is below a directory that the node
// replaces: its user gets an error that says so.
func TestReplaced(t *testing.T) {
	for _, c := range []struct {
		path          string
		node, cluster string
	}{
		{"/home/user/nvshare/.build", "", ""},
		{"/tmp/x/nvshare/.build", "", ""},
		{"/var/tmp/nvshare/.build", "", ""},
		{"/runs/nvshare/.build", "", ""},
		{"/run/user/1000/nvshare/.build", "/run", "/run"},
		{"/dev/shm/nvshare/.build", "/dev/shm", "/dev/shm"},
		{"/var/lib/jenkins/nvshare/.build", "", "/var/lib"},
	} {
		if got := replaced(c.path, false); got != c.node {
			t.Errorf("%s in a node: %q is replaced, not %q", c.path, got, c.node)
		}
		if got := replaced(c.path, true); got != c.cluster {
			t.Errorf("%s in a cluster's node: %q is replaced, not %q", c.path, got, c.cluster)
		}
	}
}
