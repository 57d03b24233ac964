// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
)

// Others that give a node's GPUs. Both would promise the same GPUs, and nobody would
// notice.
var (
	otherResources = []corev1.ResourceName{"nvidia.com/gpu", "nvidia.com/gpu.shared", "nvshare.com/gpu"}
	otherDrivers   = []string{"gpu.nvidia.com"}
)

// otherMIG begins the resources by which NVIDIA's device plugin gives MIG devices.
const otherMIG = "nvidia.com/mig-"

// otherOwner returns which device plugin or other driver gives the node's GPUs too, and
// what to do about that; nil: none does. err says why that is not known.
func (d *Driver) otherOwner(ctx context.Context) (other, err error) {
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	node, err := d.Client.CoreV1().Nodes().Get(ctx, d.NodeName, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("read node %s: %w", d.NodeName, err)
	}
	names := slices.Clone(otherResources)
	for name := range node.Status.Allocatable {
		if strings.HasPrefix(string(name), otherMIG) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		if n := node.Status.Allocatable[name]; !n.IsZero() {
			return fmt.Errorf("a device plugin gives GPUs of this node too (%s: %s): remove it from the node, or run nvshare without --dra there", name, n.String()), nil
		}
	}
	for _, driver := range otherDrivers {
		devices, err := d.devicesBy(ctx, driver)
		if err != nil {
			return nil, err
		}
		if len(devices) > 0 {
			return fmt.Errorf("driver %s gives GPUs of this node too: remove it from the node, or run nvshare without --dra there", driver), nil
		}
	}
	return nil, nil
}

// devicesBy returns what a driver has published of this node.
func (d *Driver) devicesBy(ctx context.Context, driver string) (all []resourceapi.Device, err error) {
	list, err := d.Client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorNodeName: d.NodeName, resourceapi.ResourceSliceSelectorDriver: driver,
	}.String()})
	if err != nil {
		return nil, fmt.Errorf("list slices of driver %s on node %s: %w", driver, d.NodeName, err)
	}
	for _, s := range list.Items {
		if s.Spec.Driver == driver {
			all = append(all, s.Spec.Devices...)
		}
	}
	return all, nil
}
