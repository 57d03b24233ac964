// SPDX-License-Identifier: Apache-2.0

package tenants

import (
	"errors"
	"fmt"
	"slices"

	"github.com/nvshare/nvshare/sched/api"
)

// Rules bound what pods may ask for, by namespace. They do not hold for containers outside
// Kubernetes, for which only root can ask, nor for what root sets with nvsharectl. The zero
// Rules allow everything.
type Rules struct {
	// Latency and Gang are the namespaces whose pods may have the priority latency, and
	// gangs; nil: all. Overlap is the same for overlap groups.
	Latency, Gang, Overlap []string
	Weight                 api.Bounds // the greatest weights
}

func allows(namespaces []string, namespace string) bool {
	return namespaces == nil || slices.Contains(namespaces, api.AllNamespaces) || slices.Contains(namespaces, namespace)
}

// Bound returns the terms that a container of a namespace may have, "" outside Kubernetes,
// and an error that says what was refused; nil: nothing.
func (r Rules) Bound(namespace string, t api.Terms) (api.Terms, error) {
	if namespace == "" {
		return t, nil
	}
	var refused []error
	refuse := func(what, flag, value string) {
		refused = append(refused, fmt.Errorf("%s is not allowed in namespace %q: see %s of nvshare-scheduler (Helm: scheduler.%s)", what, namespace, flag, value))
	}
	if t.Priority == api.Priority_PRIORITY_LATENCY && !allows(r.Latency, namespace) {
		refuse("priority latency", "--latency-namespaces", "latencyNamespaces")
		t.Priority = api.Priority_PRIORITY_UNSPECIFIED
	}
	if t.Gang != "" && !allows(r.Gang, namespace) {
		refuse("a gang", "--gang-namespaces", "gangNamespaces")
		t.Gang = ""
	}
	if t.Overlap != "" && !allows(r.Overlap, namespace) {
		refuse("an overlap group", "--overlap-namespaces", "overlapNamespaces")
		t.Overlap = ""
	}
	if most, bounded := r.Weight.Of(namespace); bounded && t.Weight > most {
		refuse(fmt.Sprintf("weight %d, above %d,", t.Weight, most), "--max-weight", "maxWeight")
		t.Weight = most
	}
	return t, errors.Join(refused...)
}
