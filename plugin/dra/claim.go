// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/nvshare/nvshare/sched/api"
)

// Record is a claim as it was prepared.
type Record struct {
	Version   int       `json:"version"` // recordVersion
	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	Shares    []Share   `json:"shares"`
}

const recordVersion = 1

// sameShares tells whether both are of one allocation: each allocation has share IDs of its own.
// A whole device has none, and may be given for another request of the claim.
func (r Record) sameShares(o Record) bool {
	return slices.EqualFunc(r.Shares, o.Shares, func(a, b Share) bool { return a.Name == b.Name && a.Request == b.Request })
}

// Share is a part of one device that a claim has.
type Share struct {
	Name    string     `json:"name"`  // of the CDI device, without the kind
	Token   string     `json:"token"` // by which containers name the share
	Request string     `json:"request"`
	Pool    string     `json:"pool"`
	Device  string     `json:"device"`
	ShareID *types.UID `json:"shareID,omitempty"`
	GPU     string     `json:"gpu"` // UUID of the GPU or the MIG device
	Terms   api.Terms  `json:"terms"`
	Admin   bool       `json:"admin,omitempty"` // as plugin.ClaimPart
}

// read returns the record of an allocated claim, without tokens.
func read(claim *resourceapi.ResourceClaim, pool string, devices []device) (r Record, err error) {
	r = Record{Version: recordVersion, UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name}
	if claim.Status.Allocation == nil {
		return r, errors.New("the claim is not allocated")
	}
	a := claim.Status.Allocation.Devices
	for _, result := range a.Results {
		if result.Driver != DriverName {
			continue
		}
		share, err := readShare(claim.UID, result, a.Config, pool, devices)
		if err != nil {
			return r, fmt.Errorf("request %q, device %s: %w", result.Request, result.Device, err)
		}
		r.Shares = append(r.Shares, share)
	}
	return r, nil
}

func readShare(claim types.UID, result resourceapi.DeviceRequestAllocationResult, config []resourceapi.DeviceAllocationConfiguration, pool string, devices []device) (s Share, err error) {
	i := slices.IndexFunc(devices, func(d device) bool { return d.name == result.Device })
	switch {
	case result.Pool != pool:
		return s, fmt.Errorf("it is of pool %q, not of this node's, %q", result.Pool, pool)
	case i < 0:
		return s, errors.New("this node has no such device now: delete the pod, so that it gets another one")
	}
	s = Share{
		Name: fmt.Sprintf("%s-%s", claim, result.Device), Request: result.Request, Pool: pool,
		Device: result.Device, ShareID: result.ShareID, GPU: devices[i].uuid,
	}
	if result.ShareID != nil {
		s.Name += "-" + string(*result.ShareID)
	}
	if s.Admin = ptr.Deref(result.AdminAccess, false); s.Admin {
		// The allocator says a default part, which kube-scheduler counts nowhere.
		s.Terms.Weight = 1
		return s, nil
	}
	if s.Terms, err = configured(config, result.Request); err != nil {
		return s, err
	}
	consumed := func(name resourceapi.QualifiedName) uint64 {
		q := result.ConsumedCapacity[name]
		return uint64(max(q.Value(), 0))
	}
	if n := consumed(Cores); n <= allCores {
		s.Terms.CoreRequest = uint32(n)
	} else {
		return s, fmt.Errorf("%d cores: a GPU has %d", n, allCores)
	}
	s.Terms.MemoryLimit = consumed(Memory)
	if err := errors.Join(s.Terms.Validate(), s.Terms.Consistent()); err != nil {
		return s, err
	}
	return s, nil
}

// overfull returns why a record cannot be added to others: a GPU would be promised
// more than it has. kube-scheduler prevents that; this is the last check.
func overfull(r Record, others []Record, devices []device, o Options) error {
	for _, d := range devices {
		var cores, memory uint64
		add := func(r Record) (uses bool) {
			for _, s := range r.Shares {
				if s.GPU == d.uuid {
					uses = true
					cores += uint64(s.Terms.CoreRequest)
					memory += s.Terms.MemoryLimit
				}
			}
			return uses
		}
		if !add(r) {
			continue
		}
		for _, other := range others {
			if other.UID != r.UID {
				add(other)
			}
		}
		most := d.promisable(o)
		if o.Scheduler != nil && o.PromiseMemory == 0 && d.state.Sharing == "" {
			most = 0 // how much it swaps is not known yet, and an earlier plugin may have published that
		}
		switch {
		case cores > allCores:
			return fmt.Errorf("device %s would be promised to %d %%, with the claims that are prepared already", d.name, cores)
		case most > 0 && memory > most:
			return fmt.Errorf("of device %s, %s of memory would be promised, with the claims that are prepared already; it has %s",
				d.name, api.FormatMemory(memory), api.FormatMemory(most))
		}
	}
	return nil
}
