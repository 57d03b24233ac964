// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin/placement"
	sched "github.com/nvshare/nvshare/sched/api"
)

const (
	// Annotation is the key by which a pod asks for GPUs.
	Annotation = "nvshare.com/gpu"

	// maxDevices bounds the names in one annotation.
	maxDevices = 128
	// maxShown is how many bytes of an annotation an error shows. Errors end in logs
	// and events, and an annotation may have a quarter of a MiB.
	maxShown = 256
)

// Request is what a container asks for.
type Request struct {
	// Devices are device names without the kind, each once, in the order
	// asked; just "all" if that is among them. Empty: it asks for none by name.
	Devices []string
	// Count is how many GPUs the plugin is to choose; 0 if there are Devices.
	Count int
	// Sees is the one of Devices that its programs are to see; "": all of them.
	Sees   string
	Shares []ClaimPart      // that it has by resource claims; then there are no Devices, and no Count
	Labels placement.Labels // of the pod's namespace
	Limits Limits           // of the container's spec; then Count is 1
	// Terms are what the container may have of each GPU.
	Terms sched.Terms
	// Keep has the fields of Terms that are not known now. The scheduler keeps the
	// values that it was told before; those in Terms are for a scheduler that was
	// told none.
	Keep sched.FieldSet
}

// annotationFor returns the annotation with this name that holds for a container:
// the one with the narrowest scope, by the rules of NRI's own helper.
func annotationFor(annotations map[string]string, name, container string) (key, value string, ok bool) {
	// Kubernetes allows one "/" in a key: with a suffix, the domain comes last.
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

// parseRequest reads what a container of a pod with these annotations asks for.
// known are the device names of this node. The errors name the annotations that
// are wrong, their values and what is possible; the request is without them.
func parseRequest(annotations map[string]string, container string, known []string) (r Request, choiceErr, termsErr error) {
	r, choiceErr = parseChoice(annotations, container, known)
	r.Terms, r.Keep, termsErr = parseTerms(annotations, container)
	r.imply(annotations, container)
	return r, choiceErr, termsErr
}

// parseChoice reads which GPUs a container asks for, and next to whom.
func parseChoice(annotations map[string]string, container string, known []string) (r Request, err error) {
	if key, value, ok := annotationFor(annotations, Annotation, container); ok {
		if r.Devices, r.Count, err = parseGPUs(value, known); err != nil {
			err = annotationError(key, value, err)
		}
	}
	return r, errors.Join(err, r.parseLabels(annotations, container), misspelt(annotations, container), forged(annotations))
}

// imply has a core request ask for one GPU where the pod does not say which or how
// many.
func (r *Request) imply(annotations map[string]string, container string) {
	if _, _, said := annotationFor(annotations, Annotation, container); !said && r.Terms.CoreRequest != 0 && !asksByName(annotations) {
		r.Count = 1
	}
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
