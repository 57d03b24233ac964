// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"os"
	"time"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sys/unix"
)

// settles is within what time a runtime that has sent the list of its containers tells the plugin of
// their ends. It is registered as soon as it has answered.
const settles = 10 * time.Second

// awaitEnds frees what containers have whose processes have ended, or end within limit: the runtime
// tells nobody of an end between the list of its containers and the plugin's registration.
func (p *Plugin) awaitEnds(ctrs []*api.Container, limit time.Duration) {
	seen := p.seesProcesses() // the runtime's process IDs mean something here
	var ids, gone []string
	var fds []unix.PollFd
	for _, ctr := range ctrs {
		if ctr.GetState() != api.ContainerState_CONTAINER_RUNNING || ctr.GetPid() == 0 {
			continue
		}
		fd, err := openProcess(int(ctr.GetPid()), ctr.GetId())
		switch {
		case errors.Is(err, errNoProcess):
			gone = append(gone, ctr.GetId())
		case err != nil:
		case !p.containers.knows(ctr.GetId()):
			seen = true
			unix.Close(fd)
		default:
			seen = true
			ids, fds = append(ids, ctr.GetId()), append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
		}
	}
	if seen {
		for _, id := range gone {
			p.containers.End(id)
		}
	}
	for deadline := time.Now().Add(limit); len(fds) > 0; {
		left := max(0, time.Until(deadline))
		_, err := unix.Poll(fds, int(left.Milliseconds()))
		for i := len(fds) - 1; i >= 0; i-- {
			over := fds[i].Revents != 0
			if over {
				p.containers.End(ids[i])
			}
			if over || left == 0 || err != nil && !errors.Is(err, unix.EINTR) {
				unix.Close(int(fds[i].Fd))
				ids, fds = append(ids[:i], ids[i+1:]...), append(fds[:i], fds[i+1:]...)
			}
		}
	}
}

// inHostPIDNamespace tells whether this program is in the host's first PID namespace, whose number the
// kernel has fixed.
func inHostPIDNamespace() bool {
	name, err := os.Readlink("/proc/self/ns/pid")
	return err == nil && name == "pid:[4026531836]"
}
