// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"

	sched "github.com/nvshare/nvshare/sched/api"
)

// The runtime asks before it creates a container. In this order:
//
//   - One to which another plugin of the node has given GPUs (adjusted) is entered as it is (follow).
//   - What it asks for is read from annotations (request), bounded by its claims (claimed) and by the pod's spec
//     (boundBySpec), and described as a Container (describe).
//   - GPUs are chosen, or those that were named are checked, and the container is entered (Containers.admit).
//   - What it gets is written into the answer (give): devices and environment (Adjust), what was chosen (record) and its
//     overlap group (overlap). Where that fails it is removed again.

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
		if adjust, err = p.give(c, &req, uses, ctr); err != nil {
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
		p.log.Infof("pod %s/%s, container %q: gave %v, %s", pod.GetNamespace(), pod.GetName(), ctr.GetName(), strings.Join(slices.Concat(c.Claims, req.Devices), ","), describeTerms(req.Terms))
	}
	return adjust, nil, nil
}

// give returns what is added to an admitted container; nil: nothing. The devices that were chosen for
// it are added to the request.
func (p *Plugin) give(c Container, req *Request, uses bool, ctr *api.Container) (*api.ContainerAdjustment, error) {
	if req.Count > 0 {
		req.Devices = c.GPUs
	}
	if len(c.Reach) > 0 {
		req.Devices, req.Sees = c.Reach, c.GPUs[0]
	}
	adjust, err := Adjust(*req, ctr, p.hasShim(ctr))
	if err != nil {
		return nil, err
	}
	if adjust != nil {
		record(adjust, c)
	}
	if uses {
		adjust = overlap(adjust, ctr, c.Terms)
	}
	if drops := p.drops.Load(); drops != nil && len(adjust.GetCDIDevices()) > 0 {
		return nil, *drops
	}
	return adjust, nil
}

// adjusted tells whether another plugin of this node has given a new container its GPUs:
// while one plugin replaces another, the runtime asks both about each container.
func adjusted(pod *api.PodSandbox, ctr *api.Container) bool { return recorded(pod, ctr) != nil }

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
	if err = errors.Join(cs.claimed(&req, pod, ctr, false), cs.boundBySpec(&req, pod, ctr)); err != nil {
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

// describe returns a container with what it asked for and the devices that it was
// given by other means.
func describe(pod *api.PodSandbox, ctr *api.Container, req Request, inv *Inventory) Container {
	c := Container{
		ID: ctr.GetId(), Name: ctr.GetName(), Namespace: pod.GetNamespace(), Pod: pod.GetName(), PodUID: pod.GetUid(),
		Terms: req.Terms, Keep: req.Keep, UID: ctr.GetUser().GetUid(),
		GPUs:   inv.identify(append(given(ctr), req.Devices...)),
		Labels: labelsIn(pod.GetNamespace(), req.Labels), Sandbox: pod.GetId(), Placed: req.Count > 0, Limits: req.Limits,
	}
	if len(req.Shares) > 0 {
		c.GPUs = nil
		for _, s := range req.Shares {
			c.Claims, c.GPUs = append(c.Claims, s.Name), append(c.GPUs, s.GPU)
		}
	}
	return c
}

// existing returns a container that another plugin may have admitted, and why a part of what
// it asks for cannot be met. One of whose claims nothing is known keeps the terms that the
// scheduler was told before. The lock is held.
func (cs *Containers) existing(pod *api.PodSandbox, ctr *api.Container, inv *Inventory) (Container, error) {
	req, err := cs.request(pod, ctr.GetName(), inv.Devices())
	unclaimed := errors.Join(cs.claimed(&req, pod, ctr, true), cs.boundBySpec(&req, pod, ctr))
	c := describeExisting(pod, ctr, req, inv)
	if names := recordedClaims(pod, ctr); len(names) > 0 && len(req.Shares) == 0 {
		unclaimed = cmp.Or(unclaimed, errors.New("it has a resource claim, and this plugin knows none"))
		unclaimed = fmt.Errorf("%w; it keeps the settings that the scheduler already has for it", unclaimed)
		c.Claims, c.Keep = names, sched.AllFields
	}
	return c, errors.Join(err, unclaimed)
}

// describeExisting is describe for a container that may have its GPUs from another plugin.
func describeExisting(pod *api.PodSandbox, ctr *api.Container, req Request, inv *Inventory) Container {
	c := describe(pod, ctr, req, inv)
	if uuids := recorded(pod, ctr); uuids != nil {
		c.GPUs = uuids
	}
	c.Reach = uuidsIn(pod, ctr, ReachAnnotation)
	c.Limits = cmp.Or(c.Limits, recordedLimits(pod, ctr))
	return c
}
