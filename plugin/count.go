// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/nvshare/nvshare/cdi"
	"github.com/nvshare/nvshare/plugin/placement"
)

// Keys of labels, which say with which containers a container may share a GPU; see
// package placement. A label belongs to the pod's namespace.
const (
	AffinityAnnotation     = "nvshare.com/gpu-affinity"
	AntiAffinityAnnotation = "nvshare.com/gpu-anti-affinity"
	ExclusionAnnotation    = "nvshare.com/gpu-exclusion"
)

// noGPU is the value of Annotation for a container without GPUs, in a pod whose other
// containers have some.
const noGPU = "none"

// AnyGPU is the value of Annotation for a container that gets one GPU, and may move to
// another: it implies MigratableAnnotation.
const AnyGPU = cdi.AnyDevice

var (
	// number matches all that somebody may have meant as a number.
	number = regexp.MustCompile(`^[-+]?[0-9.]+%?$`)
	count  = regexp.MustCompile(`^[1-9][0-9]{0,8}$`)
	// label is the syntax of a label's value in Kubernetes.
	label = regexp.MustCompile(`^[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?$`)
)

// parseGPUs reads a count of GPUs, or device names: a bare number is a count,
// and an index is what follows "nvshare.com/gpu=".
func parseGPUs(value string, known []string) (devices []string, n int, err error) {
	text := strings.TrimSpace(value)
	switch {
	case isAny(text):
		return nil, 1, nil
	case text == noGPU:
		return nil, 0, nil
	case !number.MatchString(text):
		devices, err = parseDevices(value, known)
		return devices, 0, err
	case count.MatchString(text):
		if n, err = strconv.Atoi(text); err == nil && n <= maxDevices {
			return nil, n, nil
		}
		return nil, 0, fmt.Errorf("more than %d GPUs", maxDevices)
	case text == "0":
		return nil, 0, fmt.Errorf("0 is not a count of GPUs: write %s=0 for the GPU with index 0, or %s", cdi.Kind, noGPU)
	}
	return nil, 0, fmt.Errorf("%.64q is not a count of GPUs: give a whole number from 1, and what you want of each as %s: \"40\", percent", text, CoreRequestAnnotation)
}

func isAny(value string) bool {
	return strings.TrimPrefix(strings.TrimSpace(value), cdi.Kind+"=") == AnyGPU
}

// askedBy returns the annotation by which a container asks for GPUs. Its value may be
// impossible to meet.
func askedBy(annotations map[string]string, container string) (key, value string, ok bool) {
	key, value, ok = annotationFor(annotations, Annotation, container)
	switch {
	case ok:
		return key, value, strings.TrimSpace(value) != noGPU
	case asksByName(annotations):
		return "", "", false
	}
	return annotationFor(annotations, CoreRequestAnnotation, container)
}

// askedBy is askedBy for this node. Where claims give the GPUs, a core request asks for none: a
// pod has it for its containers with claims.
func (cs *Containers) askedBy(annotations map[string]string, container string) (key, value string, ok bool) {
	key, value, ok = askedBy(annotations, container)
	return key, value, ok && (cs.Claims == nil || isAnnotation(key, Annotation))
}

// asksByName tells whether a pod says, for any container, which GPUs or how many it
// gets. If not, a core request alone asks for one.
func asksByName(annotations map[string]string) bool {
	domain, word, _ := strings.Cut(Annotation, "/")
	for key, value := range annotations {
		for _, prefix := range []string{Annotation, word + "." + domain} {
			rest, ok := strings.CutPrefix(key, prefix)
			if ok && strings.TrimSpace(value) != noGPU && (rest == "" || rest == "/pod" || strings.HasPrefix(rest, "/container.")) {
				return true
			}
		}
	}
	return false
}

// parseLabels reads the labels that hold for a container.
func (r *Request) parseLabels(annotations map[string]string, container string) error {
	var errs []error
	for _, l := range []struct {
		name string
		to   *string
	}{
		{AffinityAnnotation, &r.Labels.Affinity},
		{AntiAffinityAnnotation, &r.Labels.AntiAffinity},
		{ExclusionAnnotation, &r.Labels.Exclusion},
	} {
		key, value, ok := annotationFor(annotations, l.name, container)
		if !ok {
			continue
		}
		if text := strings.TrimSpace(value); label.MatchString(text) {
			*l.to = text
		} else {
			errs = append(errs, annotationError(key, value, errors.New("not a label: give up to 63 letters, digits and . _ - that begin and end with a letter or digit")))
		}
	}
	return errors.Join(errs...)
}

// labelsIn returns labels with their namespace, so that they can be compared.
func labelsIn(namespace string, l placement.Labels) placement.Labels {
	for _, s := range []*string{&l.Affinity, &l.AntiAffinity, &l.Exclusion} {
		if *s != "" {
			*s = namespace + "/" + *s
		}
	}
	return l
}
