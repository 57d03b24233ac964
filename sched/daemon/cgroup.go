// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"regexp"
	"strings"
)

var (
	// containerSegment is one directory of a cgroup path that names a
	// container: systemd scopes (cri-containerd-<id>.scope, docker-, crio-,
	// libpod-, nerdctl-), cgroupfs (<id>, libpod-<id>), and the form that mixes
	// them (<slice>:cri-containerd:<id>). Monitors (…-conmon-<id>) are not it.
	containerSegment = regexp.MustCompile(`^(?:(?:[a-z]+-)*[a-z]+-|.*:[a-z-]+:)?([0-9a-f]{64})(?:\.scope)?$`)
	podSegment       = regexp.MustCompile(`(?:^|-)pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?:\.slice)?(?:$|:)`)
	// containerd gives containers without a cgroup path /<namespace>/<name>;
	// `ctr run` uses this namespace, and names people choose.
	ctrPath = regexp.MustCompile(`^/default/([A-Za-z0-9][A-Za-z0-9_.-]*)(?:/|$)`)
)

// containerOf finds container id and pod UID in the text of
// /proc/<pid>/cgroup, for cgroup v1, v2 and hybrid hosts. Both are empty for a
// process outside containers; the pod UID is empty outside Kubernetes.
//
// The outermost container of a path counts: a container may be able to make
// cgroups below its own and name them as it likes.
func containerOf(cgroup string) (id, podUID string) {
	var paths []string
	for _, line := range strings.Split(cgroup, "\n") {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		if fields[0] == "0" { // cgroup v2 is the most exact where it is used
			paths = append([]string{fields[2]}, paths...)
		} else {
			paths = append(paths, fields[2])
		}
	}
	for _, path := range paths {
		if id, podUID = containerOfPath(path); id != "" {
			return id, podUID
		}
	}
	return "", ""
}

func containerOfPath(path string) (id, podUID string) {
	for _, segment := range strings.Split(path, "/") {
		if m := podSegment.FindStringSubmatch(segment); m != nil {
			podUID = strings.ReplaceAll(m[1], "_", "-")
		}
		if strings.Contains(segment, "conmon-") {
			continue
		}
		if m := containerSegment.FindStringSubmatch(segment); m != nil {
			return m[1], podUID
		}
	}
	if m := ctrPath.FindStringSubmatch(path); m != nil {
		return m[1], ""
	}
	return "", ""
}
