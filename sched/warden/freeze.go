// SPDX-License-Identifier: Apache-2.0

package warden

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"

	"github.com/nvshare/nvshare/sched/cgroup"
	"github.com/nvshare/nvshare/sched/warden/order"
)

// idLength is the length of a container's id. Nothing but a container's cgroup is stopped: others have users' sessions and
// daemons in them.
const idLength = 64

// freezerOf returns the file that stops the processes of a process's container.
func freezerOf(pid int, container string) (string, error) {
	if len(container) < idLength {
		return "", fmt.Errorf("%.64q is no container", container)
	}
	tree, err := cgroup.Find("/")
	if err != nil {
		return "", err
	}
	dir, err := tree.Of(pid, container)
	return cgroup.Freezer(dir), err
}

func thaw(file string) error {
	if file == "" {
		return nil
	}
	if err := cgroup.Stop(file, false); !errors.Is(err, fs.ErrNotExist) { // the container has ended
		return err
	}
	return nil
}

// limitMemory has the kernel hold the cgroup of a container, or of a user's sessions, to a memory limit.
func limitMemory(root string, o order.Order) error {
	tree, err := cgroup.Find(root)
	if err != nil {
		return err
	}
	region := tree.Region(o.GPU...)
	if region == "" {
		return errors.New(order.NoRegion)
	}
	dir, err := tree.Of(o.PID, cmp.Or(o.Container, fmt.Sprintf("user-%d.slice", o.UID)))
	if err != nil {
		return err
	}
	return cgroup.Limit(dir, cgroup.Max(region, o.Bytes))
}
