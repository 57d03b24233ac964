// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sys/unix"
)

// Audit says what the plugin does about containers that asked for GPUs and run
// without the shim, because they were created while no plugin was registered. The
// runtime reports all containers at each registration.
type Audit string

const (
	// AuditReport logs them and passes them to Plugin.Report.
	AuditReport Audit = "report"
	// AuditStop also ends their processes. The manager of the pod starts them again,
	// this time through the plugin. It needs the host's PID namespace. After a reboot the
	// kubelet starts pods in any order: those before this plugin's would run without GPUs for good.
	AuditStop Audit = "stop"
)

// Check refuses any other.
func (a Audit) Check() error {
	if a != AuditReport && a != AuditStop {
		return fmt.Errorf("%q is unknown: give report or stop, for containers that run without nvshare", string(a))
	}
	return nil
}

// Unmanaged is a container that asked for GPUs and runs without nvshare.
type Unmanaged struct {
	ID, Namespace, Pod, PodUID, Name string

	Asked string // the annotation, as key="value"; empty: something else gave it GPUs
	Why   string // the reason, and what to do
	// PID of its first process, in the runtime's PID namespace; 0: it has none yet.
	PID int
}

func (u Unmanaged) String() string {
	return fmt.Sprintf("pod %s/%s, container %q", u.Namespace, u.Pod, u.Name)
}

func (p *Plugin) identity(pod *api.PodSandbox, ctr *api.Container) Unmanaged {
	u := Unmanaged{
		ID: ctr.GetId(), Namespace: pod.GetNamespace(), Pod: pod.GetName(), PodUID: pod.GetUid(), Name: ctr.GetName(),
		PID: int(ctr.GetPid()),
	}
	if key, value, asked := p.containers.askedBy(pod.GetAnnotations(), ctr.GetName()); asked {
		u.Asked = fmt.Sprintf("%s=%q", key, shown(value))
	}
	cs := p.containers
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if l, _ := cs.limitsOf(pod, ctr); l != (Limits{}) {
		u.Asked = fmt.Sprintf("resources.limits %v", l)
	}
	return u
}

func (p *Plugin) tell(u Unmanaged) {
	p.log.Warnf("%v runs without nvshare (asked for: %s): %s", u, cmp.Or(u.Asked, "nothing"), u.Why)
	if p.Report != nil {
		p.Report(u)
	}
}

// look audits the containers that exist when the plugin registers. pods are by ID. It
// reads files, so a handler must not wait for it. What is created and not started has no
// process to look into or to end: PostStartContainer has it audited.
func (p *Plugin) look(pods map[string]*api.PodSandbox, ctrs []*api.Container) {
	for _, ctr := range ctrs {
		pod := pods[ctr.GetPodSandboxId()]
		if pod != nil && alive(ctr) && ctr.GetState() != api.ContainerState_CONTAINER_CREATED {
			p.lookAt(pod, ctr)
		}
	}
}

// PostStartContainer has a container audited in the background. Before, it enters one that has the
// shim and is not known: the runtime does not show plugins what others name in their answers, as
// NVIDIA's does for nvidia.cdi.k8s.io.
func (p *Plugin) PostStartContainer(_ context.Context, pod *api.PodSandbox, ctr *api.Container) error {
	if p.hasShim(ctr) && !p.containers.knows(ctr.GetId()) {
		p.follow(pod, ctr, p.inventory.Load())
		go p.awaitEnds([]*api.Container{ctr}, settles) // it may have ended already
	}
	go p.lookAt(pod, ctr)
	return nil
}

// lookAt audits one container.
func (p *Plugin) lookAt(pod *api.PodSandbox, ctr *api.Container) {
	if !p.judge(pod, ctr) {
		p.judgeSpec(pod, ctr)
	}
}

// unjudged is a container that may ask by its spec, of which nobody has told yet.
type unjudged struct {
	pod *api.PodSandbox
	ctr *api.Container
}

// judgeSpec audits a container that may ask by its spec, or leaves it to SetPods as long as the API server has
// not told of pods: it may never.
func (p *Plugin) judgeSpec(pod *api.PodSandbox, ctr *api.Container) {
	cs := p.containers
	if cs.specs == nil {
		return
	}
	cs.mu.Lock()
	later := cs.live.expected
	if later {
		cs.live.unjudged[ctr.GetId()] = unjudged{pod, ctr}
	}
	cs.mu.Unlock()
	if later {
		return
	}
	_ = p.learnLimits(pod, ctr) // the pod may be younger than the list
	p.judge(pod, ctr)
}

// judge audits a container by what is known, and tells whether it asks for GPUs or has any.
func (p *Plugin) judge(pod *api.PodSandbox, ctr *api.Container) bool {
	u := p.identity(pod, ctr)
	switch {
	case p.missedClaim(pod, ctr):
		u.Asked = "a resource claim"
		p.act(u)
	case p.usesGPU(pod, ctr):
		p.examine(u)
	case u.Asked == "":
		return false
	case !p.containers.knows(u.ID): // a known one was admitted, whatever the runtime tells now
		p.act(u)
	}
	return true
}

// act reports a container that was created without what it asked for, and stops it with
// AuditStop.
func (p *Plugin) act(u Unmanaged) {
	u.Why = "it was created while no plugin was registered; "
	if p.Audit != AuditStop {
		u.Why += "start it again, or have the plugin stop such containers with --audit stop"
		p.tell(u)
		return
	}
	u.Why += "stopping it"
	p.tell(u)
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

// stopGrace is how long a container may take to end by itself.
const stopGrace = 10 * time.Second

var errNoProcess = errors.New("there is no such process: it has just ended, or the plugin does not run in the host's PID namespace")

// stopProcess ends the first process of a container. The runtime then ends the
// others. forced is as in endProcess.
func stopProcess(pid int, id string, grace time.Duration) (forced bool, err error) {
	fd, err := openProcess(pid, id)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	return endProcess(fd, grace)
}

// openProcess returns a pidfd of a process of a container. It checks that the name of
// the process's cgroup has the container's ID: the PID may be another process's by
// now, or of another PID namespace.
func openProcess(pid int, id string) (fd int, err error) {
	if pid <= 0 {
		return -1, errors.New("the container runtime reports no process of it")
	}
	if len(id) < 8 { // almost any cgroup's name would have it
		return -1, fmt.Errorf("container ID %q is too short to be recognised", id)
	}
	fd, err = unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, errNoProcess
	}
	if err != nil {
		return -1, fmt.Errorf("pidfd_open %d: %w", pid, err)
	}
	// Read after the pidfd was opened: the file is that process's, or the process has
	// ended.
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

// endProcess ends a process by SIGTERM, and after grace by SIGKILL (forced).
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

// ended waits at most limit for the end of a process, and tells whether it came.
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
