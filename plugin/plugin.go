// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/sirupsen/logrus"

	"github.com/nvshare/nvshare/cdi"
	sched "github.com/nvshare/nvshare/sched/api"
)

// Plugin handles the events of one container runtime. It subscribes only to events
// that every NRI runtime knows: an old runtime refuses a plugin that subscribes to a
// new event.
type Plugin struct {
	log        logrus.FieldLogger
	containers *Containers
	inventory  atomic.Pointer[Inventory]
	drops      atomic.Pointer[error] // why this runtime gives no GPUs; nil: it does
	shimDirs   []string              // of the host, one of which containers have mounted
	audit      Audit
	report     func(Unmanaged)
	root       string // of the host's file system
	ownPod     string // <namespace>/<name>; "": it runs in none
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
	p := &Plugin{log: log, containers: containers, syncLimit: syncLimit, seesProcesses: inHostPIDNamespace, root: "/"}
	p.SetLibDir(cdi.DefaultLibDir)
	p.inventory.Store(&Inventory{})
	containers.Health.Waits(runtimePart, "not registered with the container runtime yet")
	return p
}

// SetLibDir tells which directory of the host has the shims, if it is not
// cdi.DefaultLibDir. It must be called before Run.
func (p *Plugin) SetLibDir(dir string) {
	// Containers of earlier releases have the directory itself.
	p.shimDirs = []string{filepath.Join(dir, cdi.ShimLink), dir}
}

// SetInventory changes what containers can be given from now on.
func (p *Plugin) SetInventory(inv *Inventory) {
	p.inventory.Store(inv)
	p.judgeRuntime(inv)
	signal(p.containers.changed)
}

