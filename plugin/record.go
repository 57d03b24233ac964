// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/nri/pkg/api"
)

// PlacementAnnotation has the UUIDs of a container's GPUs. The plugin writes it on
// the container, and the runtime keeps it as long as the container, so that the next
// plugin knows who has which GPU. It is an annotation of the container and not of the
// pod: nobody who makes pods can write it, and the container does not see it.
const PlacementAnnotation = "nvshare.com/gpu-placement"

// ClaimAnnotation has the names of a container's shares, by which the next plugin finds
// its claims. Runtimes tell the CDI devices of new containers only.
const ClaimAnnotation = "nvshare.com/gpu-claims"

// ReachAnnotation has the UUIDs of the GPUs that a container can open and may move to.
const ReachAnnotation = "nvshare.com/gpu-reach"

// LimitsAnnotation has the limits of a container's spec, for while the API server does not answer.
const LimitsAnnotation = "nvshare.com/gpu-limits"

var uuids = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9:-]{0,79}(,[A-Za-z0-9][A-Za-z0-9:-]{0,79})*$`)

// record writes on a container which GPUs it gets.
func record(adjust *api.ContainerAdjustment, c Container) {
	for annotation, names := range map[string][]string{PlacementAnnotation: c.GPUs, ReachAnnotation: c.Reach, ClaimAnnotation: c.Claims} {
		if len(names) > 0 {
			adjust.AddAnnotation(annotation, strings.Join(names, ","))
		}
	}
	if c.Limits != (Limits{}) {
		adjust.AddAnnotation(LimitsAnnotation, fmt.Sprint(c.Limits.Memory, c.Limits.Cores))
	}
}

// forged returns an error for each record that a pod has written itself: where a runtime passes annotations of pods on to
// containers, nobody could tell it from the plugin's.
func forged(annotations map[string]string) (err error) {
	for _, key := range []string{PlacementAnnotation, ReachAnnotation, ClaimAnnotation, LimitsAnnotation} {
		if value, has := annotations[key]; has {
			err = errors.Join(err, annotationError(key, value, errors.New("nvshare writes this itself: remove it from the pod")))
		}
	}
	return err
}

// written returns what a plugin has recorded on a container. A pod from before forged was asked may have written the same
// itself: that is not believed.
func written(pod *api.PodSandbox, ctr *api.Container, annotation string) string {
	value := ctr.GetAnnotations()[annotation]
	if its, has := pod.GetAnnotations()[annotation]; has && its == value {
		return ""
	}
	return value
}

// recorded returns the GPUs that a plugin has recorded on a container; nil without a record. The node may not
// have all of them any more.
func recorded(pod *api.PodSandbox, ctr *api.Container) []string {
	return uuidsIn(pod, ctr, PlacementAnnotation)
}

// recordedClaims returns the shares that a plugin has recorded on a container.
func recordedClaims(pod *api.PodSandbox, ctr *api.Container) []string {
	value := written(pod, ctr, ClaimAnnotation)
	names := strings.Split(value, ",")
	if len(value) > 16<<10 || slices.ContainsFunc(names, func(name string) bool { return !claimDevice.MatchString(name) }) {
		return nil
	}
	return names
}

func uuidsIn(pod *api.PodSandbox, ctr *api.Container, annotation string) []string {
	value := written(pod, ctr, annotation)
	if len(value) > 16<<10 || !uuids.MatchString(value) || strings.Count(value, ",") >= maxDevices {
		return nil
	}
	return strings.Split(value, ",")
}

// recordedLimits returns the limits that a plugin has recorded on a container.
func recordedLimits(pod *api.PodSandbox, ctr *api.Container) (l Limits) {
	if _, err := fmt.Sscanf(written(pod, ctr, LimitsAnnotation), "%d %d", &l.Memory, &l.Cores); err != nil || l.terms().Validate() != nil {
		return Limits{}
	}
	return l
}
