// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"regexp"
	"strings"

	"github.com/containerd/nri/pkg/api"
)

// PlacementAnnotation is what the plugin writes on a container that it gives
// GPUs to: their UUIDs, whoever chose them. The runtime keeps it as long as the
// container and shows it to the next plugin, which so knows without a file of
// its own who has what. It is an annotation of the container and not of the pod:
// who makes pods cannot write it, and the container does not see it.
const PlacementAnnotation = "nvshare.com/gpu-placement"

var uuids = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9:-]{0,79}(,[A-Za-z0-9][A-Za-z0-9:-]{0,79})*$`)

// record writes down which GPUs a container gets.
func record(adjust *api.ContainerAdjustment, c Container) {
	if c.GPUs != "" {
		adjust.AddAnnotation(PlacementAnnotation, c.GPUs)
	}
}

// recorded returns the GPUs that a container was given, as Container.GPUs; "" if
// that was not by a plugin that writes it down. Which of them there still are
// does not matter here.
func recorded(ctr *api.Container) string {
	value := ctr.GetAnnotations()[PlacementAnnotation]
	if len(value) > 16<<10 || !uuids.MatchString(value) || strings.Count(value, ",") >= maxDevices {
		return ""
	}
	return value
}
