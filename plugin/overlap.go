// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"maps"
	"path"
	"slices"

	"github.com/containerd/nri/pkg/api"

	"github.com/nvshare/nvshare/cdi"
	sched "github.com/nvshare/nvshare/sched/api"
)

// A container in an overlap group has a CDI device of its own, and the group's name as an
// annotation. The device's OCI hook waits for the group and mounts its directories, while
// the runtime serves other containers.

// cannotOverlap says why a container cannot be in an overlap group.
func cannotOverlap(ctr *api.Container, c Container, count int) error {
	switch {
	case ctr.GetUser() == nil:
		return errors.New("this container runtime does not say as which user the container runs, and members of a group have one user: a later containerd does")
	case slices.ContainsFunc(ctr.GetLinux().GetNamespaces(), func(n *api.LinuxNamespace) bool { return n.GetType() == "user" }):
		return errors.New("the container has a user namespace of its own, and MPS serves users of the host: leave out hostUsers: false")
	case count > 1 || count == 0 && len(c.GPUs) != 1:
		return errors.New("a member of an overlap group has exactly one GPU: ask for one")
	}
	return nil
}

// overlap adds what a container in an overlap group needs.
func overlap(adjust *api.ContainerAdjustment, ctr *api.Container, t sched.Terms) *api.ContainerAdjustment {
	if t.Overlap == "" {
		return adjust
	}
	if adjust == nil {
		adjust = &api.ContainerAdjustment{}
	}
	adjust.AddCDIDevice(&api.CDIDevice{Name: cdi.KindNRI + "=" + cdi.OverlapDevice})
	adjust.AddAnnotation(OverlapAnnotation, t.Overlap)
	env := sched.OverlapEnvironment(mpsDir(ctr), t)
	for _, key := range slices.Sorted(maps.Keys(env)) {
		replaceEnv(adjust, ctr, key, env[key])
	}
	return adjust
}

// mpsDir is where the container gets the sockets of its group's MPS daemon: where its
// environment says, or below /usr, which an image seldom mounts anything on.
func mpsDir(ctr *api.Container) string {
	if dir, _ := lookupEnv(ctr.GetEnv(), sched.MPSPipeEnv); path.IsAbs(dir) && path.Clean(dir) == dir && dir != "/" {
		return dir
	}
	return cdi.ContainerMPSDir
}