// judgeRuntime says that the runtime drops the GPUs of this node, if it has any and pods ask the plugin for them.
func (p *Plugin) judgeRuntime(inv *Inventory) {
	if drops := p.drops.Load(); drops != nil && len(inv.gpus) > 0 && p.containers.claims == nil {
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

// CreateContainer gives a container the GPUs that its pod's annotations ask
// for. An error refuses the container.
func (p *Plugin) CreateContainer(_ context.Context, pod *api.PodSandbox, ctr *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	inv := p.inventory.Load()
	if adjusted(pod, ctr) {
		p.follow(pod, ctr, inv)
		return nil, nil, nil
	}
	c, req, uses, err := p.admit(pod, ctr, inv)
	if err != nil && inv.problem != nil {
		err = fmt.Errorf("%w; nvshare-plugin cannot say which GPUs there are: %w", err, inv.problem)
	}
	var adjust *api.ContainerAdjustment
	if err == nil {
		if req.Count > 0 {
			req.Devices = strings.Split(c.GPUs, ",")
		}
		if c.Reach != "" {
			req.Devices, req.Sees = strings.Split(c.Reach, ","), c.GPUs
		}
		if adjust, err = Adjust(req, ctr); err == nil && adjust != nil {
			record(adjust, c)
		}
		if err == nil && uses {
			adjust = p.limitByKernel(overlap(adjust, ctr, c.Terms), inv, c)
		}
		if drops := p.drops.Load(); err == nil && drops != nil && len(adjust.GetCDIDevices()) > 0 {
			err = *drops
		}
		if err != nil {
			p.containers.Remove(c.ID)
		}
	}
	if err != nil {
		err = fmt.Errorf("nvshare: pod %s/%s, container %q: %w", pod.GetNamespace(), pod.GetName(), ctr.GetName(), err)
		p.log.Warn(err)
		return nil, nil, err
	}
	if uses {
		if unknown := UnknownAnnotations(pod.GetAnnotations()); unknown != "" {
			p.log.Warnf("pod %s/%s: %s", pod.GetNamespace(), pod.GetName(), unknown)
		}
		p.log.Infof("pod %s/%s, container %q: gave %v, %s", pod.GetNamespace(), pod.GetName(), ctr.GetName(), cmp.Or(c.Claims, strings.Join(req.Devices, ",")), describeTerms(req.Terms))
	}
	return adjust, nil, nil
}

// adjusted tells whether another plugin of this node has given a new container its GPUs:
// while one plugin replaces another, the runtime asks both about each container. Where a
// runtime passes annotations of pods on, a pod could have written the record: one that has
// the annotation is not believed.
func adjusted(pod *api.PodSandbox, ctr *api.Container) bool {
	_, forged := pod.GetAnnotations()[PlacementAnnotation]
	return recorded(ctr) != "" && !forged
}

// follow enters a container that another plugin has admitted, or has given a GPU.
func (p *Plugin) follow(pod *api.PodSandbox, ctr *api.Container, inv *Inventory) {
	cs := p.containers
	late := cs.learnShares(ctr)
	cs.mu.Lock()
	defer cs.mu.Unlock()
	c, err := cs.existing(pod, ctr, inv)
	if err = errors.Join(late, err); err != nil {
		p.log.Warnf("pod %s/%s, container %q was given GPUs by another plugin of this node; this one would refuse it: %v", pod.GetNamespace(), pod.GetName(), ctr.GetName(), err)
	}
	cs.enter(c)
}

// admit reads what a new container asks for, and enters it if it uses GPUs. Both happen
// under one lock, so that no change of the pod's annotations is lost between them.
func (p *Plugin) admit(pod *api.PodSandbox, ctr *api.Container, inv *Inventory) (c Container, req Request, uses bool, err error) {
	cs := p.containers
	if err := errors.Join(cs.learnShares(ctr), p.learnLimits(pod, ctr)); err != nil {
		return c, req, false, err
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if req, err = cs.request(pod, ctr.GetName(), inv.Devices()); err != nil {
		return c, req, false, err
	}
	if err = errors.Join(cs.claimed(&req, pod, ctr, false), cs.limited(&req, pod, ctr)); err != nil {
		return c, req, false, err
	}
	if len(given(ctr)) > 0 || p.hasShim(ctr) {
		req.Count = 0 // somebody else has chosen
	}
	c = describe(pod, ctr, req, inv)
	if uses = len(req.Devices) > 0 || req.Count > 0 || len(req.Shares) > 0 || p.usesGPU(pod, ctr); !uses {
		return c, req, false, nil
	}
	if req.Terms.Overlap != "" {
		if err := cannotOverlap(ctr, c, req.Count); err != nil {
			key, value, _ := annotationFor(pod.GetAnnotations(), OverlapAnnotation, ctr.GetName())
			return c, req, false, annotationError(key, value, err)
		}
	}
	if c, err = cs.admit(c, req.Count, inv.givable()); err != nil {
		key, value, ok := cs.askedBy(pod.GetAnnotations(), ctr.GetName())
		if r := (refusal{}); errors.As(err, &r) && r.annotation != "" {
			key, value, ok = cs.annotation(pod, r.annotation, ctr.GetName())
		}
		if ok {
			err = annotationError(key, value, err)
		}
	}
	return c, req, true, err
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

// describe returns a container with what it asked for and the devices that it was
// given by other means.
func describe(pod *api.PodSandbox, ctr *api.Container, req Request, inv *Inventory) Container {
	c := Container{
		ID: ctr.GetId(), Name: ctr.GetName(), Namespace: pod.GetNamespace(), Pod: pod.GetName(), PodUID: pod.GetUid(),
		Terms: req.Terms, Keep: req.Keep, UID: ctr.GetUser().GetUid(),
		GPUs:   strings.Join(inv.identify(append(given(ctr), req.Devices...)), ","),
		Labels: labelsIn(pod.GetNamespace(), req.Labels), Sandbox: pod.GetId(), Placed: req.Count > 0, Limits: req.Limits,
	}
	if len(req.Shares) > 0 {
		var names, gpus []string
		for _, s := range req.Shares {
			names, gpus = append(names, s.Name), append(gpus, s.GPU)
		}
		c.Claims, c.GPUs = strings.Join(names, ","), strings.Join(gpus, ",")
	}
	return c
}

// existing returns a container that another plugin may have admitted, and why a part of what
// it asks for cannot be met. One of whose claims nothing is known keeps the terms that the
// scheduler was told before. The lock is held.
func (cs *Containers) existing(pod *api.PodSandbox, ctr *api.Container, inv *Inventory) (Container, error) {
	req, err := cs.request(pod, ctr.GetName(), inv.Devices())
	unclaimed := errors.Join(cs.claimed(&req, pod, ctr, true), cs.limited(&req, pod, ctr))
	c := describeExisting(pod, ctr, req, inv)
	if names := recordedClaims(ctr); names != "" && len(req.Shares) == 0 {
		if unclaimed == nil {
			unclaimed = errors.New("it has a resource claim, and this plugin knows none")
		}
		unclaimed = fmt.Errorf("%w; it keeps the settings that the scheduler already has for it", unclaimed)
		c.Claims, c.Keep = names, sched.AllFields
	}
	return c, errors.Join(err, unclaimed)
}

// describeExisting is describe for a container that may have its GPUs from another plugin.
func describeExisting(pod *api.PodSandbox, ctr *api.Container, req Request, inv *Inventory) Container {
	c := describe(pod, ctr, req, inv)
	c.GPUs = cmp.Or(recorded(ctr), c.GPUs)
	c.Reach = uuidsIn(ctr, ReachAnnotation)
	c.Limits = cmp.Or(c.Limits, recordedLimits(ctr))
	return c
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
		return m.GetDestination() == cdi.ShimDir && slices.Contains(p.shimDirs, m.GetSource())
	})
}

func alive(ctr *api.Container) bool {
	return ctr.GetState() != api.ContainerState_CONTAINER_STOPPED
}
