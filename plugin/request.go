// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin/placement"
)

const (
	// Annotation is the key by which a pod asks for GPUs.
	Annotation = "nvshare.com/gpu"
	// MemoryLimitAnnotation is the key by which it limits the memory that a
	// container gets of each.
	MemoryLimitAnnotation = "nvshare.com/gpu-memory-limit"

	// maxDevices bounds the names in one annotation.
	maxDevices = 128
	// maxShown is how much of an annotation errors show, in bytes: they end in
	// logs and events, and whoever makes pods may write a quarter of a MiB.
	maxShown = 256
)

// Request is what a container asks for.
type Request struct {
	// Devices are device names without the kind, each once, in the order
	// asked; just "all" if that is among them. Empty: it does not ask.
	Devices []string
	// Count is how many GPUs the plugin is to choose; 0 if there are Devices.
	Count  int
	Labels placement.Labels // of the pod's namespace
	// MemoryLimit is what the container may have of each GPU's memory, bytes;
	// 0: no limit.
	MemoryLimit uint64
	Share       Share // of each GPU's time
	Keep        Fields
}

// annotationFor returns the annotation with this name that holds for a
// container: the one of the narrowest scope, as NRI's own helper has it.
func annotationFor(annotations map[string]string, name, container string) (key, value string, ok bool) {
	// For keys with a suffix, where name has one "/" too many for Kubernetes.
	domain, word, _ := strings.Cut(name, "/")
	for _, suffix := range []string{"/container." + container, "/pod", ""} {
		for _, k := range []string{name + suffix, word + "." + domain + suffix} {
			if v, ok := annotations[k]; ok {
				return k, v, true
			}
		}
	}
	return "", "", false
}

// ParseRequest reads what a container of a pod with these annotations asks for.
// known are the device names of this node. The error names the annotations that
// are wrong, their values and what is possible; the request is without them.
func ParseRequest(annotations map[string]string, container string, known []string) (r Request, err error) {
	key, value, ok := annotationFor(annotations, Annotation, container)
	if ok {
		if r.Devices, r.Count, err = parseGPUs(value, known); err != nil {
			err = annotationError(key, value, err)
		}
	}
	err = errors.Join(err, r.parseShares(annotations, container), r.parseLabels(annotations, container))
	if !ok && r.Share.CoreRequest != 0 && !asksByName(annotations) {
		r.Count = 1
	}
	return r, err
}

func annotationError(key, value string, err error) error {
	return fmt.Errorf("annotation %s=%q: %w", key, shown(value), err)
}

func parseDevices(value string, known []string) ([]string, error) {
	if strings.TrimSpace(value) == "" {
		return nil, errors.New("empty (give a count, or a device such as nvshare.com/gpu=0, or remove the annotation)")
	}
	parts := strings.Split(value, ",")
	if len(parts) > maxDevices {
		return nil, fmt.Errorf("%d devices, more than %d", len(parts), maxDevices)
	}
	var devices []string
	for _, part := range parts {
		part = strings.TrimSpace(part)
		kind, name, found := strings.Cut(part, "=")
		show := shown(part)
		switch {
		case part == "":
			return nil, errors.New("an empty device name (a comma too many)")
		case !found && slices.Contains(known, part):
			return nil, fmt.Errorf("%q is not a CDI device name: write %s=%s", part, cdi.Kind, part)
		case !found:
			return nil, fmt.Errorf("%q is not a CDI device name: write %s=<index>, =<UUID> or =all", show, cdi.Kind)
		case kind != cdi.Kind:
			return nil, fmt.Errorf("%q is of kind %q: only %s can be asked for here", show, shown(kind), cdi.Kind)
		case len(known) == 0:
			return nil, fmt.Errorf("no device %q: this node has no GPU", show)
		case !slices.Contains(known, name):
			return nil, fmt.Errorf("no device %q: this node has %s", show, qualified(known))
		}
		if !slices.Contains(devices, name) {
			devices = append(devices, name)
		}
	}
	if slices.Contains(devices, cdi.AllDevices) {
		devices = []string{cdi.AllDevices}
	}
	return devices, nil
}

func shown(s string) string {
	if len(s) <= maxShown {
		return s
	}
	return s[:maxShown] + "…"
}

func qualified(names []string) string {
	var q []string
	for _, n := range names {
		q = append(q, cdi.Kind+"="+n)
	}
	return strings.Join(q, ", ")
}
