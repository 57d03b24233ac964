// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"errors"
	"os"
	"strings"
	"testing"
)

func TestContainerOf(t *testing.T) {
	id := strings.Repeat("0123456789abcdef", 4)
	other := strings.Repeat("f", 64)
	const pod = "4d5c1f2e-0c1d-4a3b-9e8f-001122334455"
	slice := "kubepods-besteffort-pod" + strings.ReplaceAll(pod, "-", "_") + ".slice"
	for name, tc := range map[string]struct{ cgroup, id, pod string }{
		"Slurm, v2":                    {"0::/system.slice/slurmstepd.scope/job_71/step_0/user/task_0\n", "job_71", ""},
		"Slurm, v2, several slurmd":    {"0::/system.slice/node1_slurmstepd.scope/job_71/step_batch/user/task_0\n", "job_71", ""},
		"Slurm, v1":                    {"6:freezer:/slurm/uid_1000/job_71/step_batch\n0::/\n", "job_71", ""},
		"Slurm, v1, several slurmd":    {"6:freezer:/slurm_node1/uid_0/job_71/step_extern\n5:devices:/\n", "job_71", ""},
		"Slurm's own":                  {"0::/system.slice/slurmstepd.scope/system\n", "", ""},
		"a job of nobody's":            {"0::/user.slice/job_71\n", "", ""},
		"host, v2":                     {"0::/user.slice/user-1000.slice/session-3.scope\n", "", ""},
		"host, root":                   {"0::/\n", "", ""},
		"empty":                        {"", "", ""},
		"garbage":                      {"\x00:::\n:\n0:\n", "", ""},
		"containerd, systemd":          {"0::/kubepods.slice/kubepods-besteffort.slice/" + slice + "/cri-containerd-" + id + ".scope\n", id, pod},
		"containerd, cgroupfs":         {"0::/kubepods/besteffort/pod" + pod + "/" + id + "\n", id, pod},
		"containerd, mixed":            {"0::/system.slice/containerd.service/" + slice + ":cri-containerd:" + id + "\n", id, pod},
		"guaranteed pod":               {"0::/kubepods.slice/kubepods-pod" + strings.ReplaceAll(pod, "-", "_") + ".slice/cri-containerd-" + id + ".scope\n", id, pod},
		"static pod":                   {"0::/kubepods/pod4d5c1f2e0c1d4a3b9e8f001122334455/" + id, id, "4d5c1f2e0c1d4a3b9e8f001122334455"},
		"cri-o":                        {"0::/kubepods.slice/" + slice + "/crio-" + id + ".scope/container", id, pod},
		"cri-o's monitor":              {"0::/kubepods.slice/" + slice + "/crio-conmon-" + id + ".scope", "", ""},
		"podman, systemd":              {"0::/machine.slice/libpod-" + id + ".scope/container\n", id, ""},
		"podman, rootless":             {"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-" + id + ".scope", "", ""},
		"podman's monitor":             {"0::/machine.slice/libpod-conmon-" + id + ".scope", "", ""},
		"podman, cgroupfs":             {"0::/libpod_parent/libpod-" + id, id, ""},
		"podman's pod, cgroupfs":       {"0::/libpod_parent/" + other + "/libpod-" + id, id, ""},
		"podman's pod, systemd":        {"0::/machine.slice/machine-libpod_pod_" + other + ".slice/libpod-" + id + ".scope/container", id, ""},
		"a container's own below":      {"0::/libpod_parent/libpod-" + id + "/libpod-" + other, id, ""},
		"of Kubernetes, its own below": {"0::/kubepods/pod" + pod + "/" + id + "/libpod-" + other, id, pod},
		"docker, systemd":              {"0::/system.slice/docker-" + id + ".scope", id, ""},
		"docker, v1":                   {"12:memory:/docker/" + id + "\n1:name=systemd:/docker/" + id + "\n", id, ""},
		"nerdctl":                      {"0::/system.slice/nerdctl-" + id + ".scope", id, ""},
		"nerdctl, cgroupfs":            {"0::/default/" + id, id, ""},
		"ctr":                          {"5:cpu:/default/demo-1\n0::/\n", "demo-1", ""},
		"hybrid":                       {"2:memory:/kubepods/besteffort/pod" + pod + "/" + id + "\n1:name=systemd:/\n0::/system.slice/containerd.service\n", id, pod},
		"a cgroup of its own":          {"0::/system.slice/docker-" + id + ".scope/kubepods/docker-" + other + ".scope", id, ""},
		"short id":                     {"0::/docker/0123456789ab", "", ""},
		"other cgroup ns":              {"0::/../../" + id, id, ""},
		"colons in the path":           {"0::/a:b/docker-" + id + ".scope", id, ""},
		"65 digits, no scope":          {"0::/docker/" + id + "0", "", ""},
		"upper case is not one":        {"0::/docker/" + strings.ToUpper(id), "", ""},
	} {
		if gotID, gotPod, delegated := (hierarchies{}).containerOf(tc.cgroup); gotID != tc.id || gotPod != tc.pod || (delegated != nil) != (name == "podman, rootless") {
			t.Errorf("%s: id %q pod %q delegated %v, want %q and %q", name, gotID, gotPod, delegated, tc.id, tc.pod)
		}
	}
}

