// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/nvshare/nvshare/sched/api"
)

// What keeps the warden from tracing is found before a process shows it, and has a remedy.
func TestObstacle(t *testing.T) {
	const able, unable = "CapEff:\t0000000000080006\n", "CapEff:\t0000000000000006\n"
	for name, tc := range map[string]struct{ status, yama, pid, user, apparmor, mounts, want string }{
		"nothing":             {able, "2", "pid:[1]", hostUserNamespace, "unconfined", "", ""},
		"no capability":       {unable, "2", "pid:[1]", hostUserNamespace, "", "", api.NoPtrace},
		"and a hidden /proc":  {unable, "", "pid:[1]", hostUserNamespace, "", "22 27 0:21 / /proc rw - proc proc rw,hidepid=invisible\n", api.ProcIsHidden},
		"Yama":                {able, "3", "pid:[1]", hostUserNamespace, "", "", api.YamaForbids},
		"PID namespace":       {able, "", "pid:[2]", hostUserNamespace, "", "", api.OtherPIDNamespace},
		"user namespace":      {able, "", "pid:[1]", "user:[4026532001]", "", "", api.OtherUserspace},
		"AppArmor":            {able, "", "pid:[1]", hostUserNamespace, "docker-default (enforce)", "", api.UnderAppArmor},
		"AppArmor, of others": {able, "", "pid:[1]", hostUserNamespace, "nvshare-warden (enforce)", "", ""},
	} {
		root := t.TempDir()
		put := func(path, text string) {
			if text == "" {
				return
			}
			path = filepath.Join(root, "proc", path)
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				t.Fatal(err)
			}
			var err error
			if strings.Contains(path, "/ns/") {
				err = os.Symlink(text, path)
			} else {
				err = os.WriteFile(path, []byte(text), 0o644)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		put("self/status", tc.status)
		put("sys/kernel/yama/ptrace_scope", tc.yama)
		put("self/ns/pid", tc.pid)
		put("self/ns/user", tc.user)
		put("self/attr/apparmor/current", tc.apparmor)
		put("self/mountinfo", tc.mounts)
		put("7/ns/pid", "pid:[1]")
		put("7/ns/user", hostUserNamespace)
		got := Obstacle(root, 7)
		if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
		if got := Obstacle(root, 0); got != api.OtherPIDNamespace {
			t.Errorf("%s, the scheduler is not seen: %q", name, got)
		}
		if got != "" && strings.HasPrefix(api.WardenRemedy(got), "systemctl") {
			t.Errorf("%s has no remedy", name)
		}
	}
}
