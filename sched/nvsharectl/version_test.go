// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

func TestVersion(t *testing.T) {
	dir := serve(t, &fake{status: sample()})
	for _, c := range []struct {
		args, want string
		code       int
	}{
		{"version --run-dir " + dir, "nvsharectl         " + api.Version + "\nnvshare-scheduler  0.1.0\n", exitOK},
		{"version --run-dir /nonexistent", "nvsharectl         " + api.Version + "\n", exitUnreachable},
	} {
		if code, out, errs := ctl(strings.Fields(c.args)...); code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%s: exit %d, %q, %q, want %d and %q", c.args, code, out, errs, c.code, c.want)
		}
	}
}