// A container is believed where root made the directory that names it, and
// nowhere else; a process in another user's directory counts to that user.
func TestWhoIsBelieved(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to make another user's directories")
	}
	id, other := strings.Repeat("0123456789abcdef", 4), strings.Repeat("f", 64)
	v1, v2 := t.TempDir(), t.TempDir()
	make := func(dir string, uid int) {
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.Chown(dir, uid, uid)); err != nil {
			t.Fatal(err)
		}
	}
	scope := "docker-" + id + ".scope"
	make(v2+"/system.slice/"+scope+"/nested/"+other, 100000)
	make(v2+"/user.slice/user@3000.service", 3000)
	make(v2+"/user.slice/user@3000.service/"+scope, 3000)
	make(v2+"/user.slice/user@3000.service/"+scope+"/"+other, 3000)
	make(v2+"/default/demo", 3000)
	make(v1+"/docker/"+id, 0)
	h := readHierarchies("30 20 0:26 / " + v2 + " rw,nosuid - cgroup2 cgroup2 rw\n31 20 0:27 / " + v1 + " rw - cgroup cgroup rw,cpu,cpuacct\n32 20 0:28 /x /y rw - cgroup cgroup rw,memory\n")
	for name, tc := range map[string]struct {
		cgroup, id string
		delegated  int // -1: to nobody
	}{
		"a container of root's engine":     {"0::/system.slice/" + scope, id, -1},
		"a cgroup of a container's own":    {"0::/system.slice/" + scope + "/nested/" + other, id, -1},
		"a user who poses as one":          {"0::/user.slice/user@3000.service/" + scope, "", 3000},
		"below that":                       {"0::/user.slice/user@3000.service/" + scope + "/" + other, "", 3000},
		"by a name for ctr":                {"0::/default/demo", "", 3000},
		"one that is not there":            {"0::/system.slice/" + other, "", -1},
		"v1, controllers mounted together": {"4:cpu,cpuacct:/docker/" + id, id, -1},
		"posing in one hierarchy of two":   {"4:cpu,cpuacct:/docker/" + id + "\n0::/default/demo", id, -1},
		"not visible":                      {"5:memory:/docker/" + other, other, -1},
		"not visible, delegated":           {"5:memory:/user.slice/user@3000.service/" + other, "", 3000},
		"above our cgroup namespace":       {"0::/../../kubepods/" + other, other, -1},
		"above it, delegated":              {"0::/../../user@3000.service/" + other, "", 3000},
	} {
		got, _, delegated := h.containerOf(tc.cgroup)
		uid := -1
		if delegated != nil {
			uid = int(*delegated)
		}
		if got != tc.id || uid != tc.delegated {
			t.Errorf("%s: container %q, delegated to %d; want %q and %d", name, got, uid, tc.id, tc.delegated)
		}
	}
}
