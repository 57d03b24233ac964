// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/cdi"
)

// Plugin handles the events of one container runtime. It subscribes only to events
// that every NRI runtime knows: an old runtime refuses a plugin that subscribes to a
// new event.
type Plugin struct {
	// These are set before Run.

	ShimDir string // of the host, which containers have mounted
	Audit   Audit  // what to do about containers that run without what they asked for
	// Report is called in a goroutine of its own for each container that runs without nvshare, also for one
	// whose image cannot load the shim. nil: nobody is told.
	Report func(Unmanaged)
	OwnPod string // <namespace>/<name> of the pod in which the plugin runs, which its runtime has to know; "": it runs in none

	log        logrus.FieldLogger
	containers *Containers
	inventory  atomic.Pointer[Inventory]
	drops      atomic.Pointer[error] // why this runtime gives no GPUs; nil: it does
	// seesProcesses is inHostPIDNamespace, except in tests.
	seesProcesses func() bool
	syncLimit     time.Duration // of a runtime for the list of its containers, until it is a problem
}

var (
	_ stub.ConfigureInterface       = (*Plugin)(nil)
	_ stub.SynchronizeInterface     = (*Plugin)(nil)
	_ stub.CreateContainerInterface = (*Plugin)(nil)
	_ stub.StopContainerInterface   = (*Plugin)(nil)
	_ stub.RemoveContainerInterface = (*Plugin)(nil)
	_ stub.StopPodInterface         = (*Plugin)(nil)

	_ stub.PostStartContainerInterface = (*Plugin)(nil)
)

// New returns a plugin that knows no devices yet. It enters the containers that use
// GPUs in containers.
func New(log logrus.FieldLogger, containers *Containers) *Plugin {
	p := &Plugin{ShimDir: cdi.DefaultPaths.ShimDir, log: log, containers: containers, syncLimit: syncLimit, seesProcesses: inHostPIDNamespace}
	p.inventory.Store(&Inventory{})
	containers.Health.Waits(runtimePart, "not registered with the container runtime yet")
	return p
}

// SetInventory changes what containers can be given from now on.
func (p *Plugin) SetInventory(inv *Inventory) {
	p.inventory.Store(inv)
	p.containers.Health.setGPUs(len(inv.gpus) > 0 || inv.problem != nil)
	p.judgeRuntime(inv)
	Signal(p.containers.changed)
}

// judgeRuntime says that the runtime drops the GPUs of this node, if it has any and pods ask the plugin for them.
func (p *Plugin) judgeRuntime(inv *Inventory) {
	if drops := p.drops.Load(); drops != nil && len(inv.gpus) > 0 && p.containers.Claims == nil {
		p.containers.Health.Problem("devices", *drops)
	} else {
		p.containers.Health.Problem("devices", nil)
	}
}

// Configure learns which runtime this is.
func (p *Plugin) Configure(_ context.Context, _, runtime, version string) (api.EventMask, error) {
	p.log.Infof("connected to %s %s", runtime, version)
	p.drops.Store(nil)
	if !injectsCDI(runtime, version) {
		drops := fmt.Errorf("%s %s is not known to give containers the devices that plugins name: nvshare needs containerd 2.1 or 1.7.30, or CRI-O 1.34, or later", runtime, version)
		p.log.Error(drops)
		p.drops.Store(&drops)
	}
	p.judgeRuntime(p.inventory.Load())
	return 0, nil // subscribe to all events that have a handler
}

// Synchronize learns which containers exist, and starts the audit.
func (p *Plugin) Synchronize(_ context.Context, pods []*api.PodSandbox, ctrs []*api.Container) ([]*api.ContainerUpdate, error) {
	byID := make(map[string]*api.PodSandbox, len(pods))
	for _, pod := range pods {
		byID[pod.GetId()] = pod
	}
	inv := p.inventory.Load()
	using, wrong := p.enter(byID, ctrs, inv)
	for _, err := range wrong { // created while no plugin was there to refuse them
		p.log.Warn(err)
	}
	go p.look(byID, ctrs)
	go p.awaitEnds(ctrs, settles)
	p.log.Debugf("synchronized: %d containers, %d use GPUs through nvshare", len(ctrs), using)
	return nil, nil
}

// enter replaces the known containers by those that exist. It returns how many use
// GPUs, and an error for each whose annotations cannot be met.
func (p *Plugin) enter(pods map[string]*api.PodSandbox, ctrs []*api.Container, inv *Inventory) (n int, wrong []error) {
	cs := p.containers
	if err := cs.learnShares(ctrs...); err != nil {
		wrong = append(wrong, err)
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	var using, ended []Container
	for _, ctr := range ctrs {
		pod := pods[ctr.GetPodSandboxId()]
		switch {
		case pod == nil || !p.usesGPU(pod, ctr):
		case !alive(ctr):
			ended = append(ended, describeExisting(pod, ctr, Request{}, inv))
		default:
			c, err := cs.existing(pod, ctr, inv)
			if err != nil {
				wrong = append(wrong, fmt.Errorf("pod %s/%s, container %q runs without a part of what it asks for: %w", pod.GetNamespace(), pod.GetName(), ctr.GetName(), err))
			}
			using = append(using, c)
		}
	}
	cs.replace(using, ended)
	return len(using), wrong
}

// StopContainer frees the GPUs of a container whose processes have ended.
func (p *Plugin) StopContainer(_ context.Context, _ *api.PodSandbox, ctr *api.Container) ([]*api.ContainerUpdate, error) {
	p.containers.End(ctr.GetId())
	return nil, nil
}

// RemoveContainer forgets a container, also one that never started.
func (p *Plugin) RemoveContainer(_ context.Context, _ *api.PodSandbox, ctr *api.Container) error {
	p.containers.Remove(ctr.GetId())
	return nil
}

// StopPodSandbox forgets all containers of a pod. The runtime reports the end of each
// before, except of containers that it failed to create.
func (p *Plugin) StopPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	p.containers.EndPod(pod.GetId())
	return nil
}

// usesGPU tells whether a container was given GPUs, by this plugin or by other
// means. It believes what only the node's own programs can write: the record of a
// placement, devices, and a mount of the shim, which who has a record has, too. Environment
// and other mounts are the pod's to choose.
func (p *Plugin) usesGPU(pod *api.PodSandbox, ctr *api.Container) bool {
	return adjusted(pod, ctr) || len(given(ctr)) > 0 || p.hasShim(ctr)
}

// hasShim tells whether the node's shim is mounted in a container.
func (p *Plugin) hasShim(ctr *api.Container) bool {
	return slices.ContainsFunc(ctr.GetMounts(), func(m *api.Mount) bool {
		return m.GetDestination() == cdi.ShimDir && m.GetSource() == p.ShimDir
	})
}

func alive(ctr *api.Container) bool {
	return ctr.GetState() != api.ContainerState_CONTAINER_STOPPED
}
