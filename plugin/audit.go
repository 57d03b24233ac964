// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sys/unix"
)

// Audit says what becomes of containers that asked for GPUs and run without the
// shim: made while no plugin was registered, or after the runtime had dropped
// it. The runtime tells of all containers at each registration, so none of them
// stays unseen for longer than the plugin was away.
type Audit int

const (
	// AuditReport has them logged, and handed to whoever SetAudit names.
	AuditReport Audit = iota
	// AuditStop also ends their processes: whoever manages the pod starts it
	// again, this time through the plugin. It needs the host's PID namespace.
	AuditStop
)

// ParseAudit reads "report" or "stop".
func ParseAudit(s string) (Audit, error) {
	switch s {
	case "report":
		return AuditReport, nil
	case "stop":
		return AuditStop, nil
	}
	return 0, fmt.Errorf("%q is not what can be done with containers that run without nvshare: report or stop", s)
}

// Unmanaged is a container that asked for GPUs and runs without the shim.
type Unmanaged struct {
	ID, Namespace, Pod, PodUID, Name string

	Asked string // the annotation, as key="value"
	// PID of its first process, as the runtime sees it; 0: it has none yet.
	PID int
}

func (u Unmanaged) String() string {
	return fmt.Sprintf("pod %s/%s, container %q", u.Namespace, u.Pod, u.Name)
}

// SetAudit decides what becomes of containers that run without what they asked
// for; report, if not nil, is told of each, in a goroutine of its own. It must be
// called before Run. The default is AuditReport.
func (p *Plugin) SetAudit(what Audit, report func(Unmanaged)) {
	p.audit, p.report = what, report
}

// unmanaged returns what there is to say of a container that exists; nil if it
// did not ask, has what it asked for, or has ended.
func unmanaged(pod *api.PodSandbox, ctr *api.Container) *Unmanaged {
	if !alive(ctr) || usesGPU(ctr) {
		return nil
	}
	key, value, asked := askedBy(pod.GetAnnotations(), ctr.GetName())
	if !asked {
		return nil
	}
	return &Unmanaged{
		ID: ctr.GetId(), Namespace: pod.GetNamespace(), Pod: pod.GetName(), PodUID: pod.GetUid(), Name: ctr.GetName(),
		Asked: fmt.Sprintf("%s=%q", key, shown(value)), PID: int(ctr.GetPid()),
	}
}

// act reports what an audit has found, and stops it if it is to. It takes as
// long as those containers take to end: not for a handler.
func (p *Plugin) act(found []Unmanaged) {
	for _, u := range found {
		what := "start it again to get them, or have the plugin stop such containers with --audit stop"
		if p.audit == AuditStop {
			what = "stopping it"
		}
		p.log.Warnf("%v runs without nvshare although its pod asks for GPUs (%s): it was created while no plugin was registered; %s", u, u.Asked, what)
		if p.report != nil {
			p.report(u)
		}
	}
	if p.audit != AuditStop {
		return
	}
	for _, u := range found {
		go func() {
			switch forced, err := stopProcess(u.PID, u.ID, stopGrace); {
			case err != nil:
				p.log.Errorf("%v: cannot stop it: %v", u, err)
			case forced:
				p.log.Warnf("%v: killed, because it did not end within %v", u, stopGrace)
			default:
				p.log.Infof("%v: stopped", u)
			}
		}()
	}
}

// stopGrace is how long a container may take to end by itself.
const stopGrace = 10 * time.Second

var errNoProcess = errors.New("there is no such process: it has just ended, or the plugin does not run in the host's PID namespace")

// stopProcess ends the first process of a container, and with it all others of
// its PID namespace. forced as of endProcess.
func stopProcess(pid int, id string, grace time.Duration) (forced bool, err error) {
	fd, err := openProcess(pid, id)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	return endProcess(fd, grace)
}

// openProcess returns a pidfd of a process of a container. That it is the
// container's is known from its cgroup, whose name has the container's ID: a PID
// alone may be another's by now, or of another PID namespace than ours.
func openProcess(pid int, id string) (fd int, err error) {
	if pid <= 0 {
		return -1, errors.New("the runtime tells no process of it")
	}
	if len(id) < 8 { // would be found in about any cgroup's name
		return -1, fmt.Errorf("container ID %q is too short to be recognised", id)
	}
	fd, err = unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, errNoProcess
	}
	if err != nil {
		return -1, fmt.Errorf("pidfd_open %d: %w", pid, err)
	}
	// Read now, this is of the process that fd holds, or of none if it has ended.
	cgroup, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	switch {
	case err != nil || ended(fd, 0):
		err = errNoProcess
	case !strings.Contains(string(cgroup), id):
		err = fmt.Errorf("process %d is not in a cgroup of container %s (does the plugin run in the host's PID namespace?)", pid, id)
	default:
		return fd, nil
	}
	unix.Close(fd)
	return -1, err
}

// endProcess ends a process by SIGTERM, and by SIGKILL (forced) when grace is
// over.
func endProcess(pidfd int, grace time.Duration) (forced bool, err error) {
	send := func(sig unix.Signal) error {
		if err := unix.PidfdSendSignal(pidfd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("send it %s: %w", unix.SignalName(sig), err)
		}
		return nil
	}
	if err := send(unix.SIGTERM); err != nil {
		return false, err
	}
	if ended(pidfd, grace) {
		return false, nil
	}
	return true, send(unix.SIGKILL)
}

// ended waits until a process has, for at most limit.
func ended(pidfd int, limit time.Duration) bool {
	for deadline := time.Now().Add(limit); ; {
		left := max(0, time.Until(deadline))
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(left.Milliseconds()))
		if n > 0 {
			return true
		}
		if err != nil && !errors.Is(err, unix.EINTR) || left == 0 {
			return false
		}
	}
}
