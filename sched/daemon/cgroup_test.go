// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"strings"
	"testing"
)

func TestContainerOf(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	other := strings.Repeat("f", 64)
	const pod = "4d5c1f2e-0c1d-4a3b-9e8f-001122334455"
	slice := "kubepods-besteffort-pod" + strings.ReplaceAll(pod, "-", "_") + ".slice"
	for name, tc := range map[string]struct{ cgroup, id, pod string }{
		"host, v2":              {"0::/user.slice/user-1000.slice/session-3.scope\n", "", ""},
		"host, root":            {"0::/\n", "", ""},
		"empty":                 {"", "", ""},
		"garbage":               {"\x00:::\n:\n0:\n", "", ""},
		"containerd, systemd":   {"0::/kubepods.slice/kubepods-besteffort.slice/" + slice + "/cri-containerd-" + id + ".scope\n", id, pod},
		"containerd, cgroupfs":  {"0::/kubepods/besteffort/pod" + pod + "/" + id + "\n", id, pod},
		"containerd, mixed":     {"0::/system.slice/containerd.service/" + slice + ":cri-containerd:" + id + "\n", id, pod},
		"guaranteed pod":        {"0::/kubepods.slice/kubepods-pod" + strings.ReplaceAll(pod, "-", "_") + ".slice/cri-containerd-" + id + ".scope\n", id, pod},
		"static pod":            {"0::/kubepods/pod4d5c1f2e0c1d4a3b9e8f001122334455/" + id, id, "4d5c1f2e0c1d4a3b9e8f001122334455"},
		"cri-o":                 {"0::/kubepods.slice/" + slice + "/crio-" + id + ".scope/container", id, pod},
		"cri-o's monitor":       {"0::/kubepods.slice/" + slice + "/crio-conmon-" + id + ".scope", "", ""},
		"podman, systemd":       {"0::/machine.slice/libpod-" + id + ".scope/container\n", id, ""},
		"podman, rootless":      {"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + id + ".scope", id, ""},
		"podman's monitor":      {"0::/machine.slice/libpod-conmon-" + id + ".scope", "", ""},
		"podman, cgroupfs":      {"0::/libpod_parent/libpod-" + id, id, ""},
		"docker, systemd":       {"0::/system.slice/docker-" + id + ".scope", id, ""},
		"docker, v1":            {"12:memory:/docker/" + id + "\n1:name=systemd:/docker/" + id + "\n", id, ""},
		"nerdctl":               {"0::/system.slice/nerdctl-" + id + ".scope", id, ""},
		"nerdctl, cgroupfs":     {"0::/default/" + id, id, ""},
		"ctr":                   {"5:cpu:/default/demo-1\n0::/\n", "demo-1", ""},
		"hybrid":                {"2:memory:/kubepods/besteffort/pod" + pod + "/" + id + "\n1:name=systemd:/\n0::/system.slice/containerd.service\n", id, pod},
		"a cgroup of its own":   {"0::/system.slice/docker-" + id + ".scope/kubepods/docker-" + other + ".scope", id, ""},
		"short id":              {"0::/docker/0123456789ab", "", ""},
		"other cgroup ns":       {"0::/../../" + id, id, ""},
		"colons in the path":    {"0::/a:b/docker-" + id + ".scope", id, ""},
		"65 digits, no scope":   {"0::/docker/" + id + "0", "", ""},
		"upper case is not one": {"0::/docker/" + strings.ToUpper(id), "", ""},
	} {
		if gotID, gotPod := containerOf(tc.cgroup); gotID != tc.id || gotPod != tc.pod {
			t.Errorf("%s: id %q pod %q, want %q and %q", name, gotID, gotPod, tc.id, tc.pod)
		}
	}
}
