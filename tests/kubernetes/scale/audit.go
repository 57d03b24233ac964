// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// audited is the count of what each device was promised, made from the objects in the API
// server alone, with nothing of the scheduler or of the driver.
type audited struct {
	Claims     int      `json:"claims"`
	Devices    int      `json:"devices_in_use"`
	NodesUsed  int      `json:"nodes_in_use"`
	Overcommit []string `json:"overcommitted"` // devices that were promised beyond what they have
	Wrong      []string `json:"wrong"`         // pods whose claim is not what they asked for, or not on their node
	MostCores  int64    `json:"most_cores_of_a_device"`
}

type device struct{ pool, name string }

// audit adds up all claims. It also notes in placed which GPU each pod has.
func audit(ctx context.Context, c kubernetes.Interface, asks []ask, placed []placement) (a audited, err error) {
	a.Overcommit, a.Wrong = []string{}, []string{}
	has := map[device]map[resourceapi.QualifiedName]int64{}
	slicesOf, err := c.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{})
	if err != nil {
		return a, err
	}
	for _, s := range slicesOf.Items {
		for _, d := range s.Spec.Devices {
			left := map[resourceapi.QualifiedName]int64{}
			for name, q := range d.Capacity {
				left[name] = q.Value.Value()
			}
			has[device{s.Spec.Pool.Name, d.Name}] = left
		}
	}
	claims, err := c.ResourceV1().ResourceClaims(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return a, err
	}
	type given struct {
		device device
		ask    ask
	}
	of := map[string][]given{} // by pod
	used := map[device]map[resourceapi.QualifiedName]int64{}
	for _, claim := range claims.Items {
		if claim.Status.Allocation == nil {
			continue
		}
		a.Claims++
		for _, r := range claim.Status.Allocation.Devices.Results {
			d := device{r.Pool, r.Device}
			if used[d] == nil {
				used[d] = map[resourceapi.QualifiedName]int64{}
			}
			for name, q := range r.ConsumedCapacity {
				used[d][name] += q.Value()
			}
			cores, memory := r.ConsumedCapacity["cores"], r.ConsumedCapacity["memory"]
			for _, user := range claim.Status.ReservedFor {
				of[user.Name] = append(of[user.Name], given{d, ask{cores.Value(), memory.Value()}})
			}
		}
	}
	nodes := map[string]bool{}
	for d, sums := range used {
		nodes[d.pool] = true
		a.MostCores = max(a.MostCores, sums["cores"])
		for name, sum := range sums {
			if most, ok := has[d][name]; !ok || sum > most {
				a.Overcommit = append(a.Overcommit, fmt.Sprintf("%s/%s: %s %d of %d", d.pool, d.name, name, sum, most))
			}
		}
	}
	slices.Sort(a.Overcommit)
	a.Devices, a.NodesUsed = len(used), len(nodes)
	for i, want := range asks {
		got := of[podName(i)]
		if len(got) != 1 || got[0].ask != want || got[0].device.pool != placed[i].node {
			a.Wrong = append(a.Wrong, fmt.Sprintf("%s on %s asked for %v and has %v", podName(i), placed[i].node, want, got))
			continue
		}
		placed[i].gpu = got[0].device.name
	}
	if len(a.Overcommit)+len(a.Wrong) > 0 {
		fmt.Printf("THE AUDIT FAILED: %d devices overcommitted, %d pods wrong\n", len(a.Overcommit), len(a.Wrong))
	}
	return a, nil
}
