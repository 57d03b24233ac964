// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

var (
	// containerSegment is one directory of a cgroup path that names a
	// container: systemd scopes (cri-containerd-<id>.scope, docker-, crio-,
	// libpod-, nerdctl-), cgroupfs (<id>, libpod-<id>), and the form that mixes
	// both (<slice>:cri-containerd:<id>). Monitors (…-conmon-<id>) do not count.
	containerSegment = regexp.MustCompile(`^(?:(?:[a-z]+-)*[a-z]+-|.*:[a-z-]+:)?([0-9a-f]{64})(?:\.scope)?$`)
	podSegment       = regexp.MustCompile(`(?:^|-)pod([0-9a-f]{8}(?:[-_]?[0-9a-f]{4}){3}[-_]?[0-9a-f]{12})(?:\.slice)?(?:$|:)`)
	// ctrName is a container of `ctr run`: containerd gives containers without
	// a cgroup path /<namespace>/<name>, and people choose these names.
	ctrName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]*$`)
	// slurmRoot is the cgroup below which slurmd puts jobs, v2 or v1; with v1 that of the user is between.
	slurmRoot = regexp.MustCompile(`^(?:(?:.+_)?slurmstepd\.scope|slurm(?:_.+)?)$`)
	slurmUser = regexp.MustCompile(`^uid_[0-9]+$`)
	slurmJob  = regexp.MustCompile(`^job_[0-9]+$`)
	// userManager is the cgroup that systemd delegates to a user.
	userManager = regexp.MustCompile(`^user@([0-9]+)\.service$`)
	// userSlice is the cgroup in which systemd keeps all sessions of a user.
	userSlice = regexp.MustCompile(`^user-([0-9]+)\.slice$`)
)

// named is a directory of a cgroup path that names a container.
type named struct {
	container, podUID string
	dir               string // the path up to and including the directory
}

// nameIn finds the outermost directory of a cgroup path that names a
// container. Inner ones may be the container's own: a container can make
// cgroups below its own and name them as it likes.
func nameIn(path string) (n named, ok bool) {
	segments := strings.Split(path, "/")
	for i, segment := range segments {
		if m := podSegment.FindStringSubmatch(segment); m != nil {
			n.podUID = strings.ReplaceAll(m[1], "_", "-")
		}
		if strings.Contains(segment, "conmon-") {
			continue
		}
		if j := i + 1; slurmRoot.MatchString(segment) && j < len(segments) {
			if slurmUser.MatchString(segments[j]) && j+1 < len(segments) {
				j++
			}
			if slurmJob.MatchString(segments[j]) {
				return named{container: segments[j], dir: strings.Join(segments[:j+1], "/")}, true
			}
		}
		if m := containerSegment.FindStringSubmatch(segment); m != nil {
			if inPod := i+1 < len(segments) && n.podUID == "" && segment == m[1] && strings.HasPrefix(segments[i+1], "libpod-"); inPod {
				continue // a pod of podman, whose containers are below it
			}
			n.container, n.dir = m[1], strings.Join(segments[:i+1], "/")
			return n, true
		}
	}
	if len(segments) > 2 && segments[0] == "" && segments[1] == "default" && ctrName.MatchString(segments[2]) {
		return named{container: segments[2], dir: strings.Join(segments[:3], "/")}, true
	}
	return named{}, false
}

// cgroupLine is one line of /proc/<pid>/cgroup.
type cgroupLine struct {
	controllers string // "" for cgroup v2
	path        string
}

// cgroupLines reads the text of /proc/<pid>/cgroup. The line of cgroup v2 comes
// first: it is the most exact one where it is used.
func cgroupLines(text string) (lines []cgroupLine) {
	for line := range strings.Lines(text) {
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case len(fields) != 3:
		case fields[0] == "0":
			lines = slices.Insert(lines, 0, cgroupLine{"", fields[2]})
		default:
			lines = append(lines, cgroupLine{fields[1], fields[2]})
		}
	}
	return lines
}

// hierarchies are the cgroup file systems of the host that are visible here:
// where each is mounted, by its controllers ("" for cgroup v2).
type hierarchies map[string]string

// readHierarchies finds the hierarchies in the text of /proc/<pid>/mountinfo. A
// mount that does not show the hierarchy's root does not count.
func readHierarchies(mountinfo string) hierarchies {
	all := hierarchies{}
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		fields, kind := strings.Fields(before), strings.Fields(after)
		if !ok || len(fields) < 5 || len(kind) < 3 || fields[3] != "/" {
			continue
		}
		switch kind[0] {
		case "cgroup2":
			all[""] = fields[4]
		case "cgroup":
			for option := range strings.SplitSeq(kind[2], ",") {
				all[option] = fields[4]
			}
		}
	}
	return all
}

// ownerOf returns which user owns a directory of a hierarchy; false: the kernel
// does not say, as when the owner of a parent directory keeps others out. Where
// the hierarchy is not visible, the directory belongs to root unless its path
// says that systemd has delegated it to a user.
func (h hierarchies) ownerOf(controllers, dir string) (uid uint32, ok bool) {
	controller, _, _ := strings.Cut(controllers, ",")
	mount, visible := h[controller]
	if !visible || strings.HasPrefix(dir, "/..") {
		for segment := range strings.SplitSeq(dir, "/") {
			if m := userManager.FindStringSubmatch(segment); m != nil {
				n, err := strconv.ParseUint(m[1], 10, 32)
				return uint32(n), err == nil
			}
		}
		return 0, true
	}
	var st unix.Stat_t
	err := unix.Stat(filepath.Join(mount, dir), &st)
	return st.Uid, err == nil
}

// containerOf finds the container of a process in the text of its
// /proc/<pid>/cgroup, for cgroup v1, v2 and hybrid hosts. Both are empty for a
// process outside containers; the pod UID is empty outside Kubernetes. A name is
// believed only if the directory with that name belongs to root. If it belongs
// to another user, that user is delegated; nil: nobody.
func (h hierarchies) containerOf(cgroup string) (id, podUID string, delegated *uint32) {
	for _, line := range cgroupLines(cgroup) {
		n, ok := nameIn(line.path)
		if !ok {
			continue
		}
		uid, ok := h.ownerOf(line.controllers, n.dir)
		switch {
		case ok && uid == 0:
			return n.container, n.podUID, nil
		case ok && delegated == nil:
			delegated = &uid
		}
	}
	return "", "", delegated
}

// sessionOf finds the user of the sessions that a process is part of; nil: it is part of
// none. Like a container's, the directory counts only if root made it.
func (h hierarchies) sessionOf(cgroup string) *uint32 {
	for _, line := range cgroupLines(cgroup) {
		segments := strings.Split(line.path, "/")
		i := slices.IndexFunc(segments, userSlice.MatchString) // inner ones may be the user's own
		if i < 0 {
			continue
		}
		if owner, ok := h.ownerOf(line.controllers, strings.Join(segments[:i+1], "/")); !ok || owner != 0 {
			continue
		}
		if n, err := strconv.ParseUint(userSlice.FindStringSubmatch(segments[i])[1], 10, 32); err == nil {
			uid := uint32(n)
			return &uid
		}
	}
	return nil
}
