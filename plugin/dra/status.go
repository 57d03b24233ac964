// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	apply "k8s.io/client-go/applyconfigurations/resource/v1"
	"k8s.io/client-go/util/workqueue"

	"github.com/nvshare/nvshare/plugin"
	"github.com/nvshare/nvshare/sched/api"
)

// statuses writes into the claims what the containers that use them have now. It never
// keeps anybody waiting: only the latest of each share is written.
type statuses struct {
	queue workqueue.TypedRateLimitingInterface[string] // names of shares

	mu     sync.Mutex
	latest map[string]api.Terms
}

// Answered is called with the terms that the scheduler has taken for a container.
func (d *Driver) Answered(c plugin.Container, terms api.Terms) {
	for _, name := range c.Claims {
		d.status.mu.Lock()
		old, known := d.status.latest[name]
		d.status.latest[name] = terms
		d.status.mu.Unlock()
		if !known || old != terms {
			d.status.queue.Add(name)
		}
	}
}

// writeStatuses writes until the queue is shut down.
func (d *Driver) writeStatuses(ctx context.Context) {
	for {
		name, end := d.status.queue.Get()
		if end {
			return
		}
		if err := d.writeStatus(ctx, name); err != nil && ctx.Err() == nil {
			d.Log.Warnf("write what share %s has into the status of its claim: %v", name, err)
			d.status.queue.AddRateLimited(name)
		} else {
			d.status.queue.Forget(name)
		}
		d.status.queue.Done(name)
	}
}

// writeStatus writes one share into status.devices of its claim. A claim that does not
// exist any more is no error.
func (d *Driver) writeStatus(ctx context.Context, name string) error {
	record, share, ok := d.store.share(name)
	d.status.mu.Lock()
	terms, told := d.status.latest[name]
	if !ok {
		delete(d.status.latest, name)
	}
	d.status.mu.Unlock()
	if !ok || !told {
		return nil
	}
	effective := map[string]string{}
	for _, f := range api.Fields {
		effective[words(f.Key)] = f.Format(terms)
	}
	data, err := json.Marshal(effective)
	if err != nil {
		return err
	}
	device := apply.AllocatedDeviceStatus().WithDriver(DriverName).WithPool(share.Pool).WithDevice(share.Device).WithData(runtime.RawExtension{Raw: data})
	if share.ShareID != nil {
		device.WithShareID(string(*share.ShareID))
	}
	claim := apply.ResourceClaim(record.Name, record.Namespace).WithUID(record.UID).WithStatus(apply.ResourceClaimStatus().WithDevices(device))
	ctx, cancel := context.WithTimeout(ctx, requestLimit)
	defer cancel()
	// Each share has a manager of its own, which changes nothing of the others.
	_, err = d.Client.ResourceV1().ResourceClaims(record.Namespace).ApplyStatus(ctx, claim, metav1.ApplyOptions{FieldManager: manager(share), Force: true})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) { // deleted, or another claim of this name
		return nil
	}
	return err
}

// forgetStatuses forgets what was written for shares that are not prepared any more. A share
// is told of after its claim was prepared: what is not among the records then was unprepared.
func (d *Driver) forgetStatuses() {
	d.status.mu.Lock()
	defer d.status.mu.Unlock()
	prepared := map[string]bool{}
	for _, r := range d.store.Records() {
		for _, s := range r.Shares {
			prepared[s.Name] = true
		}
	}
	maps.DeleteFunc(d.status.latest, func(name string, _ api.Terms) bool { return !prepared[name] })
}

// manager is the field manager of a share: names have at most 128 characters.
func manager(s Share) string {
	text := fmt.Sprintf("nvshare-%s", s.Device)
	if s.ShareID != nil {
		text += "-" + string(*s.ShareID)
	}
	return text
}
