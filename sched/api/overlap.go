// SPDX-License-Identifier: Apache-2.0

package api

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
)

// An overlap group is the containers of one namespace and user that name the same group:
// on each GPU their processes share an MPS server, and so run at the same time. Its full
// name is <namespace>/<uid>/<name>; the namespace of engines' containers is EngineOverlap,
// and that of programs outside containers is empty.

// Variables of the programs in an overlap group.
const (
	// MPSPipeEnv names the directory of the group's MPS daemon.
	MPSPipeEnv = "CUDA_MPS_PIPE_DIRECTORY"
	// MPSThreadsEnv is the part of the GPU's processors that a program may use, percent.
	MPSThreadsEnv = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
)

// EngineOverlap stands for the namespace of the overlap groups of podman, Docker, nerdctl
// and ctr. No namespace of Kubernetes has this name.
const EngineOverlap = "@engines"

// OverlapAnnotation has the name of a container's overlap group. Users of engines say it;
// on the containers of pods the plugin writes it.
const OverlapAnnotation = "nvshare.com/gpu-overlap"

// ParseOverlap reads the name of an overlap group. It returns "", no group, for "none".
func ParseOverlap(s string) (string, error) {
	if s == "none" {
		return "", nil
	}
	if !gangName.MatchString(s) {
		return "", fmt.Errorf("%.64q is not an overlap group: give a name of up to 63 letters, digits and . _ - that begins and ends with a letter or digit", s)
	}
	return s, nil
}

// FormatOverlap writes an overlap group for people; "" is "none".
func FormatOverlap(group string) string {
	if group == "" {
		return "none"
	}
	return group[strings.LastIndexByte(group, '/')+1:]
}

// OverlapIn returns the full name of a group; "" for no group.
func OverlapIn(namespace string, uid uint32, name string) string {
	if name == "" {
		return ""
	}
	return namespace + "/" + strconv.FormatUint(uint64(uid), 10) + "/" + name
}

// OverlapFor writes the full name of a group for people: programs outside containers are in no
// namespace.
func OverlapFor(group string) string {
	namespace, uid, name, ok := SplitOverlap(group)
	if !ok || namespace != "" {
		return group
	}
	return fmt.Sprintf("%s of user %d", name, uid)
}

// SplitOverlap is the opposite of OverlapIn.
func SplitOverlap(group string) (namespace string, uid uint32, name string, ok bool) {
	parts := strings.Split(group, "/")
	if len(parts) != 3 {
		return "", 0, "", false
	}
	n, err := strconv.ParseUint(parts[1], 10, 32)
	return parts[0], uint32(n), parts[2], err == nil && checkName(parts[2]) == nil
}

// OverlapDir is the directory of a group's MPS daemon on one GPU, below the run directory.
// Its length does not depend on the names: the daemon makes sockets in it.
func OverlapDir(runDir, group, gpu string) string {
	sum := sha256.Sum256([]byte(group + "\x00" + gpu))
	return filepath.Join(runDir, OverlapBelow, hex.EncodeToString(sum[:8]))
}

// OverlapBelow is the directory below the run directory that has those of all groups.
const OverlapBelow = "overlap"

// The directories below OverlapDir. Members see the first two: the second is their
// /dev/shm in containers.
const (
	OverlapPipe   = "pipe"
	OverlapShared = "shm"
	OverlapLog    = "log"
)

// OverlapEnvironment returns what a member's environment needs. A core limit is the part of
// the processors that the program may use, from its start on.
func OverlapEnvironment(pipe string, t Terms) map[string]string {
	env := map[string]string{MPSPipeEnv: pipe}
	if t.CoreLimit != 0 && t.CoreLimit < 100 {
		env[MPSThreadsEnv] = strconv.FormatUint(uint64(t.CoreLimit), 10)
	}
	return env
}
